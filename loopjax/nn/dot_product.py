"""Attention over dense logits, which the backward pass computes again.

Kept for it are the output and two numbers per query and head, never the
[T, S] weights of a head. Every product has its contracted dimension last on the
left and first on the right, so that no compiler copies an array of that size
into another layout: on a CPU these copies, and the weights' way to memory and
back, take as long as all else (benchmarks/results/).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

_HIDDEN = -1e30  # Finite: a query that sees no key has finite weights.
_PART = 256  # Maximum queries at a time.
_STRETCH = 128  # Minimum queries of a stretch of causal attention,
_STRETCHES = 4  # and the number of stretches of a long row.


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
  are never of more than 256 of them, and keys that causality hides from all of
  a stretch of queries are left out.

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
  length = query.shape[1]
  if not causal or length != key.shape[1] or length < 2 * _STRETCH:
    return _in_parts(
      query, key, value, visible, documents, causal, 0, key.shape[1]
    )
  # Keys after the last query of a stretch are hidden from all of it: they are
  # left out, which is nearly half of all pairs.
  size = max(_STRETCH, -(-length // _STRETCHES))
  return jnp.concatenate(
    [
      _in_parts(
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


def _in_parts(
  query: Array,
  key: Array,
  value: Array,
  visible: Array | None,
  documents: Array | None,
  causal: bool,
  first: int,
  num_keys: int,
) -> Array:
  """`attend` of the queries from `first` on to the first `num_keys` keys.

  Args:
    query: [B, T, H, d_h].
    key, value: [B, S, G, d_h].
    visible: bool [B or 1, T, S].
    documents: i32 [B, S].
    causal: query t sees keys 0 .. first + t alone.
  """
  length, rest = query.shape[1], query.shape[1] % _PART
  own = None if documents is None else documents[:, first : first + length]

  def mix(query: Array, seen: Seen) -> Array:
    return _attend(query, key, value, seen, num_keys)[0]

  if length <= _PART:
    start = jnp.asarray(first, jnp.int32) if causal else None
    return mix(query, Seen(visible, own, documents, start))

  def some(x: Array, start: int, size: int) -> Array:
    """[parts, B, size, ...] of arrays of queries."""
    part = x[:, start : start + (length - start) // size * size]
    part = part.reshape(len(x), -1, size, *x.shape[2:])
    return jnp.moveaxis(part, 1, 0)

  def mixed(start: int, size: int) -> Array:
    parts = (length - start) // size
    starts = first + start + size * jnp.arange(parts) if causal else None
    queries, seen, ids = (
      None if x is None else some(x, start, size) for x in (query, visible, own)
    )

    def one(part: Any) -> Array:
      query, seen, ids, start = part
      return mix(query, Seen(seen, ids, documents, start))

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
    *(
      _attend(query, key, value, Seen(seen), key.shape[1])
      for key, value, seen in parts
    ),
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
  query: Array, key: Array, value: Array, seen: Seen, num_keys: int
) -> tuple[Array, Array]:
  """Attention to the first keys, as many as `num_keys`.

  All keys are arguments, so that calls for several queries keep them once for
  their backward passes.

  Returns:
    The output, and the log of the sum of exponentials, f32 [B, T, H, 1].
  """
  return _forward(query, key, value, seen, num_keys)[0]


def _forward(
  query: Array, key: Array, value: Array, seen: Seen, num_keys: int
) -> tuple[tuple[Array, Array], _Residuals]:
  kept = query, key, value, seen
  key, value, seen = _first(num_keys, key, value, seen)
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
  return (output, sums), _Residuals(*kept, output, largest, total)


def _backward(
  num_keys: int, kept: _Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
  cotangent, of_sums = cotangents
  query = kept.query
  key, value, seen = _first(num_keys, kept.key, kept.value, kept.seen)
  groups = key.shape[2]
  scale = query.shape[-1] ** -0.5
  logits = _logits(query, key, seen)
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
  hidden = [(0, 0), (0, kept.key.shape[1] - num_keys), (0, 0), (0, 0)]
  of_key = jnp.transpose(scale * of_key, (0, 3, 1, 2)).astype(key.dtype)
  of_value = jnp.transpose(of_value, (0, 3, 1, 2)).astype(value.dtype)
  return (
    _by_token((scale * of_query).astype(query.dtype), query),
    jnp.pad(of_key, hidden),
    jnp.pad(of_value, hidden),
    None,
  )


_attend.defvjp(_forward, _backward)


def _first(
  num_keys: int, key: Array, value: Array, seen: Seen
) -> tuple[Array, Array, Seen]:
  """The first keys and values, and what queries see of them."""
  visible, of_key = seen.visible, seen.of_key
  if visible is not None:
    visible = visible[..., :num_keys]
  if of_key is not None:
    of_key = of_key[:, :num_keys]
  seen = seen._replace(visible=visible, of_key=of_key)
  return key[:, :num_keys], value[:, :num_keys], seen


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
