"""Attention and fast weights in turn: the stack of models that sleep.

Source: "Language Models Need Sleep" (arXiv 2605.26099, equation 5). A pair is
an attention block and a memory block; every parameter has a leading axis of
pairs, so that one pair is compiled whatever their number.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import checks, sharding
from loopjax.errors import UserError
from loopjax.nn import (
  attention,
  block,
  fast_weights,
  gated_delta,
  jet,
  mlp,
  norm,
)
from loopjax.types import Array, Precision

MEMORIES: dict[str, Any] = {
  "gated_delta": gated_delta.GatedDeltaNet,
  "jet": jet.JetBlock,
}


class Shape(Protocol):
  """The fields of a family's `Config` that describe its pairs.

  Attributes:
    width: D. num_layers: attention and memory layers together.
    num_prelude_layers, num_coda_layers: of them, at both ends.
    num_heads: of attention.
    mlp: "swiglu" or "gelu". mlp_ratio: F = floor(mlp_ratio D).
    memory: a key of MEMORIES.
    num_memory_heads: H. key_width: d_k. value_width: d_v, each of one head.
    rope_base: longest wavelength over 2 pi, in tokens.
    init_std: of every matrix.
  """

  @property
  def width(self) -> int: ...
  @property
  def num_layers(self) -> int: ...
  @property
  def num_prelude_layers(self) -> int: ...
  @property
  def num_coda_layers(self) -> int: ...
  @property
  def num_heads(self) -> int: ...
  @property
  def mlp(self) -> str: ...
  @property
  def mlp_ratio(self) -> float: ...
  @property
  def memory(self) -> str: ...
  @property
  def num_memory_heads(self) -> int: ...
  @property
  def key_width(self) -> int: ...
  @property
  def value_width(self) -> int: ...
  @property
  def rope_base(self) -> float: ...
  @property
  def init_std(self) -> float: ...


def check(shape: Shape) -> None:
  """Raises UserError unless there is such a stack."""
  checks.one_of("model", shape, mlp=mlp.MLPS, memory=MEMORIES)
  checks.at_least(
    "model",
    shape,
    width=1,
    num_layers=1,
    num_prelude_layers=0,
    num_coda_layers=0,
    num_heads=1,
    num_memory_heads=1,
    key_width=1,
    value_width=1,
    rope_base=1,
    init_std=0,
  )
  for name in ("num_layers", "num_prelude_layers", "num_coda_layers"):
    if getattr(shape, name) % 2:
      raise UserError(f"model.{name}={getattr(shape, name)} must be even")
  if shape.num_prelude_layers + shape.num_coda_layers >= shape.num_layers:
    raise UserError(
      f"model.num_layers={shape.num_layers} leaves no layer between"
      f" model.num_prelude_layers={shape.num_prelude_layers} and"
      f" model.num_coda_layers={shape.num_coda_layers}"
    )
  if int(shape.width * shape.mlp_ratio) < 1:
    raise UserError(f"model.mlp_ratio={shape.mlp_ratio} leaves no MLP")
  if shape.width % (2 * shape.num_heads):
    raise UserError(
      f"model.width={shape.width} must be a multiple of twice"
      f" model.num_heads={shape.num_heads}"
    )


class Memory(NamedTuple):
  """What the pairs of a stack hold of earlier tokens; a leading axis of pairs.

  Attributes:
    state: of the memory layers.
    past: keys and values of the attention layers, P tokens.
  """

  state: fast_weights.State
  past: attention.Past


class MemoryBlock(nnx.Module):
  """x + memory(norm(x)), then x + mlp(norm(x))."""

  def __init__(self, shape: Shape, *, precision: Precision, rngs: nnx.Rngs):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    init = nnx.initializers.normal(shape.init_std)
    self.memory_norm = norm.rms_norm(shape.width, **shared)
    self.memory = MEMORIES[shape.memory](
      shape.width,
      shape.num_memory_heads,
      shape.key_width,
      shape.value_width,
      init=init,
      **shared,
    )
    self.mlp_norm = norm.rms_norm(shape.width, **shared)
    hidden = int(shape.width * shape.mlp_ratio)
    self.mlp = mlp.MLPS[shape.mlp](shape.width, hidden, init=init, **shared)
    self.precision = precision

  def __call__(
    self, x: Array, state: fast_weights.State, mask: Array | None
  ) -> tuple[Array, fast_weights.State, dict[str, Array]]:
    """x: [B, S, D]; the rest as in the memory layer."""
    stream = self.precision.accumulate
    mixed, state, stats = self.memory(self.memory_norm(x), state, mask=mask)
    x = x + checkpoint_name(mixed, "attention").astype(stream)
    added = self.mlp(self.mlp_norm(x))
    x = x + checkpoint_name(added, "mlp").astype(stream)
    return sharding.by_example(x), state, stats


class Pair(nnx.Module):
  """An attention block, then a memory block."""

  def __init__(self, shape: Shape, *, precision: Precision, rngs: nnx.Rngs):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    self.near = block.Block(
      shape.width,
      shape.num_heads,
      int(shape.width * shape.mlp_ratio),
      "rmsnorm",
      mlp_kind=shape.mlp,
      causal=True,
      qk_norm=False,
      init=nnx.initializers.normal(shape.init_std),
      **shared,
    )
    self.far = MemoryBlock(shape, **shared)


def make_pairs(
  shape: Shape, num_pairs: int, *, precision: Precision, rngs: nnx.Rngs
) -> Pair:
  """All pairs in one: its parameters are [num_pairs, ...]; for `run_pairs`."""

  def make_pair(key: Array) -> Pair:
    return Pair(shape, precision=precision, rngs=nnx.Rngs(params=key))

  return jax.vmap(make_pair)(jax.random.split(rngs.params(), num_pairs))


def empty_memory(
  pairs: Pair, batch: int, num_past: int, *, carry_convolutions: bool
) -> Memory:
  """What the pairs hold before the first token: zeros."""
  layer, precision = pairs.near.attention, pairs.near.precision
  num_pairs, width, _ = layer.query.kernel.shape
  head_width = width // layer.num_heads
  shape = (num_pairs, batch, num_past, layer.num_heads, head_width)
  none = jnp.zeros(shape, precision.compute)
  state = pairs.far.memory.initial_state(
    batch, carry_convolutions=carry_convolutions
  )
  stacked = jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (num_pairs, *x.shape)), state
  )
  return Memory(stacked, attention.Past(none, none))


def again(behind: Memory, before: Memory) -> Memory:
  """For another pass over a window: its fast weights, all else from before.

  Args:
    behind: what the last pass left.
    before: what the window began with.
  """
  state = before.state._replace(fast=behind.state.fast)
  return before._replace(state=state)


def run_pairs(
  pairs: Pair,
  x: Array,
  memory: Memory,
  tables: tuple[Array, Array],
  visible: Array,
  mask: Array | None,
  *,
  unroll: bool = False,
) -> tuple[Array, Memory, dict[str, Array]]:
  """Applies the pairs one after another to the tokens of a window.

  Args:
    pairs: from `make_pairs`.
    x: residual stream [B, S, D].
    memory: before the window, with P tokens in the past.
    tables: rotary tables of P + S positions.
    visible: bool [B, S, P + S], see `Attention.behind`.
    mask: bool [B, S], False for tokens that are not there; None: all are.
    unroll: compiles each pair by itself.

  Returns:
    The residual stream [B, S, D]; the memory after the window, with P + S
    tokens in the past; statistics of every pair, [num_pairs, ...] by name.
  """

  def step(x: Array, of_pair: tuple[Pair, Memory]):
    pair, memory = of_pair
    x, past = pair.near.behind(x, memory.past, tables, visible)
    x, state, stats = pair.far(x, memory.state, mask)
    return x, (Memory(state, past), stats)

  x, (memory, stats) = jax.lax.scan(step, x, (pairs, memory), unroll=unroll)
  return x, memory, stats


def flops(shape: Shape, num_tokens: int, num_past: int) -> int:
  """Forward FLOPs of one pair on a window of one sequence.

  A multiply-add counts as two; point-wise operations are left out, and so is
  the inverse within a chunk. Attention counts every pair of tokens: what the
  mask hides is computed too.
  """
  width, heads = shape.width, shape.num_memory_heads
  keys, values = heads * shape.key_width, heads * shape.value_width
  hidden = int(width * shape.mlp_ratio)
  matrices = {"swiglu": 3, "gelu": 2}[shape.mlp]
  near = 4 * width**2 + 2 * (num_past + num_tokens) * width
  far = width * (2 * keys + 3 * values + 2 * heads)
  if shape.memory == "jet":  # The generator of the convolution, four taps.
    far += values // 8 * (width + 4 * values)
  rule = 3 * shape.key_width * shape.value_width
  rule += 2 * chunk_of(num_tokens) * (shape.key_width + shape.value_width)
  mlps = 2 * matrices * width * hidden
  return 2 * num_tokens * (near + far + heads * rule + mlps)


def chunk_of(num_tokens: int) -> int:
  """Tokens that the gated delta rule solves together."""
  return min(-(-num_tokens // 16) * 16, 64)
