"""UTM: one universal-transformer block, applied repeatedly.

Source: G. Sapunov, arXiv 2604.21999, section 2. The input is memory tokens
followed by cells. A router determines for each token the weight of every step
and when the token halts.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import layout

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver, halting
from loopjax.losses import tokens as token_losses
from loopjax.models import every_loop
from loopjax.models.utm.config import HALTING, Config
from loopjax.nn import attention, block, linear, rope
from loopjax.protocols import AnyTeacher
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  LoopOptions,
  Metrics,
  Output,
  TaskSpec,
)

TRACES = (
  "hidden",
  "prediction",
  "confidence",
  "probability",
  "weight",
  "attention",
  "attention_mass",
  "relative_change",
)

_MEMORY_INIT_STD = 0.02  # As in the authors' code.


class Carry(NamedTuple):
  """The state after step k.

  Attributes:
    hidden: h_k, f32 [B, S, D].
    output: sum over i <= k of w_i g_i, f32 [B, S, D].
    halting: halting state of every token, [B, S].
  """

  hidden: Array
  output: Array
  halting: halting.HaltingState


# Memory tokens, then cells.
STATE = driver.Part(
  lambda carry: {"hidden": carry.hidden},
  lambda carry, state: carry._replace(hidden=state["hidden"]),
)


class Model(nnx.Module):
  """The universal transformer with memory tokens."""

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    checks.no_next_tokens(spec)
    checks.one_document(spec, "attends to the whole row")
    self.config, self.spec, self.options = config, spec, options
    self.precision = PRECISIONS[config.precision]
    num_memory = config.num_memory_tokens

    width = config.width
    shared: dict[str, Any] = {"precision": self.precision, "rngs": rngs}
    self.token_embedding = linear.embedding(spec.vocab_size, width, **shared)
    self.cell_type = linear.embedding(1, width, **shared)
    if num_memory:
      self.memory_type = linear.embedding(1, width, **shared)
      noise = jax.random.normal(rngs.params(), (num_memory, width))
      self.memory_tokens = nnx.Param(_MEMORY_INIT_STD * noise)
    self.step_embedding = linear.embedding(config.num_loops, width, **shared)
    kernels = KERNELS[options.kernels]
    self.block = block.Block(config.block_shape(), kernels=kernels, **shared)
    if config.halting != "fixed":
      self.router = linear.readout(width, 1, bias=config.router_bias, **shared)
    self.head = linear.readout(width, spec.vocab_size, **shared)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Predicts every cell at once (sections 2.1 and 2.2).

    Args:
      inputs: token ids [B, T].
      num_loops: K; may exceed the number in training.
      kind: how the loop is executed; as in the model's options if None.
      trace: names from TRACES: "hidden" g_k f32 [K, B, S, D]; "prediction"
        argmax of head(g_k) i32 [K, B, T]; "confidence" its probability f32
        [K, B, T]; "probability" p_k and "weight" w_k f32 [K, B, S]; "attention"
        weights f32 [K, B, H, S, S]; "attention_mass" f32 [K, B, 2], the
        fraction of attention that cells and memory tokens, respectively, give
        to memory, mean over heads and tokens; "relative_change" of the state,
        f32 [K, B], see `every_loop.state`. The mean of the latter over a
        row's steps, up to the one at which its last token halts, is also added
        to the statistics. The S = M + T tokens are memory, then cells.
    """
    chex.assert_shape(inputs, (None, self.spec.sequence_length))
    config = self.config
    num_loops = checks.num_loops(config, num_loops)
    num_memory = config.num_memory_tokens
    rule = HALTING[config.halting](config)
    positions = rope.positions_after_memory(
      config.positions, num_memory, self.spec.coordinates
    )
    tables = rope.rope_tables(
      positions, self.block.attention.head_width, config.rope_base
    )
    metadata = attention.Metadata(tables)

    def step(carry: Carry, k: Array) -> tuple[Carry, dict[str, Array]]:
      u_BxSxD = carry.hidden + self._step_vector(k)
      g_BxSxD, _ = self.block(u_BxSxD, metadata)
      p_BxS = self._probability(g_BxSxD)  # p_k = sigmoid(w g_k + b)
      before = carry.halting
      w_BxS, after = rule.update(before, p_BxS, k == num_loops - 1)
      output = carry.output + w_BxS[..., None] * g_BxSxD
      frozen = {
        "pre": after.halted,
        "post": before.halted,
        "none": jnp.zeros_like(before.halted),
      }[config.freeze]
      hidden = jnp.where(frozen[..., None], carry.hidden, g_BxSxD)
      record = {
        "probability": p_BxS,
        "weight": w_BxS,
        "running": ~before.halted,
        **self._trace(trace, u_BxSxD, g_BxSxD, metadata),
      }
      if "relative_change" in trace:
        change = every_loop.state(carry.hidden, hidden)["relative_change"]
        record["relative_change"] = change
      return Carry(hidden, output, after), record

    hidden = self._embed(inputs)
    start = Carry(hidden, jnp.zeros_like(hidden), rule.init(hidden.shape[:2]))
    carry, records, steps_run = driver.run_loop(
      step,
      start,
      num_loops,
      kind=kind or self.options.execution,
      part=STATE,
      remat=self.options.remat,
      done_fn=lambda carry: jnp.all(carry.halting.halted),
    )
    with jax.named_scope("read_out"):
      logits = self.head(carry.output[:, num_memory:])
    stats = _ponder_statistics(carry.halting.steps, num_memory, steps_run)
    if num_memory and "attention_mass" in trace:
      stats |= _attention_statistics(
        records["attention_mass"], records["running"]
      )
    return Output(
      logits=logits,
      losses={"ponder": jnp.mean(carry.halting.cost)},
      stats=stats,
      loops=_loop_statistics(records),
      trace=checks.recorded(records, trace),
    )

  def _embed(self, inputs: Array) -> Array:
    """Memory tokens, then embedded cells, with type embeddings: [B, S, D]."""
    cell_type = self.cell_type.embedding[...][None]
    cells = self.token_embedding(inputs) + cell_type
    if not self.config.num_memory_tokens:
      return cells
    memory = self.memory_tokens[...] + self.memory_type.embedding[...]
    memory = jnp.broadcast_to(memory[None], (inputs.shape[0], *memory.shape))
    # Otherwise XLA stores the copies of a token next to each other, and gives
    # the whole stream this layout.
    memory = layout.with_layout_constraint(memory, layout.Layout((0, 1, 2)))
    return jnp.concatenate([memory, cells], axis=1)

  def _step_vector(self, k: Array) -> Array:
    """The vector added to every token before step k: that of k mod K."""
    row = k % self.config.num_loops
    return self.step_embedding.embedding[...][row][None, None]

  @jax.named_scope("halting")
  def _probability(self, x_BxSxD: Array) -> Array:
    """The router: sigmoid(w x + b), f32 [B, S]; 0 with halting="fixed"."""
    if self.config.halting == "fixed":
      return jnp.zeros(x_BxSxD.shape[:2])
    return jax.nn.sigmoid(self.router(x_BxSxD)[..., 0])

  def _trace(self, names, u_BxSxD, g_BxSxD, metadata) -> dict[str, Array]:
    """The requested traces that are expensive to compute."""
    record = {}
    if "hidden" in names:
      record["hidden"] = g_BxSxD
    cells = g_BxSxD[:, self.config.num_memory_tokens :]
    if from_logits := {"prediction", "confidence"} & {*names}:
      logits = self.head(cells).astype(jnp.float32)
      read_out = linear.prediction_and_confidence(logits)
      record |= {name: read_out[name] for name in from_logits}
    if "attention" in names or "attention_mass" in names:
      record["attention"] = self.block.attention_weights(u_BxSxD, metadata)
    if "attention_mass" in names:
      num_memory = self.config.num_memory_tokens
      on_memory = jnp.sum(record["attention"][..., :num_memory], axis=-1)
      by_cells = jnp.mean(on_memory[..., num_memory:], axis=(1, 2))
      by_memory = jnp.sum(on_memory[..., :num_memory], axis=(1, 2))
      by_memory /= max(num_memory, 1) * on_memory.shape[1]
      record["attention_mass"] = jnp.stack([by_cells, by_memory], axis=-1)
    return {name: record[name] for name in record if name in names}


