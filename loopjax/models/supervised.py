"""What TRM, HRM and URM share: deep supervision of segments.

Their states are tuples of arrays f32 [B, S, D], S = M + T, one for each of
`Config.state_names`; the first is read out. A model of these families has
`ends` (`ends.Ends`) and

  recurse(x, state, kind, keys=None, cut=jax.lax.stop_gradient) -> state

which computes one segment of supervision, with the paper's gradient, from the
embedded inputs x, f32 [B, S, D]; `kind` says how its loops run, "scan" or
"unroll", and `cut` is applied to the state where the paper stops the gradient.
Every application of a network ends with `moved`, which draws the noise on the
path from the keys, [B]. A family's file contains this method and its network.

With `start`, `damping` and `path_noise` they are Equilibrium Reasoners (arXiv
2605.21488): trained from random starts and disturbed on the way, their states
settle in the same answer, so more loops and more starts solve more.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import optax

from loopjax import checks
from loopjax.loop import driver, supervision
from loopjax.losses import tokens as token_losses
from loopjax.models import every_loop
from loopjax.nn import block, linear, rope, shape
from loopjax.nn.keys import by_content, by_example
from loopjax.nn.shape import Shape
from loopjax.protocols import AnyTeacher, Family
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  Carried,
  Metrics,
  Output,
  TaskSpec,
)

TRACES = (
  "hidden", "prediction", "confidence", "margin", "relative_change",
)  # fmt: skip
State = tuple[Array, ...]
Cut = Callable[[Any], Any]
_HALT_WEIGHT = 0.5  # Of the halting losses, in the authors' code.


@dataclasses.dataclass(frozen=True)
class Config:
  """What these families set alike; the defaults are the authors' code's.

  Attributes:
    width: D.
    num_heads: H.
    num_layers: number of layers of a network.
    mlp_ratio: F = floor(mlp_ratio D); 3 gives 1,536, which is 8/3 D rounded up
      to a multiple of 256.
    num_loops: segments of supervision; the most in training.
    num_cycles: recursions of a segment.
    num_memory_tokens: M, positions before the task's tokens; the papers have
      the puzzle embedding there.
    positions, rope_base: settings of the rotary embedding, see
      `rope.positions_after_memory`; "offset" is the papers'.
    exploration: see `loop.supervision.halts`.
    start: initial states: "fixed" vectors, the same for all examples, or
      "normal", drawn for each example, token and feature, also in evaluation.
    damping: share d of the old state in the new one: d z + (1 - d) f(z) (EqR).
    path_noise: standard deviation of the noise that training adds to the state
      after every application of a network (EqR).
    token_loss: cross-entropy of the "stablemax" or the "softmax" of logits.
    precision: "float32" or "bfloat16", the dtype of matrix products.
  """

  width: int = 512
  num_heads: int = 8
  num_layers: int = checks.setting(4, least=1)
  mlp_ratio: float = 3.0
  num_loops: int = checks.setting(16, least=1)
  num_cycles: int = checks.setting(2, least=1)
  num_memory_tokens: int = checks.setting(1, least=0)
  positions: str = "offset"
  rope_base: float = checks.setting(10_000.0, least=1)
  exploration: float = checks.setting(0.1, within="[0, 1]")
  start: str = "fixed"
  damping: float = checks.setting(0.0, within="[0, 1)")
  path_noise: float = checks.setting(0.0, least=0)
  token_loss: str = "stablemax"
  precision: str = "bfloat16"
  state_names: ClassVar[tuple[str, ...]]

  def __post_init__(self) -> None:
    checks.plain_values("model", self)
    checks.one_of(
      "model",
      self,
      positions=rope.POSITIONS,
      start=("fixed", "normal"),
      token_loss=token_losses.DISTRIBUTIONS,
      precision=PRECISIONS,
    )
    if self.positions == "none":
      checks.without_effect("model", self, "positions", "rope_base")
    self.block_shape()

  def block_shape(self) -> Shape:
    """The sizes of a block; raises UserError if they are invalid."""
    return shape.multi_head(self.width, self.num_heads, self.mlp_ratio)


def start(num_states: int, sizes: tuple[int, int, int]) -> State:
  """Initial states: fixed random vectors, each the same at all positions.

  They are not trained: constants, the same for every seed.

  Args:
    num_states: how many.
    sizes: (B, S, D).
  """
  # No checkpoint stores them, so a user's choice of generator must not count.
  key = jax.random.key(0, impl="threefry2x32")
  vectors = _truncated(key, (num_states, sizes[2]))
  return tuple(jnp.broadcast_to(v[None, None], sizes) for v in vectors)


def begun(config: Any, sizes: tuple[int, int, int], keys: Array) -> State:
  """The initial states of examples, by `config.start`.

  Args:
    config: a `Config`.
    sizes: (B, S, D).
    keys: a random key for each example, [B].
  """
  if config.start == "fixed":
    return start(len(config.state_names), sizes)
  shape = (len(config.state_names), *sizes[1:])
  drawn = jax.vmap(lambda key: _truncated(key, shape))(keys)
  return tuple(drawn[:, i] for i in range(shape[0]))


def _truncated(key: Array, shape: tuple[int, ...]) -> Array:
  """Normal draws, truncated at two, whose standard deviation is one."""
  # Truncation leaves a standard normal 0.8796.
  return jax.random.truncated_normal(key, -2, 2, shape) / 0.87962566


def moved(
  config: Any, old: Array, new: Array, keys: Array | None
) -> tuple[Array, Array | None]:
  """The state after a network was applied, and the keys of the next time.

  d old + (1 - d) new + b e (EqR), with the damping d, the noise b, and e
  standard normal.

  Args:
    config: a `Config`.
    old, new: the state before, and what the network makes of it, f32 [B, S, D].
    keys: random keys, [B]; None for no noise.
  """
  if config.damping:
    new = config.damping * old + (1 - config.damping) * new
  if keys is None:
    return new, None
  pairs = jax.vmap(jax.random.split)(keys)
  draw = jax.vmap(lambda key: jax.random.normal(key, old.shape[1:], old.dtype))
  return new + config.path_noise * draw(pairs[:, 1]), pairs[:, 0]


def last_with_gradient(
  cycle: Callable[[Any], Any],
  state: Any,
  num_cycles: int,
  kind: str,
  cut: Cut,
) -> Any:
  """The state after several cycles; only the last has a gradient."""
  state = driver.repeat(cycle, state, num_cycles - 1, kind=kind)
  return cycle(cut(state))


def run(
  model: Any,
  inputs: Array,
  *,
  num_loops: int | None = None,
  kind: driver.Kind | None = None,
  trace: tuple[str, ...] = (),
  keys: Array | None = None,
) -> Output:
  """Predicts every token at once, after K segments from the initial state.

  The `__call__` of the models, see `protocols.Model`; a loop is a segment. All
  of them run: "halt_steps" says after which one the head would have halted.
  TRACES: "hidden", the state that is read out, f32 [K, B, S, D]; "prediction",
  i32, and "confidence", f32 [K, B, T], of its read-out; "margin", positive if
  the head halts, f32 [K, B]; "relative_change" of the state that is read out,
  f32 [K, B], see `every_loop.state`. The softmax of the output's logits is the
  distribution of the training loss, for any `token_loss`. With `start="normal"`
  the initial state is drawn from `keys`, [B], or else from the example's
  tokens, so that it is the same in any batch. There is no noise on the path.
  """
  chex.assert_shape(inputs, (None, model.spec.sequence_length))
  num_loops = checks.num_loops(model.config, num_loops)
  kind = kind or model.options.execution
  x = model.ends.embed(inputs)
  of_distribution = token_losses.DISTRIBUTIONS[model.config.token_loss]

  def segment(state: State, k: Array) -> tuple[State, dict[str, Array]]:
    del k
    before = state[0]
    # Without a cut, so that a loop has a Jacobian.
    state = model.recurse(x, state, _inner(kind), cut=lambda state: state)
    logits, q = model.ends.read_out(state[0])
    record = {"margin": model.ends.margin(q)}
    if "hidden" in trace:
      record["hidden"] = state[0]
    if "relative_change" in trace:
      change = every_loop.state(before, state[0])["relative_change"]
      record["relative_change"] = change
    if {"prediction", "confidence"} & {*trace}:
      record |= linear.prediction_and_confidence(of_distribution(logits))
    return state, record

  if keys is None:
    same = jax.random.key(0, impl="threefry2x32")  # With any generator.
    keys = by_content(same, inputs)
  state = begun(model.config, x.shape, keys)
  names = model.config.state_names
  state, records, steps_run = driver.run_loop(
    segment,
    state,
    num_loops,
    kind=kind,
    part=driver.Part(
      lambda state: dict(zip(names, state, strict=True)),
      lambda _, state: tuple(state[name] for name in names),
    ),
  )
  halts = records["margin"] > 0
  first = jnp.argmax(halts, axis=0) + 1
  halt_steps = jnp.where(jnp.any(halts, axis=0), first, num_loops)
  return Output(
    logits=of_distribution(model.ends.read_out(state[0])[0]),
    losses={},
    stats={
      "halt_steps": halt_steps.astype(jnp.float32),
      "loops_run": jnp.full(len(inputs), steps_run, jnp.float32),
    },
    loops={"halted": jnp.mean(halts.astype(jnp.float32), axis=1)},
    trace=checks.recorded(records, trace),
  )


def _inner(kind: driver.Kind) -> str:
  """How the loops in a segment are executed: "while" as "scan"."""
  return "unroll" if kind == "unroll" else "scan"


def init_carried(config: Config, spec: TaskSpec, batch_size: int) -> Carried:
  """Rows that all take a new example at the first step."""
  num_positions = config.num_memory_tokens + spec.sequence_length
  sizes = (batch_size, num_positions, config.width)
  state = tuple(jnp.zeros(sizes) for _ in config.state_names)
  return Carried(by_example=supervision.empty(state, spec.sequence_length))


def loss(
  model: Any, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """One segment of supervision of every row (TRM, figure 3).

  Cross-entropy, averaged over the counted tokens of each example and then over
  examples, + 1/2 BCE of q_halt against "every counted token is right". If the
  model learns q_continue (HRM, section 2), + 1/2 BCE against the next segment's
  head, which is computed without a gradient.

  Returns:
    (f32 scalar, metrics). "right" is the share of rows whose answer is right,
    "halted" the share of rows that halt now, "segments" the mean number of
    segments that rows have run on their example.
  """
  del step, teacher  # No schedule, no teacher.
  config, kind = model.config, _inner(model.options.execution)
  carried = batch["carried"].by_example
  keys = by_example(key, batch)
  fresh = begun(config, carried.state[0].shape, _folded(keys, 1))
  rows = supervision.refilled(carried, batch, fresh)
  x = model.ends.embed(rows.example["inputs"])
  noise = _folded(keys, 2) if config.path_noise else None
  state = model.recurse(x, rows.state, kind, noise)
  logits, q = model.ends.read_out(state[0])

  targets, weights = rows.example["targets"], rows.example["weights"]
  logits = token_losses.DISTRIBUTIONS[config.token_loss](logits)
  losses = token_losses.token_cross_entropy(logits, targets)
  cross_entropy = jnp.mean(token_losses.row_means(losses, weights))
  right = jnp.all((jnp.argmax(logits, -1) == targets) | (weights == 0), axis=1)
  halt_loss = _binary_cross_entropy(q[:, 0], right)
  total = cross_entropy + _HALT_WEIGHT * halt_loss
  metrics = {"cross_entropy": cross_entropy, "halt_loss": halt_loss}

  steps = rows.steps + 1
  is_last = steps >= config.num_loops
  state = jax.lax.stop_gradient(state)
  if model.ends.continues:
    _, after = model.ends.read_out(model.recurse(x, state, kind)[0])
    target = jnp.where(is_last, after[:, 0], jnp.max(after, axis=1))
    target = jax.lax.stop_gradient(jax.nn.sigmoid(target))
    metrics["continue_loss"] = _binary_cross_entropy(q[:, 1], target)
    total += _HALT_WEIGHT * metrics["continue_loss"]
  wants = model.ends.margin(q) > 0
  halted = supervision.halts(
    wants, steps, config.num_loops, config.exploration, keys
  )
  next_rows = supervision.SupervisionState(state, steps, halted, rows.example)
  result: dict[str, Any] = {
    **metrics,
    "right": jnp.mean(right.astype(jnp.float32)),
    "halted": jnp.mean(halted.astype(jnp.float32)),
    "segments": jnp.mean(steps.astype(jnp.float32)),
    "carried": Carried(by_example=next_rows),
  }
  return total, result


def _folded(keys: Array, number: int) -> Array:
  return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def _binary_cross_entropy(logits: Array, target: Array) -> Array:
  """Mean over the rows of logits [B], targets in [0, 1] or bool."""
  target = target.astype(jnp.float32)
  return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, target))


def costs(
  config: Config,
  spec: TaskSpec,
  num_loops: int,
  *,
  segment: int,
  with_gradient: int,
  num_forward: int = 1,
) -> dict[str, object]:
  """FLOPs of one example, see `protocols.Family.costs`.

  Args:
    config: config of the model.
    spec: properties of the task.
    num_loops: segments.
    segment: forward FLOPs of one.
    with_gradient: the part of them that has a backward pass.
    num_forward: segments that a training step runs.
  """
  head = 2 * spec.sequence_length * config.width * spec.vocab_size
  return {
    "flops_per_example": block.flops_by_loop(head, segment, num_loops),
    "training_flops_per_example": 3 * head
    + num_forward * segment
    + 2 * with_gradient,
  }


def family(config_type: Any, model_type: Any, costs: Any) -> Family:
  """The `Family` of a model with deep supervision."""
  return Family(
    Config=config_type,
    Model=model_type,
    loss=loss,
    costs=costs,
    traces=TRACES,
    headline=("segments",),
    draws_state=lambda config: config.start == "normal",
    init_carried=init_carried,
    num_memory_tokens=lambda config: config.num_memory_tokens,
  )
