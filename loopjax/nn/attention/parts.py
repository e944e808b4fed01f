"""A cache of three stacks: before, in and after a loop."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.attention.cache import Cache
from loopjax.nn.shape import Shape
from loopjax.types import Array, Precision

# As "per_loop", but a generated token's loops start from the previous token's
# state: continuous chain of thought (Huginn, arXiv 2502.05171).
CONTINUOUS = "continuous"
KINDS = (*cache_lib.KINDS, CONTINUOUS)


class PartsCache(NamedTuple):
  """Keys and values of the three parts; rows have the same tokens in each.

  Attributes:
    prelude, coda: a slot for every layer; there may be none.
    core: a slot for every layer in every loop, or fewer if loops share them.
    state: f32 [B, D], the state after the last token's loops, from which the
      next generated token's loops start; None if they start as in a prompt.
  """

  prelude: Cache
  core: Cache
  coda: Cache
  state: Array | None = None

  @property
  def capacity(self) -> int:
    """M, maximum number of tokens of a row."""
    return self.core.capacity

  @property
  def is_unstacked(self) -> bool:
    """See `Cache.is_unstacked`."""
    return self.core.is_unstacked

  def within(self, span: int | None) -> "PartsCache":
    """See `Cache.within`."""
    return self._each(lambda part: part.within(span))

  def cut(self, length: Array, rows: Array) -> "PartsCache":
    """See `Cache.cut`; only for caches without a state."""
    return self._each(lambda part: part.cut(length, rows))

  def of_rows(
    self, rows: Array, span: int | None, *, unstack: bool
  ) -> "PartsCache":
    """See `Cache.of_rows`."""

    def one(part: Cache) -> Cache:
      return part.of_rows(rows, span, unstack=unstack and part.num_slots > 0)

    selected = self._each(one)
    if self.state is None:
      return selected
    return selected._replace(state=self.state.at[rows].get(mode="clip"))

  def with_rows(
    self, part: "PartsCache", rows: Array, num_tokens: int
  ) -> "PartsCache":
    """See `Cache.with_rows`."""
    updated = PartsCache(
      prelude=self.prelude.with_rows(part.prelude, rows, num_tokens),
      core=self.core.with_rows(part.core, rows, num_tokens),
      coda=self.coda.with_rows(part.coda, rows, num_tokens),
    )
    if self.state is None:
      return updated
    assert part.state is not None
    return updated._replace(
      state=self.state.at[rows].set(part.state, mode="drop")
    )

  def extended(self, places: Array, state: Array) -> "PartsCache":
    """See `Cache.extended`; `state` is the one after the loops, [B, S, D]."""
    longer = self._each(lambda part: part.extended(places))
    if self.state is None:
      return longer
    real = places < self.capacity
    last = real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    newest = jnp.take_along_axis(state, last[:, None, None], axis=1)[:, 0]
    any_real = jnp.any(real, axis=1)[:, None]
    return longer._replace(state=jnp.where(any_real, newest, self.state))

  def first_state(self, usual: Array, places: Array) -> Array:
    """The state [B, 1, D] before the loops of a generated token.

    Args:
      usual: the initial state of prompt tokens and of a text's first token.
      places: places of the tokens, i32 [B, 1].
    """
    if self.state is None:
      return usual
    return jnp.where(places[..., None] == 0, usual, self.state[:, None])

  def _each(self, change: Callable[[Cache], Cache]) -> "PartsCache":
    return self._replace(
      prelude=change(self.prelude),
      core=change(self.core),
      coda=change(self.coda),
    )


def empty(
  shape: Shape,
  num_layers: tuple[int, int, int],
  batch: int,
  max_tokens: int,
  precision: Precision,
  *,
  num_loops: int,
  kind: str,
) -> PartsCache:
  """A cache without tokens, see `Reading.empty_cache`.

  Args:
    shape: structure of the blocks.
    num_layers: layers before the loop, in it, and after it.
    batch, max_tokens, num_loops, kind: as in `Reading.empty_cache`.
    precision: the model's dtypes.
  """
  before, core, after = num_layers
  state = None
  if kind == CONTINUOUS:
    state = jnp.zeros((batch, shape.width), precision.accumulate)
    kind = "per_loop"

  def part(slots: int, num_loops: int, kind: str) -> Cache:
    weight = cache_lib.loop_weights(kind, num_loops)
    count = slots * (num_loops if weight is None else 1)
    return cache_lib.empty(shape, count, batch, max_tokens, precision, weight)

  once = 1, "per_loop"
  return PartsCache(
    part(before, *once), part(core, num_loops, kind), part(after, *once), state
  )
