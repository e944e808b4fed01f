"""Dot-product attention that recomputes the logits in the backward pass.

The residuals are the output and two numbers per query and head, never the [T,
S] attention weights. Every product contracts the last dimension of its left
operand with the first of its right operand. Compilers would otherwise transpose
[T, S] arrays, which on CPUs takes as long as everything else.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

_PART = 256  # Maximum number of queries that are processed together.
# Causal attention splits many queries into blocks of consecutive queries.
_MIN_BLOCK = 128  # Minimum number of queries of a block.
_NUM_BLOCKS = 4  # Maximum number of blocks.
_HIDDEN = -1e30  # Finite, to keep the weights of a query without keys finite.


class Mask(NamedTuple):
  """The keys that each query attends to: those that all fields allow.

  Attributes:
    visible: bool [B or 1, T, S]; None allows all keys.
    query_documents, key_documents: i32 [B, T] and [B, S]; queries attend to
      keys with the same number. None allows all keys.
    start: i32 scalar; query t attends to keys 0 .. start + t. None allows all
      keys.
  """

  visible: Array | None = None
  query_documents: Array | None = None
  key_documents: Array | None = None
  start: Array | None = None

  def to_array(self, num_queries: int, num_keys: int) -> Array | None:
    """The mask as bool [B or 1, T, S]; None if all keys are allowed."""
    mask = self.visible
    if self.query_documents is not None:
      assert self.key_documents is not None
      same = self.query_documents[:, :, None] == self.key_documents[:, None]
      mask = same if mask is None else mask & same
    if self.start is not None:
      pairs = (1, num_queries, num_keys)
      place = jax.lax.broadcasted_iota(jnp.int32, pairs, 1) + self.start
      earlier = place >= jax.lax.broadcasted_iota(jnp.int32, pairs, 2)
      mask = earlier if mask is None else mask & earlier
    return mask


def hide(logits: Array, visible: Array) -> Array:
  """Logits [B, G, R T, S] with -1e30 where not `visible` [B or 1, T, S]."""
  split = logits.reshape(*logits.shape[:2], -1, *visible.shape[1:])
  split = jnp.where(visible[:, None, None], split, _HIDDEN)
  return split.reshape(logits.shape)


class _Residuals(NamedTuple):
  """Residuals of the forward pass; R = H / G query heads form a group.

  Attributes:
    query, key, value, mask: the arguments.
    output: [B, T, H, d_h].
    largest, total: maximum of the logits of each query, and the sum of
      exp(logit - largest), f32 [B, G, R T, 1].
  """

  query: Array
  key: Array
  value: Array
  mask: Mask
  output: Array
  largest: Array
  total: Array


def attend(
  query: Array,
  key: Array,
  value: Array,
  *,
  causal: bool = False,
  visible: Array | None = None,
  documents: Array | None = None,
) -> Array:
  """softmax(q k^T / sqrt(d_h)) v per head.

  Matrix products keep the dtype of their inputs and accumulate in float32; the
  softmax is computed in float32. At most 256 queries are processed together, to
  limit the logits' memory. Causal attention processes blocks of queries and
  omits the keys after each block.

  Args:
    query: [B, T, H, d_h].
    key, value: [B, S, G, d_h]; each is shared by H / G consecutive query heads.
    causal: whether query t attends to keys 0 .. t only.
    visible: bool [B or 1, T, S], the keys that a query attends to; all if None.
      The output of a query without keys is finite but undefined.
    documents: i32 [B, S], where T = S; tokens attend to tokens with the same
      number. None if every row is one document.

  Returns:
    [B, T, H, d_h] in the value's dtype.
  """
  length = query.shape[1]
  if not causal or length != key.shape[1] or length < 2 * _MIN_BLOCK:
    return _attend_in_parts(
      query, key, value, visible, documents, causal, 0, key.shape[1]
    )
  # The keys after a block's last query are masked for the whole block and are
  # omitted: with four blocks, three eighths of all pairs.
  size = max(_MIN_BLOCK, -(-length // _NUM_BLOCKS))
  return jnp.concatenate(
    [
      _attend_in_parts(
        query[:, start : start + size],
        key,
        value,
        None if visible is None else visible[:, start : start + size],
        documents,
        causal,
        start,
        min(start + size, length),
      )
      for start in range(0, length, size)
    ],
    axis=1,
  )


def _attend_in_parts(
  query: Array,
  key: Array,
  value: Array,
  visible: Array | None,
  documents: Array | None,
  causal: bool,
  first: int,
  num_keys: int,
) -> Array:
  """`attend` to the first `num_keys` keys, for the queries from `first` on.

  Args:
    query: the queries from `first` on, [B, T, H, d_h].
    key, value: all keys and values [B, S, G, d_h].
    visible: bool [B or 1, T, S], or None.
    documents: i32 [B, S], or None.
    causal: whether query t attends to keys 0 .. first + t only.
    first: index of the first query among all queries.
    num_keys: number of keys to attend to.
  """
  length, remainder = query.shape[1], query.shape[1] % _PART
  query_documents = (
    None if documents is None else documents[:, first : first + length]
  )

  def mix(query: Array, mask: Mask) -> Array:
    return _attend(query, key, value, mask, num_keys)[0]

  if length <= _PART:
    start = jnp.asarray(first, jnp.int32) if causal else None
    return mix(query, Mask(visible, query_documents, documents, start))

  def split(x: Array, start: int, size: int) -> Array:
    """Queries from `start` on, [B, T, ...], as [parts, B, size, ...]."""
    part = x[:, start : start + (length - start) // size * size]
    part = part.reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(part, 1, 0)

  def mixed(start: int, size: int) -> Array:
    parts = (length - start) // size
    starts = first + start + size * jnp.arange(parts) if causal else None
    queries, visibles, ids = (
      None if x is None else split(x, start, size)
      for x in (query, visible, query_documents)
    )

    def mix_part(part: Any) -> Array:
      query, visible, ids, start = part
      return mix(query, Mask(visible, ids, documents, start))

    output = jax.lax.map(mix_part, (queries, visibles, ids, starts))
    return jnp.moveaxis(output, 0, 1).reshape(len(query), -1, *query.shape[2:])

  if not remainder:
    return mixed(0, _PART)
  return jnp.concatenate(
    [mixed(0, _PART), mixed(length - remainder, remainder)], axis=1
  )


def attend_to_parts(query: Array, *parts: tuple[Array, Array, Any]) -> Array:
  """`attend` to the concatenation of several sequences of keys and values.

  Each part is attended to separately, and the results are averaged with weights
  proportional to the sums of exponentials of the logits. Keys and values are
  not copied.

  Args:
    query: [B, T, H, d_h].
    parts: (key, value, visible), as in `attend`; S may differ between parts.
      Every query must attend to at least one key.

  Returns:
    [B, T, H, d_h] in the values' dtype.
  """
  mixed, sums = zip(
    *(
      _attend(query, key, value, Mask(visible), key.shape[1])
      for key, value, visible in parts
    ),
    strict=True,
  )
  shares = jax.nn.softmax(jnp.stack(sums), axis=0)
  accumulate = shares.dtype
  total = sum(
    share * x.astype(accumulate) for share, x in zip(shares, mixed, strict=True)
  )
  return jnp.asarray(total).astype(parts[0][1].dtype)


def attend_by_head(
  query: Array, key: Array, value: Array, *, visible: Array
) -> Array:
  """`attend` to keys and values [B, G, S, d_h], the layout of caches.

  Keys and values are not transposed. Differentiated by JAX, which stores the
  attention weights.
  """
  queries = by_head(query, key.shape[1])
  logits = product("bgtd,bgsd->bgts", queries, key)
  logits = hide(logits * query.shape[-1] ** -0.5, visible)
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  mixed = product("bgts,bgsd->bgtd", weights.astype(value.dtype), value)
  return by_token((mixed / total).astype(value.dtype), query)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
  query: Array, key: Array, value: Array, mask: Mask, num_keys: int
) -> tuple[Array, Array]:
  """Attention to the first `num_keys` keys.

  Takes all keys, which lets the residuals of calls for different queries share
  them.

  Returns:
    (the output [B, T, H, d_h], the log of the sum of exponentials of the logits
    f32 [B, T, H, 1]).
  """
  return _forward(query, key, value, mask, num_keys)[0]


def _forward(
  query: Array, key: Array, value: Array, mask: Mask, num_keys: int
) -> tuple[tuple[Array, Array], _Residuals]:
  arguments = query, key, value, mask
  key, value, mask = _first_keys(num_keys, key, value, mask)
  logits = _logits(query, key, mask)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - largest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  mixed = product(
    "bgts,bgsd->bgtd",
    weights.astype(value.dtype),
    by_head(value, value.shape[2]),
  )
  output = by_token((mixed / total).astype(value.dtype), query)
  sums = by_token(largest + jnp.log(total), query)
  return (output, sums), _Residuals(*arguments, output, largest, total)


def _backward(
  num_keys: int, residuals: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
  cotangent, d_sums = cotangents
  query = residuals.query
  key, value, mask = _first_keys(
    num_keys, residuals.key, residuals.value, residuals.mask
  )
  groups = key.shape[2]
  scale = query.shape[-1] ** -0.5
  logits = _logits(query, key, mask)
  weights = jnp.exp(logits - residuals.largest)  # Not yet divided by the total.
  # sum_s w_s dw_s is the dot product of the output with its cotangent.
  wide = residuals.total.dtype
  mean = jnp.sum(
    cotangent.astype(wide) * residuals.output.astype(wide),
    axis=-1,
    keepdims=True,
  )
  d_output = (by_head(cotangent, groups) / residuals.total).astype(value.dtype)
  d_weights = product("bgtd,bgds->bgts", d_output, columns(value, groups))
  # The log of the sum has the attention weights as derivatives by the logits.
  mean = by_head(mean - d_sums, groups)
  d_logits = weights * (d_weights - mean / residuals.total)
  weights, d_logits = (x.astype(value.dtype) for x in (weights, d_logits))
  d_query = product("bgts,bgsd->bgtd", d_logits, by_head(key, groups))
  d_key = product("bgdt,bgts->bgds", columns(query, groups), d_logits)
  d_value = product("bgdt,bgts->bgds", jnp.swapaxes(d_output, 2, 3), weights)
  omitted = [(0, 0), (0, residuals.key.shape[1] - num_keys), (0, 0), (0, 0)]
  d_key = jnp.transpose(scale * d_key, (0, 3, 1, 2)).astype(key.dtype)
  d_value = jnp.transpose(d_value, (0, 3, 1, 2)).astype(value.dtype)
  return (
    by_token((scale * d_query).astype(query.dtype), query),
    jnp.pad(d_key, omitted),
    jnp.pad(d_value, omitted),
    None,
  )


_attend.defvjp(_forward, _backward)


def _first_keys(
  num_keys: int, key: Array, value: Array, mask: Mask
) -> tuple[Array, Array, Mask]:
  """The first `num_keys` keys and values, and their mask."""
  visible, documents = mask.visible, mask.key_documents
  if visible is not None:
    visible = visible[..., :num_keys]
  if documents is not None:
    documents = documents[:, :num_keys]
  mask = mask._replace(visible=visible, key_documents=documents)
  return key[:, :num_keys], value[:, :num_keys], mask


def _logits(query: Array, key: Array, mask: Mask) -> Array:
  """Scaled logits, f32 [B, G, R T, S]; -1e30 for masked keys."""
  groups = key.shape[2]
  logits = product(
    "bgtd,bgds->bgts", by_head(query, groups), columns(key, groups)
  )
  logits *= query.shape[-1] ** -0.5
  visible = mask.to_array(query.shape[1], key.shape[1])
  return logits if visible is None else hide(logits, visible)


def by_head(x: Array, groups: int) -> Array:
  """[B, T, H, d_h] -> [B, G, R T, d_h], the R heads of a group in order."""
  batch, length, heads, width = x.shape
  x = jnp.transpose(x, (0, 2, 1, 3))
  return x.reshape(batch, groups, heads // groups * length, width)


def columns(x: Array, groups: int) -> Array:
  """[B, T, H, d_h] -> [B, G, d_h, R T]: the transpose of `by_head`."""
  return jnp.swapaxes(by_head(x, groups), 2, 3)


def by_token(x: Array, query: Array) -> Array:
  """[B, G, R T, d_h] -> [B, T, H, d_h], the inverse of `by_head`."""
  batch, length, heads, _ = query.shape
  x = x.reshape(batch, heads, length, x.shape[-1])
  return jnp.transpose(x, (0, 2, 1, 3))


def product(equation: str, left: Array, right: Array) -> Array:
  """einsum that accumulates and returns float32, or a wider input dtype."""
  wide: Any = jnp.promote_types(jnp.float32, left.dtype)
  return jnp.einsum(equation, left, right, preferred_element_type=wide)
