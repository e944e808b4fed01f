"""Multi-head attention with rotary positions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.kernels import Kernels
from loopjax.nn import linear, rope
from loopjax.nn.attention import dot_product
from loopjax.nn.attention.attend import attend, attend_to
from loopjax.nn.attention.cache import Cache, KeyValues
from loopjax.nn.attention.part import Part
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision


class Metadata(NamedTuple):
  """Positions and masks of S tokens, shared by all layers and loops of a call.

  Attributes:
    tables: rotary tables of the tokens' positions, from `rope.rope_tables`.
    visible: bool [B, S, N], the cache places that each token attends to; None
      without a cache.
    places: i32 [B, S], the cache places that the tokens' keys and values are
      written to; None without a cache.
    documents: i32 [B, S], without a cache only: tokens attend to tokens with
      the same number (and to earlier ones only, if `Shape.causal`). None if
      every row is one document.
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
  scaling: Sequence[float] = (),
) -> Metadata:
  """The metadata of a text's tokens.

  Args:
    shape: (B, S).
    head_width: d_h.
    base: longest wavelength over 2 pi, in tokens.
    documents: i32 [B, S], each token's document number; None if a row is one
      document. Only without a cache.
    cache: a cache of the preceding tokens, or None.
    valid: bool [B, S], False for padding: no token attends to it, and its
      outputs are finite but undefined. None for no padding. Only with a cache.
    scaling: as in `rope.rope_tables`.
  """
  if cache is not None:
    assert documents is None, "a row of a cache is one document"
    assert shape[1] <= cache.capacity, (shape, cache.capacity)
    places = cache.places(jnp.ones(shape, bool) if valid is None else valid)
    tables = rope.rope_tables(places[..., None], head_width, base, scaling)
    return Metadata(tables, cache.visible(places), places)
  assert valid is None, "without a cache, documents mask padding"
  # Positions in the row are valid for every document: only differences matter.
  places = jnp.arange(shape[1])
  tables = rope.rope_tables(places[:, None], head_width, base, scaling)
  return Metadata(tables, documents=documents)


def places_in(documents: Array) -> Array:
  """Positions of tokens in their documents, runs of one number: i32 [B, T]."""
  before = jnp.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
  place = jax.lax.broadcasted_iota(jnp.int32, documents.shape, 1)
  start = jnp.where(documents != before, place, 0)
  return place - jax.lax.cummax(start, axis=1)


