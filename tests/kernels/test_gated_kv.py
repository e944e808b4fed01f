"""The update of a gated latent and its cache rows, in every form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_kv_examples import (
  FAST,
  arrays,
  assert_only_rounded,
  by_hand,
  differentiated,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core as jax_core
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pallas_examples import (
  MACHINES,
  calls_for_tpu,
  compiler,
  num_kernels_for_hopper,
  on_gpu,
  on_tpu,
)
from tests_support import assert_close, long_case

from loopjax.kernels.gated_kv import Weights, gated_kv, pallas_tpu, reference

CASES = {
  # One token per row, each at a different place; two rows are not written.
  "decode": {
    "batch": 4, "tokens": 1, "width": 24, "heads": 3, "head_width": 8,
    "rows": 5, "start": (4, -1, 0, 2**31 - 1),
  },
  # One example does not fit, and is not partly written.
  "chunk": {
    "batch": 3, "tokens": 5, "width": 24, "heads": 1, "head_width": 6,
    "rows": 9, "start": (4, 5, 0),
  },
  # Three tiles of tokens, the last one partial, two of columns and of heads.
  "tiles": {
    "batch": 2, "tokens": 20, "width": 256, "heads": 4, "head_width": 64,
    "rows": 32, "start": (12, 3),
  },
}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
  monkeypatch.setattr(pallas_tpu, "_MAX_TOKENS", 16)
  monkeypatch.setattr(pallas_tpu, "_for_tiles", lambda: 0)


def interpreted(operands):
  """Results and gradients of the TPU kernels."""
  kernel = functools.partial(gated_kv, implementation="pallas_tpu")
  with on_tpu():
    return differentiated(kernel, operands)


@pytest.mark.parametrize("name", CASES)
def test_reference_by_hand(name):
  with jax.enable_x64(True):
    operands = arrays(jnp.float64, **CASES[name])
    actual = jax.jit(gated_kv, compiler_options=FAST)(*operands)
    assert_close(actual, by_hand(*operands), 1e-14)


def test_gates_at_their_ends():
  """z = 0 gives x, z = 1 gives h, and h = x stays, all bitwise."""
  x, h, weights, *_ = arrays(jnp.float32, **CASES["chunk"])
  zero = jnp.zeros_like(weights.gate_input)
  for bias, expected in ((-jnp.inf, x), (jnp.inf, h)):
    fixed = Weights(zero, zero, jnp.full(24, bias), weights.key, weights.value)
    if bias > 0:  # x + (h - x) is h but for rounding.
      np.testing.assert_allclose(
        reference.blend(x, h, fixed), expected, atol=1e-6
      )
    else:
      assert jnp.array_equal(reference.blend(x, h, fixed), expected)
  assert jnp.array_equal(reference.blend(x, x, weights), x)


def test_first_loop_projects_the_inputs():
  x, _, weights, tables, cache, start = arrays(jnp.float32, **CASES["chunk"])
  latent, written = gated_kv(x, None, weights, tables, cache, start)
  assert latent is x
  same = gated_kv(x, x, weights, tables, cache, start)
  assert_close(written, same[1], 1e-6)


def test_parts_of_a_large_tile_have_equal_numbers_of_rows():
  assert [*map(pallas_tpu._rows, (8, 512, 1024, 1008))] == [8, 512, 512, 336]


@pytest.mark.parametrize("implementation", ["reference", "pallas_tpu"])
def test_without_a_cache_the_rows_are_returned(implementation):
  """The keys and values that a cache would get, and their gradients."""
  *inputs, cache, _ = arrays(jnp.float32, **CASES["chunk"])
  start = jnp.zeros(3, jnp.int32)
  form = functools.partial(gated_kv, implementation=implementation)

  def rows(x, h, weights, tables, cache, start):
    latent, written = gated_kv(x, h, weights, tables, cache, start)
    return latent, tuple(y[:, : x.shape[1]] for y in written)

  def alone(*operands):
    return form(*operands[:-2])

  operands = (*inputs, cache, start)
  with on_tpu():
    actual = differentiated(alone, operands)
  assert_close(actual, differentiated(rows, operands), 1e-5)


@pytest.mark.parametrize("name", ["decode", long_case("chunk"), "tiles"])
def test_kernel_is_the_reference(name, request):
  """Results and all gradients; unwritten rows bitwise."""
  if name == "tiles":
    request.getfixturevalue("small_tiles")
  operands = arrays(jnp.float32, **CASES[name])
  actual = interpreted(operands)
  expected = differentiated(gated_kv, operands)
  assert_close(actual, expected, 1e-5)
  (_, (keys, _)), (*_, d_cache) = actual
  for b, first in enumerate(CASES[name]["start"]):
    kept = np.ones(CASES[name]["rows"], bool)
    if 0 <= first <= len(kept) - CASES[name]["tokens"]:
      kept[first : first + CASES[name]["tokens"]] = False
    assert jnp.array_equal(keys[b, kept], operands[4][0][b, kept])
    assert not jnp.any(d_cache[0][b, ~kept])
    assert jnp.all(d_cache[0][b, kept])


@pytest.mark.long
def test_kernel_in_bfloat16():
  operands = arrays(jnp.bfloat16, **CASES["decode"])
  assert_only_rounded(interpreted(operands), operands)


def test_kernel_in_the_first_loop():
  x, _, *others = arrays(jnp.float32, **CASES["decode"])
  actual = interpreted((x, None, *others))
  expected = differentiated(gated_kv, (x, None, *others))
  assert_close(actual, expected, 1e-5)
  assert jnp.array_equal(actual[0][0], x)
  assert not jnp.any(actual[1][2].gate_input)


@pytest.fixture
def gpu(monkeypatch):
  """Results and gradients of the GPU kernels, interpreted."""
  copy = plgpu.copy_smem_to_gmem

  def whole_copy(source, target, **options):
    # A GPU refuses copies that start off a multiple of 128 bytes of shared
    # memory, such as those of single rows; the interpreter does not.
    forms = [type(x).__name__ for x in getattr(source, "transforms", ())]
    assert not any("Index" in form for form in forms), "not a whole buffer"
    copy(source, target, **options)

  monkeypatch.setattr(plgpu, "copy_smem_to_gmem", whole_copy)

  def run(operands):
    kernel = functools.partial(gated_kv, implementation="pallas_gpu")
    with on_gpu(monkeypatch):
      return differentiated(kernel, operands)

  return run


GPU_CASES = {
  # Two heads; two tiles of columns of each square matrix.
  "decode": {
    "batch": 3, "tokens": 1, "width": 64, "heads": 2, "head_width": 64,
    "rows": 3, "start": (2, -1, 0),
  },
  # Two tiles of tokens, the last one partial, in runs of 8 rows.
  "chunk": {
    "batch": 3, "tokens": 24, "width": 64, "heads": 1, "head_width": 64,
    "rows": 32, "start": (8, 9, 0),
  },
}  # fmt: skip


@pytest.mark.parametrize("name", [long_case("decode"), "chunk"])
def test_gpu_kernels_are_the_reference(name, gpu):
  operands = arrays(jnp.bfloat16, **GPU_CASES[name])
  actual = gpu(operands)
  assert_only_rounded(actual, operands)
  (_, (_, values)), (*_, d_cache) = actual
  for b, first in enumerate(GPU_CASES[name]["start"]):
    kept = np.ones(GPU_CASES[name]["rows"], bool)
    if 0 <= first <= len(kept) - GPU_CASES[name]["tokens"]:
      kept[first : first + GPU_CASES[name]["tokens"]] = False
    assert jnp.array_equal(values[b, kept], operands[4][1][b, kept])
    assert not jnp.any(d_cache[1][b, ~kept])


def test_gpu_kernels_in_the_first_loop(gpu):
  x, _, *others = arrays(jnp.bfloat16, **GPU_CASES["decode"])
  operands = (x, None, *others)
  assert_only_rounded(gpu(operands), operands)


def test_what_gpu_kernels_do_not_take():
  run = functools.partial(gated_kv, implementation="pallas_gpu")
  with pytest.raises(ValueError, match="takes bfloat16 inputs and cache"):
    run(*arrays(jnp.float32, **GPU_CASES["decode"]))
  with pytest.raises(ValueError, match="multiples of 64, not D=24, d_h=8"):
    run(*arrays(jnp.bfloat16, **CASES["decode"]))


def test_backward_pass_keeps_inputs_and_latent_alone():
  """Of arrays as large as the inputs; autodiff also keeps the gate."""
  operands = arrays(jnp.float32, **CASES["chunk"])
  shape = operands[0].shape

  def kept(implementation):
    form = functools.partial(gated_kv, implementation=implementation)
    _, pull_back = jax.eval_shape(functools.partial(jax.vjp, form), *operands)
    return sum(x.shape == shape for x in jax.tree.leaves(pull_back))

  assert kept("pallas_tpu") == 2
  assert kept("reference") > 2


def large(*, batch, tokens, dtype=jnp.bfloat16):
  """Shapes of a layer of the 1.4 B model of arXiv 2605.07721."""
  width, heads, head_width, rows = 2048, 16, 128, 1024
  like = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
  square = like((width, width))
  weights = Weights(square, square, like((width,)), square, square)
  angles = jax.ShapeDtypeStruct((batch, tokens, head_width // 2), jnp.float32)
  x = like((batch, tokens, width))
  cache = (like((batch, rows, heads, head_width)),) * 2
  start = jax.ShapeDtypeStruct((batch,), jnp.int32)
  return x, x, weights, (angles, angles), cache, start


def gradients(implementation):
  def total(inputs, latent, weights, tables, cache, start):
    results = gated_kv(
      inputs, latent, weights, tables, cache, start,
      implementation=implementation,
    )  # fmt: skip
    leaves = jax.tree.leaves(results)
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)

  return jax.grad(total, (0, 1, 2))


SIZES = {
  "decode": {"batch": 8, "tokens": 1},
  "chunk": {"batch": 4, "tokens": 500},
}


@pytest.mark.parametrize(
  ("batch", "mebibytes", "streams"),
  [(1, 128, 1), (4, 128, 1), (1, 64, 1), (4, 64, 2)],
)
def test_weights_are_streamed_once_for_all_tokens_that_fit(
  monkeypatch, batch, mebibytes, streams
):
  """Of v5e and v6e, and of v5p; each tile of tokens streams all weights."""
  monkeypatch.setattr(pallas_tpu, "_vmem", lambda: mebibytes * 2**20)
  operands = large(batch=batch, tokens=500)
  jaxpr = jax.make_jaxpr(gradients("pallas_tpu"))(*operands)
  found = [
    equation.params["grid_mapping"].grid
    for equation in equations(jaxpr.jaxpr)
    if equation.primitive.name == "pallas_call"
  ]
  update, pull_back = found
  assert update[0] == streams
  assert pull_back[0] <= streams


def equations(jaxpr):
  """All calls of a program, including nested ones."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from equations(inner)


