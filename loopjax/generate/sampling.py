"""How next tokens are drawn from logits, each row by its own rule."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.types import Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a text's tokens are drawn.

  The order is that of most libraries: the penalty, the temperature, then what
  is left out by number, by mass, and by chance, each of what is left.

  Attributes:
    temperature: divides the logits; 0 for the most likely token.
    top_k: the most likely tokens that stay, and those as likely as the last of
      them; 0 for all.
    top_p: of the most likely tokens as many stay as are needed for this mass,
      in (0, 1] (nucleus sampling, arXiv 1904.09751).
    min_p: a token stays if it is at least this many times as likely as the most
      likely one, in [0, 1] (arXiv 2407.01082).
    repetition_penalty: divides positive logits and multiplies negative ones of
      tokens that are in the text, prompt included (CTRL, arXiv 1909.05858).
    seed: a text's tokens depend on it, and on no other text: the noise of a
      token is of the seed and of its place in the text.
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
      ("repetition_penalty", 0, 100),
      ("seed", 0, 2**32 - 1),
    ):
      value = getattr(self, name)
      whole = name in ("top_k", "seed")
      number = type(value) is int or (type(value) is float and not whole)
      if not number or not math.isfinite(value) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise UserError(f"{name}={value!r} is not {kind} in [{low}, {high}]")
    for name in ("top_p", "repetition_penalty"):
      if not getattr(self, name):
        raise UserError(f"{name}=0 must be more than 0")


class Rows(NamedTuple):
  """`Sampling` of every row, arrays [B]."""

  temperature: Any
  top_k: Any
  top_p: Any
  min_p: Any
  repetition_penalty: Any
  seed: Any


def rows(samplings: Sequence[Sampling]) -> Rows:
  """Their values as arrays on the host."""

  def column(name: str, dtype: type) -> np.ndarray:
    return np.array([getattr(one, name) for one in samplings], dtype)

  return Rows(
    *(
      column(name, {"top_k": np.int32, "seed": np.uint32}.get(name, np.float32))
      for name in Rows._fields
    )
  )


def draw(logits: Array, seen: Array, rows: Rows, place: Array) -> Array:
  """One token for each row, i32 [B].

  Args:
    logits: f32 [B, V].
    seen: bool [B, V], tokens that are in the text.
    rows: how it is drawn.
    place: i32 [B], of the token in its text.
  """
  logits = penalised(logits, seen, rows.repetition_penalty)
  most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)

  def drawn() -> Array:
    warm = rows.temperature > 0
    scaled = logits / jnp.where(warm, rows.temperature, 1.0)[:, None]
    token = jnp.argmax(
      jnp.where(kept(scaled, rows), scaled, -jnp.inf)
      + _noise(rows.seed, place, logits.shape[-1]),
      axis=-1,
    )
    return jnp.where(warm, token.astype(jnp.int32), most_likely)

  return jax.lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: most_likely)


def penalised(logits: Array, seen: Array, penalty: Array) -> Array:
  """Logits f32 [B, V] after the repetition penalty f32 [B]."""
  penalty = penalty[:, None]
  changed = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen, changed, logits)


def kept(scaled: Array, rows: Rows) -> Array:
  """bool [B, V], the tokens that may be drawn, of logits f32 [B, V]."""
  top_k = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[-1])
  some = (rows.top_k > 0) | (rows.top_p < 1)

  def least_kept() -> Array:
    """The smallest logit that stays, [B, 1]."""
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    stays = jnp.arange(scaled.shape[-1])[None] < top_k[:, None]
    chance = jax.nn.softmax(jnp.where(stays, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(chance, axis=-1) - chance
    top_p = rows.top_p[:, None]
    # Rounded sums may reach 1 before the last token.
    stays &= (before < top_p) | (top_p >= 1)
    # One stays even if top_p is 0 in float32.
    last = jnp.maximum(jnp.sum(stays, axis=-1, keepdims=True) - 1, 0)
    least = jnp.take_along_axis(ordered, last, axis=-1)
    return jnp.where(some[:, None], least, -jnp.inf)

  least = jax.lax.cond(
    jnp.any(some),
    least_kept,
    lambda: jnp.full((len(scaled), 1), -jnp.inf),
  )
  best = jnp.max(scaled, axis=-1, keepdims=True)
  return (scaled >= least) & (scaled >= best + jnp.log(rows.min_p)[:, None])


def _noise(seeds: Array, places: Array, num: int) -> Array:
  """Gumbel noise f32 [B, num]: the largest sum is a draw of the softmax."""

  def of_row(seed: Array, place: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(seed), place)
    return jax.random.gumbel(key, (num,))

  return jax.vmap(of_row)(seeds, places)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
  """The chance that one of k samples is right, of a problem tried n times.

  1 - C(n - c, k) / C(n, k), which has no bias (arXiv 2107.03374, equation 1).

  Raises:
    UserError: k is not in [1, n], or c not in [0, n].
  """
  if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
    raise UserError(
      f"pass@{k} needs at least {k} samples and from 0 to all of them right,"
      f" not {num_right} of {num_samples}"
    )
  wrong = num_samples - num_right
  return 1 - math.comb(wrong, k) / math.comb(num_samples, k)
