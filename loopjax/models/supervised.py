"""What TRM, HRM and URM share: both ends of the model, and its supervision.

Their states are tuples of arrays f32 [B, S, D], S = M + T; the first is read
out. A model of these families has `ends` (`Ends`), `num_states`, and

  recurse(x, state, kind) -> state

one segment of supervision, with the gradient that the paper gives it. The
families write nothing but that.
"""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver, supervision
from loopjax.losses import tokens as token_losses
from loopjax.nn import attention, linear, rope, shape
from loopjax.nn.shape import Shape
from loopjax.protocols import Frozen
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  Carried,
  Metrics,
  Output,
  Precision,
  TaskSpec,
)

TRACES = ("hidden", "prediction", "confidence", "margin")
HEADLINE = ("segments",)
ENTRIES = supervision.ENTRIES
State = tuple[Array, ...]
_HALT_WEIGHT = 0.5  # Of the halting losses, in the authors' code.


def check(config: Any, **bounds: int) -> None:
  """Checks the settings that these families share.

  Args:
    config: of a family.
    **bounds: of its own settings.

  Raises:
    UserError: a value that cannot be, or that has no effect.
  """
  checks.plain_values("model", config)
  checks.one_of(
    "model",
    config,
    positions=rope.POSITIONS,
    token_loss=token_losses.CROSS_ENTROPIES,
    precision=PRECISIONS,
  )
  shared = {"num_loops": 1, "num_memory_tokens": 0, "rope_base": 1}
  checks.at_least("model", config, **shared, **bounds)
  if not 0 <= config.exploration <= 1:
    raise UserError(f"model.exploration={config.exploration} must be in [0, 1]")
  if config.positions == "none":
    because = "model.positions='none'"
    checks.without_effect("model", config, because, "rope_base")


def block_shape(width: int, num_heads: int, mlp_ratio: float) -> Shape:
  """Sizes of a block; raises UserError if there is none of these."""
  return Shape(
    width,
    num_heads,
    num_key_value_heads=num_heads,
    head_width=shape.head_width(width, num_heads),
    mlp_width=shape.mlp_width(width, mlp_ratio),
  )


