"""Attention over dense logits, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import assert_rounded

from loopjax.nn.attention import dot_product

CASES = {  # Queries, keys, query heads, key heads, causal, masked.
  "all": (5, 5, 4, 4, False, False),
  "causal": (5, 5, 4, 4, True, False),
  "grouped": (4, 6, 6, 2, False, False),
  "masked": (5, 7, 2, 2, False, True),
  "causal-grouped-masked": (6, 6, 6, 2, True, True),
}


def _plain(query, key, value, causal, visible):
  """By its definition, query by query, head by head."""
  output = np.zeros((*query.shape[:3], value.shape[3]))
  per_group = query.shape[2] // key.shape[2]
  for b, t, h in np.ndindex(query.shape[:3]):
    keys, values = key[b, :, h // per_group], value[b, :, h // per_group]
    seen = np.ones(len(keys), bool) if visible is None else visible[b, t]
    if causal:
      seen = seen & (np.arange(len(keys)) <= t)
    weights = np.exp(keys @ query[b, t, h] / query.shape[3] ** 0.5) * seen
    output[b, t, h] = weights / weights.sum() @ values
  return output


def _inputs(case):
  num_queries, num_keys, heads, groups, causal, masked = CASES[case]
  rng = np.random.default_rng(0)
  query = rng.normal(size=(2, num_queries, heads, 3))
  key, value = rng.normal(size=(2, 2, num_keys, groups, 3))
  visible = rng.random((2, num_queries, num_keys)) < 0.6
  visible[:, :, 0] = True
  return query, key, value, causal, visible if masked else None


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_definition(case):
  query, key, value, causal, visible = _inputs(case)
  cotangent = np.random.default_rng(1).normal(size=query.shape)
  with jax.enable_x64(True):

    def attend(query, key, value):
      mask = None if visible is None else jnp.asarray(visible)
      return dot_product.attend(query, key, value, causal=causal, visible=mask)

    output, transpose = jax.vjp(attend, *map(jnp.asarray, (query, key, value)))
    gradients = jax.device_get(transpose(jnp.asarray(cotangent)))
  expected = _plain(query, key, value, causal, visible)
  np.testing.assert_allclose(output, expected, atol=1e-12)
  # A directional derivative by central differences.
  rng = np.random.default_rng(2)
  step = 1e-6
  for place, gradient in enumerate(gradients):
    arguments = [query, key, value]
    direction = rng.normal(size=arguments[place].shape)
    ends = []
    for sign in (1, -1):
      moved = list(arguments)
      moved[place] = moved[place] + sign * step * direction
      ends.append(np.sum(_plain(*moved, causal, visible) * cotangent))
    slope = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_parts_are_attended_to_as_one_sequence(cut):
  """Also if a query sees no key of a part; with gradients."""
  query, key, value, _, visible = _inputs("causal-grouped-masked")
  visible[0, 2] = np.arange(6) == 0
  cotangent = np.random.default_rng(1).normal(size=query.shape)
  with jax.enable_x64(True):
    operands = tuple(map(jnp.asarray, (query, key, value)))
    seen = jnp.asarray(visible)

    def whole(query, key, value):
      return dot_product.attend(query, key, value, visible=seen)

    def parts(query, key, value):
      first, last = slice(0, cut), slice(cut, None)
      return dot_product.attend_to_parts(
        query, *((key[:, s], value[:, s], seen[..., s]) for s in (last, first))
      )

    results = []
    for form in (whole, parts):
      output, transpose = jax.vjp(form, *operands)
      results.append((output, transpose(jnp.asarray(cotangent))))
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-12)


def test_nothing_of_all_pairs_of_tokens_is_kept_for_the_backward_pass():
  query = jax.ShapeDtypeStruct((2, 32, 4, 8), jnp.float32)

  def residuals(query, key, value):
    return jax.vjp(
      lambda *x: dot_product.attend(*x, causal=True), query, key, value
    )[1]

  kept = jax.tree.leaves(jax.eval_shape(residuals, query, query, query))
  assert kept
  assert max(x.size for x in kept) == query.size


@pytest.mark.long
def test_a_query_that_sees_nothing_is_finite_and_leaves_others_alone():
  query, key, value, _, visible = map(jnp.asarray, _inputs("masked"))
  visible = visible.at[0, 1].set(False)

  def others(query, key, value):
    output = dot_product.attend(query, key, value, visible=visible)
    return jnp.sum(output.at[0, 1].set(0.0) ** 2), output

  gradients, output = jax.grad(others, (0, 1, 2), has_aux=True)(
    query, key, value
  )
  assert np.isfinite(output).all()
  assert all(np.isfinite(x).all() for x in gradients)
  np.testing.assert_array_equal(gradients[0][0, 1], 0.0)


@pytest.mark.long
def test_products_take_bfloat16_and_accumulate_more():
  query, key, value, causal, _ = _inputs("causal")
  halves = [jnp.asarray(x, jnp.bfloat16) for x in (query, key, value)]
  output = dot_product.attend(*halves, causal=causal)
  assert output.dtype == jnp.bfloat16
  exact = _plain(*(np.asarray(x, np.float64) for x in halves), causal, None)
  # Roundings of scaled queries, of weights and of the result.
  assert_rounded(output, exact, roundings=3)
