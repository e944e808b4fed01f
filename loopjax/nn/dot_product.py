"""Attention over dense logits, which the backward pass computes again.

Kept for it are the output and two numbers per query and head, never the
[T, S] weights of a head. Every product has its contracted dimension last on the
left and first on the right, so that no compiler copies an array of that size
into another layout: on a CPU these copies, and the weights' way to memory and
back, take as long as all else (benchmarks/results/).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

_HIDDEN = -1e30  # Finite: a query that sees no key has finite weights.
_PART = 512  # Queries at a time, of more than twice as many.


class Seen(NamedTuple):
  """What T queries see of S keys; what is None hides nothing.

  Attributes:
    visible: bool [B or 1, T, S].
    of_query, of_key: i32 [B, T] and [B, S]; equal ones see each other.
    start: i32 scalar; query t sees keys 0 .. start + t alone.
  """

  visible: Array | None = None
  of_query: Array | None = None
  of_key: Array | None = None
  start: Array | None = None

  def mask(self, num_queries: int, num_keys: int) -> Array | None:
    """All of it, bool [B or 1, T, S]; None if nothing is hidden."""
    mask = self.visible
    if self.of_query is not None:
      assert self.of_key is not None
      same = self.of_query[:, :, None] == self.of_key[:, None]
      mask = same if mask is None else mask & same
    if self.start is not None:
      pairs = (1, num_queries, num_keys)
      place = jax.lax.broadcasted_iota(jnp.int32, pairs, 1) + self.start
      earlier = place >= jax.lax.broadcasted_iota(jnp.int32, pairs, 2)
      mask = earlier if mask is None else mask & earlier
    return mask


class _Residuals(NamedTuple):
  """What the backward pass needs; heads of a group are rows of one matrix.

  Attributes:
    query, key, value, seen: the arguments.
    output: [B, T, H, d_h].
    largest, total: of a query's logits, and of their exponentials, f32
      [B, G, R T, 1] of R queries' heads in a group.
  """

  query: Array
  key: Array
  value: Array
  seen: Seen
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
  """softmax(q k / sqrt(d_h)) v per head.

  Products take inputs as they are and accumulate in float32, as does the
  softmax. Many queries are taken in parts, one after another, so that logits
  are never of more than 1,024 of them.

  Args:
    query: [B, T, H, d_h].
    key, value: [B, S, G, d_h]; H / G neighbouring query heads read each.
    causal: query t sees keys 0 .. t alone.
    visible: bool [B or 1, T, S], the keys that a query sees; all if None. The
      output of a query that sees no key is finite but arbitrary.
    documents: i32 [B, S], where T = S; a token sees those of its number alone.

  Returns:
    [B, T, H, d_h] in the value's dtype.
  """
  first = jnp.zeros((), jnp.int32) if causal else None
  length, rest = query.shape[1], query.shape[1] % _PART
  if length <= 2 * _PART:
    return _attend(
      query, key, value, Seen(visible, documents, documents, first)
    )[0]

  def some(x: Array, start: int, size: int) -> Array:
    """[parts, B, size, ...] of arrays of queries."""
    part = x[:, start : start + (length - start) // size * size]
    part = part.reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(part, 1, 0)

  def mixed(start: int, size: int) -> Array:
    parts = (length - start) // size
    starts = start + size * jnp.arange(parts) if causal else None
    queries, seen, ids = (
      None if x is None else some(x, start, size)
      for x in (query, visible, documents)
    )

    def one(part: Any) -> Array:
      query, seen, ids, first = part
      return _attend(query, key, value, Seen(seen, ids, documents, first))[0]

    output = jax.lax.map(one, (queries, seen, ids, starts))
    return jnp.moveaxis(output, 0, 1).reshape(len(query), -1, *query.shape[2:])

  if not rest:
    return mixed(0, _PART)
  return jnp.concatenate([mixed(0, _PART), mixed(length - rest, rest)], axis=1)


def attend_to_parts(query: Array, *parts: tuple[Array, Array, Array]) -> Array:
  """`attend` to several sequences of keys as if they were one.

  Each part is attended to alone, and weighted by the sum of the exponentials
  of its logits, so that no keys or values are concatenated.

  Args:
    query: [B, T, H, d_h].
    parts: keys and values [B, S, G, d_h], and `visible`, as in `attend`. A
      query sees a key in one of them at least.

  Returns:
    [B, T, H, d_h] in the values' dtype.
  """
  mixed, sums = zip(
    *(_attend(query, key, value, Seen(seen)) for key, value, seen in parts),
    strict=True,
  )
  shares = jax.nn.softmax(jnp.stack(sums), axis=0)
  wide = shares.dtype
  total = sum(
    share * x.astype(wide) for share, x in zip(shares, mixed, strict=True)
  )
  return jnp.asarray(total).astype(parts[0][1].dtype)


def attend_by_head(
  query: Array, key: Array, value: Array, *, visible: Array
) -> Array:
  """`attend` to keys and values [B, G, S, d_h], as a cache keeps them.

  No key or value is copied into another layout. The backward pass is JAX's.
  """
  queries = _by_head(query, key.shape[1])
  logits = _product("bgtd,bgsd->bgts", queries, key)
  logits = _hide(logits * query.shape[-1] ** -0.5, visible)
  weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  mixed = _product("bgts,bgsd->bgtd", weights.astype(value.dtype), value)
  return _by_token((mixed / total).astype(value.dtype), query)


@jax.custom_vjp
def _attend(
  query: Array, key: Array, value: Array, seen: Seen
) -> tuple[Array, Array]:
  """The output, and the log of the sum of exponentials, f32 [B, T, H, 1]."""
  return _forward(query, key, value, seen)[0]


def _forward(
  query: Array, key: Array, value: Array, seen: Seen
) -> tuple[tuple[Array, Array], _Residuals]:
  logits = _logits(query, key, seen)
  largest = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - largest)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  mixed = _product(
    "bgts,bgsd->bgtd",
    weights.astype(value.dtype),
    _by_head(value, value.shape[2]),
  )
  output = _by_token((mixed / total).astype(value.dtype), query)
  sums = _by_token(largest + jnp.log(total), query)
  kept = _Residuals(query, key, value, seen, output, largest, total)
  return (output, sums), kept


def _backward(
  kept: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
  cotangent, of_sums = cotangents
  query, key, value = kept.query, kept.key, kept.value
  groups = key.shape[2]
  scale = query.shape[-1] ** -0.5
  logits = _logits(query, key, kept.seen)
  weights = jnp.exp(logits - kept.largest)  # Not yet divided by the total.
  # sum_s w_s dw_s is the product of the output with its cotangent.
  wide = kept.total.dtype
  mean = jnp.sum(
    cotangent.astype(wide) * kept.output.astype(wide), axis=-1, keepdims=True
  )
  of_output = (_by_head(cotangent, groups) / kept.total).astype(value.dtype)
  of_weights = _product("bgtd,bgds->bgts", of_output, _columns(value, groups))
  # A logit's own share of the sum of exponentials is its weight, too.
  mean = _by_head(mean - of_sums, groups)
  of_logits = weights * (of_weights - mean / kept.total)
  weights, of_logits = (x.astype(value.dtype) for x in (weights, of_logits))
  of_query = _product("bgts,bgsd->bgtd", of_logits, _by_head(key, groups))
  of_key = _product("bgdt,bgts->bgds", _columns(query, groups), of_logits)
  of_value = _product("bgdt,bgts->bgds", jnp.swapaxes(of_output, 2, 3), weights)
  return (
    _by_token((scale * of_query).astype(query.dtype), query),
    jnp.transpose(scale * of_key, (0, 3, 1, 2)).astype(key.dtype),
    jnp.transpose(of_value, (0, 3, 1, 2)).astype(value.dtype),
    None,
  )


_attend.defvjp(_forward, _backward)


def _logits(query: Array, key: Array, seen: Seen) -> Array:
  """f32 [B, G, R T, S]; hidden keys have a large negative one."""
  groups = key.shape[2]
  logits = _product(
    "bgtd,bgds->bgts", _by_head(query, groups), _columns(key, groups)
  )
  logits *= query.shape[-1] ** -0.5
  mask = seen.mask(query.shape[1], key.shape[1])
  return logits if mask is None else _hide(logits, mask)


def _hide(logits: Array, visible: Array) -> Array:
  """Logits [B, G, R T, S] of which only what is `visible` counts."""
  by_head = logits.reshape(*logits.shape[:2], -1, *visible.shape[1:])
  by_head = jnp.where(visible[:, None, None], by_head, _HIDDEN)
  return by_head.reshape(logits.shape)


def _by_head(x: Array, groups: int) -> Array:
  """[B, T, H, ...] -> [B, G, R T, ...] for G groups of heads."""
  batch, length, heads, width = x.shape
  x = jnp.transpose(x, (0, 2, 1, 3))
  return x.reshape(batch, groups, heads // groups * length, width)


def _columns(x: Array, groups: int) -> Array:
  """[B, T, H, d_h] -> [B, G, d_h, R T]: the transpose of `_by_head`."""
  return jnp.swapaxes(_by_head(x, groups), 2, 3)


def _by_token(x: Array, query: Array) -> Array:
  """[B, G, R T, d_h] -> [B, T, H, d_h], the inverse of `_by_head`."""
  batch, length, heads, _ = query.shape
  x = x.reshape(batch, heads, length, x.shape[-1])
  return jnp.transpose(x, (0, 2, 1, 3))


def _product(equation: str, left: Array, right: Array) -> Array:
  """einsum that accumulates in, and returns, float32 or wider."""
  wide: Any = jnp.promote_types(jnp.float32, left.dtype)
  return jnp.einsum(equation, left, right, preferred_element_type=wide)
