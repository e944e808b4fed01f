"""Attention and fast weights in turn: the stack of models that sleep.

Source: "Language Models Need Sleep" (arXiv 2605.26099, equation 5). A group is
so many attention blocks and the memory block behind them; every parameter has
a leading axis of groups, so that one is compiled whatever their number.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import checks, sharding
from loopjax.errors import UserError
from loopjax.kernels.gated_delta import chunked
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
  """The fields of a family's `Config` that describe its memory blocks.

  Attributes:
    width: D. num_layers: of attention. num_memory_layers: M, of memory.
    num_prelude_layers, num_coda_layers: of those of attention, at both ends.
    mlp: "swiglu" or "gelu". mlp_ratio: F = floor(mlp_ratio D).
    memory: a key of MEMORIES.
    memory_mlp: whether a memory block has an MLP.
    num_memory_heads: H. key_width: d_k. value_width: d_v, each of one head.
    A_range, dt_range, negative_eigenvalues: see `fast_weights.Gates`.
    init_std: of every matrix.
  """

  @property
  def width(self) -> int: ...
  @property
  def num_layers(self) -> int: ...
  @property
  def num_memory_layers(self) -> int: ...
  @property
  def num_prelude_layers(self) -> int: ...
  @property
  def num_coda_layers(self) -> int: ...
  @property
  def mlp(self) -> str: ...
  @property
  def mlp_ratio(self) -> float: ...
  @property
  def memory(self) -> str: ...
  @property
  def memory_mlp(self) -> bool: ...
  @property
  def num_memory_heads(self) -> int: ...
  @property
  def key_width(self) -> int: ...
  @property
  def value_width(self) -> int: ...
  @property
  def A_range(self) -> tuple[float, float]: ...
  @property
  def dt_range(self) -> tuple[float, float]: ...
  @property
  def negative_eigenvalues(self) -> bool: ...
  @property
  def init_std(self) -> float: ...


def check(shape: Shape) -> None:
  """Raises UserError unless there is such a stack."""
  checks.one_of("model", shape, memory=MEMORIES)
  checks.at_least(
    "model",
    shape,
    num_memory_layers=1,
    num_prelude_layers=0,
    num_coda_layers=0,
    num_memory_heads=1,
    key_width=1,
    value_width=1,
  )
  gates(shape)
  each, rest = divmod(shape.num_layers, shape.num_memory_layers)
  if rest or not each:
    raise UserError(
      f"model.num_memory_layers={shape.num_memory_layers} must divide"
      f" model.num_layers={shape.num_layers}: as many layers of attention stand"
      " before each"
    )
  for name in ("num_prelude_layers", "num_coda_layers"):
    if getattr(shape, name) % each:
      raise UserError(
        f"model.{name}={getattr(shape, name)} must be a multiple of {each}, the"
        " layers of attention before one of memory"
      )
  if shape.num_prelude_layers + shape.num_coda_layers >= shape.num_layers:
    raise UserError(
      f"model.num_layers={shape.num_layers} leaves no layer between"
      f" model.num_prelude_layers={shape.num_prelude_layers} and"
      f" model.num_coda_layers={shape.num_coda_layers}"
    )


def gates(shape: Shape) -> fast_weights.Gates:
  """How the gates of fast weights start; raises UserError."""
  return fast_weights.Gates(
    shape.A_range, shape.dt_range, shape.negative_eigenvalues
  )


class Memory(NamedTuple):
  """What groups hold of earlier tokens; a leading axis of groups.

  Attributes:
    state: of the memory layers.
    past: keys and values [groups, layers, B, P, H, W] of attention, P tokens.
  """

  state: fast_weights.State
  past: attention.Past


class Groups(NamedTuple):
  """Attention blocks [groups, layers, ...] and memory blocks [groups, ...]."""

  attention: block.Block
  memory: "MemoryBlock"


class MemoryBlock(nnx.Module):
  """x + memory(norm(x)), then x + mlp(norm(x)) if it has an MLP."""

  def __init__(self, shape: Shape, *, precision: Precision, rngs: nnx.Rngs):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    init = nnx.initializers.normal(shape.init_std)
    self.memory_norm = norm.rms_norm(shape.width, **shared)
    self.memory = MEMORIES[shape.memory](
      shape.width,
      shape.num_memory_heads,
      shape.key_width,
      shape.value_width,
      gates=gates(shape),
      init=init,
      **shared,
    )
    if shape.memory_mlp:
      self.mlp_norm = norm.rms_norm(shape.width, **shared)
      hidden = int(shape.width * shape.mlp_ratio)
      self.mlp = mlp.MLPS[shape.mlp](shape.width, hidden, init=init, **shared)
    else:  # Inserted into a trained stack, to which it adds nothing at first.
      output = self.memory.fast_weights.output.kernel
      output[...] = jnp.zeros_like(output[...])
    self.has_mlp, self.precision = shape.memory_mlp, precision

  def __call__(
    self, x: Array, state: fast_weights.State, mask: Array | None
  ) -> tuple[Array, fast_weights.State, dict[str, Array]]:
    """x: [B, S, D]; the rest as in the memory layer."""
    stream = self.precision.accumulate
    mixed, state, stats = self.memory(self.memory_norm(x), state, mask=mask)
    x = x + checkpoint_name(mixed, "attention").astype(stream)
    if self.has_mlp:
      added = self.mlp(self.mlp_norm(x))
      x = x + checkpoint_name(added, "mlp").astype(stream)
    return sharding.by_example(x), state, stats


def make_memories(
  shape: Shape, *, precision: Precision, rngs: nnx.Rngs
) -> MemoryBlock:
  """All memory blocks in one: its parameters are [M, ...]; for `grouped`."""

  def make(key: Array) -> MemoryBlock:
    return MemoryBlock(shape, precision=precision, rngs=nnx.Rngs(params=key))

  keys = jax.random.split(rngs.params(), shape.num_memory_layers)
  return jax.vmap(make)(keys)


def grouped(layers: block.Block, memories: MemoryBlock) -> Groups:
  """As many of the layers, from `stack.make_layers`, before each memory."""
  num_groups = len(jax.tree.leaves(memories)[0])
  blocks = jax.tree.map(
    lambda x: x.reshape(num_groups, -1, *x.shape[1:]), layers
  )
  return Groups(blocks, memories)


def empty_memory(
  groups: Groups, batch: int, num_past: int, *, carry_convolutions: bool
) -> Memory:
  """What the groups hold before the first token: zeros."""
  layer, precision = groups.attention.attention, groups.attention.precision
  *outer, width, _ = layer.query.kernel.shape
  head_width = width // layer.num_heads
  shape = (*outer, batch, num_past, layer.num_heads, head_width)
  none = jnp.zeros(shape, precision.compute)
  state = groups.memory.memory.initial_state(
    batch, carry_convolutions=carry_convolutions
  )
  stacked = jax.tree.map(
    lambda x: jnp.broadcast_to(x[None], (outer[0], *x.shape)), state
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


def run_groups(
  groups: Groups,
  x: Array,
  memory: Memory,
  tables: tuple[Array, Array],
  visible: Array,
  mask: Array | None,
  *,
  unroll: bool = False,
) -> tuple[Array, Memory, dict[str, Array]]:
  """Applies the groups one after another to the tokens of a window.

  Args:
    groups: from `grouped`.
    x: residual stream [B, S, D].
    memory: before the window, with P tokens in the past.
    tables: rotary tables of P + S positions.
    visible: bool [B, S, P + S], see `Attention.behind`.
    mask: bool [B, S], False for tokens that are not there; None: all are.
    unroll: compiles each block by itself.

  Returns:
    The residual stream [B, S, D]; the memory after the window, with P + S
    tokens in the past; statistics of every memory layer, [groups, ...] by name.
  """

  def attend(x: Array, of_layer: tuple[block.Block, attention.Past]):
    layer, past = of_layer
    return layer.behind(x, past, tables, visible)

  def step(x: Array, of_group: tuple[Groups, Memory]):
    group, memory = of_group
    x, past = jax.lax.scan(
      attend, x, (group.attention, memory.past), unroll=unroll
    )
    x, state, stats = group.memory(x, memory.state, mask)
    return x, (Memory(state, past), stats)

  x, (memory, stats) = jax.lax.scan(step, x, (groups, memory), unroll=unroll)
  return x, memory, stats


def memory_flops(shape: Shape, num_tokens: int) -> int:
  """Forward FLOPs of one memory block on a window of one sequence.

  A multiply-add counts as two; point-wise operations are left out, and so is
  the inverse within a chunk.
  """
  width, heads = shape.width, shape.num_memory_heads
  keys, values = heads * shape.key_width, heads * shape.value_width
  layer = width * (2 * keys + 3 * values + 2 * heads)
  if shape.memory == "jet":  # The generator of the convolution, four taps.
    layer += values // 8 * (width + 4 * values)
  rule = 3 * shape.key_width * shape.value_width
  chunk = chunked.even_size(num_tokens, chunked.CHUNK_SIZE)
  rule += 2 * chunk * (shape.key_width + shape.value_width)
  matrices = {"swiglu": 3, "gelu": 2}[shape.mlp] * shape.memory_mlp
  hidden = int(width * shape.mlp_ratio)
  return 2 * num_tokens * (layer + heads * rule + matrices * width * hidden)
