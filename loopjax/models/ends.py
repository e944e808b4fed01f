"""Both ends of TRM, HRM and URM: embedding, read-out and halting head."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.nn import attention, linear, rope
from loopjax.types import PRECISIONS, Array, TaskSpec


class Ends(nnx.Module):
  """Input embedding, read-out and halting head.

  The M positions before the task's tokens are inputs of zeros, except the
  first: the puzzle vector, which is learned and starts at zero. All of them
  have states, so they are memory that a segment can write. The halting head
  reads the first position: q_halt, and q_continue, which only a model that
  learns it (`continues`) uses. Other models have it so that their numbers of
  parameters are the papers'.
  """

  def __init__(
    self,
    config: Any,
    spec: TaskSpec,
    *,
    continues: bool = False,
    rngs: nnx.Rngs,
  ):
    """Makes their parameters.

    Args:
      config: config of a family of `supervised`.
      spec: properties of the task.
      continues: whether the model learns q_continue.
      rngs: random keys of the initial values.
    """
    checks.no_next_tokens(spec)
    checks.one_document(spec, "attends to the whole row")
    width, num_memory = config.width, config.num_memory_tokens
    precision = PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    self.token_embedding = linear.embedding(spec.vocab_size, width, **shared)
    if num_memory:
      self.puzzle_vector = nnx.Param(jnp.zeros((width,), precision.params))
    self.head = linear.readout(width, spec.vocab_size, use_bias=False, **shared)
    self.halt_head = linear.readout(
      width, 2, bias=-5.0, init=nnx.initializers.zeros_init(), **shared
    )
    self.width, self.num_memory = width, num_memory
    self.continues = continues

  def embed(self, inputs: Array) -> Array:
    """x: sqrt(D) times the embeddings, memory first, f32 [B, S, D]."""
    x = self.token_embedding(inputs)
    if self.num_memory:
      memory = jnp.zeros((len(x), self.num_memory, self.width), x.dtype)
      memory = memory.at[:, 0].set(self.puzzle_vector[...][None])
      x = jnp.concatenate([memory, x], axis=1)
    return math.sqrt(self.width) * x

  @jax.named_scope("read_out")
  def read_out(self, state: Array) -> tuple[Array, Array]:
    """(logits f32 [B, T, V], q_halt and q_continue f32 [B, 2]).

    Args:
      state: the one that is read out, f32 [B, S, D].
    """
    cells = state[:, self.num_memory :]
    return self.head(cells), self.halt_head(state[:, 0])

  def margin(self, q: Array) -> Array:
    """The margin for halting, f32 [B]: the row halts if it is positive."""
    return q[:, 0] - q[:, 1] if self.continues else q[:, 0]


def attention_metadata(model: Any) -> attention.Metadata:
  """Rotary positions of memory and of the task's tokens, for full attention."""
  config = model.config
  positions = rope.positions_after_memory(
    config.positions, config.num_memory_tokens, model.spec.coordinates
  )
  head_width = config.block_shape().head_width
  return attention.Metadata(
    rope.rope_tables(positions, head_width, config.rope_base)
  )
