"""A stack of blocks with stacked parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.errors import UserError
from loopjax.nn import attention, block, stack
from loopjax.nn import keys as keys_lib
from loopjax.types import Precision


@dataclasses.dataclass(frozen=True)
class Settings(stack.StackConfig):
  norm_order: str = "pre"
  qk_norm: bool = False
  dropout: float = 0.0


def shape_of(**changes):
  settings = {"width": 16, "num_heads": 2, "init_std": 0.3, **changes}
  return Settings(**settings).block_shape()


FAST = {"xla_backend_optimization_level": 0}
X = jax.random.normal(jax.random.key(1), (2, 6, 16))


@functools.cache
def make(num_layers=3, **changes):
  def build():
    rngs, shape = nnx.Rngs(params=0), shape_of(**changes)
    return stack.stacked(
      num_layers, rngs, block.Block, shape, precision=Precision()
    )

  return jax.jit(build, compiler_options=FAST)()


def run(layers, metadata, **options):
  def apply(layers, x):
    return stack.run_layers(layers, x, None, metadata, **options)[0]

  return jax.jit(apply, compiler_options=FAST)(layers, X)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("unroll", [False, True])
def test_layers_run_one_after_another(unroll, remat):
  layers = make()
  metadata = attention.make_metadata((1, 6), 8, 100.0)
  expected = X
  call = jax.jit(lambda layer, x: layer(x, metadata)[0], compiler_options=FAST)
  for index in range(3):
    layer = jax.tree.map(lambda leaf, i=index: leaf[i], layers)
    expected = call(layer, expected)
  actual = run(layers, metadata, unroll=unroll, remat=remat)
  np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.long
def test_a_post_norm_adds_branches_of_unit_scale():
  """x + n(attention), then + n(mlp): both have a mean square of 1."""
  layers = make(1, norm_order="branch")
  metadata = attention.make_metadata((1, 6), 8, 100.0)
  block = jax.tree.map(lambda leaf: leaf[0], layers)
  mixed, _ = block.attention(block.attention_norm(X), metadata)

  def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

  x = X + normed(mixed)
  expected = x + normed(block.mlp(block.mlp_norm(x)))
  np.testing.assert_allclose(run(layers, metadata), expected, atol=1e-4)


def test_layers_differ_and_have_the_layer_axis_in_front():
  params = nnx.to_pure_dict(nnx.state(make()))
  assert params["attention"]["query"]["kernel"].shape == (3, 16, 16)
  assert params["mlp"]["output"]["kernel"].shape == (3, 64, 16)
  assert params["mlp_norm"]["scale"].shape == (3, 16)
  for kernel in (params["attention"]["key"], params["mlp"]["value"]):
    first, second, _ = kernel["kernel"]
    assert not jnp.array_equal(first, second)
    np.testing.assert_allclose(jnp.std(kernel["kernel"]), 0.3, rtol=0.1)


@pytest.mark.long
def test_rematerialisation_keeps_less():
  layers = make(6, mlp_ratio=16.0)
  graphdef, params = nnx.split(layers)
  metadata = attention.make_metadata((1, 64), 8, 100.0)
  x = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)

  def temporaries(remat):
    def loss(params, x):
      layers = nnx.merge(graphdef, params)
      x, _ = stack.run_layers(layers, x, None, metadata, remat=remat)
      return jnp.sum(x**2)

    compiled = jax.jit(jax.grad(loss)).lower(params, x).compile(FAST)
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries("full") < 0.5 * temporaries("none")


@pytest.mark.long
def test_rotary_positions_are_relative():
  """Equal tokens at other positions attend equally."""
  layers = make(1)
  long = attention.make_metadata((1, 9), 8, 100.0).tables
  first, later = (
    run(layers, attention.Metadata(tuple(table[i : i + 6] for table in long)))
    for i in (0, 3)
  )
  np.testing.assert_allclose(first, later, atol=1e-4)


def test_an_odd_head_width_is_named():
  with pytest.raises(UserError, match="width=16 must be a multiple of twice"):
    shape_of(num_heads=16)


@pytest.mark.long
def test_every_layer_and_branch_drops_by_a_key_of_its_own():
  """The blocks by hand, with a key per example, layer and branch."""
  layers = make(2, dropout=0.5)
  x = jax.random.normal(jax.random.key(1), (2, 5, 16))
  metadata = attention.make_metadata((1, 5), 8, 100.0)
  keys = jax.random.split(jax.random.key(2), 2)  # One for each example.
  got, _ = stack.run_layers(layers, x, None, metadata, keys=keys)

  def mask(layer, branch):
    of_branch = [
      jax.random.fold_in(jax.random.fold_in(key, layer), branch) for key in keys
    ]
    return jnp.stack([jax.random.bernoulli(k, 0.5, (5, 16)) for k in of_branch])

  for index in range(2):
    layer = jax.tree.map(lambda leaf, index=index: leaf[index], layers)
    masks = [mask(index, branch) for branch in range(2)]
    assert not jnp.array_equal(*masks)
    assert not jnp.array_equal(masks[0][0], masks[0][1])
    mixed, _ = layer.attention(layer.attention_norm(x), metadata)
    x = x + jnp.where(masks[0], 2 * mixed, 0)
    x = x + jnp.where(masks[1], 2 * layer.mlp(layer.mlp_norm(x)), 0)
  np.testing.assert_allclose(got, x, atol=1e-5)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_impossible_rates_of_dropout_are_named(rate):
  with pytest.raises(UserError, match=f"dropout={rate}"):
    shape_of(dropout=rate)


@pytest.mark.long
def test_dropout_keeps_the_mean_and_drops_its_share():
  x = jnp.full((400, 400), 3.0)
  dropped = keys_lib.dropout(x, 0.25, jax.random.split(jax.random.key(0), 400))
  assert abs(float(jnp.mean(dropped == 0)) - 0.25) < 0.005
  assert abs(float(jnp.mean(dropped)) - 3.0) < 0.02
  assert keys_lib.dropout(x, 0.25, None) is x


@pytest.mark.long
def test_a_list_of_layers_shares_the_memory_of_the_stack():
  layers, metadata = make(), attention.make_metadata((1, 6), 8, 100.0)
  apart = stack.unstacked(layers)
  kernel, third = (x.attention.query.kernel[...] for x in (layers, apart[2]))
  np.testing.assert_array_equal(third, kernel[2])
  offset = third.unsafe_buffer_pointer() - kernel.unsafe_buffer_pointer()
  assert offset == 2 * third.nbytes
  np.testing.assert_allclose(
    run(apart, metadata), run(layers, metadata), atol=1e-4
  )
