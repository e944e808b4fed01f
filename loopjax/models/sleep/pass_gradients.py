"""The N passes over a window: their gradients, and what is recorded of each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.loop import driver
from loopjax.models.sleep.config import Config
from loopjax.nn import hybrid
from loopjax.types import Array

Carry = tuple[Array, hybrid.Memory]


def run(
  config: Config,
  one_pass: Any,
  carry: Carry,
  num_passes: int,
  kind: str,
  *,
  want_first: bool,
) -> tuple[Carry | None, Carry, dict[str, Array]]:
  """Runs the passes, with the gradient that the config describes.

  Returns:
    (the carry after the first pass, None unless `want_first`; the carry after
    the last pass; records [N, ...]).
  """
  if terms := config.implicit_terms:
    first, last, records = driver.run_implicit(
      one_pass, carry, num_passes, num_terms=terms, kind=kind
    )
    return first if want_first else None, last, records
  return driver.run_truncated(
    one_pass,
    carry,
    num_passes,
    num_with_gradient=config.gradient_passes,
    cut_fn=functools.partial(_cut, config),
    want_first=want_first,
    kind=kind,
  )


def _cut(config: Config, carry: Carry) -> Carry:
  """The carry, with gradients stopped as `gradient_cut` says."""
  (hidden, memory), cut = carry, config.gradient_cut
  if cut in ("hidden", "both"):
    hidden = jax.lax.stop_gradient(hidden)
  if cut in ("fast_weights", "both"):
    memory = jax.lax.stop_gradient(memory)
  return hidden, memory


def record(
  config: Config,
  hidden: Array,
  memory: hybrid.Memory,
  stats: dict[str, Array],
  mask: Array | None,
) -> dict[str, Array]:
  """Statistics of a pass, f32 scalars summed over the window's tokens."""
  fast = memory.state.fast
  # Fast weights may be zero, where the norm has no gradient.
  hidden, fast, stats = jax.lax.stop_gradient((hidden, fast, stats))
  weights = jnp.ones(hidden.shape[:2]) if mask is None else jnp.float32(mask)
  tokens = jnp.sum(weights, axis=1)
  norms = jnp.linalg.norm(fast, axis=(-2, -1))  # [groups, layers, B, H]
  norms = jnp.mean(norms, axis=(0, 1, 3))
  sums = {
    "num_tokens": jnp.sum(tokens),
    "hidden_norm": jnp.sum(jnp.linalg.norm(hidden, axis=-1) * weights),
    "fast_weight_norm": jnp.sum(norms * tokens),
  }
  retentions = jnp.concatenate(stats["retention"])  # [layers, B, H]
  per_layer = config.num_memory_layers / config.num_layers
  first = round(per_layer * config.num_prelude_layers)
  for layer, retention in enumerate(retentions, start=first):
    means = jnp.mean(retention, axis=-1)
    sums[f"retention/memory={layer}"] = jnp.sum(means * tokens)
  return sums
