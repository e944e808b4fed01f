"""The stack f_theta: equal causal blocks with their parameters side by side.

Every parameter has a leading axis of layers. One block is compiled, whatever
their number, and the pattern of a parameter's path covers all layers.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.nn import block, mlp, rope
from loopjax.nn import remat as remat_lib
from loopjax.types import Array, Precision


class Shape(Protocol):
  """The fields of a family's `Config` that describe its stack.

  Attributes:
    width: D. num_layers: L. num_heads: H.
    mlp: "gelu" (GPT-2) or "swiglu". mlp_ratio: F = floor(mlp_ratio D).
    dropout: share of what attention and MLP add that is dropped in training.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix, the embedding table included.
  """

  @property
  def width(self) -> int: ...
  @property
  def num_layers(self) -> int: ...
  @property
  def num_heads(self) -> int: ...
  @property
  def mlp(self) -> str: ...
  @property
  def mlp_ratio(self) -> float: ...
  @property
  def dropout(self) -> float: ...
  @property
  def rope_base(self) -> float: ...
  @property
  def init_std(self) -> float: ...


def check(shape: Shape) -> None:
  """Raises UserError unless there is such a stack."""
  checks.one_of("model", shape, mlp=mlp.MLPS)
  checks.at_least(
    "model", shape, width=1, num_layers=1, num_heads=1, rope_base=1, init_std=0
  )
  if not 0 <= shape.dropout < 1:
    raise UserError(f"model.dropout={shape.dropout} must be in [0, 1)")
  if mlp_width(shape) < 1:
    raise UserError(f"model.mlp_ratio={shape.mlp_ratio} leaves no MLP")
  if shape.width % (2 * shape.num_heads):
    raise UserError(
      f"model.width={shape.width} must be a multiple of twice"
      f" model.num_heads={shape.num_heads}"
    )


def mlp_width(shape: Shape) -> int:
  """F, hidden features of an MLP."""
  return int(shape.width * shape.mlp_ratio)


def make_layers(
  shape: Shape, num_layers: int, *, precision: Precision, rngs: nnx.Rngs
) -> block.Block:
  """Pre-norm blocks with RMS norms, causal attention and no biases.

  Returns:
    One block that holds all: its parameters are [num_layers, ...], so it is
    for `run_layers` and not to be called itself.
  """

  def make_layer(key: Array) -> block.Block:
    return block.Block(
      shape.width,
      shape.num_heads,
      mlp_width(shape),
      "rmsnorm",
      mlp_kind=shape.mlp,
      causal=True,
      qk_norm=False,
      dropout=shape.dropout,
      init=nnx.initializers.normal(shape.init_std),
      precision=precision,
      rngs=nnx.Rngs(params=key),
    )

  return jax.vmap(make_layer)(jax.random.split(rngs.params(), num_layers))


def rope_tables(shape: Shape, num_tokens: int) -> tuple[Array, Array]:
  """Rotary tables of positions 0 .. num_tokens - 1."""
  positions = jnp.arange(num_tokens)[:, None]
  return rope.rope_tables(
    positions, shape.width // shape.num_heads, shape.rope_base
  )


def run_layers(
  layers: block.Block,
  x: Array,
  tables: tuple[Array, Array],
  *,
  key: Array | None = None,
  unroll: bool = False,
  remat: str = "none",
) -> Array:
  """Applies the blocks one after another.

  Args:
    layers: from `make_layers`.
    x: residual stream [B, T, D].
    tables: from `rope_tables`.
    key: of dropout; None for none.
    unroll: compiles each block by itself.
    remat: what a block keeps for the backward pass, as in
      `loop.driver.run_loop`.

  Returns:
    The residual stream behind the last block, [B, T, D].
  """

  num_layers = len(jax.tree.leaves(layers)[0])
  keys = None if key is None else jax.random.split(key, num_layers)

  def step(x: Array, of_layer: Any) -> tuple[Array, None]:
    layer, layer_key = of_layer
    return layer(x, tables, layer_key), None

  return remat_lib.scan(step, x, (layers, keys), unroll=unroll, remat=remat)[0]


def flops(shape: Shape, num_tokens: int, num_past: int = 0) -> int:
  """Forward FLOPs of the stack's L blocks on one sequence.

  A multiply-add counts as two; point-wise operations are left out. Attention
  counts every pair of tokens, `num_past` earlier ones included: what the causal
  mask hides is computed too.
  """
  width = shape.width
  matrices = {"swiglu": 3, "gelu": 2}[shape.mlp]
  projections = 4 * width**2 + matrices * width * mlp_width(shape)
  mixing = 2 * (num_past + num_tokens) * width  # Logits, and the weighted sum.
  return 2 * num_tokens * (projections + mixing) * shape.num_layers


def cache_bytes(shape: Shape, precision: Precision) -> int:
  """Bytes of one token's keys and values in the stack's L blocks."""
  itemsize = jnp.dtype(precision.compute).itemsize
  return 2 * shape.num_layers * shape.width * itemsize
