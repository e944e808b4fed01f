"""The vocabulary in chunks: tables with one row per token, and their logits.

Chunk j of n has the tokens j, n + j, 2n + j, ...: if a table's rows are split
over devices, every device holds a part of every chunk. Leading dimensions of
hidden states are kept: a batch split over devices stays split. Products of
16-bit arrays have results in float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.types import Array


def widened(
  equation: str, left: Array, right: Array, precision: Any = None
) -> Array:
  """einsum that accumulates in, and returns, float32 or a wider dtype.

  The derivatives for 16-bit inputs are products of 16-bit arrays too. JAX alone
  would multiply float32 cotangents, at half the rate or less on accelerators,
  and then round the gradients to 16 bits.
  """
  if jnp.promote_types(left.dtype, right.dtype).itemsize == 2:
    return _of_narrow(equation, left, right)
  return _einsum(equation, left, right, precision)


def _einsum(
  equation: str, left: Array, right: Array, precision: Any = None
) -> Array:
  wide: Any = jnp.promote_types(jnp.float32, right.dtype)
  return jnp.einsum(
    equation, left, right, precision=precision, preferred_element_type=wide
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_narrow(equation: str, left: Array, right: Array) -> Array:
  return _einsum(equation, left, right)


def _tangent(
  equation: str, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
  """Rounds the tangent; the transpose then rounds the cotangent."""
  (left, right), result = primals, _of_narrow(equation, *primals)
  total: Any = 0
  for one, other in ((tangents[0], right), (left, tangents[1])):
    if not any(isinstance(x, _Zero) for x in (one, other)):
      total += jnp.einsum(equation, one, other).astype(result.dtype)
  return result, total


_Zero = jax.custom_derivatives.SymbolicZero
_of_narrow.defjvp(_tangent, symbolic_zeros=True)


# Finite: 0 * loss of a masked token must be 0, not NaN.
MASKED_LOGIT = -1e9
CHUNK_SIZE = 2048  # Maximum number of tokens of a chunk.


def product(equation: str, left: Array, right: Array) -> Array:
  """`widened`, without rounding of float32 inputs on accelerators."""
  precision = None if right.dtype == jnp.bfloat16 else "highest"
  return widened(equation, left, right, precision)


def num_chunks(vocab_size: int, chunk_size: int) -> int:
  """Number of chunks of at most `chunk_size` tokens.

  From the minimum to twice the minimum, prefers a divisor of the vocabulary
  size, which avoids a padded copy of the table. Among divisors, takes the one
  whose chunk size has the most factors of 2: the chunk size must be a multiple
  of the number of devices that split it.
  """
  least = -(-vocab_size // chunk_size)
  divisors = [n for n in range(least, 2 * least) if vocab_size % n == 0]

  def power_of_two(n: int) -> int:
    size = vocab_size // n
    return size & -size

  return max(divisors, key=power_of_two, default=least)


def fold(table: Array, num_chunks: int) -> Array:
  """[V, D] -> [C, n, D], where [:, j] is chunk j; padded to a multiple of n."""
  missing = -len(table) % num_chunks
  if missing:
    table = jnp.pad(table, ((0, missing), (0, 0)))
  return table.reshape(-1, num_chunks, table.shape[1])


def unfold(folded: Array, vocab_size: int) -> Array:
  """[C, n, D] -> [V, D], the inverse of `fold`."""
  return folded.reshape(-1, folded.shape[-1])[:vocab_size]


def rows(folded: Array, chunk: Array) -> Array:
  """The rows [C, D] of a chunk."""
  return jax.lax.dynamic_index_in_dim(folded, chunk, axis=1, keepdims=False)


def put_rows(folded: Array, new: Array, chunk: Array) -> Array:
  """The folded table with the rows [C, D] of a chunk replaced, in its dtype."""
  return jax.lax.dynamic_update_index_in_dim(
    folded, new.astype(folded.dtype), chunk, axis=1
  )


def add_logits(top: Array, total: Array, logits: Array) -> tuple[Array, ...]:
  """Online softmax (arXiv 1805.02867): a chunk's logits join the sums so far.

  Args:
    top: the largest logit so far, [...]; -inf before the first chunk.
    total: the sum of exp(logit - top), [...].
    logits: the chunk's, [..., C].

  Returns:
    (the new top and total, the chunk's terms exp(logit - top) [..., C], and the
    factor of all earlier terms [...]).
  """
  higher = jnp.maximum(top, jnp.max(logits, axis=-1))
  terms = jnp.exp(logits - higher[..., None])
  fade = jnp.exp(top - higher)
  return higher, total * fade + jnp.sum(terms, axis=-1), terms, fade


def logits(hidden: Array, folded: Array, chunk: Array) -> tuple[Array, Array]:
  """Logits [..., C] of a chunk of a folded table, and the ids of their tokens.

  Ids have the logits' shape; padding rows from `fold` have ids V and above.
  """
  # Ids are constants. An enclosing scan would hoist them and everything
  # computed from them alone: masks over all tokens and the whole vocabulary.
  _, chunk = jax.lax.optimization_barrier((hidden, chunk))
  values = product("...d,vd->...v", hidden, rows(folded, chunk))
  place = jax.lax.iota(jnp.int32, values.shape[-1])
  # JAX hoists values that do not depend on the carry out of an enclosing
  # differentiated loop: without the barrier, the masks of all chunks. Only one
  # row of ids passes the barrier, because a full array would be written to
  # memory.
  values, place = jax.lax.optimization_barrier((values, place))
  ids = place * folded.shape[1] + chunk
  return values, jnp.broadcast_to(ids, values.shape)