@pytest.mark.parametrize("size", SIZES)
def test_lowers_for_tpu(size):
  calls, names = calls_for_tpu(gradients("pallas_tpu"), large(**SIZES[size]))
  assert names == ["gated_kv", "gated_kv_pull_back"]
  # Keys and values are results 1 and 2, in the arguments' memory.
  assert calls[0].count("output_operand_alias<output_tuple_indices") == 2


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_lowers_for_hopper(size):
  """Blend, project and pull back."""
  operands = large(**SIZES[size])
  assert num_kernels_for_hopper(gradients("pallas_gpu"), operands) == 3


@pytest.mark.manual
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MACHINES)
def test_compiles_ahead_of_time(name, size, monkeypatch):
  """With all tiles in VMEM or shared memory; the cache is written in place."""
  machine, implementation = compiler(name, monkeypatch)
  mesh = Mesh(np.array(machine.devices[:1]), ("data",))
  whole = NamedSharding(mesh, PartitionSpec())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
    large(**SIZES[size]),
  )
  form = functools.partial(gated_kv, implementation=implementation)
  options = machine.compiler_options
  update = jax.jit(form, donate_argnums=(4,))
  backward = jax.jit(gradients(implementation))
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Names the chip.
    update, backward = (x.lower(*shapes) for x in (update, backward))
  update = update.compile(options)
  cache = sum(2 * x.size for x in shapes[4])
  memory = update.memory_analysis()
  assert memory.alias_size_in_bytes == cache
  assert memory.temp_size_in_bytes < cache
  backward.compile(options)


