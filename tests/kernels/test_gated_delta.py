"""gated_delta: both forms against the recurrence in NumPy, and each other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_examples import (
  EXAMPLES,
  FAST,
  KEY_WIDTH,
  NUM_HEADS,
  SHAPES,
  VALUE_WIDTH,
  arrays,
  assert_close,
  recurrence,
)
from jax.extend import core

from loopjax.kernels.gated_delta import (
  api,
  chunked,
  chunks,
  gated_delta,
  reference,
)

FORMS = {
  "reference": reference.gated_delta,
  "chunked": functools.partial(chunked.gated_delta, chunk_size=64),
}


def compiled(function, *operands):
  return jax.jit(function, compiler_options=FAST)(*operands)


@pytest.mark.parametrize(
  ("num_tokens", "chunk_size"),
  [
    (1, 16), (2, 16), (15, 64), (16, 32), (17, 16), (17, 64), (63, 32),
    (63, 64), (64, 16), (64, 64), (65, 16), (65, 32), (65, 64), (130, 16),
    (130, 32), (130, 64), (75, 80),
  ],
)  # fmt: skip
def test_chunks_are_the_recurrence(num_tokens, chunk_size):
  expected = recurrence(*arrays(num_tokens))
  form = functools.partial(chunked.gated_delta, chunk_size=chunk_size)
  with jax.enable_x64(True):
    actual = compiled(form, *map(jnp.asarray, arrays(num_tokens)))
    assert actual[0].dtype == actual[1].dtype == jnp.float64
  assert_close(actual, expected, 1e-10)


@pytest.mark.parametrize("num_tokens", [17, 130])
@pytest.mark.parametrize("form", FORMS)
def test_float32_is_the_recurrence(form, num_tokens):
  operands = arrays(num_tokens, np.float32)
  actual = compiled(FORMS[form], *map(jnp.asarray, operands))
  assert actual[0].dtype == actual[1].dtype == jnp.float32
  assert_close(actual, recurrence(*operands), 1e-5)


def test_bfloat16_inputs_are_computed_in_float32():
  operands = [jnp.asarray(x, jnp.bfloat16) for x in arrays(40)[:5]]
  state = jnp.asarray(arrays(40)[5], jnp.float32)
  actual = compiled(gated_delta, *operands, state)
  assert actual[0].dtype == actual[1].dtype == jnp.float32
  wide = [np.asarray(x, np.float64) for x in (*operands, state)]
  assert_close(actual, recurrence(*wide), 1e-5)


def test_without_a_state_it_starts_from_zeros():
  *inputs, state = arrays(20)
  actual = compiled(gated_delta, *map(jnp.float32, inputs))
  assert_close(actual, recurrence(*inputs, np.zeros_like(state)), 1e-5)
  nothing = [jnp.float32(x[:, :0]) for x in inputs]
  output, after = gated_delta(*nothing, jnp.float32(state))
  assert output.shape == (len(EXAMPLES), 0, NUM_HEADS, VALUE_WIDTH)
  assert jnp.array_equal(after, jnp.float32(state))


def test_a_mesh_of_explicit_axes_splits_examples():
  mesh = jax.make_mesh(
    (len(EXAMPLES),), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,)
  )
  by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
  inputs = [jnp.float32(x) for x in arrays(20)[:5]]
  split = jax.device_put(inputs, by_row)
  with jax.set_mesh(mesh):
    actual = compiled(gated_delta, *split)
  assert all(x.sharding.spec[0] == "batch" for x in actual)
  assert_close(actual, compiled(gated_delta, *inputs), 1e-6)


def test_any_split_is_the_whole():
  with jax.enable_x64(True):
    *inputs, state = map(jnp.asarray, arrays(130))
    whole = compiled(gated_delta, *inputs, state)
    edges = [0, 1, 3, 17, 65, 130]
    outputs = []
    for first, last in itertools.pairwise(edges):
      piece = [x[:, first:last] for x in inputs]
      output, state = compiled(gated_delta, *piece, state)
      outputs.append(output)
    assert_close((jnp.concatenate(outputs, 1), state), whole, 1e-12)


@pytest.mark.parametrize(
  ("chunk_size", "at_once"), [(16, 4), (16, 100), (64, 2)]
)
def test_groups_of_chunks_change_nothing(chunk_size, at_once):
  """9 chunks of 16 in 3 groups or 1; 3 of 48 in 2, with an empty chunk."""
  with jax.enable_x64(True):
    operands = [jnp.asarray(x) for x in arrays(130)]
    form = functools.partial(chunked.gated_delta, chunk_size=chunk_size)
    one = compiled(functools.partial(form, chunks_at_once=1), *operands)
    many = functools.partial(form, chunks_at_once=at_once)
    assert_close(compiled(many, *operands), one, 1e-12)


def lengths_of_scans(jaxpr):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "scan":
      yield eqn.params["length"]
    for inner in core.jaxprs_in_params(eqn.params):
      yield from lengths_of_scans(inner)


@pytest.mark.parametrize(
  ("platform", "expected"), [("cpu", [4]), ("tpu", [1, 2]), (None, [4])]
)
def test_chunks_are_those_of_the_machine_that_is_compiled_for(
  platform, expected
):
  """4 chunks of 32, one at a time, or 2 of 64 at once; `fit` compiles here."""
  device = platform and jax.sharding.AbstractDevice(
    device_kind=platform, num_cores=None, platform=platform
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  operands = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays(128)]
  with jax.sharding.use_abstract_mesh(mesh):
    jaxpr = jax.make_jaxpr(gated_delta)(*operands).jaxpr
  assert [*lengths_of_scans(jaxpr)] == expected


@pytest.mark.parametrize("size", [16, 48, 64, 80])
def test_inverse_where_powers_would_overflow(size):
  """Equal keys and write gates of 2: entries of A stay at 2."""
  matrix = np.tril(np.full((2, size, size), 2.0), -1)
  matrix[1] *= np.random.default_rng(0).uniform(-1, 1, (size, size))
  matrix = np.float64(np.float32(matrix))
  expected = np.linalg.inv(np.eye(size) + matrix)
  actual = compiled(chunks.inverse_of, jnp.float32(matrix))
  assert np.abs(expected[0]).max() <= 2
  assert np.linalg.matrix_power(matrix[0], size // 2).max() > 2.0**size
  assert_close((actual[0],), (expected[0],), 1e-6)
  # |X| |A| |X| is the condition of a triangular inverse X, element by element
  # (Higham, Accuracy and Stability of Numerical Algorithms, section 14.2).
  inverse, factor = np.abs(expected[1]), np.abs(np.eye(size) + matrix[1])
  bound = np.finfo(np.float32).eps * (inverse @ factor @ inverse).max()
  np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=bound)


def masks(num_tokens):
  """Padding before, after, everywhere and in between."""
  token = np.arange(num_tokens)
  return np.stack(
    [token >= 5, token < num_tokens - 7, token < 0, token % 3 > 0, token == 9]
  )[: len(EXAMPLES)]


@pytest.mark.parametrize("form", FORMS)
def test_masked_tokens_are_not_there(form):
  """As if removed; their values change no bit, including the state's."""
  num_tokens = 40
  *inputs, state = arrays(num_tokens, np.float32)
  mask = masks(num_tokens)
  run = functools.partial(gated_delta, mask=mask, implementation=form)
  output, after = compiled(run, *inputs, state)
  assert (np.asarray(output)[~mask] == 0).all()
  assert np.array_equal(np.asarray(after)[2], state[2])  # All masked.
  poison = itertools.cycle([np.nan, np.inf, -np.inf, 3.0])
  dirty = []
  for x in inputs:
    hidden = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
    dirty.append(np.where(hidden, x, np.float32(next(poison))))
  again = compiled(run, *dirty, state)
  for first, second in zip((output, after), again, strict=True):
    assert np.array_equal(first, second)
  for example, keep in enumerate(mask):
    kept = [x[example : example + 1, keep] for x in inputs]
    want, last = recurrence(*kept, state[example : example + 1])
    got = output[example : example + 1, keep], after[example : example + 1]
    if keep.any():
      assert_close(got, (want, last), 1e-5)


