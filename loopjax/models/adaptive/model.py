"""Adaptive loops and memory: loops within layers, and two memory banks.

Source: "Adaptive Loops and Memory in Transformers" (arXiv 2603.08391). The
output of each layer is a sum over N iterations of one block, weighted by a
router (equations 3 to 5). The state is enriched from a memory bank of the layer
and from one that all layers share (equations 6 to 10).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks, sharding
from loopjax.errors import UserError
from loopjax.kernels import KERNELS
from loopjax.loop import driver, memory
from loopjax.losses import tokens as token_losses
from loopjax.models import causal
from loopjax.models.adaptive.config import WHY_NO_MORE, Config
from loopjax.models.adaptive.layer import SLOTS, Layer
from loopjax.nn import linear, stack
from loopjax.nn import remat as remat_lib
from loopjax.nn.attention.cache import Cache
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

HALTING_TRACE = "halting"
TRACES = ("hidden", HALTING_TRACE, *SLOTS)


class Model(nnx.Module):
  """A stack of layers, each with its own loop."""

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
    precision = PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    shape, width = config.block_shape(), config.width
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = stack.stacked(
      config.num_layers,
      rngs,
      Layer,
      config,
      kernels=KERNELS[options.kernels],
      precision=precision,
    )
    if config.num_global_slots:
      self.global_bank = memory.MemoryBank(
        config.num_global_slots, width, init=shape.init, **shared
      )
    self.final_norm = shape.norm(width, **shared)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)

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
    exit_threshold: float | Array = 1.0,
  ) -> Output:
    """Predicts every next token.

    Args:
      inputs, documents, cache, valid: see `causal.begin`.
      num_loops: number of iterations of every layer, from 1 to N; N if None.
      kind: see `causal.begin`; with "while" a layer's loop ends when all tokens
        have halted.
      trace: names from TRACES: "hidden" h^(t) of the last layer, f32
        [N, B, T, D]; "halting" p_halt^(t) of all layers, f32 [N, B, T, L];
        "local_slots" and "global_slots", for banks that exist: the mean over
        tokens of the attention over slots, f32 [N, B, L, M].
      exit_threshold: in (0, 1]. A token halts in a layer when the sum of its
        p_halt reaches the threshold; that iteration gets the remainder. Other
        tokens still attend to it. Not checked if it is an array.
    """
    config = self.config
    num_loops = checks.num_loops(config, num_loops, WHY_NO_MORE)
    call = causal.begin(self, inputs, num_loops, kind, documents, cache, valid)
    _, kind, metadata, _ = call
    is_number = isinstance(exit_threshold, int | float)
    if is_number and not 0 < exit_threshold <= 1:
      raise UserError(f"exit_threshold={exit_threshold} must be in (0, 1]")
    bank = self.global_bank if config.num_global_slots else None
    # Padding is excluded from statistics.
    real = inputs < self.spec.num_tokens
    if documents is not None:  # The end of a document may pad rows, too.
      real &= documents > 0
    token_weights = real.astype(jnp.float32)
    token_weights /= jnp.maximum(
      jnp.sum(token_weights, axis=1, keepdims=True), 1.0
    )

    def run_layer(
      carry: tuple[Array, Cache | None], item: tuple[Layer, Array]
    ) -> tuple[tuple[Array, Cache | None], dict[str, Any]]:
      layer, index = item
      x, cache, record = layer(
        *carry,
        metadata,
        index * num_loops,
        bank,
        token_weights,
        num_loops,
        exit_threshold,
        driver.later(kind, index * num_loops),
        self.options.remat,
        trace,
      )
      return (x, cache), record

    (x, cache), records = remat_lib.scan(
      run_layer,
      (sharding.split_by_example(self.token_embedding(inputs)), cache),
      (self.layers, jnp.arange(config.num_layers)),
      unroll=kind == "unroll",
    )
    return self._output(
      self.final_norm(x),
      records,
      trace,
      cache and cache.extended(metadata.places),
    )

  def _output(
    self,
    hidden: Array,
    records: dict[str, Any],
    trace: tuple[str, ...],
    cache: Cache | None,
  ) -> Output:
    """The output from the final state [B, T, D] and the layers' records."""
    steps, reads = records["steps"], records["reads"]  # [L, B]
    num_loops = records["weight"].shape[1]
    traces = {}
    if "hidden" in trace:
      traces["hidden"] = records["hidden"][-1]
    if "halting" in trace:
      traces["halting"] = jnp.moveaxis(records["halting"], 0, -1)
    for name in SLOTS:
      if name in records:
        traces[name] = jnp.moveaxis(records[name], 0, 2)
    if driver.STATE in records:
      traces |= driver.in_order(records[driver.STATE])
    scales = jax.vmap(Layer.scales)(self.layers)[:, :num_loops]
    losses = {"ponder": (jnp.mean(steps) - 1) / max(num_loops - 1, 1)}  # (12)
    if self.config.ponder_prior:
      losses["prior"] = jnp.mean(records["divergence"])
    return Output(
      logits=linear.token_logits(
        hidden, self.readout_table(), self.spec.num_padding_tokens
      ),
      losses=losses,
      stats={
        "loops_run": jnp.full(len(hidden), jnp.mean(records["run"])),
        "ponder_steps": jnp.mean(steps, axis=0),
        **_by_layer("ponder_steps", steps),
        **_by_layer("ponder_steps_std", records["steps_std"]),
        **{
          by_layer: value
          for name, values in reads.items()
          for by_layer, value in _by_layer(name, values).items()
        },
      },
      loops={
        "output_weight": jnp.mean(records["weight"], axis=(0, 2)),
        **_by_layer("loop_scale", scales),
      },
      trace=traces,
      hidden=hidden,
      cache=cache,
    )


def _by_layer(name: str, values: Array) -> dict[str, Array]:
  """The values [L, ...] of each layer, by name: "<name>/layer=i"."""
  return {f"{name}/layer={i}": values[i] for i in range(len(values))}


def loss(
  model: Model, batch: Batch, key: Array, step: Array, teacher: AnyTeacher
) -> tuple[Array, Metrics]:
  """Cross-entropy + lambda n~ (equation 11).

  n~ is averaged over the tokens of each example, then over layers and examples.
  With `ponder_prior`, KL(p_halt || g), averaged the same way, replaces n~
  (PonderNet, equation 8).

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  del key, step, teacher  # No dropout, no schedule, no teacher.
  config = model.config
  output = model(batch["inputs"], documents=batch.get("documents"))
  cross_entropy = token_losses.next_token(model, output.hidden, batch)
  penalty = output.losses["prior" if config.ponder_prior else "ponder"]
  total = cross_entropy + config.ponder_weight * penalty
  return total, {
    "cross_entropy": cross_entropy,
    **output.losses,
    **{name: jnp.mean(value) for name, value in output.stats.items()},
    **output.loops,
  }