class Ends(nnx.Module):
  """Input embedding, read-out and halting head.

  The M positions before the task's tokens are inputs of zeros, except the
  first: the puzzle vector, which is learned and starts at zero. All of them
  have states, so they are memory that a segment can write. The halting head
  reads the first position: q_halt, and q_continue, which only a model that
  learns it (`continues`) has a use for. The others keep it for the papers'
  numbers of parameters.
  """

  def __init__(
    self,
    width: int,
    num_memory: int,
    spec: TaskSpec,
    *,
    continues: bool = False,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
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

  def read_out(self, state: State) -> tuple[Array, Array]:
    """(logits f32 [B, T, V], q_halt and q_continue f32 [B, 2])."""
    cells = state[0][:, self.num_memory :]
    return self.head(cells), self.halt_head(state[0][:, 0])

  def margin(self, q: Array) -> Array:
    """By how much the head is for halting, f32 [B]: above 0 it is."""
    return q[:, 0] - q[:, 1] if self.continues else q[:, 0]


def attention_metadata(model: Any) -> attention.Metadata:
  """Rotary positions of memory and of the task's tokens; all see all."""
  config = model.config
  positions = rope.positions_after_memory(
    config.positions, config.num_memory_tokens, model.spec.coordinates
  )
  head_width = config.block_shape().head_width
  return attention.Metadata(
    rope.rope_tables(positions, head_width, config.rope_base)
  )


def start(num_states: int, sizes: tuple[int, int, int]) -> State:
  """Initial states: fixed random vectors, each the same at all positions.

  They are not trained, so they are constants here, the same for every seed.

  Args:
    num_states: how many.
    sizes: (B, S, D).
  """
  key = jax.random.key(0)
  # The standard deviation of a normal cut off at two is 0.8796.
  vectors = jax.random.truncated_normal(key, -2, 2, (num_states, sizes[2]))
  vectors /= 0.87962566
  return tuple(jnp.broadcast_to(v[None, None], sizes) for v in vectors)


def run(
  model: Any,
  inputs: Array,
  num_loops: int | None,
  kind: str | None,
  trace: tuple[str, ...],
) -> Output:
  """Segment after segment from the initial state, without halting.

  Arguments are those of `protocols.Model.__call__`; a loop is a segment.
  TRACES: "hidden" the state that is read out, f32 [K, B, S, D]; "prediction"
  i32 and "confidence" f32 [K, B, T] of its read-out; "margin" the logit to
  halt, f32 [K, B].
  """
  chex.assert_shape(inputs, (None, model.spec.sequence_length))
  num_loops = num_loops or model.config.num_loops
  kind = kind or model.options.kind
  x = model.ends.embed(inputs)

  def segment(state: State, k: Array) -> tuple[State, dict[str, Array]]:
    del k
    state = model.recurse(x, jax.lax.stop_gradient(state), _inner(kind))
    logits, q = model.ends.read_out(state)
    record = {"margin": model.ends.margin(q)}
    if "hidden" in trace:
      record["hidden"] = state[0]
    if {"prediction", "confidence"} & {*trace}:
      record |= linear.prediction_and_confidence(logits)
    return state, record

  state = start(model.num_states, x.shape)
  state, records, steps_run = driver.run_loop(
    segment, state, num_loops, kind=kind
  )
  halts = records["margin"] > 0
  first = jnp.argmax(halts, axis=0) + 1
  halt_steps = jnp.where(jnp.any(halts, axis=0), first, num_loops)
  return Output(
    logits=model.ends.read_out(state)[0],
    losses={},
    stats={
      "halt_steps": halt_steps.astype(jnp.float32),
      "loops_run": jnp.full(len(inputs), steps_run, jnp.float32),
    },
    loops={"halted": jnp.mean(halts.astype(jnp.float32), axis=1)},
    trace={name: records[name] for name in trace},
  )


def _inner(kind: str) -> str:
  """How the loops inside of a segment run: none of them ends early."""
  return "unroll" if kind == "unroll" else "scan"


def init_carried(
  num_states: int, width: int, num_memory: int, spec: TaskSpec, batch_size: int
) -> Carried:
  """Rows that all take an example at the first step."""
  sizes = (batch_size, num_memory + spec.sequence_length, width)
  state = tuple(jnp.zeros(sizes) for _ in range(num_states))
  return Carried(by_example=supervision.empty(state, spec.sequence_length))


def loss(
  model: Any, batch: Batch, key: Array, step: Array, frozen: Frozen
) -> tuple[Array, Metrics]:
  """One segment of supervision of every row (TRM, figure 3).

  Cross-entropy, averaged over the counted tokens of each example and then over
  examples, + 1/2 BCE of q_halt against "every counted token is right". If the
  model learns q_continue (HRM, section 2), + 1/2 BCE against what the next
  segment's head says, which is run for it without a gradient.

  Returns:
    (f32 scalar, metrics). "right" is the share of rows whose answer is right,
    "halted" of those that now halt, "segments" the mean number that rows have
    run of their example.
  """
  del step, frozen  # No schedule, no teacher.
  config, kind = model.config, _inner(model.options.kind)
  carried = batch["carried"].by_example
  fresh = start(model.num_states, carried.state[0].shape)
  rows = supervision.refilled(carried, batch, fresh)
  x = model.ends.embed(rows.example["inputs"])
  state = model.recurse(x, rows.state, kind)
  logits, q = model.ends.read_out(state)

  targets, weights = rows.example["targets"], rows.example["weights"]
  cross_entropy = jnp.mean(
    _mean(
      token_losses.CROSS_ENTROPIES[config.token_loss](logits, targets), weights
    )
  )
  right = jnp.all((jnp.argmax(logits, -1) == targets) | (weights == 0), axis=1)
  halt_loss = _binary_cross_entropy(q[:, 0], right)
  total = cross_entropy + _HALT_WEIGHT * halt_loss
  metrics = {"cross_entropy": cross_entropy, "halt_loss": halt_loss}

  steps = rows.steps + 1
  is_last = steps >= config.num_loops
  state = jax.lax.stop_gradient(state)
  if model.ends.continues:
    _, after = model.ends.read_out(model.recurse(x, state, kind))
    target = jnp.where(is_last, after[:, 0], jnp.max(after, axis=1))
    target = jax.lax.stop_gradient(jax.nn.sigmoid(target))
    metrics["continue_loss"] = _binary_cross_entropy(q[:, 1], target)
    total += _HALT_WEIGHT * metrics["continue_loss"]
  wants = model.ends.margin(q) > 0
  halted = supervision.halts(
    wants, steps, config.num_loops, config.exploration, key
  )
  next_rows = supervision.SupervisionState(state, steps, halted, rows.example)
  result: dict[str, Any] = {
    "loss": total,
    **metrics,
    "right": jnp.mean(right.astype(jnp.float32)),
    "halted": jnp.mean(halted.astype(jnp.float32)),
    "segments": jnp.mean(steps.astype(jnp.float32)),
    "carried": Carried(by_example=next_rows),
  }
  return total, result


def _mean(values: Array, weights: Array) -> Array:
  """Weighted means of the rows of [B, T], f32 [B]; 0 without any weight."""
  total = jnp.sum(weights, axis=1)
  return jnp.sum(values * weights, axis=1) / jnp.maximum(total, 1e-9)


def _binary_cross_entropy(logits: Array, target: Array) -> Array:
  """Mean over the rows of logits [B], targets in [0, 1] or bool."""
  target = target.astype(jnp.float32)
  return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, target))


def costs(
  spec: TaskSpec,
  width: int,
  num_loops: int,
  *,
  segment: int,
  with_gradient: int,
  num_forward: int = 1,
) -> dict[str, object]:
  """FLOPs of one example, see `protocols.Family.costs`.

  Args:
    spec: of the task.
    width: D.
    num_loops: segments.
    segment: forward FLOPs of one.
    with_gradient: the part of them that has a backward pass.
    num_forward: segments that a training step runs.
  """
  head = 2 * spec.sequence_length * width * spec.vocab_size
  return {
    "flops_per_example": [
      head + segment * (loop + 1) for loop in range(num_loops)
    ],
    "training_flops_per_example": 3 * head
    + num_forward * segment
    + 2 * with_gradient,
  }