def test_default_is_the_reference_until_a_kernel_is_measured():
  operands = arrays(jnp.float32, **CASES["decode"])

  def is_kernel(**options):
    form = functools.partial(gated_kv, **options)
    return "pallas_call" in str(jax.make_jaxpr(form)(*operands))

  assert not is_kernel()
  assert is_kernel(implementation="pallas_tpu")
  with pytest.raises(ValueError, match="'fast' is not one of"):
    is_kernel(implementation="fast")


@pytest.mark.parametrize(("place", "shape", "message"), [
  (0, (3, 5), r"inputs must be \[B, S, D\]"),
  (1, (3, 4, 24), r"latent must be \(3, 5, 24\), not \(3, 4, 24\)"),
  (5, (2,), r"start must be \(3,\)"),
])  # fmt: skip
def test_shapes_that_do_not_fit(place, shape, message):
  operands = list(arrays(jnp.float32, **CASES["chunk"]))
  operands[place] = jnp.zeros(shape)
  with pytest.raises(ValueError, match=message):
    gated_kv(*operands)


@pytest.mark.parametrize("missing", [4, 5])
def test_a_cache_and_its_places_belong_together(missing):
  operands = list(arrays(jnp.float32, **CASES["chunk"]))
  operands[missing] = None
  with pytest.raises(ValueError, match="both cache and start"):
    gated_kv(*operands)


def test_more_tokens_than_rows():
  operands = arrays(jnp.float32, **{**CASES["chunk"], "rows": 4})
  with pytest.raises(ValueError, match="5 tokens do not fit into 4 rows"):
    gated_kv(*operands)
