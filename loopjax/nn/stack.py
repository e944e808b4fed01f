"""The stack f_theta: causal blocks of the same shape, run by a scan.

The layers' parameters are stacked: every array has a leading layer axis. Only
one block is compiled for any number of layers, and all layers share a
parameter's path.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax import checks
from loopjax.nn import attention, block, norm
from loopjax.nn import remat as remat_lib
from loopjax.nn import shape as shape_lib
from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.nn.keys import fold_in
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, Array

_Module = TypeVar("_Module", bound=nnx.Module)
# Where a block has RMS norms. "pre": on the inputs of attention and MLP;
# "branch": also on their outputs (Ouro, arXiv 2510.25741); "sum": on their
# inputs, and on the residual stream after each addition (Huginn, arXiv
# 2502.05171), which bounds the state.
INNER_NORMS = ("pre", "branch")  # The residual stream itself has none.
NORM_ORDERS = (*INNER_NORMS, "sum")


@dataclasses.dataclass(frozen=True)
class StackConfig:
  """Settings of any stack of causal blocks; configs of families extend them.

  Attributes:
    width: D.
    num_layers: L.
    num_heads: H.
    mlp: "gelu" (GPT-2), "swiglu" or "geglu".
    mlp_ratio: F = floor(mlp_ratio D).
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: standard deviation of the initial values of every matrix,
      including the embedding table.
    precision: "float32" or "bfloat16", the dtype of matrix products.
    num_key_value_heads: G, each shared by H / G query heads; 0 for H.
    head_width: d_h; 0 for D / H.
    norm_epsilon: what is added to the mean square in the norms of blocks and in
      the final norm.
  """

  width: int = 768
  num_layers: int = checks.setting(4, least=1)
  num_heads: int = 12
  mlp: str = "gelu"
  mlp_ratio: float = 4.0
  rope_base: float = checks.setting(10_000.0, least=1)
  init_std: float = checks.setting(0.02, least=0)
  precision: str = "float32"
  num_key_value_heads: int = 0
  head_width: int = 0
  norm_epsilon: float = checks.setting(1e-6, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of("model", self, precision=PRECISIONS)
    self.block_shape()

  def block_shape(self) -> Shape:
    """Structure of the blocks; raises UserError if it is invalid.

    `dropout`, `norm_order`, `qk_norm`, `qk_bias` and `value_bias` are settings
    of some families.
    """
    values = vars(self)  # Values by name.
    rms_norm = functools.partial(norm.rms_norm, epsilon=self.norm_epsilon)
    order = values.get("norm_order", "pre")
    return Shape(
      self.width,
      self.num_heads,
      num_key_value_heads=self.num_key_value_heads or self.num_heads,
      head_width=self.head_width
      or shape_lib.head_width(self.width, self.num_heads),
      mlp_width=shape_lib.mlp_width(self.width, self.mlp_ratio),
      mlp=self.mlp,
      norm=rms_norm,
      post_norm=norm.identity if order == "pre" else rms_norm,
      norm_sum=order == "sum",
      qk_norm=rms_norm if values.get("qk_norm") else norm.identity,
      qk_bias=values.get("qk_bias", False),
      value_bias=values.get("value_bias", False),
      causal=True,
      dropout=values.get("dropout", 0.0),
      init=nnx.initializers.normal(self.init_std),
    )


def stacked(
  number: int,
  rngs: nnx.Rngs,
  make: Callable[..., _Module],
  *arguments: Any,
  **options: Any,
) -> _Module:
  """Modules `make(*arguments, **options, rngs=...)`, initialised independently.

  Returns:
    A module whose parameters have the shape [number, ...], for a scan such as
    `run_layers`; do not call it.
  """

  def make_one(key: Array) -> _Module:
    return make(*arguments, **options, rngs=nnx.Rngs(params=key))

  return jax.vmap(make_one)(jax.random.split(rngs.params(), number))


def unstacked(layers: block.Block) -> nnx.List:
  """Splits stacked parameters into a list of blocks.

  On CPUs, a product with a slice of stacked parameters first copies the slice,
  which takes as long as the product for a single token. The parameters of the
  list are views of the stacked ones, without a copy, where these are on a CPU
  and a layer's part is aligned.
  """
  leaves, treedef = jax.tree.flatten(layers)
  parts = zip(*map(_parts, leaves), strict=True)
  return nnx.List(jax.tree.unflatten(treedef, part) for part in parts)


def _parts(stacked: Array) -> Any:
  """The parts of a stacked array, one per layer."""
  if isinstance(stacked, jax.ShapeDtypeStruct):
    shape, sharding = stacked.shape[1:], stacked.sharding
    part = jax.ShapeDtypeStruct(shape, stacked.dtype, sharding=sharding)
    return stacked.shape[0] * [part]
  if isinstance(stacked, jax.core.Tracer) or len(stacked.devices()) > 1:
    return list(stacked)
  return [jax.device_put(x, *stacked.devices()) for x in np.asarray(stacked)]


def run_layers(
  layers: nnx.Module,
  x: Array,
  cache: Cache | None,
  metadata: attention.Metadata,
  *,
  first_slot: Array | int = 0,
  condition: Array | None = None,
  keys: Array | None = None,
  unroll: bool = False,
  remat: str = "none",
) -> tuple[Array, Cache | None]:
  """Applies the blocks one after another.

  Args:
    layers: blocks with stacked parameters, as from `stacked`, or from
      `unstacked`; the latter without dropout.
    x: residual stream [B, T, D].
    cache: cache of earlier tokens, or None.
    metadata: positions and masks of the tokens.
    first_slot: the first layer's cache slot.
    condition: what blocks that take a `condition` get; None for other blocks.
    keys: random keys of dropout, [B]; None for no dropout.
    unroll: whether to compile each block separately.
    remat: the residuals that a block stores, a key of `remat.POLICIES`.

  Returns:
    (the residual stream after the last block [B, T, D], the cache).
  """
  kwargs: dict[str, Any] = {} if condition is None else {"condition": condition}
  if isinstance(layers, nnx.List):
    return _run_list(layers, x, cache, metadata, first_slot, kwargs)
  num_layers = len(jax.tree.leaves(layers)[0])
  indices = jnp.arange(num_layers)
  keys_LxB = None
  if keys is not None:
    keys_LxB = jax.vmap(fold_in, (None, 0))(keys, indices)
  slots = None if cache is None else indices + first_slot

  def step(carry: Any, layer_inputs: Any) -> tuple[Any, None]:
    layer, layer_keys, slot = layer_inputs
    options = {"keys": layer_keys, **kwargs}
    return layer(carry[0], metadata, carry[1], slot, **options), None

  carry, _ = remat_lib.scan(
    step, (x, cache), (layers, keys_LxB, slots), unroll=unroll, remat=remat
  )
  return carry


def _run_list(
  layers: nnx.List,
  x: Array,
  cache: Any,
  metadata: attention.Metadata,
  first_slot: Array | int,
  kwargs: dict[str, Any],
) -> tuple[Array, Any]:
  """`run_layers` of a list; only the first layer is traced."""

  def run(layer: Any, x: Array, cache: Any, slot: Any) -> tuple[Array, Any]:
    return layer(x, metadata, cache, slot, **kwargs)

  traced, run_unstacked = jax.jit(run), jax.jit(functools.partial(run, slot=0))
  for index, layer in enumerate(layers):
    slot: Any = first_slot + index
    if cache is None or not cache.is_unstacked:
      x, cache = traced(layer, x, cache, slot)
    else:
      x, part = run_unstacked(layer, x, cache.only(slot))
      cache = cache.with_only(slot, part)
  return x, cache


def keys_and_values(
  layers: block.Block | nnx.List, x: Array, metadata: attention.Metadata
) -> KeyValues:
  """Keys and values of every block, all with the same input x [B, S, D]."""
  if isinstance(layers, nnx.List):
    by_layer = [layer.keys_and_values(x, metadata) for layer in layers]
    return KeyValues(
      *(jnp.stack(arrays) for arrays in zip(*by_layer, strict=True))
    )

  def project(_: None, layer: block.Block) -> tuple[None, KeyValues]:
    return None, KeyValues(*layer.keys_and_values(x, metadata))

  return jax.lax.scan(project, None, layers)[1]
