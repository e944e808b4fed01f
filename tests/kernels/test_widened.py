"""Products of 16-bit arrays: results in float32, derivatives in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jax_core

from loopjax.kernels.vocabulary import widened


def operands(dtype):
  rng = np.random.default_rng(0)
  left, right = rng.normal(size=(2, 24, 16)), rng.normal(size=(16, 8))
  return jnp.asarray(left, dtype), jnp.asarray(right, dtype)


def form(*x):
  return widened("btd,de->bte", *x)


def products(jaxpr):
  """The dtypes of the inputs of every product."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield tuple(str(x.aval.dtype) for x in equation.invars)
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from products(inner)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_product_has_inputs_of_one_dtype(dtype):
  """Also products of gradients, for all operands or for one."""
  left, right = operands(dtype)
  for argnums, number in (((0, 1), 3), ((0,), 2), ((1,), 2)):
    run = jax.grad(lambda *x: jnp.sum(form(*x) ** 2), argnums)
    found = [*products(jax.make_jaxpr(run)(left, right).jaxpr)]
    name = jnp.dtype(dtype).name
    assert found == [(name, name)] * number


def test_values_and_derivatives_are_those_of_the_wide_product():
  left, right = operands(jnp.bfloat16)
  wide = [x.astype(jnp.float32) for x in (left, right)]
  cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(2, 24, 8)))

  def differentiated(*x):
    result, transpose = jax.vjp(form, *x)
    return result, *transpose(cotangent.astype(result.dtype))

  actual, expected = differentiated(left, right), differentiated(*wide)
  assert [x.dtype.name for x in actual] == ["float32", "bfloat16", "bfloat16"]
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-5)
  for one, other in zip(actual[1:], expected[1:], strict=True):
    scale = float(jnp.max(jnp.abs(other)))
    error = jnp.max(jnp.abs(one.astype(jnp.float32) - other))
    assert error < 2e-2 * scale
  _, tangent = jax.jvp(form, (left, right), (left, right))
  np.testing.assert_allclose(tangent, 2 * expected[0], rtol=2e-2, atol=0.1)
