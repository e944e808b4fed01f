"""Linear maps against NumPy, and the form of their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import roofline
from flax import nnx
from in_float64 import without_rounding
from jax.sharding import NamedSharding, PartitionSpec

from loopjax.nn import linear, mlp
from loopjax.types import PRECISIONS, Precision


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


@pytest.mark.parametrize(
  ("precision", "hidden"), [("float32", 21), ("bfloat16", 24)]
)
def test_hidden_features_are_whole_tiles_in_bfloat16(precision, hidden):
  """For 21 features, with the same values and gradients as without padding."""
  precision = PRECISIONS[precision]
  layer = mlp.MLPS["swiglu"](7, 21, precision=precision, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(layer)
  x = jax.random.normal(jax.random.key(1), (2, 3, 7)).astype(precision.compute)

  def padded(params):
    return nnx.merge(graphdef, params)(x)

  def plain(params):
    one = nnx.merge(graphdef, params)
    gate, value, output = (
      part.kernel[...].astype(precision.compute)
      for part in (one.gate, one.value, one.output)
    )
    return (jax.nn.silu(x @ gate) * (x @ value)) @ output

  program = str(jax.make_jaxpr(padded)(params))
  assert f"[6,{hidden}] = dot_general" in program
  found, expected = (
    without_rounding(
      jax.value_and_grad(lambda x, f=f: jnp.sum(f(x).astype(jnp.float32) ** 2))
    )(params)
    for f in (padded, plain)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9),
    found,
    expected,
  )


def test_a_gate_of_all_loops_gathers_no_rows():
  """[K, B, T, D] with B split over devices: only the gradient is reduced."""
  mesh = jax.make_mesh((8,), ("data",))

  def placed(shape, *axes):
    where = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

  gate = linear.readout(32, 1, precision=Precision(), rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(gate)
  params = nnx.to_pure_dict(params)

  def loss(kernel, x):
    gate = nnx.merge(graphdef, {**params, "kernel": kernel})
    return jnp.sum(jax.nn.log_sigmoid(gate(x)))

  arguments = placed((32, 1)), placed((3, 8, 6, 32), None, "data")
  compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
  traffic = roofline.collectives(roofline.parse(compiled.as_text()))
  assert traffic.num_bytes == {"all-reduce": 32 * 4}