def test_padding_after_the_tokens_changes_no_bit():
  *inputs, state = arrays(64, np.float32)
  whole = compiled(gated_delta, *inputs, state)
  longer = [
    np.pad(x, ((0, 0), (0, 64), *[(0, 0)] * (x.ndim - 2))) for x in inputs
  ]
  mask = np.broadcast_to(np.arange(128) < 64, (len(EXAMPLES), 128))
  padded = compiled(functools.partial(gated_delta, mask=mask), *longer, state)
  assert np.array_equal(padded[0][:, :64], whole[0])
  assert np.array_equal(padded[1], whole[1])


def test_chunks_keep_no_state_for_every_token():
  """2048 tokens: one state each is 32 MiB."""
  shapes = [
    jax.ShapeDtypeStruct((1, 2048, *s), jnp.float32)
    for s in ((1, 64), (1, 64), (1, 64), (1,), (1,))
  ]

  def temporaries(form):
    def loss(*inputs):
      output, state = gated_delta(*inputs, implementation=form)
      return jnp.sum(output**2) + jnp.sum(state**2)

    run = jax.jit(jax.grad(loss, range(5)), compiler_options=FAST)
    return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

  assert temporaries("reference") > 32 * 2**20
  assert temporaries("chunked") < 8 * 2**20


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("form", FORMS)
def test_lowers_for_accelerators_without_rounding(form, platform):
  def loss(*inputs):
    output, state = gated_delta(*inputs, implementation=form)
    return jnp.sum(output**2) + jnp.sum(state**2)

  shapes = [
    jax.ShapeDtypeStruct((2, 256, *shape), jnp.bfloat16) for shape in SHAPES
  ]
  lowered = jax.jit(jax.grad(loss, range(5))).trace(*shapes)
  text = lowered.lower(lowering_platforms=(platform,)).as_text()
  products = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
  assert len(products) > 3
  assert all("precision = [HIGHEST, HIGHEST]" in x for x in products)
  assert all("xbf16" not in x for x in products)


