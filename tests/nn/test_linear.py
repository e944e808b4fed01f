"""Linear maps against NumPy, and the form of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.nn import linear
from loopjax.types import Precision


def make(kind, compute=jnp.float32):
  precision = Precision(compute=compute)
  return getattr(linear, kind)(7, 5, precision=precision, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7)])
@pytest.mark.parametrize("kind", ["linear", "readout"])
def test_linear_maps_are_their_products(kind, shape):
  layer = make(kind)
  x = np.asarray(jax.random.normal(jax.random.key(1), shape))
  expected = x @ np.asarray(layer.kernel[...])
  actual = layer(x)
  assert actual.shape == (*shape[:-1], 5)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])
def test_gradients_of_linear_maps_are_products_of_matrices(compute):
  graphdef, params = nnx.split(make("linear", compute))

  def loss(params, x):
    return jnp.sum(jnp.tanh(nnx.merge(graphdef, params)(x)))

  x = jnp.ones((2, 3, 7))
  gradient = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x).jaxpr
  products = [
    [variable.aval.ndim for variable in equation.invars]
    for equation in jax.tree.leaves(gradient.eqns)
    if equation.primitive.name == "dot_general"
  ]
  assert products == [[2, 2]] * 3  # Forward, to the input, to the kernel.
