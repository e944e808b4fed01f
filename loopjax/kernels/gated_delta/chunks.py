"""Tokens by chunk, their decays, and the triangular inverse of a chunk.

Notation as in `chunked`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.kernels.gated_delta.reference import product, repeat_heads, unit
from loopjax.types import Array

BLOCK = 16  # Rows of a diagonal block of M.

Inputs = tuple[Array, Array, Array, Array, Array]


class Chunks(NamedTuple):
  """Tokens by chunk, in float32 or wider; n chunks of C tokens.

  Attributes:
    query, key: [n, B, H, C, d_k], of length 1 / sqrt(d_k) and 1.
    value: [n, B, H, C, d_v].
    write: [n, B, H, C].
    coarse, fine: [n, B, H, C]; their sum is c. Differences of `coarse` are
      exact, and `fine` is small: c_i - c_j is accurate to rounding even if the
      decay before token j was large.
  """

  query: Array
  key: Array
  value: Array
  write: Array
  coarse: Array
  fine: Array


def prepare(inputs: Inputs, size: int) -> Chunks:
  """Tokens [B, T, ...] by chunk; T is a multiple of `size`."""
  query, key, value, log_decay, write = inputs
  wide = jnp.promote_types(jnp.float32, value.dtype)
  num_heads = value.shape[2]
  query, key, value, log_decay, write = (
    fold(x.astype(wide), size)
    for x in (
      repeat_heads(query.astype(wide), num_heads),
      repeat_heads(key.astype(wide), num_heads),
      value,
      log_decay,
      write,
    )
  )
  info = jnp.finfo(wide)
  least = 2.0 ** (info.nexp - 1)  # exp(-least) is 0.
  # A sum of `size` multiples of this, up to `least`, is exact.
  grid = least * 2.0 ** (np.ceil(np.log2(size)) - info.nmant - 1)
  log_decay = jnp.maximum(log_decay, -least)
  coarse = jax.lax.stop_gradient(jnp.round(log_decay / grid) * grid)
  return Chunks(
    unit(query) * query.shape[-1] ** -0.5,
    unit(key),
    value,
    write,
    _running_sum(coarse),
    _running_sum(log_decay - coarse),
  )


def _running_sum(x: Array) -> Array:
  """Cumulative sum along the last axis; a product, which XLA does not fuse."""
  lower = jnp.tril(jnp.ones(2 * x.shape[-1:], x.dtype))
  return product("...j,ij->...i", x, lower)


def fold(x: Array, size: int) -> Array:
  """[B, T, H, ...] -> [n, B, H, C, ...]."""
  x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
  return jnp.moveaxis(x, (1, 3), (0, 2))


def unfold(x: Array) -> Array:
  """[n, B, H, C, ...] -> [B, T, H, ...]."""
  x = jnp.moveaxis(x, (0, 2), (1, 3))
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def from_start(x: Chunks) -> Array:
  """exp(c) [n, B, H, C, 1]."""
  return jnp.exp(x.coarse + x.fine)[..., None]


def to_end(x: Chunks) -> Array:
  """exp(c_C - c) [n, B, H, C, 1]."""
  coarse, fine = (c[..., -1:] - c for c in (x.coarse, x.fine))
  return jnp.exp(coarse + fine)[..., None]


def through(x: Chunks) -> Array:
  """exp(c_C) [n, B, H, 1, 1]."""
  return from_start(x)[..., -1:, :]


def pair_decays(x: Chunks) -> Array:
  """D [n, B, H, C, C]; masked before exp, to avoid overflow."""
  coarse, fine = (c[..., :, None] - c[..., None, :] for c in (x.coarse, x.fine))
  is_lower = jnp.tril(jnp.ones(coarse.shape, bool))
  return jnp.exp(jnp.where(is_lower, coarse + fine, -jnp.inf))


def inverse_of(matrix: Array) -> Array:
  """(I + M)^-1 for the part M of [..., C, C] below the diagonal.

  C is a multiple of BLOCK; entries on and above the diagonal are not read. The
  inverses X, Z of two diagonal blocks, with M' below X and left of Z, combine
  into the inverse of both: -Z M' X replaces M'.
  """
  size = matrix.shape[-1]
  starts = range(0, size, BLOCK)
  blocks = _inverse_blocks(
    jnp.stack(
      [matrix[..., i : i + BLOCK, i : i + BLOCK] for i in starts], axis=-3
    )
  )

  def join(first: int, last: int) -> Array:
    if last - first == BLOCK:
      return blocks[..., first // BLOCK, :, :]
    middle = first + (last - first) // (2 * BLOCK) * BLOCK
    upper, lower = join(first, middle), join(middle, last)
    corner = matrix[..., middle:last, first:middle]
    corner = product("...ij,...jk->...ik", corner, upper)
    corner = -product("...ij,...jk->...ik", lower, corner)
    space = [(0, 0)] * (matrix.ndim - 1) + [(0, last - middle)]
    lower = jnp.concatenate([corner, lower], axis=-1)
    return jnp.concatenate([jnp.pad(upper, space), lower], axis=-2)

  return join(0, size)


def _inverse_blocks(matrix: Array) -> Array:
  """The same for M [..., BLOCK, BLOCK], all pairs of one width at once.

  Uses operations instead of constant arrays: `jax.lax.custom_root`
  differentiates with respect to captured constants, which a custom VJP does not
  allow.
  """
  square = (BLOCK, BLOCK)
  row, column = (jax.lax.broadcasted_iota(jnp.int32, square, i) for i in (0, 1))

  def corners(width: int) -> Array:
    row_block, column_block = row // width, column // width
    is_corner = (row_block % 2 == 1) & (row_block == column_block + 1)
    return jnp.where(jnp.broadcast_to(is_corner, matrix.shape), matrix, 0)

  identity = jnp.eye(BLOCK, dtype=matrix.dtype)
  inverse = jnp.broadcast_to(identity, matrix.shape) - corners(1)
  width = 2
  while width < BLOCK:
    corner = product("...ij,...jk->...ik", corners(width), inverse)
    inverse -= product("...ij,...jk->...ik", inverse, corner)
    width *= 2
  return inverse
