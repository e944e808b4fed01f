"""The prefix cache: a prefix that several prompts share is prefilled once.

The keys and values of prompts are kept in blocks of tokens. A block is found by
the hash of all tokens up to its end, so blocks with the same hash follow the
same text. The least recently used blocks are evicted.
"""

import collections
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.generate import batching
from loopjax.generate.programs.cached_model import CachedModel
from loopjax.generate.programs.slots import State, placed
from loopjax.generate.requests import GenerationRequest
from loopjax.types import Array

BLOCK = 16  # Tokens.


class Prefixes:
  """The cached prompt prefixes of one engine.

  Attributes:
    num_blocks: maximum number of blocks.
    sizes: numbers of blocks that are copied together, each compiled separately.
  """

  def __init__(
    self, model: CachedModel, params: Any, num_bytes: int, cache: Any
  ):
    """Allocates the blocks.

    Args:
      model: a model whose cache has places, see `CachedModel.has_places`.
      params: its parameters.
      num_bytes: how much the blocks may take.
      cache: the engine's cache.

    Raises:
      UserError: there is no room for a single block.
    """
    axes = _axes(model, params)
    shapes = [
      jax.ShapeDtypeStruct(_block_shape(leaf.shape, *pair), leaf.dtype)
      for leaf, pair in zip(jax.tree.leaves(cache), axes, strict=True)
      if min(pair) >= 0
    ]
    block_bytes = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    self.num_blocks = num_bytes // block_bytes
    if not self.num_blocks:
      raise UserError(
        f"there is no room for {BLOCK} prompt tokens ({block_bytes:,} bytes) in"
        f" {num_bytes:,} bytes"
      )
    max_blocks = min(model.max_tokens // BLOCK, self.num_blocks)
    self.sizes = batching.powers(1, max_blocks)
    devices = jax.tree.leaves(cache)[0].devices()
    self._blocks = placed(
      [jnp.zeros((self.num_blocks, *x.shape), x.dtype) for x in shapes],
      devices,
    )
    self._load = jax.jit(
      functools.partial(_load, axes=axes), donate_argnames="state"
    )
    self._save = jax.jit(
      functools.partial(_save, axes=axes), donate_argnames="blocks"
    )
    self.clear()

  def clear(self) -> None:
    """Forgets all prompts."""
    # Block by hash; those that were used last are at the end.
    self._found: collections.OrderedDict[bytes, int] = collections.OrderedDict()
    self._free = list(range(self.num_blocks))[::-1]

  def load(
    self, state: State, slot: int, request: GenerationRequest
  ) -> tuple[State, int]:
    """Copies the cached prefix of a prompt to a slot.

    At least the last token is not copied, since the model must predict from it.

    Args:
      state: donated.
      slot: the slot.
      request: the request with the prompt.

    Returns:
      The state, and the number of copied tokens.
    """
    prompt, cached = request.prompt, []
    for name in self._names(request, len(prompt) - 1):
      if name not in self._found:
        break
      cached.append(name)
    if not cached:
      return state, 0
    self._touch(cached)
    size = self._size(len(cached))
    # Surplus blocks are copied but masked.
    ids = np.zeros(size, np.int32)
    ids[: len(cached)] = [self._found[name] for name in cached]
    num_tokens = len(cached) * BLOCK
    tokens = np.full(size * BLOCK, state.slots.seen.shape[1], np.int32)
    tokens[:num_tokens] = prompt[:num_tokens]
    state = self._load(
      state, self._blocks, np.int32(slot), ids, tokens, np.int32(num_tokens)
    )
    return state, num_tokens

  def save(self, state: State, slot: int, request: GenerationRequest) -> None:
    """Stores the new blocks of the prompt in a slot."""
    # The last token of a prompt may be read with more loops than the others.
    num_tokens = len(request.prompt) - (request.prefill_loops > 0)
    names = list(self._names(request, num_tokens))
    if all(name in self._found for name in names):
      return self._touch(names)
    size = self._size(len(names))
    ids = np.full(size, self.num_blocks, np.int32)  # Out of range: not kept.
    self._touch([name for name in names if name in self._found])
    for place, name in enumerate(names):
      if name not in self._found:
        if not self._free:
          self._free.append(self._found.popitem(last=False)[1])
        ids[place] = self._found[name] = self._free.pop()
    self._touch(names)
    self._blocks = self._save(state.cache, self._blocks, np.int32(slot), ids)
    return None

  def compile(self, state: State, size: int) -> State:
    """Copies no blocks of a size, an element of `sizes`; donates the state."""
    none = np.full(size, self.num_blocks, np.int32)
    tokens = np.full(size * BLOCK, state.slots.seen.shape[1], np.int32)
    slot = number = np.int32(0)
    self._blocks = self._save(state.cache, self._blocks, slot, none)
    return self._load(
      state, self._blocks, slot, np.zeros_like(none), tokens, number
    )

  def _names(
    self, request: GenerationRequest, num_tokens: int
  ) -> Iterator[bytes]:
    """The hashes of the blocks among the first tokens of a prompt."""
    # Prompts are read with the loops of the request.
    name = f"{request.num_loops},{request.prefill_loops}".encode()
    tokens = np.asarray(request.prompt, np.int32)
    for block in range(min(num_tokens // BLOCK, self.num_blocks)):
      part = tokens[block * BLOCK : (block + 1) * BLOCK].tobytes()
      name = hashlib.blake2b(name + part, digest_size=16).digest()
      yield name

  def _touch(self, names: list[bytes]) -> None:
    """Marks blocks of a prompt as used, the first ones last.

    Without its beginning a block is of no use, so that ends go first.
    """
    for name in reversed(names):
      self._found.move_to_end(name)

  def _size(self, num: int) -> int:
    return next(size for size in self.sizes if size >= num)


def make(
  model: CachedModel, params: Any, mebibytes: int, cache: Any
) -> Prefixes | None:
  """`Prefixes` of so many MiB; None for 0, or if no prompt has a block.

  Raises:
    UserError: cache entries depend on how a prompt is prefilled, or there is no
      room for a block.
  """
  if not mebibytes or model.max_tokens < BLOCK:
    return None
  if not model.has_places:
    raise UserError(
      f"prefix_mib={mebibytes}: a cache of kind {model.cache_kind!r} does not"
      " support prefix sharing: its entries depend on the whole prefill"
    )
  return Prefixes(model, params, mebibytes * 2**20, cache)


def _axes(model: CachedModel, params: Any) -> list[tuple[int, int]]:
  """(axis of the batch, axis of the places) of each leaf; -1 for none."""
  batch_axes, place_axes = model.batch_axes(params), model.place_axes(params)
  return list(
    zip(jax.tree.leaves(batch_axes), jax.tree.leaves(place_axes), strict=True)
  )


def _block_shape(
  shape: tuple[int, ...], batch: int, places: int
) -> tuple[int, ...]:
  """The shape of a block of a leaf of the cache: one row, BLOCK places."""
  sizes = {batch: 1, places: BLOCK}
  return tuple(sizes.get(axis, size) for axis, size in enumerate(shape))


def _load(
  state: State,
  blocks: list[Array],
  slot: Array,
  ids: Array,
  tokens: Array,
  num_tokens: Array,
  *,
  axes: list[tuple[int, int]],
) -> State:
  """Copies blocks to the first places of a slot.

  Args:
    state: donated.
    blocks: [num_blocks, ...] for each leaf of the cache with places.
    slot: i32 scalar.
    ids: i32 [N], the blocks, in order.
    tokens: i32 [N BLOCK], their tokens, padded with V.
    num_tokens: i32 scalar, number of tokens without the padding.
    axes: see `_axes`.
  """
  leaves, structure = jax.tree.flatten(state.cache)
  remaining = iter(blocks)
  for index, (batch, places) in enumerate(axes):
    if min(batch, places) < 0:
      continue
    copied = jnp.moveaxis(next(remaining)[ids], 0, places)
    shape = list(copied.shape)  # Merges the axes of blocks and their places.
    shape[places : places + 2] = [len(ids) * BLOCK]
    start = [jnp.zeros((), jnp.int32)] * leaves[index].ndim
    start[batch] = slot
    leaves[index] = jax.lax.dynamic_update_slice(
      leaves[index], copied.reshape(shape), start
    )
  cache: Any = jax.tree.unflatten(structure, leaves)
  seen = state.slots.seen
  row = jnp.zeros(seen.shape[1], bool).at[tokens].set(True, mode="drop")
  is_slot = jnp.arange(len(seen)) == slot
  cache = cache.cut(jnp.full(len(seen), num_tokens), is_slot)
  slots = state.slots._replace(seen=seen.at[slot].set(row))
  return State(cache, slots)


def _save(
  cache: Any,
  blocks: list[Array],
  slot: Array,
  ids: Array,
  *,
  axes: list[tuple[int, int]],
) -> list[Array]:
  """Copies the first places of a slot to blocks; arguments as in `_load`.

  Ids out of range are skipped.
  """
  saved = []
  remaining = iter(blocks)
  for leaf, (batch, places) in zip(jax.tree.leaves(cache), axes, strict=True):
    if min(batch, places) < 0:
      continue
    row = jax.lax.dynamic_slice_in_dim(leaf, slot, 1, batch)
    row = jax.lax.slice_in_dim(row, 0, len(ids) * BLOCK, axis=places)
    shape = list(row.shape)
    shape[places : places + 1] = [len(ids), BLOCK]
    row = jnp.moveaxis(row.reshape(shape), places, 0)
    saved.append(next(remaining).at[ids].set(row, mode="drop"))
  return saved
