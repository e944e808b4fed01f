"""Attention over rotated queries and keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.nn import dot_product, linear, rope
from loopjax.nn.attend import attend
from loopjax.nn.cache import Cache
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision


class Past(NamedTuple):
  """Keys and values of P tokens before a sequence, the oldest first.

  Attributes:
    key, value: [B, P, G, d_h] of G heads; keys are not rotated, since positions
      are counted from the oldest token that the next window sees.
  """

  key: Array
  value: Array


class Metadata(NamedTuple):
  """What S tokens see, and from where: the same in every layer and loop.

  Attributes:
    tables: rotary tables of their positions, from `rope.rope_tables`.
    visible: bool [B, S, keys], which keys of a cache a token sees.
    places: i32 [B, S], where in it their own keys go, if there is one.
    documents: i32 [B, S]; without a cache, tokens see those of their number
      alone, of which `Shape.causal` says which. None if all have the same.
  """

  tables: tuple[Array, Array]
  visible: Array | None = None
  places: Any = None
  documents: Array | None = None


def make_metadata(
  shape: tuple[int, ...],
  head_width: int,
  base: float,
  *,
  documents: Array | None = None,
  cache: Cache | None = None,
  valid: Array | None = None,
) -> Metadata:
  """What the tokens of a text see: those before them in their document.

  Args:
    shape: (B, S).
    head_width: d_h.
    base: longest wavelength over 2 pi, in tokens.
    documents: i32 [B, S], a number for each document of a row; None if a row
      is one document.
    cache: of earlier tokens, after which these are read; None for none.
    valid: bool [B, S]; a token that is not is seen by none, and its own
      outputs are finite but arbitrary. None if all are.
  """
  if cache is not None:
    assert documents is None, "a row of a cache is one document"
    return _metadata_after(cache, shape, head_width, base, valid)
  assert valid is None, "documents tell padding from text"
  places = jnp.arange(shape[1])  # Of the row: only differences matter.
  tables = rope.rope_tables(places[:, None], head_width, base)
  return Metadata(tables, documents=documents)


def _metadata_after(
  cache: Cache,
  shape: tuple[int, ...],
  head_width: int,
  base: float,
  valid: Array | None,
) -> Metadata:
  """What tokens see that go on where the rows of a cache end."""
  assert shape[1] <= cache.room, (shape, cache.room)
  places = cache.places(jnp.ones(shape, bool) if valid is None else valid)
  positions = cache.positions(places)[..., None]
  tables = rope.rope_tables(positions, head_width, base)
  return Metadata(tables, cache.visible(places), places)


class Attention(nnx.Module):
  """H query heads that share G heads of keys and values.

  Neighbouring query heads read the same keys and values (grouped queries,
  arXiv 2305.13245); with G = H each has its own. Queries and keys are rotated;
  before that, `Shape.qk_norm` normalises them per head (UTM, section 2.1: RMS
  norms with a learned gain). If `Shape.causal`, a token sees itself and those
  before it; else it sees all.
  """

  def __init__(self, shape: Shape, *, precision: Precision, rngs: nnx.Rngs):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}

    def matrix(inputs: int, outputs: int) -> nnx.Linear:
      bias, init = shape.attention_bias, shape.init
      return linear.linear(inputs, outputs, use_bias=bias, init=init, **shared)

    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    self.query = matrix(shape.width, queries)
    self.key, self.value = matrix(shape.width, keys), matrix(shape.width, keys)
    self.output = matrix(queries, shape.width)
    self.query_norm = shape.qk_norm(shape.head_width, **shared)
    self.key_norm = shape.qk_norm(shape.head_width, **shared)
    self.head_width, self.causal = shape.head_width, shape.causal
    self.precision = precision

  def __call__(
    self,
    x: Array,
    metadata: Metadata,
    cache: Cache | None = None,
    slot: Array | None = None,
  ) -> tuple[Array, Cache | None]:
    """Attention to the tokens themselves, or to all in a slot of a cache.

    Args:
      x: [B, S, D].
      metadata: what the tokens see.
      cache: of earlier tokens; those of x are written to it first.
      slot: of the cache, i32 scalar.

    Returns:
      [B, S, D], and the cache.
    """
    query, key, value = self._rotated(x, metadata.tables)
    if cache is not None:
      assert metadata.visible is not None, "rows of a cache have lengths"
      cache = cache.write(slot, key, value, metadata.places)
      mixed = dot_product.attend_by_head(
        query, *cache.read(slot), visible=metadata.visible
      )
      return self.merged(mixed), cache
    mixed = attend(
      query, key, value, causal=self.causal, documents=metadata.documents
    )
    return self.merged(mixed), cache

  def attend_with_past(
    self, x: Array, past: Past, tables: tuple[Array, Array], visible: Array
  ) -> tuple[Array, Past]:
    """Attention to earlier tokens and to x itself.

    Args:
      x: [B, S, D].
      past: keys and values of P earlier tokens; P may be 0.
      tables: from `rope_tables`, for P + S positions.
      visible: bool [B or 1, S, P + S], the keys that a query sees; `causal` is
        ignored. The output of a query that sees no key is finite but arbitrary.

    Returns:
      [B, S, D], and the keys and values of all P + S tokens.
    """
    own = self._keys(x)
    past = Past(*(jnp.concatenate(y, 1) for y in zip(past, own, strict=True)))
    num_past = past.key.shape[1] - x.shape[1]
    last = tables[0][num_past:], tables[1][num_past:]
    compute = self.precision.compute
    mixed = dot_product.attend(
      rope.rotate(self.queries(x), last).astype(compute),
      rope.rotate(past.key, tables).astype(compute),
      past.value,
      visible=visible,
    )
    return self.merged(mixed), past

  def kept(self, x: Array, metadata: Metadata) -> tuple[Array, Array]:
    """What a cache keeps of x [B, S, D]: rotated keys, and values."""
    return self._rotated(x, metadata.tables)[1:]

  def weights(self, x: Array, metadata: Metadata) -> Array:
    """The attention weights that `__call__` mixes with: f32 [B, H, S, S]."""
    query, key, _ = self._rotated(x, metadata.tables)
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = jnp.einsum(
      "bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32
    )
    first = jnp.zeros((), jnp.int32) if self.causal else None
    ids = metadata.documents
    seen = dot_product.Seen(metadata.visible, ids, ids, first)
    visible = seen.mask(*logits.shape[-2:])
    if visible is not None:
      logits = jnp.where(visible[:, None], logits, -jnp.inf)
    return jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1)

  def _heads(self, x: Array) -> Array:
    """[B, S, heads, d_h]."""
    return x.reshape(*x.shape[:-1], -1, self.head_width)

  def merged(self, x: Array) -> Array:
    """Combines the outputs of all heads [B, S, H, d_h]: [B, S, D]."""
    return self.output(x.reshape(*x.shape[:-2], -1))

  def _rotated(
    self, x: Array, tables: tuple[Array, Array]
  ) -> tuple[Array, Array, Array]:
    """Rotated queries [B, S, H, d_h] and keys, and values [B, S, G, d_h]."""
    compute, own = self.precision.compute, self._keys(x)
    return (
      rope.rotate(self.queries(x), tables).astype(compute),
      rope.rotate(own.key, tables).astype(compute),
      own.value,
    )

  def queries(self, x: Array) -> Array:
    """Queries [B, S, H, d_h], not rotated."""
    return self.query_norm(self._heads(self.query(x)))

  def _keys(self, x: Array) -> Past:
    key, value = self._heads(self.key(x)), self._heads(self.value(x))
    return Past(self.key_norm(key), value)
