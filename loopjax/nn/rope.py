"""Rotary position embedding over one or several coordinates."""

import jax.numpy as jnp

from loopjax.types import Array

POSITIONS = ("overlap", "offset", "grid", "none")


def positions_after_memory(
  kind: str, num_memory: int, coordinates: tuple[tuple[int, ...], ...]
) -> Array:
  """Positions of memory tokens, and of the T tokens of the task after them.

  Args:
    kind: "overlap": both count from 0; "offset": the task's tokens follow
      memory; "grid": the task's coordinates, memory counts along all of them;
      "none": zeros, no rotation.
    num_memory: M.
    coordinates: of the task's tokens, [T, A].

  Returns:
    i32 [M + T, 1], [M + T, A] for "grid".
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


def rope_tables(
  positions: Array, head_width: int, base: float
) -> tuple[Array, Array]:
  """Cosines and sines of the rotation angles.

  With A coordinates per token, frequency pair i rotates with coordinate i mod
  A, at the (i // A)-th frequency of that coordinate: with A = 1 this is the
  usual rotary embedding (arXiv 2104.09864).

  Args:
    positions: [..., S, A] coordinates (tokens).
    head_width: d_h, even.
    base: the longest wavelength is about 2 pi * base tokens.

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
  angle = coordinate * jnp.broadcast_to(frequency, coordinate.shape)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
  """Rotates x [B, S, H, d_h] in the half-split layout; f32 result.

  tables: [S, d_h / 2], or [B, S, d_h / 2] where rows have their own positions.
  """
  cos, sin = (x.reshape(-1, *x.shape[-2:])[:, :, None] for x in tables)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
