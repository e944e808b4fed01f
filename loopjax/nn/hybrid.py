"""Stacks of attention and fast-weight blocks, for models that sleep.

Source: "Language Models Need Sleep" (arXiv 2605.26099, equation 5). A group has
one or more attention blocks followed by one or more memory blocks. Parameters
are stacked along an axis of groups; only one group is compiled.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import sharding
from loopjax.kernels import Kernels
from loopjax.nn import attention, block
from loopjax.nn import remat as remat_lib
from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.nn.fast_weights import gated_delta, jet
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.fast_weights.shape import MemoryShape
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision

MEMORIES: dict[str, Any] = {
  "gated_delta": gated_delta.GatedDeltaNet,
  "jet": jet.JetBlock,
}


class Memory(NamedTuple):
  """The state of all groups after earlier tokens.

  Attributes:
    state: states of the memory layers, [groups, layers, B, ...].
    past: keys and values of the last P tokens,
      [groups, layers, B, P, G, d_h].
  """

  state: fast_weights.State
  past: KeyValues


class Groups(NamedTuple):
  """Attention and memory blocks; parameters are [groups, layers, ...]."""

  attention: block.Block
  memory: "MemoryBlock"


class MemoryBlock(nnx.Module):
  """x + memory(norm(x)), then the same with the MLP, if any.

  The residual stream has the accumulate dtype. The outputs of memory and MLP
  are named "attention" and "mlp" for rematerialisation policies.
  """

  def __init__(
    self,
    shape: Shape,
    memory: MemoryShape,
    *,
    kernels: Kernels = Kernels(),
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    self.memory_norm = shape.norm(shape.width, **shared)
    self.memory = MEMORIES[memory.kind](
      shape.width,
      memory.num_heads,
      memory.key_width,
      memory.value_width,
      gates=memory.gates,
      init=shape.init,
      kernels=kernels,
      **shared,
    )
    if memory.has_mlp:
      self.mlp_norm = shape.norm(shape.width, **shared)
      self.mlp = block.make_mlp(shape, **shared)
    else:  # Inserted into a trained stack; initially without effect.
      output = self.memory.fast_weights.output.kernel
      output[...] = jnp.zeros_like(output[...])
    self.has_mlp, self.precision = memory.has_mlp, precision

  def __call__(
    self,
    x: Array,
    state: fast_weights.State,
    packing: fast_weights.Packing | None,
  ) -> tuple[Array, fast_weights.State, dict[str, Array]]:
    """Applies the block to x [B, S, D].

    Other arguments and results as in `GatedDeltaNet.__call__`.
    """
    stream = self.precision.accumulate
    mixed, state, stats = self.memory(self.memory_norm(x), state, packing)
    x = x + checkpoint_name(mixed, "attention").astype(stream)
    if self.has_mlp:
      added = checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
      x = x + added.astype(stream)
    return sharding.split_by_example(x), state, stats


def grouped(layers: block.Block, memories: MemoryBlock) -> Groups:
  """Splits stacked layers into groups.

  The number of groups is the smaller of the two layer counts, which must divide
  the larger.
  """
  num_groups = min(len(jax.tree.leaves(x)[0]) for x in (layers, memories))
  return jax.tree.map(
    lambda x: x.reshape(num_groups, -1, *x.shape[1:]), Groups(layers, memories)
  )


def empty_memory(
  groups: Groups, batch: int, num_past: int, *, carry_convolutions: bool
) -> Memory:
  """The memory before the first token: zeros for the states and P tokens."""
  layer, precision = groups.attention.attention, groups.attention.precision
  *outer, _, features = layer.key.kernel.shape
  heads = (features // layer.head_width, layer.head_width)
  shape = (*outer, batch, num_past, *heads)
  zeros = jnp.zeros(shape, precision.compute)
  state = groups.memory.memory.initial_state(
    batch, carry_convolutions=carry_convolutions
  )
  memories = jax.tree.leaves(groups.memory)[0].shape[:2]
  stacked = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (*memories, *x.shape)), state
  )
  return Memory(stacked, KeyValues(zeros, zeros))


def run_groups(
  groups: Groups,
  x: Array,
  memory: Memory,
  tables: tuple[Array, Array],
  mask: Array | None,
  packing: fast_weights.Packing | None,
  *,
  reach: int,
  unroll: bool = False,
  remat: str = "none",
) -> tuple[Array, Memory, dict[str, Array]]:
  """Applies the groups to the tokens of a window, one after another.

  Args:
    groups: from `grouped`.
    x: residual stream [B, S, D].
    memory: the memory before the window, with P past tokens.
    tables: rotary tables for P + S positions.
    mask: bool [B, P + S], or None, see `Attention.attend_with_past`.
    packing: packing of the tokens that are not padding; None without padding.
    reach: as in `Attention.attend_with_past`.
    unroll: whether to compile each block separately.
    remat: the residuals that a group stores, a key of `remat.POLICIES`.

  Returns:
    (the residual stream [B, S, D]; the memory after the window, with P + S past
    tokens; statistics of every memory layer, [groups, layers, ...] by name).
  """

  def attend(x: Array, layer_inputs: tuple[block.Block, KeyValues]):
    layer, past = layer_inputs
    return layer.attend_with_past(x, past, tables, reach, mask)

  def remember(x: Array, layer_inputs: tuple[MemoryBlock, fast_weights.State]):
    layer, state = layer_inputs
    x, *outputs = layer(x, state, packing)
    return x, outputs

  def step(x: Array, group_inputs: tuple[Groups, Memory]):
    group, memory = group_inputs
    x, past = _through(attend, x, (group.attention, memory.past), unroll)
    x, (state, stats) = _through(
      remember, x, (group.memory, memory.state), unroll
    )
    return x, (Memory(state, past), stats)

  # Group by group: one scan would stack each group's residuals and read them
  # back. XLA removes a loop over a single group.
  is_alone = len(jax.tree.leaves(groups)[0]) == 1
  run_group = remat_lib.rematerialised(
    step, remat, prevent_cse=unroll or is_alone
  )
  x, (memory, stats) = jax.lax.scan(
    run_group, x, (groups, memory), unroll=unroll
  )
  return x, memory, stats


def _through(step: Any, x: Array, layers: Any, unroll: bool) -> tuple[Any, Any]:
  """`jax.lax.scan`; no loop for a single layer, which would copy states."""
  if len(jax.tree.leaves(layers)[0]) > 1:
    return jax.lax.scan(step, x, layers, unroll=unroll)
  x, outputs = step(x, jax.tree.map(lambda y: y[0], layers))
  return x, jax.tree.map(lambda y: y[None], outputs)


def read_groups(
  groups: Groups,
  x: Array,
  cache: Cache,
  state: fast_weights.State,
  metadata: attention.Metadata,
  packing: fast_weights.Packing,
  *,
  first_slot: int,
) -> tuple[Array, Cache, fast_weights.State]:
  """`run_groups` with keys and values in a cache.

  Args:
    groups: from `grouped`; may be empty.
    x: residual stream [B, S, D].
    cache: cache of keys and values; a slot is an attention layer.
    state: states of the memory layers, [groups, layers, B, ...].
    metadata: positions and masks of the tokens.
    packing: packing of the tokens that are not padding.
    first_slot: the first layer's cache slot.

  Returns:
    (the residual stream [B, S, D], the cache, the states after the tokens).
  """
  num_groups, num_layers = jax.tree.leaves(groups.attention)[0].shape[:2]
  if not num_groups:  # Nothing to trace.
    return x, cache, state

  def attend(carry: Any, layer_inputs: tuple[block.Block, Array]):
    x, cache = carry
    layer, slot = layer_inputs
    return layer(x, metadata, cache, slot), None

  def remember(x: Array, layer_inputs: tuple[MemoryBlock, fast_weights.State]):
    layer, state = layer_inputs
    return layer(x, state, packing)[:2]

  def step(carry: Any, group_inputs: Any):
    group, state, slots = group_inputs
    (x, cache), _ = jax.lax.scan(attend, carry, (group.attention, slots))
    x, state = jax.lax.scan(remember, x, (group.memory, state))
    return (x, cache), state

  slots = jnp.arange(num_groups * num_layers).reshape(num_groups, -1)
  carry = x, cache
  (x, cache), state = jax.lax.scan(
    step, carry, (groups, state, first_slot + slots)
  )
  return x, cache, state
