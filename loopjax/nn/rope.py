"""Rotary position embedding over one or several coordinates."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.types import Array

POSITIONS = ("overlap", "offset", "grid", "none")


def positions_after_memory(
  kind: str, num_memory: int, coordinates: tuple[tuple[int, ...], ...]
) -> Array:
  """Positions of M memory tokens followed by the T tokens of the task.

  Args:
    kind: "overlap": both are numbered from 0; "offset": the task's tokens are
      numbered from M; "grid": the task's tokens have their coordinates, and
      memory token m has the position m in every coordinate; "none": all
      positions are 0, without rotation.
    num_memory: M.
    coordinates: coordinates of the task's tokens, [T, A].

  Returns:
    i32 [M + T, 1], or [M + T, A] for "grid".
  """
  memory = jnp.arange(num_memory)[:, None]
  tokens = jnp.arange(len(coordinates))[:, None]
  if kind == "none":
    memory, tokens = jnp.zeros_like(memory), jnp.zeros_like(tokens)
  elif kind == "offset":
    tokens = tokens + num_memory
  elif kind == "grid":
    tokens = jnp.asarray(coordinates)
    memory = jnp.broadcast_to(memory, (num_memory, tokens.shape[1]))
  return jnp.concatenate([memory, tokens])


class Scaling(NamedTuple):
  """Frequency scaling for longer contexts, as in Llama 3.1 and later.

  Attributes:
    factor: frequencies with long wavelengths are divided by this.
    low, high: wavelengths above `length` / low are long, those below `length` /
      high do not change; frequencies in between are interpolated.
    length: original context length in tokens.
  """

  factor: float
  low: float
  high: float
  length: float


def check_scaling(scaling: Sequence[float]) -> None:
  """Raises UserError unless these are empty or valid fields of a `Scaling`."""
  if not scaling:
    return
  if len(scaling) != len(Scaling._fields):
    raise UserError(
      f"model.rope_scaling={scaling!r} must have {len(Scaling._fields)} numbers"
    )
  factor, low, high, length = scaling
  is_whole = length >= 1 and length % 1 == 0
  if not (factor >= 1 and 0 < low < high and is_whole):
    raise UserError(
      f"model.rope_scaling={scaling!r}: needs factor >= 1, 0 < low < high, and"
      " a length that is a whole number of at least 1"
    )


def _scaled(frequency: Array, scaling: Scaling) -> Array:
  """Frequencies of "rope_type": "llama3", in radians per token."""
  turns = scaling.length * frequency / (2 * jnp.pi)
  smooth = (turns - scaling.low) / (scaling.high - scaling.low)
  smooth = jnp.clip(smooth, 0.0, 1.0)
  return frequency * (smooth + (1 - smooth) / scaling.factor)


def rope_tables(
  positions: Array, head_width: int, base: float, scaling: Sequence[float] = ()
) -> tuple[Array, Array]:
  """Cosines and sines of the rotation angles.

  With A coordinates per token, the i-th pair of features is rotated by
  coordinate i mod A, with the (i // A)-th frequency. With A = 1 this is the
  usual rotary embedding (arXiv 2104.09864).

  Args:
    positions: coordinates [..., S, A].
    head_width: d_h, even.
    base: the longest wavelength is about 2 pi base, in positions.
    scaling: a `Scaling`; empty for none.

  Returns:
    (cos, sin), each f32 [..., S, d_h / 2].
  """
  num_coordinates = positions.shape[-1]
  num_pairs = head_width // 2
  pair = jnp.arange(num_pairs)
  pairs_each = -(-num_pairs // num_coordinates)
  frequency = base ** (-(pair // num_coordinates) / pairs_each)
  coordinate = positions.astype(jnp.float32)[..., pair % num_coordinates]
  frequency = frequency.astype(jnp.float32)
  if scaling:
    frequency = _scaled(frequency, Scaling(*scaling))
  angle = coordinate * jnp.broadcast_to(frequency, coordinate.shape)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
  """Rotates x [B, S, H, d_h]; returns f32 of the same shape.

  The pairs are features i and i + d_h / 2 (the "half-split" layout).

  Args:
    x: queries or keys.
    tables: from `rope_tables`, [S, d_h / 2] each; [B, S, d_h / 2] if rows have
      different positions.
  """
  cos, sin = (x.reshape(-1, *x.shape[-2:])[:, :, None] for x in tables)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
