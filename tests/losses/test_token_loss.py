"""Cross-entropies of tokens: by chunks, in plain form, of other functions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vocabulary_examples
from tests_support import array_sizes
from vocabulary_examples import FAST, HIDDEN, ROWS, assert_close, compiled, like

from loopjax.losses import tokens
from loopjax.losses.tokens import token_loss, token_scores

WIDTH = 12
CASES = {
  **vocabulary_examples.SIZES,
  "one_real_token": {"vocab": 37, "chunk": 8, "padding": 36},
}


def arrays(case, dtype):
  """Hidden states [3, 5, D], table [V, D], targets among the real tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (3, 5, WIDTH), dtype)
  table = jax.random.normal(keys[1], (case["vocab"], WIDTH), dtype)
  real = case["vocab"] - case.get("padding", 0)
  return hidden, table, jax.random.randint(keys[2], (3, 5), 0, real)


def chunks(case):
  return functools.partial(
    token_loss,
    num_padding_tokens=case.get("padding", 0),
    chunk_size=case["chunk"],
  )


def plain(case):
  return functools.partial(
    vocabulary_examples.token_loss, num_padding_tokens=case.get("padding", 0)
  )


def values_and_grads(form, hidden, table, targets, weights=None):
  """Losses, and gradients of a weighted sum of them."""
  if weights is None:
    weights = jnp.linspace(0.5, 1.5, targets.size, dtype=hidden.dtype)
    weights = weights.reshape(targets.shape)

  def weighted(hidden, table):
    losses = form(hidden, table, targets)
    return jnp.sum(weights.astype(losses.dtype) * losses), losses

  run = jax.grad(weighted, (0, 1), has_aux=True)
  grads, values = jax.jit(run, compiler_options=FAST)(hidden, table)
  return values, grads


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_reference(name):
  case = CASES[name]
  with jax.enable_x64(True):
    operands = arrays(case, jnp.float64)
    actual, expected = (
      values_and_grads(form(case), *operands) for form in (chunks, plain)
    )
    assert actual[0].dtype == jnp.float64
    assert_close(actual, expected, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)]
)
def test_narrow_inputs_add_in_float32(dtype, tolerance):
  case = CASES["padding"]
  operands = arrays(case, dtype)
  actual, expected = (
    values_and_grads(form(case), *operands) for form in (chunks, plain)
  )
  assert actual[0].dtype == jnp.float32
  assert {x.dtype for x in actual[1]} == {jnp.dtype(dtype)}
  assert_close(actual, expected, tolerance)
  # Values of rounded inputs, without further rounding.
  wide = [x.astype(jnp.float32) for x in operands[:2]]
  exact = jax.jit(plain(case))(*wide, operands[2])
  assert_close(actual[0], exact, 1e-5)


@pytest.mark.long
def test_reference_by_hand():
  """-log of the target's probability, in NumPy, token by token."""
  case = {"vocab": 9, "padding": 2}
  with jax.enable_x64(True):
    hidden, table, targets = arrays(case, jnp.float64)
    losses = plain(case)(hidden, table, targets)
  h, w = (np.asarray(x, np.float64) for x in (hidden, table))
  for b, t in np.ndindex(targets.shape):
    exponentials = np.exp([w[v] @ h[b, t] for v in range(7)])
    share = exponentials[targets[b, t]] / exponentials.sum()
    np.testing.assert_allclose(losses[b, t], -np.log(share), atol=1e-12)


@pytest.mark.parametrize("form", [chunks, plain])
def test_padding_targets_are_finite_and_without_weight_move_nothing(form):
  case = CASES["padding"]
  hidden, table, targets = arrays(case, jnp.float32)
  padded = targets.at[0].set(case["vocab"] - 1)
  weights = jnp.ones(targets.shape).at[0].set(0.0)
  expected = values_and_grads(form(case), hidden, table, targets, weights)
  actual = values_and_grads(form(case), hidden, table, padded, weights)
  assert jnp.isfinite(actual[0]).all()
  assert (actual[0][0] > 1e8).all()
  assert_close(actual[1], expected[1], 1e-6)
  assert (actual[1][1][-case["padding"] :] == 0).all()
  heavy = values_and_grads(form(case), hidden, table, padded)[1]
  assert (heavy[1][-case["padding"] :] == 0).all()  # The logit is a constant.


@pytest.mark.parametrize(("offset", "scale"), [(2.0**14, 1.0), (0.0, 1e18)])
def test_large_logits_neither_overflow_nor_lose_their_differences(
  offset, scale
):
  """A common offset of all logits of a token changes no loss, bitwise."""
  case = CASES["ragged"]
  hidden, table, targets = arrays(case, jnp.float32)
  # Multiples of 1/8: sums are exact with and without the offset.
  hidden, table = jnp.round(8 * hidden) / 8, jnp.round(8 * table) / 8
  table = table.at[:, 0].set(1.0)
  hidden = scale * hidden.at[..., 0].set(0.0)
  before, grads = values_and_grads(chunks(case), hidden, table, targets)
  far = hidden.at[..., 0].set(offset)
  after, _ = values_and_grads(chunks(case), far, table, targets)
  assert jnp.array_equal(before, after)
  assert all(jnp.isfinite(x).all() for x in (before, *grads))


