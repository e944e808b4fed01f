"""A stack of blocks with stacked parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.errors import UserError
from loopjax.nn import dropout, stack
from loopjax.types import Precision


@dataclasses.dataclass(frozen=True)
class Shape:
  """The fields that a stack asks for."""

  width: int = 16
  num_layers: int = 3
  num_heads: int = 2
  mlp: str = "gelu"
  mlp_ratio: float = 4.0
  dropout: float = 0.0
  rope_base: float = 100.0
  init_std: float = 0.3


FAST = {"xla_backend_optimization_level": 0}
X = jax.random.normal(jax.random.key(1), (2, 6, 16))


@functools.cache
def make(shape=Shape()):
  def build():
    rngs = nnx.Rngs(params=0)
    return stack.make_layers(
      shape, shape.num_layers, precision=Precision(), rngs=rngs
    )

  return jax.jit(build, compiler_options=FAST)()


def run(layers, tables, **options):
  def apply(layers, x):
    return stack.run_layers(layers, x, tables, **options)

  return jax.jit(apply, compiler_options=FAST)(layers, X)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("unroll", [False, True])
def test_layers_run_one_after_another(unroll, remat):
  layers, tables = make(), stack.rope_tables(Shape(), 6)
  expected = X
  call = jax.jit(lambda layer, x: layer(x, tables), compiler_options=FAST)
  for index in range(3):
    layer = jax.tree.map(lambda leaf, i=index: leaf[i], layers)
    expected = call(layer, expected)
  actual = run(layers, tables, unroll=unroll, remat=remat)
  np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_layers_differ_and_have_the_layer_axis_in_front():
  params = nnx.to_pure_dict(nnx.state(make()))
  assert params["attention"]["query"]["kernel"].shape == (3, 16, 16)
  assert params["mlp"]["output"]["kernel"].shape == (3, 64, 16)
  assert params["mlp_norm"]["scale"].shape == (3, 16)
  for kernel in (params["attention"]["key"], params["mlp"]["value"]):
    first, second, _ = kernel["kernel"]
    assert not jnp.array_equal(first, second)
    np.testing.assert_allclose(jnp.std(kernel["kernel"]), 0.3, rtol=0.1)


def test_rematerialisation_keeps_less():
  shape = dataclasses.replace(Shape(), num_layers=6, mlp_ratio=16.0)
  graphdef, params = nnx.split(make(shape))
  tables = stack.rope_tables(shape, 64)
  x = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)

  def temporaries(remat):
    def loss(params, x):
      layers = nnx.merge(graphdef, params)
      return jnp.sum(stack.run_layers(layers, x, tables, remat=remat) ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(params, x).compile(FAST)
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries("full") < 0.5 * temporaries("none")


def test_rotary_positions_are_relative():
  """Equal tokens at other places attend as they did."""
  shape = dataclasses.replace(Shape(), num_layers=1)
  layers = make(shape)
  long = stack.rope_tables(shape, 9)
  shifted = tuple(table[3:] for table in long)
  first = run(layers, tuple(table[:6] for table in long))
  later = run(layers, shifted)
  np.testing.assert_allclose(first, later, atol=1e-4)


def test_costs_by_hand():
  shape = dataclasses.replace(Shape(), mlp="swiglu", mlp_ratio=2.75)
  block = 4 * 16**2 + 3 * 16 * 44 + 2 * 6 * 16
  assert stack.flops(shape, 6) == 2 * 6 * 3 * block
  assert stack.cache_bytes(shape, Precision()) == 2 * 3 * 16 * 4
  half = Precision(compute=jnp.bfloat16)
  assert stack.cache_bytes(shape, half) == 2 * 3 * 16 * 2


def test_an_odd_head_width_is_named():
  with pytest.raises(UserError, match="width=16 must be a multiple of twice"):
    stack.check(dataclasses.replace(Shape(), num_heads=16))


def test_every_layer_and_branch_drops_by_a_key_of_its_own():
  """The blocks by hand, with their own keys split off in order."""
  shape = dataclasses.replace(Shape(), num_layers=2, dropout=0.5)
  layers = stack.make_layers(
    shape, 2, precision=Precision(), rngs=nnx.Rngs(params=0)
  )
  x = jax.random.normal(jax.random.key(1), (2, 5, shape.width))
  tables, key = stack.rope_tables(shape, 5), jax.random.key(2)
  got = stack.run_layers(layers, x, tables, key=key)
  for index, layer_key in enumerate(jax.random.split(key, 2)):
    layer = jax.tree.map(lambda leaf, index=index: leaf[index], layers)
    keys = [jax.random.fold_in(layer_key, branch) for branch in range(2)]
    masks = [jax.random.bernoulli(k, 0.5, x.shape) for k in keys]
    assert not jnp.array_equal(*masks)
    mixed = layer.attention(layer.attention_norm(x), tables)
    x = x + jnp.where(masks[0], 2 * mixed, 0)
    x = x + jnp.where(masks[1], 2 * layer.mlp(layer.mlp_norm(x)), 0)
  np.testing.assert_allclose(got, x, atol=1e-5)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_of_dropout_are_named(rate):
  with pytest.raises(UserError, match=f"dropout={rate}"):
    stack.check(dataclasses.replace(Shape(), dropout=rate))


def test_dropout_keeps_the_mean_and_drops_its_share():
  x = jnp.full((400, 400), 3.0)
  dropped = dropout.dropout(x, 0.25, jax.random.key(0))
  assert abs(float(jnp.mean(dropped == 0)) - 0.25) < 0.005
  assert abs(float(jnp.mean(dropped)) - 3.0) < 0.02
  assert dropout.dropout(x, 0.25, None) is x
