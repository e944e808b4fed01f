"""The stack f_theta: identical causal blocks with stacked parameters.

Every parameter has a leading axis of layers. One block is compiled whatever
their number, and one pattern of a parameter's path covers all layers.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.nn import attention, block, norm
from loopjax.nn import remat as remat_lib
from loopjax.nn import shape as shape_lib
from loopjax.nn.cache import Cache, Kept
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision


def block_shape(
  *,
  width: int,
  num_heads: int,
  num_key_value_heads: int = 0,
  head_width: int = 0,
  qk_norm: bool = False,
  mlp: str,
  mlp_ratio: float,
  post_norm: bool = False,
  dropout: float = 0.0,
  init_std: float,
) -> Shape:
  """Blocks with RMS norms, causal attention and no biases.

  Args:
    width: D.
    num_heads: H.
    num_key_value_heads: G; 0 for H.
    head_width: d_h; 0 for D / H.
    qk_norm: whether each head's queries and keys are normed.
    mlp: a key of `mlp.MLPS`.
    mlp_ratio: F = floor(mlp_ratio D).
    post_norm: whether the output of a branch is normed too, not only its input.
    dropout: rate on the outputs of attention and MLP, in training.
    init_std: of every matrix.

  Raises:
    UserError: no such block exists.
  """
  return Shape(
    width,
    num_heads,
    num_key_value_heads=num_key_value_heads or num_heads,
    head_width=head_width or shape_lib.head_width(width, num_heads),
    mlp_width=shape_lib.mlp_width(width, mlp_ratio),
    mlp=mlp,
    post_norm=norm.rms_norm if post_norm else norm.none,
    qk_norm=norm.rms_norm if qk_norm else norm.none,
    causal=True,
    dropout=dropout,
    init=nnx.initializers.normal(init_std),
  )


def make_layers(
  shape: Shape, num_layers: int, *, precision: Precision, rngs: nnx.Rngs
) -> block.Block:
  """Stacked blocks, each initialised independently.

  Returns:
    One block that holds all: its parameters are [num_layers, ...], so it is
    for `run_layers` and must not be called itself.
  """

  def make_layer(key: Array) -> block.Block:
    rngs = nnx.Rngs(params=key)
    return block.Block(shape, precision=precision, rngs=rngs)

  return jax.vmap(make_layer)(jax.random.split(rngs.params(), num_layers))


def apart(layers: block.Block) -> nnx.List:
  """The blocks, each with parameters of its own, before a loop that runs them.

  On CPUs a product with a slice of stacked parameters copies the slice first,
  which for one token takes as long as the product. Here all are copied once.
  """
  num_layers = len(jax.tree.leaves(layers)[0])
  each = [
    jax.tree.map(operator.itemgetter(i), layers) for i in range(num_layers)
  ]
  # Without the barrier the slices would move into the loop.
  return nnx.List(jax.lax.optimization_barrier(each))


def run_layers(
  layers: block.Block | nnx.List,
  x: Array,
  cache: Cache | None,
  metadata: attention.Metadata,
  *,
  first_slot: Array | int = 0,
  key: Array | None = None,
  unroll: bool = False,
  remat: str = "none",
) -> tuple[Array, Cache | None]:
  """Applies the blocks one after another.

  Args:
    layers: from `make_layers`, or `apart`, then without dropout.
    x: residual stream [B, T, D].
    cache: of earlier tokens, if these are read after others; or None.
    metadata: what the tokens see.
    first_slot: of the cache, for the first layer.
    key: of dropout; None for none.
    unroll: whether to compile each block separately.
    remat: what a block keeps for the backward pass, as in
      `loop.driver.run_loop`.

  Returns:
    The residual stream after the last block, [B, T, D], and the cache.
  """
  if isinstance(layers, nnx.List):
    for index, layer in enumerate(layers):
      x, cache = layer(x, metadata, cache, first_slot + index)
    return x, cache
  num_layers = len(jax.tree.leaves(layers)[0])
  keys = None if key is None else jax.random.split(key, num_layers)
  slots = None if cache is None else first_slot + jnp.arange(num_layers)

  def step(carry: Any, of_layer: Any) -> tuple[Any, None]:
    layer, layer_key, slot = of_layer
    return layer(carry[0], metadata, carry[1], slot, key=layer_key), None

  carry, _ = remat_lib.scan(
    step, (x, cache), (layers, keys, slots), unroll=unroll, remat=remat
  )
  return carry


def kept_of(
  layers: block.Block | nnx.List, x: Array, metadata: attention.Metadata
) -> Kept:
  """What a cache would keep if x [B, S, D] were the input of every block."""
  if isinstance(layers, nnx.List):
    each = [layer.kept(x, metadata) for layer in layers]
    return Kept(*(jnp.stack(both) for both in zip(*each, strict=True)))

  def of_layer(_: None, layer: block.Block) -> tuple[None, Kept]:
    return None, Kept(*layer.kept(x, metadata))

  return jax.lax.scan(of_layer, None, layers)[1]
