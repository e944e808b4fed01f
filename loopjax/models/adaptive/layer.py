"""One layer of adaptive loops and memory (arXiv 2603.08391, section 2).

The output is a sum over N iterations of one block, weighted by a router
(equations 3 to 5). In every iteration, unless configured otherwise, the state
is first enriched from two memory banks (equations 6 to 10).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import sharding
from loopjax.kernels import Kernels
from loopjax.loop import driver, halting, memory
from loopjax.models.adaptive.config import Config
from loopjax.nn import attention, block, linear
from loopjax.nn.attention.cache import Cache
from loopjax.types import Array, Precision

SLOTS = ("local_slots", "global_slots")  # Traces of attention to the banks.


class Carry(NamedTuple):
  """The state after iteration t.

  Attributes:
    h: h^(t), f32 [B, T, D].
    output: sum over i <= t of p_halt^(i) h^(i), f32 [B, T, D].
    steps: sum over i <= t of i p_halt^(i), f32 [B, T].
    divergence: sum over i <= t of p_halt^(i) log(p_halt^(i) / g_i), f32 [B, T];
      0 without a prior g.
    halting: halting state; `spent` is the sum over i <= t of p_halt^(i).
    cache: cache of keys and values, or None.
  """

  h: Array
  output: Array
  steps: Array
  divergence: Array
  halting: halting.HaltingState
  cache: Cache | None


STATE = driver.Part(
  lambda carry: {"hidden": carry.h},
  lambda carry, state: carry._replace(h=state["hidden"]),
)


class Layer(nnx.Module):
  """One block with its loop, router and reads of the memory banks."""

  def __init__(
    self,
    config: Config,
    *,
    kernels: Kernels = Kernels(),
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    shape, width = config.block_shape(), config.width
    self.config = config
    self.block = block.Block(shape, kernels=kernels, **shared)
    if config.loop_update == "literal":
      self.loop_norm = shape.norm(width, **shared)
    num_scales = config.num_loops + 1 - config.scale_from_step
    if num_scales > 0:
      scales = jnp.full((num_scales,), config.loop_scale, precision.params)
      self.loop_scale = nnx.Param(scales)
    if config.num_loops > 1:  # Else the halting probability is 1.
      zeros = nnx.initializers.zeros_init()
      self.router = linear.readout(width + 1, 1, init=zeros, **shared)
    read: dict[str, Any] = {
      "gate": config.memory_gate,
      "gate_bias": config.gate_bias,
      "init": shape.init,
      **shared,
    }
    if config.num_local_slots:
      self.local_bank = memory.MemoryBank(
        config.num_local_slots, width, init=shape.init, **shared
      )
      self.local_read = memory.GatedRead(width, **read)
    if config.num_global_slots:
      self.global_read = memory.GatedRead(width, **read)

  def __call__(
    self,
    h: Array,
    cache: Cache | None,
    metadata: attention.Metadata,
    first_slot: Array,
    global_bank: memory.MemoryBank | None,
    token_weights: Array,
    num_loops: int,
    exit_threshold: float | Array,
    kind: driver.Kind,
    remat: str,
    trace: tuple[str, ...],
  ) -> tuple[Array, Cache | None, dict[str, Any]]:
    """Runs all iterations of the layer.

    Args:
      h: the input [B, T, D].
      cache: cache of earlier tokens, or None.
      metadata: positions and masks of the tokens.
      first_slot: the slot of the cache that the first iteration uses.
      global_bank: the bank that all layers share, or None.
      token_weights: weights in statistics, f32 [B, T], sum 1 per example.
      num_loops: number of iterations, at most N.
      exit_threshold: see `Model.__call__`.
      kind, remat: as in `loop.driver.run_loop`.
      trace: names from TRACES.

    Returns:
      (the output [B, T, D], the cache, statistics and traces by name).
    """
    config, scales = self.config, self.scales()
    placement = config.memory_placement
    reads: dict[str, Array] = {}
    rule = halting.ACT(1 - exit_threshold, config.halting_mass == "remainder")

    def step(carry: Carry, i: Array) -> tuple[Carry, dict[str, Any]]:
      h = carry.h
      read: dict[str, Array] = {}
      if placement == "in_loop":
        h, read = self.enrich(h, global_bank, token_weights, trace)  # (10)
      added, cache = self._update(h, carry.cache, metadata, first_slot + i)
      h = h + scales[i] * added  # h^(t), (5)
      t = (i + 1).astype(jnp.float32)
      p_halt = self._probability(h, t) * (1 - carry.halting.spent)  # (3), (4)
      p_halt, state = rule.update(carry.halting, p_halt, i == num_loops - 1)
      h, p_halt = map(sharding.split_by_example, (h, p_halt))
      output = carry.output + p_halt[..., None] * h  # (4)
      steps = carry.steps + t * p_halt  # E[n], (12)
      divergence = carry.divergence + self._divergence(p_halt, i, num_loops)
      traces = {"hidden": h, "halting": p_halt}
      running = ~carry.halting.halted & (token_weights > 0)
      record = {
        "weight": jnp.sum(token_weights * p_halt, axis=1),
        "running": jnp.any(running, axis=1),
        "reads": read,
      }
      record |= {name: traces[name] for name in traces if name in trace}
      return Carry(h, output, steps, divergence, state, cache), record

    if placement == "pre_layer":
      h, reads = self.enrich(h, global_bank, token_weights, trace)
    zeros, token_zeros = jnp.zeros_like(h), jnp.zeros(h.shape[:2])
    carry, records, steps_run = driver.run_loop(
      step,
      Carry(h, zeros, token_zeros, token_zeros, rule.init(h.shape[:2]), cache),
      num_loops,
      kind=kind,
      remat=remat,
      part=STATE,
      done_fn=lambda carry: jnp.all(carry.halting.halted),
    )
    output, steps = carry.output, carry.steps
    if config.halting_mass == "renormalised":
      mass = jnp.maximum(carry.halting.spent, jnp.finfo(jnp.float32).tiny)
      output, steps = output / mass[..., None], steps / mass
    if placement == "post_layer":
      output, reads = self.enrich(output, global_bank, token_weights, trace)
    mean = jnp.sum(token_weights * steps, axis=1)
    variance = jnp.sum(token_weights * (steps - mean[:, None]) ** 2, axis=1)
    return output, carry.cache, {
      **_with_reads(records, reads),
      "run": steps_run.astype(jnp.float32),
      "steps": mean, "steps_std": jnp.sqrt(variance),
      "divergence": jnp.sum(token_weights * carry.divergence, axis=1),
    }  # fmt: skip

  def scales(self) -> Array:
    """s_t for t = 1 .. N, f32 [N]: softplus(alpha_t), or 1 if there is none."""
    config = self.config
    ones = jnp.ones(min(config.scale_from_step - 1, config.num_loops))
    if config.scale_from_step > config.num_loops:
      return ones
    return jnp.concatenate([ones, jax.nn.softplus(self.loop_scale[...])])

  def log_prior(self, num_loops: int) -> Array:
    """log g_t for t = 1 .. N, f32 [N], where g_t ~ (1 - lambda_p)^(t - 1).

    PonderNet's geometric prior, truncated and normalised.
    """
    log_survival = jnp.log1p(-jnp.float32(self.config.ponder_prior))
    index = jnp.arange(num_loops, dtype=jnp.float32)
    return jax.nn.log_softmax(index * log_survival)

  def _divergence(self, p_halt: Array, i: Array, num_loops: int) -> Array:
    """p_halt log(p_halt / g_i), f32 [B, T]; 0 without a prior g."""
    if not self.config.ponder_prior:
      return jnp.zeros_like(p_halt)
    tiny = jnp.finfo(jnp.float32).tiny  # The gradient at 0 must be finite.
    log_ratio = jnp.log(jnp.maximum(p_halt, tiny))
    return p_halt * (log_ratio - self.log_prior(num_loops)[i])

  def enrich(
    self,
    h: Array,
    global_bank: memory.MemoryBank | None,
    token_weights: Array,
    trace: tuple[str, ...],
  ) -> tuple[Array, dict[str, Array]]:
    """h + g_L W_L m_local + g_G W_G m_global (equation 10).

    Args:
      h, global_bank, token_weights, trace: as in `__call__`.

    Returns:
      (the enriched state [B, T, D], statistics by name). The statistics are
      means over tokens, for each bank: "<bank>_gate" [B]; "<bank>_entropy", the
      entropy of the attention over slots in nats, [B]; and, if traced,
      "<bank>_slots", that attention, [B, M].
    """
    read: dict[str, Array] = {}
    enriched = h
    banks = []
    if self.config.num_local_slots:
      banks.append(("local", self.local_read, self.local_bank))
    if global_bank is not None:
      banks.append(("global", self.global_read, global_bank))
    for name, reader, bank in banks:
      added, gate, weights = reader(h, bank)
      enriched = enriched + added
      entropy = jnp.sum(jax.scipy.special.entr(weights), axis=-1)
      read[f"{name}_gate"] = jnp.sum(token_weights * jnp.mean(gate, -1), axis=1)
      read[f"{name}_entropy"] = jnp.sum(token_weights * entropy, axis=1)
      if f"{name}_slots" in trace:
        slots = jnp.einsum("bt,btm->bm", token_weights, weights)
        read[f"{name}_slots"] = slots
    return enriched, read

  def _update(
    self,
    h: Array,
    cache: Cache | None,
    metadata: attention.Metadata,
    slot: Array,
  ) -> tuple[Array, Cache | None]:
    """(the update of h that equation 5 scales by s_t, the cache)."""
    if self.config.loop_update == "literal":
      return self.block(self.loop_norm(h), metadata, cache, slot)
    updated, cache = self.block(h, metadata, cache, slot)
    return updated - h, cache

  @jax.named_scope("halting")
  def _probability(self, h: Array, t: Array) -> Array:
    """p_t = sigmoid(W_h [h^(t); t / N] + b_h), f32 [B, T] (equation 3)."""
    if self.config.num_loops == 1:
      return jnp.ones(h.shape[:2], jnp.float32)
    step = jnp.broadcast_to(t / self.config.num_loops, (*h.shape[:2], 1))
    logits = self.router(jnp.concatenate([h, step], axis=-1))
    return jax.nn.sigmoid(logits[..., 0])


def _with_reads(
  records: dict[str, Any], once: dict[str, Array]
) -> dict[str, Any]:
  """The iterations' records, with "reads": means of those of the banks.

  A row's mean is over the iterations in which it has tokens that run. How many
  more the loop takes depends on its execution and on the other rows.

  Args:
    records: the records of all iterations; "reads" has those made "in_loop".
    once: statistics of a read outside of the loop.
  """
  reads, ran = records.pop("reads"), records.pop("running")
  num_loops, iterations = len(ran), jnp.sum(ran, axis=0, dtype=jnp.float32)
  slots = {name: reads.pop(name) for name in SLOTS if name in reads}
  for name in SLOTS:
    if name in once:  # The same in all iterations.
      slots[name] = jnp.repeat(once.pop(name)[None], num_loops, axis=0)
  means = {
    name: jnp.sum(x, axis=0, where=ran) / jnp.maximum(iterations, 1.0)
    for name, x in reads.items()
  }
  return {**records, **slots, "reads": once | means}