class Attention(nnx.Module):
  """Grouped-query attention: H query heads share G key-value heads.

  Each group of H / G consecutive query heads attends to one key-value head
  (arXiv 2305.13245); with G = H this is multi-head attention. Queries and keys
  are normalised per head by `Shape.qk_norm` (UTM, section 2.1: RMS norms with a
  learned gain) and then rotated. If `Shape.causal`, tokens attend to themselves
  and earlier tokens, else to all tokens.
  """

  def __init__(
    self,
    shape: Shape,
    *,
    kernels: Kernels = Kernels(),
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}

    def matrix(inputs: int, outputs: int, bias: bool = False) -> nnx.Linear:
      init = shape.init
      return linear.linear(inputs, outputs, use_bias=bias, init=init, **shared)

    queries = shape.num_heads * shape.head_width
    keys = shape.num_key_value_heads * shape.head_width
    self.query = matrix(shape.width, queries, shape.qk_bias)
    self.key = matrix(shape.width, keys, shape.qk_bias)
    self.value = matrix(shape.width, keys, shape.value_bias)
    self.output = matrix(queries, shape.width)
    self.query_norm = shape.qk_norm(shape.head_width, **shared)
    self.key_norm = shape.qk_norm(shape.head_width, **shared)
    self.head_width, self.causal = shape.head_width, shape.causal
    self.kernels, self.precision = kernels, precision

  @jax.named_scope("attention")
  def __call__(
    self,
    x: Array,
    metadata: Metadata,
    cache: Cache | None = None,
    slot: Array | None = None,
  ) -> tuple[Array, Cache | None]:
    """Attention among the tokens of x, and to the tokens in a cache, if any.

    Args:
      x: [B, S, D].
      metadata: positions and masks of the tokens.
      cache: cache of earlier tokens, or None. The keys and values of x are
        added to it first.
      slot: the cache slot to use, i32 scalar.

    Returns:
      (output [B, S, D], the cache).
    """
    query, key, value = self.rotated(x, metadata.tables)
    if cache is not None:
      assert metadata.visible is not None, (
        "the metadata was made without the cache"
      )
      cache = cache.write(slot, key, value, metadata.places)
      mixed = dot_product.attend_by_head(
        query, *cache.read(slot), visible=metadata.visible
      )
      return self.merged(mixed), cache
    mixed = attend(
      query,
      key,
      value,
      causal=self.causal,
      documents=metadata.documents,
      implementation=self.kernels.attention,
    )
    return self.merged(mixed), cache

  @jax.named_scope("attention")
  def attend_with_past(
    self,
    x: Array,
    past: KeyValues,
    tables: tuple[Array, Array],
    reach: int,
    mask: Array | None,
  ) -> tuple[Array, KeyValues]:
    """Attention to earlier tokens and among the tokens of x.

    Args:
      x: [B, S, D].
      past: keys and values of P >= 0 earlier tokens, the oldest first. Keys are
        not rotated: positions count from the oldest token that is visible.
      tables: from `rope_tables`, for P + S positions.
      reach: number of tokens that a token attends to: itself and those before
        it; `Shape.causal` is ignored.
      mask: bool [B, P + S], False for padding, to which no token attends; None
        if there is none. The output of a query without keys is finite but
        undefined.

    Returns:
      (output [B, S, D], the keys and values of all P + S tokens).
    """
    current = self._keys(x)
    pairs = zip(past, current, strict=True)
    past = KeyValues(*(jnp.concatenate(y, axis=1) for y in pairs))
    num_past = past.key.shape[1] - x.shape[1]
    last = tables[0][num_past:], tables[1][num_past:]
    compute = self.precision.compute
    documents = None
    if mask is not None:
      everywhere = jnp.zeros(x.shape[:2], jnp.int32)
      documents = everywhere, jnp.where(mask, 0, -1)
    part = Part(
      rope.rotate(past.key, tables).astype(compute),
      past.value,
      first=num_past,
      reach=reach,
      documents=documents,
    )
    mixed = attend_to(
      rope.rotate(self.queries(x), last).astype(compute),
      part,
      implementation=self.kernels.attention,
    )
    return self.merged(mixed), past

  def keys_and_values(
    self, x: Array, metadata: Metadata
  ) -> tuple[Array, Array]:
    """Rotated keys and values of x [B, S, D], [B, S, G, d_h] each."""
    return self.rotated(x, metadata.tables)[1:]

  def weights(self, x: Array, metadata: Metadata) -> Array:
    """The attention weights of `__call__` without a cache: f32 [B, H, S, S]."""
    query, key, _ = self.rotated(x, metadata.tables)
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = jnp.einsum(
      "bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32
    )
    first = jnp.zeros((), jnp.int32) if self.causal else None
    ids = metadata.documents
    mask = dot_product.Mask(metadata.visible, ids, ids, first)
    visible = mask.to_array(*logits.shape[-2:])
    if visible is not None:
      logits = jnp.where(visible[:, None], logits, -jnp.inf)
    return jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1)

  def _heads(self, x: Array) -> Array:
    """Splits features into heads: [B, S, heads d_h] to [B, S, heads, d_h]."""
    return x.reshape(*x.shape[:-1], -1, self.head_width)

  def merged(self, x: Array) -> Array:
    """The output projection of all heads: [B, S, H, d_h] to [B, S, D]."""
    return self.output(x.reshape(*x.shape[:-2], -1))

  def rotated(
    self, x: Array, tables: tuple[Array, Array]
  ) -> tuple[Array, Array, Array]:
    """Rotated queries [B, S, H, d_h] and keys, and values [B, S, G, d_h]."""
    compute, key_values = self.precision.compute, self._keys(x)
    return (
      rope.rotate(self.queries(x), tables).astype(compute),
      rope.rotate(key_values.key, tables).astype(compute),
      key_values.value,
    )

  def queries(self, x: Array) -> Array:
    """Queries [B, S, H, d_h], not rotated."""
    return self.query_norm(self._heads(self.query(x)))

  def _keys(self, x: Array) -> KeyValues:
    key, value = self._heads(self.key(x)), self._heads(self.value(x))
    return KeyValues(self.key_norm(key), value)