def _ponder_statistics(
  steps_BxS: Array, num_memory: int, steps_run: Array
) -> dict[str, Array]:
  """Mean number of steps until halting, by kind of token: f32 [B] by name."""
  stats = {
    "ponder_steps": jnp.mean(steps_BxS, axis=1),
    "ponder_steps_cells": jnp.mean(steps_BxS[:, num_memory:], axis=1),
    "loops_run": jnp.full(steps_BxS.shape[:1], steps_run, jnp.float32),
  }
  if num_memory:
    memory_BxM = steps_BxS[:, :num_memory]
    stats["ponder_steps_memory"] = jnp.mean(memory_BxM, axis=1)
  return stats


def _attention_statistics(
  mass_KxBx2: Array, running_KxBxS: Array
) -> dict[str, Array]:
  """Fraction of attention on memory: f32 [B] by name.

  Mean over the steps in which the row has tokens that run. How many more the
  loop takes depends on its execution and on the other rows.
  """
  ran_KxBx1 = jnp.any(running_KxBxS, axis=2, keepdims=True)
  by_cells, by_memory = jnp.mean(mass_KxBx2, axis=0, where=ran_KxBx1).T
  return {
    "attention_sequence_to_memory": by_cells,
    "attention_memory_to_memory": by_memory,
  }


def _loop_statistics(records: dict[str, Array]) -> dict[str, Array]:
  """Statistics of every step: f32 [K] by name.

  Means over examples and tokens; "std" is the spread over an example's tokens.
  """
  probability, weight = records["probability"], records["weight"]
  return {
    "router_probability": jnp.mean(probability, axis=(1, 2)),
    "router_probability_std": jnp.mean(jnp.std(probability, axis=2), axis=1),
    "output_weight": jnp.mean(weight, axis=(1, 2)),
    "running": jnp.mean(records["running"].astype(jnp.float32), axis=(1, 2)),
  }


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """Cross-entropy + lambda min(1, step / warm-up) ponder cost (section 5.1).

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del key, teacher  # No dropout, no teacher.
  config = model.config
  output = model(batch["inputs"])
  cross_entropy = token_losses.batch_mean(
    token_losses.token_cross_entropy(output.logits, batch["targets"]), batch
  )
  ponder_weight = config.ponder_weight * token_losses.linear_warmup(
    step, config.ponder_warmup_steps
  )
  total = cross_entropy + ponder_weight * output.losses["ponder"]
  return total, {
    "cross_entropy": cross_entropy,
    "ponder": output.losses["ponder"],
    "ponder_weight": ponder_weight,
    **{name: jnp.mean(value) for name, value in output.stats.items()},
    **output.loops,
  }
