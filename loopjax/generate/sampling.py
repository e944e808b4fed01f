"""Sampling of the next token from logits, with settings for each row."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.types import Array

_COLDEST = 1e-30  # A lower temperature would turn logits into infinities.


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the tokens of a sequence are sampled.

  The settings apply in the order of most libraries: repetition penalty,
  temperature, then top-k, top-p and min-p, each to the tokens that remain.

  Attributes:
    temperature: divides the logits; 0 for greedy decoding.
    top_k: number of most likely tokens to keep, and any that tie with the last
      of them; 0 for all.
    top_p: the most likely tokens are kept until their total probability is at
      least this, in (0, 1] (nucleus sampling, arXiv 1904.09751).
    min_p: tokens are kept whose probability is at least this fraction of the
      most likely token's, in [0, 1] (arXiv 2407.01082).
    repetition_penalty: divides positive logits and multiplies negative ones of
      tokens that occur in the sequence, prompt included; in [0.01, 100] (CTRL,
      arXiv 1909.05858).
    seed: seed of the random numbers, which depend only on the seed and on the
      token's position, not on other sequences.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  seed: int = 0

  def __post_init__(self) -> None:
    for name, low, high in (
      ("temperature", 0, 100),
      ("top_k", 0, 2**31 - 1),
      ("top_p", 0, 1),
      ("min_p", 0, 1),
      ("repetition_penalty", 0.01, 100),
      ("seed", 0, 2**32 - 1),
    ):
      value = getattr(self, name)
      whole = name in ("top_k", "seed")
      number = isinstance(value, numbers.Integral if whole else numbers.Real)
      if (
        isinstance(value, bool)
        or not number
        or not math.isfinite(value)
        or not low <= value <= high
      ):
        kind = "an integer" if whole else "a number"
        raise UserError(f"{name}={value!r} is not {kind} in [{low}, {high}]")
    if not self.top_p:
      raise UserError("top_p=0 must be more than 0")


class SamplingArrays(NamedTuple):
  """The fields of `Sampling`, one value for each row, arrays [B]."""

  temperature: Any
  top_k: Any
  top_p: Any
  min_p: Any
  repetition_penalty: Any
  seed: Any


def to_arrays(samplings: Sequence[Sampling]) -> SamplingArrays:
  """The settings of each row, as arrays on the host."""

  def column(name: str, dtype: type) -> np.ndarray:
    return np.array([getattr(one, name) for one in samplings], dtype)

  return SamplingArrays(
    *(
      column(name, {"top_k": np.int32, "seed": np.uint32}.get(name, np.float32))
      for name in SamplingArrays._fields
    )
  )


def draw(
  logits: Array, seen: Array, settings: SamplingArrays, position: Array
) -> Array:
  """One token for each row, i32 [B].

  Args:
    logits: f32 [B, V].
    seen: bool [B, V], the tokens that occur in the sequence.
    settings: how to sample.
    position: i32 [B], the token's position in its sequence.
  """
  logits = penalised(logits, seen, settings.repetition_penalty)
  most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def sample() -> Array:
    is_random = settings.temperature > 0
    temperature = jnp.maximum(settings.temperature, _COLDEST)
    scaled = logits / jnp.where(is_random, temperature, 1.0)[:, None]
    token = jnp.argmax(
      jnp.where(allowed(scaled, settings), scaled, -jnp.inf)
      + gumbel(settings.seed, position, logits.shape[-1]),
      axis=-1,
    )
    return jnp.where(is_random, token.astype(jnp.int32), most_likely)

  any_random = jnp.any(settings.temperature > 0)
  return jax.lax.cond(any_random, sample, lambda: most_likely)


def penalised(logits: Array, seen: Array, penalty: Array) -> Array:
  """Logits f32 [B, V] after the repetition penalty f32 [B]."""
  penalty = penalty[:, None]
  changed = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen, changed, logits)


def allowed(scaled: Array, settings: SamplingArrays) -> Array:
  """The tokens left by top-k, top-p and min-p: bool [B, V] of f32 [B, V].

  Args:
    scaled: logits divided by the temperature.
    settings: sampling settings of the rows.
  """
  top_k = jnp.where(settings.top_k > 0, settings.top_k, scaled.shape[-1])
  truncates = (settings.top_k > 0) | (settings.top_p < 1)

  def cutoff() -> Array:
    """The smallest logit left by top-k and top-p, [B, 1]."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    is_kept = jnp.arange(scaled.shape[-1])[None] < top_k[:, None]
    probability = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = settings.top_p[:, None]
    # Rounded sums may reach 1 before the last token.
    is_kept &= (before < top_p) | (top_p >= 1)
    # One stays even if top_p is 0 in float32.
    last = jnp.maximum(jnp.sum(is_kept, axis=-1, keepdims=True) - 1, 0)
    threshold = jnp.take_along_axis(ordered, last, axis=-1)
    return jnp.where(truncates[:, None], threshold, -jnp.inf)

  threshold = jax.lax.cond(
    jnp.any(truncates),
    cutoff,
    lambda: jnp.full((len(scaled), 1), -jnp.inf),
  )
  best = jnp.max(scaled, axis=-1, keepdims=True)
  min_p_threshold = best + jnp.log(settings.min_p)[:, None]
  return (scaled >= threshold) & (scaled >= min_p_threshold)


def gumbel(seeds: Array, positions: Array, num: int) -> Array:
  """Gumbel noise f32 [B, num]: argmax(logits + noise) samples the softmax.

  Args:
    seeds, positions: the rows' seeds and positions, [B].
    num: number of values for each row.
  """

  def row_noise(seed: Array, position: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (num,))

  return jax.vmap(row_noise)(seeds, positions)
