"""LoopFormer: a looped transformer whose loops know their time and step size.

Source: arXiv 2602.11451, and its authors' code where the paper is silent. A
trajectory of M loops is a list of step sizes dt_1 .. dt_M with sum 1; the time
of a loop is the sum of the step sizes before it. Both scale and gate the
branches of every block. Training aligns a random trajectory of fewer loops with
the one of K equal steps, so that a trained model runs with any number of loops.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import checks, sharding
from loopjax.kernels import KERNELS, Kernels
from loopjax.loop import driver
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, every_loop, reading
from loopjax.nn import attention, linear, norm, stack
from loopjax.nn import block as block_lib
from loopjax.nn.attention.cache import Cache
from loopjax.nn.keys import by_example, dropout, fold_in
from loopjax.nn.shape import Shape
from loopjax.protocols import AnyTeacher, Family
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  LoopOptions,
  Metrics,
  Output,
  Precision,
  TaskSpec,
)

TRACES = ("hidden", "prediction", "confidence")
NUM_SINUSOIDS = 256
_SHORT = 2**31 - 1  # Folded into random keys; the model uses other numbers.


@dataclasses.dataclass(frozen=True)
class Config(stack.StackConfig):
  """Hyper-parameters; the defaults are the paper's.

  Those of `stack.StackConfig`, and:

  Attributes:
    num_loops: K, number of loops of the long trajectory.
    dropout: dropout rate on embeddings and on the outputs of attention and MLP,
      in training.
    short_weight: weight of the cross-entropy of the short trajectory.
    consistency_weight: weight of the mean squared difference of the last states
      of both trajectories. If both weights are 0, no short one is run.
  """

  width: int = 2048
  num_layers: int = 3
  num_heads: int = 32
  mlp_ratio: float = 2.5
  num_loops: int = checks.setting(8, least=1)
  dropout: float = 0.0
  short_weight: float = checks.setting(0.1, least=0)
  consistency_weight: float = checks.setting(0.1, least=0)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num_loops == 1:
      weights = "short_weight", "consistency_weight"
      why = ": one loop has no shorter trajectory"
      checks.without_effect("model", self, "num_loops", *weights, why=why)

  def has_short(self) -> bool:
    """Whether training runs a short trajectory."""
    weighed = self.short_weight > 0 or self.consistency_weight > 0
    return self.num_loops > 1 and weighed


def short_trajectory(key: Array, num_loops: int) -> Array:
  """Draws the step sizes of a trajectory of fewer than K loops.

  The number of steps S is uniform in 1 .. K-1. Step sizes are multiples of 1/K:
  in order, each is uniform among those that give every later step at least 1/K,
  and the last one is the rest.

  Args:
    key: random key.
    num_loops: K, at least 2.

  Returns:
    f32 [K-1], S step sizes with sum 1, then zeros.
  """
  num_steps = jax.random.randint(key, (), 1, num_loops)

  def draw(remaining: Array, index: Array) -> tuple[Array, Array]:
    later = num_steps - 1 - index  # Negative after the last step.
    drawn = jax.random.randint(
      jax.random.fold_in(key, index), (), 1, remaining - later + 1
    )
    size = jnp.where(later > 0, drawn, remaining)
    return remaining - size, size

  indices = jnp.arange(num_loops - 1)
  _, sizes = jax.lax.scan(draw, jnp.asarray(num_loops), indices)
  return sizes.astype(jnp.float32) / num_loops


def sinusoids(x: Array) -> Array:
  """cos(x w), then sin(x w), w_j = 10000^(-j/128): [M] to [M, 256], f32."""
  half = NUM_SINUSOIDS // 2
  angles = jnp.outer(x, 10_000.0 ** (-jnp.arange(half) / half))
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Embedding(nnx.Module):
  """E(x) = Linear(SiLU(Linear(sinusoids(x)))), [M] to [M, D], in float32."""

  def __init__(self, width: int, **shared: Any):
    self.input = linear.readout(NUM_SINUSOIDS, width, **shared)
    self.output = linear.readout(width, width, **shared)

  def __call__(self, x: Array) -> Array:
    return self.output(jax.nn.silu(self.input(sinusoids(x))))


class Block(nnx.Module):
  """A causal block whose branches are scaled and gated by a condition."""

  def __init__(
    self,
    shape: Shape,
    epsilon: float,
    kernels: Kernels,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    width, self.dropout = shape.width, shape.dropout
    self.epsilon = epsilon  # Of the norms without a gain.
    self.attention = attention.Attention(shape, kernels=kernels, **shared)
    self.mlp = block_lib.make_mlp(shape, **shared)
    # A start at 0, where every block is the identity, would leave attention and
    # MLP without a gradient in the first step.
    self.modulation = linear.readout(
      width, 4 * width, init=shape.init, **shared
    )

  def __call__(
    self,
    x: Array,
    metadata: attention.Metadata,
    cache: Cache | None = None,
    slot: Array | None = None,
    *,
    keys: Array | None = None,
    condition: Array,
  ) -> tuple[Array, Cache | None]:
    """As `nn.block.Block`, with the condition c of the loop, f32 [D]."""
    x = sharding.split_by_example(x)
    modulation_4xD = self.modulation(jax.nn.silu(condition)).reshape(4, -1)
    g_a, g_m, s_a, s_m = modulation_4xD[:, None, None]  # [1, 1, D] each.

    def add(x: Array, gate: Array, branch: Array, index: int) -> Array:
      branch = dropout(branch, self.dropout, fold_in(keys, index))
      return x + gate * branch.astype(x.dtype)

    scaled = norm.rms_normalise(x, self.epsilon) * (1 + s_a)
    mixed, cache = self.attention(scaled, metadata, cache, slot)
    x = add(x, g_a, checkpoint_name(mixed, "attention"), 0)
    scaled = norm.rms_normalise(x, self.epsilon) * (1 + s_m)
    x = add(x, g_m, checkpoint_name(self.mlp(scaled), "mlp"), 1)
    return sharding.split_by_example(x), cache


class Model(nnx.Module):
  """The looped transformer with shortcut modulation."""

  embed = causal.embed
  logits = causal.logits
  readout_table = causal.readout_table

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    precision, shape = PRECISIONS[config.precision], config.block_shape()
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    shared: dict[str, Any] = {"precision": precision, "init": shape.init}
    self.time_embedding = Embedding(config.width, **shared, rngs=rngs)
    self.size_embedding = Embedding(config.width, **shared, rngs=rngs)
    self.layers = stack.stacked(
      config.num_layers,
      rngs,
      Block,
      shape,
      config.norm_epsilon,
      KERNELS[options.kernels],
      precision,
    )
    self.final_norm = causal.final_norm(config, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
    cache: Cache | None = None,
    valid: Array | None = None,
    keys: Array | None = None,
    step_sizes: Array | None = None,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, num_loops, kind, documents, cache, valid, keys: see
        `causal.begin`.
      trace: names from TRACES: "hidden" x_1 .. x_M f32 [M, B, T, D];
        "prediction", argmax of the read-out of every state, i32 [M, B, T];
        "confidence", its probability, f32 [M, B, T]. A state within a
        trajectory is not the one that a shorter trajectory ends with.
      step_sizes: dt_1 .. dt_M with sum 1, f32 [M], instead of `num_loops`;
        loops of size 0 are skipped. 1/M each if None.
    """
    if step_sizes is not None:
      num_loops = len(step_sizes)
    call = causal.begin(
      self, inputs, num_loops, kind, documents, cache, valid, keys
    )
    # t_i = dt_1 + .. + dt_{i-1}; c_i = E_t(t_i) + E_dt(dt_i).
    dt, remat = step_sizes, "full"
    if dt is None:
      dt, remat = jnp.full(call.num_loops, 1 / call.num_loops), "none"
    t = jnp.cumsum(dt) - dt
    c = self.time_embedding(t) + self.size_embedding(dt)

    def blocks(carry: causal.Carry, i: Array) -> causal.Carry:
      return stack.run_layers(
        self.layers,
        *carry,
        call.metadata,
        first_slot=i * self.config.num_layers,
        condition=c[i],
        keys=fold_in(call.keys, i + 1),
        unroll=call.kind == "unroll",
        remat=self.options.remat,
      )

    def step(
      carry: causal.Carry, i: Array
    ) -> tuple[causal.Carry, every_loop.Record]:
      if step_sizes is None:
        carry = blocks(carry, i)  # x_i = f(x_{i-1}; c_i)
      else:
        carry = jax.lax.cond(dt[i] > 0, blocks, lambda x, _: x, carry, i)
      stats = {"hidden_norm": norm.mean_norm(carry[0])}
      return carry, every_loop.record(self, trace, stats, hidden=carry[0])

    carry, records, steps_run = driver.run_loop(
      step,
      (self.embed(inputs, keys), cache),  # x_0
      call.num_loops,
      kind=call.kind,
      part=causal.STATE,
      remat=remat,  # A `cond` would store the weights for every loop.
    )
    return causal.output(self, call, carry, records, steps_run)

  def readout_input(self, hidden: Array) -> Array:
    """A state [B, T, D] after the final norm, f32."""
    return self.final_norm(hidden)


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """CE(long) + w_s CE(short) + w_c MSE(stop_gradient(x_long), x_short).

  Long: K steps of 1/K. Short: drawn once per training step. x is the last state
  after the final norm. All terms are weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del step, teacher  # No schedule, no teacher.
  config, documents = model.config, batch.get("documents")
  keys = by_example(key, batch)
  long = model(batch["inputs"], documents=documents, keys=keys)
  long_loss, metrics = token_losses.output_loss(model, long, batch)
  if not config.has_short():
    return long_loss, metrics
  sizes = short_trajectory(jax.random.fold_in(key, _SHORT), config.num_loops)
  short = model(
    batch["inputs"],
    documents=documents,
    keys=fold_in(keys, _SHORT),
    step_sizes=sizes,
  )
  short_loss, _ = token_losses.output_loss(model, short, batch)
  difference = jax.lax.stop_gradient(long.hidden) - short.hidden
  consistency = token_losses.batch_mean(jnp.mean(difference**2, axis=-1), batch)
  total = (
    long_loss
    + config.short_weight * short_loss
    + config.consistency_weight * consistency
  )
  return total, {
    **metrics,
    "cross_entropy": long_loss,
    "short_cross_entropy": short_loss,
    "consistency": consistency,
    "short_loops": jnp.sum(sizes > 0).astype(jnp.float32),
  }


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """FLOPs of a forward pass on one example, by number of loops.

  Also FLOPs of a training step with a short trajectory, which has K/2 loops on
  average.

  The conditions are computed once per batch, and are counted for every example.
  """
  width, layers = config.width, config.num_layers
  head = 2 * spec.sequence_length * width * spec.vocab_size
  embeddings = 2 * 2 * width * (NUM_SINUSOIDS + width)
  modulation = 2 * width * 4 * width
  block = block_lib.flops(config.block_shape(), spec.sequence_length)
  per_loop = embeddings + layers * (modulation + block)
  by_loop = block_lib.flops_by_loop(head, per_loop, num_loops)
  short = head + per_loop * num_loops // 2
  training = {"training_flops_per_example": 3 * (by_loop[-1] + short)}
  return {
    "flops_per_example": by_loop,
    **(training if config.has_short() else {}),
  }


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  reading=reading.READING,
)
