"""Common properties of fast-weight layers: state, masks, gates, gradients."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.fast_weights.gated_delta import GatedDeltaNet
from loopjax.nn.fast_weights.jet import JetBlock
from loopjax.nn.fast_weights.layer import Gates, State, pack, packing, unpack
from loopjax.types import Precision

FAST = {"xla_backend_optimization_level": 0}
LAYERS = {"gated_delta": GatedDeltaNet, "jet": JetBlock}
WIDTH, HEADS, KEYS, VALUES, TOKENS = 12, 2, 4, 8, 15
X = jax.random.normal(jax.random.key(1), (3, TOKENS, WIDTH))
BOTH = crossing("name", LAYERS)


def build(name, precision=Precision(), **options):
  def make():
    return LAYERS[name](
      WIDTH, HEADS, KEYS, VALUES,
      precision=precision, rngs=nnx.Rngs(params=0), **options,
    )  # fmt: skip

  return jax.jit(make, compiler_options=FAST)()


@functools.cache
def trained(name):
  """A layer whose parameters all differ from their initial values."""
  graphdef, params = nnx.split(build(name))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(7), len(leaves))
  moved = [
    x + 0.3 * jax.random.normal(key, x.shape)
    for x, key in zip(leaves, keys, strict=True)
  ]
  return nnx.merge(graphdef, jax.tree.unflatten(tree, moved))


@functools.partial(jax.jit, compiler_options=FAST)
def apply(layer, x, state, mask=None):
  return layer(x, state, None if mask is None else packing(mask))


def full_state(layer, carry=True):
  """A state without zeros."""
  leaves, tree = jax.tree.flatten(
    layer.initial_state(len(X), carry_convolutions=carry)
  )
  keys = jax.random.split(jax.random.key(3), len(leaves))
  drawn = [
    jax.random.normal(key, x.shape, x.dtype)
    for x, key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, drawn)


def assert_trees_close(actual, expected, tolerance):
  for got, want in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def in_pieces(layer, state):
  outputs = []
  for first, last in itertools.pairwise([0, 1, 2, 4, 6, TOKENS]):
    output, state, _ = apply(layer, X[:, first:last], state)
    outputs.append(output)
  return jnp.concatenate(outputs, axis=1), state


@pytest.mark.long
@BOTH
def test_any_split_is_the_whole_if_convolutions_are_carried(name):
  """Pieces of 1, 1, 2, 2 and 9 tokens; convolutions see 4."""
  layer = trained(name)
  state = full_state(layer)
  whole = apply(layer, X, state)[:2]
  assert jnp.abs(whole[0]).max() > 1
  assert_trees_close(in_pieces(layer, state), whole, 1e-4)


@BOTH
def test_convolutions_that_are_not_carried_start_anew(name):
  layer = trained(name)
  carried, alone = full_state(layer), full_state(layer, carry=False)
  assert alone.tail is None
  whole, after, _ = apply(layer, X, alone)
  assert after.tail is None
  empty = jax.tree.map(jnp.zeros_like, carried.tail)
  assert_trees_close(
    (whole, after.fast),
    (lambda y, state, _: (y, state.fast))(
      *apply(layer, X, State(alone.fast, empty))
    ),
    1e-6,
  )
  output, _, _ = apply(layer, X[:, 6:], alone)
  other, _, _ = apply(layer, X[:, 6:], State(alone.fast, carried.tail))
  change = jnp.abs(output - other).max((0, 2))
  assert (change[:3] > 1e-3).all()


@BOTH
def test_tokens_see_themselves_those_before_and_the_state(name):
  layer = trained(name)
  state = full_state(layer)
  before, _, _ = apply(layer, X, state)
  after, _, _ = apply(layer, X.at[:, 9].add(1.0), state)
  change = jnp.abs(after - before).max((0, 2))
  assert (change[:9] == 0).all()
  assert (change[9:] > 0).all()
  other, _, _ = apply(layer, X, State(state.fast + 1.0, state.tail))
  assert (jnp.abs(other - before).max((0, 2)) > 0).all()


def masks():
  """Before; in between; everything."""
  token = np.arange(TOKENS)
  return np.stack([token >= 5, token % 3 > 0, token < 0])


@BOTH
def test_masked_tokens_are_not_there(name):
  """For outputs, fast weights and convolutions; for any values."""
  layer, mask = trained(name), masks()
  state = full_state(layer)
  y, after, stats = apply(layer, X, state, mask)
  assert (np.asarray(y)[~mask] == 0).all()
  poison = jnp.where(mask[..., None], X, jnp.nan)
  for first, second in zip(
    jax.tree.leaves((y, after, stats)),
    jax.tree.leaves(apply(layer, poison, state, mask)),
    strict=True,
  ):
    assert jnp.array_equal(first, second)
  for example in range(2):
    one = jax.tree.map(lambda x, i=example: x[i : i + 1], (X, state, stats))
    got = jax.tree.map(lambda x, i=example: x[i : i + 1], (y, after))
    want = apply(layer, one[0][:, mask[example]], one[1])
    assert_trees_close((got[0][:, mask[example]], got[1]), want[:2], 1e-5)
    assert_trees_close(one[2], want[2], 1e-6)
  for got, want in zip(
    jax.tree.leaves(after), jax.tree.leaves(state), strict=True
  ):
    assert jnp.array_equal(got[2], want[2])
  assert (stats["retention"][2] == 1).all()


@BOTH
def test_where_the_padding_stands_changes_no_bit(name):
  layer = trained(name)
  state = full_state(layer)
  space = jnp.full((3, 7, WIDTH), 5.0)
  real = np.ones((3, TOKENS), bool)
  hidden = np.zeros((3, 7), bool)
  front = apply(
    layer,
    jnp.concatenate([space, X], 1),
    state,
    np.concatenate([hidden, real], 1),
  )
  packed_after = apply(
    layer,
    jnp.concatenate([X, space], 1),
    state,
    np.concatenate([real, hidden], 1),
  )
  assert jnp.array_equal(front[0][:, 7:], packed_after[0][:, :TOKENS])
  for first, second in zip(
    jax.tree.leaves(front[1:]), jax.tree.leaves(packed_after[1:]), strict=True
  ):
    assert jnp.array_equal(first, second)


@pytest.mark.parametrize("there", [True, False])
def test_the_gradient_of_moved_tokens_is_the_adjoint(there):
  """<w, A x> is <A^T w, x> for any w and x."""
  places = packing(masks())
  w, x = jax.random.normal(jax.random.key(6), (2, *X.shape))

  def moved(x):
    return pack(x, places)[0] if there else unpack(x, places)

  adjoint = jax.grad(lambda x: jnp.vdot(w, moved(x)))(jnp.zeros_like(x))
  np.testing.assert_allclose(
    jnp.vdot(adjoint, x), jnp.vdot(w, moved(x)), rtol=1e-4
  )


@functools.cache
def gradients(name):
  """Of a random projection of the outputs, for parameters, x and state."""
  graphdef, params = nnx.split(trained(name))
  weights = jax.random.normal(jax.random.key(5), X.shape)

  def value(params, state, x, mask):
    y, _, _ = nnx.merge(graphdef, params)(x, state, packing(mask))
    return jnp.sum(weights * y)

  run = jax.jit(jax.grad(value, (0, 1, 2)), compiler_options=FAST)
  return functools.partial(run, params, full_state(trained(name)))


@pytest.mark.long
@BOTH
def test_every_parameter_and_all_of_the_state_get_a_gradient(name):
  everything = np.ones((3, TOKENS), bool)
  params, state, x = gradients(name)(X, everything)
  flat = jax.tree_util.tree_leaves_with_path((params, state))
  # Query, key, value, two gates' logits, output gate, norm, output, A_log,
  # dt_bias; with three convolutions, or two matrices and a bias. The state.
  assert len(flat) == {"gated_delta": 10 + 3 + 4, "jet": 10 + 3 + 2}[name]
  for path, leaf in flat:
    assert jnp.abs(leaf).max() > 1e-3, path
  assert (jnp.abs(x).max((0, 2)) > 1e-3).all()


@BOTH
def test_masked_tokens_have_no_part_in_gradients(name):
  """Including gradients of parameters, for any values of these tokens."""
  mask = masks()
  clean = gradients(name)(X, mask)
  poison = jnp.where(mask[..., None], X, jnp.nan)
  for first, second in zip(
    jax.tree.leaves(clean),
    jax.tree.leaves(gradients(name)(poison, mask)),
    strict=True,
  ):
    assert jnp.isfinite(second).all()
    assert jnp.array_equal(first, second)
  x = np.asarray(clean[2])
  assert (x[~mask] == 0).all()
  assert (np.abs(x[mask]).max(-1) > 0).all()


@BOTH
def test_gradients_reach_the_window_before(name):
  """Only through the fast weights."""
  layer = trained(name)

  def later(x):
    start = layer.initial_state(len(x))
    _, state, _ = layer(x, start)
    y, _, _ = layer(X, state)
    return jnp.sum(y**2)

  slope = jax.jit(jax.grad(later), compiler_options=FAST)(X[:, :9])
  assert (jnp.abs(slope).max((0, 2)) > 1e-4).all()


@BOTH
def test_retention_is_the_product_of_the_decay_gates(name):
  layer = trained(name)
  _, _, stats = apply(layer, X, layer.initial_state(3), masks())
  fast_weights = layer.fast_weights
  kernel = np.asarray(fast_weights.decay.kernel[...])
  gates = np.logaddexp(
    0, np.asarray(X) @ kernel + np.asarray(fast_weights.dt_bias[...])
  )
  log_decay = -np.exp(np.asarray(fast_weights.A_log[...])) * gates
  expected = np.exp(np.sum(log_decay * masks()[..., None], axis=1))
  np.testing.assert_allclose(stats["retention"], expected, rtol=1e-4)


def test_a_new_head_forgets_half_of_its_state_in_69_tokens(monkeypatch):
  monkeypatch.setattr(fast_weights, "DT_RANGE", (0.00999, 0.01001))
  layer = build("gated_delta", gates=Gates(A_range=(0.999, 1.001)))
  state = layer.initial_state(1)
  _, _, stats = apply(layer, jnp.zeros((1, 69, WIDTH)), state)
  # The ranges leave 0.2% of the exponent open.
  np.testing.assert_allclose(stats["retention"], np.exp(-0.69), rtol=5e-3)


def test_gates_start_in_their_ranges():
  heads = 8192
  layer = fast_weights.FastWeights(
    2, heads, 1, 1, precision=Precision(), rngs=nnx.Rngs(params=0)
  )
  rates = np.exp(np.asarray(layer.A_log[...]))
  steps = np.logaddexp(0, np.asarray(layer.dt_bias[...]))
  assert rates.min() >= 1e-4 and rates.max() <= 16
  # Five standard errors of a quantile q: sqrt(q (1 - q) / n) / density.
  np.testing.assert_allclose(
    np.quantile(rates, [0.25, 0.75]),
    [4, 12],
    atol=5 * (0.25 * 0.75 / heads) ** 0.5 * 16,
  )
  assert steps.min() >= 0.00099 and steps.max() <= 0.101
  np.testing.assert_allclose(
    np.log(np.median(steps)),
    np.log(0.01),
    atol=5 * (0.25 / heads) ** 0.5 * np.log(100),
  )


@BOTH
def test_write_gates_go_up_to_two_with_negative_eigenvalues(name):
  """From a zero state, one token writes its gate times its value."""
  gates = Gates(negative_eigenvalues=True)
  single, double = build(name), build(name, gates=gates)
  state = single.initial_state(3)
  first, second = (
    apply(layer, X[:, :1], state)[1].fast for layer in (single, double)
  )
  assert jnp.abs(first).max() > 1e-5
  np.testing.assert_allclose(second, 2 * first, rtol=1e-5)


@BOTH
def test_bfloat16_keeps_state_and_gates_in_float32(name):
  half = Precision(params=jnp.bfloat16, compute=jnp.bfloat16)
  layer = build(name, half)
  assert layer.fast_weights.A_log[...].dtype == jnp.float32
  assert layer.fast_weights.dt_bias[...].dtype == jnp.float32
  assert layer.query.kernel[...].dtype == jnp.bfloat16
  tails = layer.initial_state(3, carry_convolutions=True).tail
  assert all(x.dtype == jnp.bfloat16 for x in tails)
  params = nnx.split(trained(name))[1]
  layer = nnx.merge(nnx.split(layer)[0], params)
  state = full_state(trained(name), carry=False)
  y, after, stats = apply(layer, X, state)
  assert y.dtype == jnp.bfloat16
  assert after.fast.dtype == stats["retention"].dtype == jnp.float32
  expected = apply(trained(name), X, state)
  scale = float(jnp.abs(expected[0]).max())
  np.testing.assert_allclose(y, expected[0], atol=0.05 * scale)
  np.testing.assert_allclose(
    stats["retention"], expected[2]["retention"], rtol=1e-5
  )


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@BOTH
def test_lowers_for_accelerators(name, platform):
  layer = build(name)
  traced = jax.jit(layer.__call__).trace(X, layer.initial_state(3))
  assert "while" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("ends", [(2.0, 1.0), (-1.0, 1.0), (1.0, 1.0)])
def test_wrong_ranges_are_named(ends):
  message = re.escape(f"A_range={ends} must be 0 <= low < high")
  with pytest.raises(UserError, match=message):
    Gates(A_range=ends)