def mean_loss(*operands, form=token_loss):
  return jnp.mean(form(*operands))


plain_loss = functools.partial(mean_loss, form=vocabulary_examples.token_loss)


def peak(compiled):
  """Bytes of arguments, results and temporaries."""
  memory = compiled.memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
  )


def test_memory_at_the_vocabulary_of_a_language_model():
  """4,096 tokens, 129,280 rows (DiscoLoop, appendix B): an eighth of plain."""
  operands = (
    like(4, 1024, 128),
    like(129_280, 128),
    like(4, 1024, dtype=jnp.int32),
  )
  whole, parts = (
    compiled(form, operands, True) for form in (plain_loss, mean_loss)
  )
  assert peak(parts) < peak(whole) / 8
  assert max(array_sizes(parts.as_text())) == 129_280 * 128  # The table.


@pytest.mark.parametrize(("backward", "share"), [(False, 1 / 3), (True, 1 / 4)])
def test_no_array_of_tokens_by_vocabulary_is_in_the_program(backward, share):
  operands = like(4, 128, 16), like(16_384, 16), like(4, 128, dtype=jnp.int32)
  vocabulary_examples.assert_no_array_of_the_vocabulary(
    plain_loss, mean_loss, operands, backward, share
  )


def test_a_mesh_changes_nothing_and_gathers_no_table():
  hidden, table, targets = arrays({"vocab": 4608}, jnp.float32)
  targets = jnp.concatenate([targets] * 4)

  def loss(hidden, table):
    return jnp.mean(token_loss(hidden, table, targets))

  operands = jnp.concatenate([hidden] * 4), table
  text = vocabulary_examples.on_a_mesh(
    loss, operands, (HIDDEN, ROWS), tolerance=1e-5
  )
  whole = re.findall(r"= f32\[4608,12\]\S* (\S+)\(", text)
  assert not [name for name in whole if name.startswith("all-")]


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform):
  operands = (
    like(8, 128, 256, dtype=jnp.bfloat16),
    like(129_280, 256, dtype=jnp.bfloat16),
    like(8, 128, dtype=jnp.int32),
  )
  vocabulary_examples.assert_lowers(mean_loss, operands, platform)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_scores_of_tokens(case):
  """Losses, and the first of the most likely tokens, without padding."""
  real, options = case["vocab"] - case.get("padding", 0), chunks(case).keywords
  scores = functools.partial(token_scores, **options)
  run = jax.jit(scores, compiler_options=FAST)
  for equal in (False, True):
    with jax.enable_x64(True):
      hidden, table, targets = arrays(case, jnp.float64)
      rows = table.at[real // 2 :].set(table[0]) if equal else table
      losses, best = run(hidden, rows, targets)
      expected = plain(case)(hidden, rows, targets)
    np.testing.assert_allclose(losses, expected, atol=1e-12)
    logits = np.einsum("btd,vd->btv", hidden, rows)[..., :real]
    # Equal rows have equal logits up to the order of summation.
    nearly = logits >= logits.max(axis=-1, keepdims=True) - 1e-12
    np.testing.assert_array_equal(best, np.argmax(nearly, axis=-1))


def test_of_equal_tokens_the_first_is_the_most_likely():
  hidden, table = jnp.ones((2, 3, 4)), jnp.ones((37, 4))
  _, best = token_scores(
    hidden,
    table.at[:11].set(0.0),
    jnp.zeros((2, 3), jnp.int32),
    num_padding_tokens=3,
    chunk_size=8,
  )
  np.testing.assert_array_equal(best, 11)


def stablemax_cross_entropy(logits, targets):
  of_softmax = tokens.DISTRIBUTIONS["stablemax"](logits)
  return tokens.token_cross_entropy(of_softmax, targets)


def test_stablemax_is_its_definition():
  """s(x) / sum s with s(x) = x + 1, or 1 / (1 - x) below 0; in float64."""
  random = np.random.default_rng(0)
  logits = np.float32(3 * random.normal(size=(4, 5, 7)))
  targets = random.integers(0, 7, (4, 5))
  x = logits.astype(np.float64)
  s = np.where(x < 0, 1 / (1 - np.minimum(x, 0)), x + 1)
  chances = s / s.sum(-1, keepdims=True)
  expected = -np.log(np.take_along_axis(chances, targets[..., None], -1))
  found = stablemax_cross_entropy(jnp.asarray(logits), targets)
  np.testing.assert_allclose(found, expected[..., 0], rtol=1e-5)


def test_stablemax_has_a_gradient_at_one_and_far_away():
  """At 1 the branch for negative logits would divide by zero."""
  logits = jnp.array([[1.0, -1e6, 1e6, 0.0]])
  loss = jax.grad(lambda x: jnp.sum(stablemax_cross_entropy(x, jnp.array([0]))))
  assert jnp.isfinite(loss(logits)).all()
  # A softmax this confident in a wrong token has no smaller gradient.
  assert loss(logits)[0, 0] < -0.1