def test_very_short_sequences_go_by_token():
  def is_chunked(num_tokens, **options):
    form = functools.partial(gated_delta, **options)
    inputs = [x[:, :num_tokens] for x in arrays(4)[:5]]
    return "custom_vjp_call" in str(jax.make_jaxpr(form)(*inputs))

  assert not is_chunked(api.LONGEST_BY_TOKEN)
  assert is_chunked(api.LONGEST_BY_TOKEN + 1)
  assert not is_chunked(4, implementation="reference")
  assert is_chunked(1, implementation="chunked")
  with pytest.raises(ValueError, match="'fast' is not one of"):
    is_chunked(4, implementation="fast")


@pytest.mark.parametrize(("name", "shape", "message"), [
  ("query", (4, 8, KEY_WIDTH), r"must be \[B, T, H, D\]"),
  ("query", (5, 8, 3, KEY_WIDTH), "4 heads of value must be a multiple"),
  ("key", (5, 7, 2, KEY_WIDTH), r"key must be \(5, 8, 2, 8\), not"),
  ("log_decay", (5, 8, 2), r"log_decay must be \(5, 8, 4\), not"),
  ("write", (5, 8), r"write must be \(5, 8, 4\), not"),
  ("state", (5, 4, 6, 8), r"state must be \(5, 4, 8, 6\), not"),
  ("mask", (5, 9), r"mask must be \(5, 8\), not"),
])  # fmt: skip
def test_a_wrong_shape_is_named(name, shape, message):
  names = ("query", "key", "value", "log_decay", "write", "state")
  operands = dict(zip(names, arrays(8), strict=True))
  operands[name] = np.zeros(shape, bool if name == "mask" else np.float32)
  with pytest.raises(ValueError, match=message):
    gated_delta(**operands)


@pytest.mark.parametrize("chunk_size", [0, 8, 24])
def test_a_wrong_chunk_size_is_named(chunk_size):
  with pytest.raises(ValueError, match=f"chunk_size={chunk_size} must be a"):
    gated_delta(*arrays(8), chunk_size=chunk_size)
