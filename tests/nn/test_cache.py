"""Caches against lists: which loops' keys are kept, and the masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.nn.attention import cache as cache_lib
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS

ROWS, LAYERS, LOOPS, ROOM = 3, 2, 4, 8
SHAPE = Shape(8, 2, num_key_value_heads=2, head_width=4, mlp_width=8)
SLOTS = LAYERS * LOOPS
LENGTHS = np.array([5, 2, 3])  # Prompt lengths of the rows.


def empty(kind, max_tokens=ROOM):
  weight = cache_lib.loop_weights(kind, LOOPS)
  slots = SLOTS if weight is None else LAYERS
  made = cache_lib.empty(
    SHAPE, slots, ROWS, max_tokens, PRECISIONS["float32"], weight
  )
  nothing = jnp.full_like(made.key, jnp.nan)  # In unwritten places.
  return cache_lib.Cache(nothing, nothing, made.length, weight)


def kept(kind, loop, by_loop):
  """A loop's view of the values [K, ...] of the loops up to its own."""
  return {
    "per_loop": by_loop[loop],
    "last_loop": by_loop[loop],
    "first_loop": by_loop[0],
    "mean": by_loop[: loop + 1].mean(axis=0),
  }[kind]


@pytest.mark.parametrize("kind", cache_lib.KINDS)
def test_loops_share_what_the_kind_says(kind):
  """Distinct keys and values for every layer, loop and token."""
  cache = empty(kind)
  valid = np.arange(5)[None] < LENGTHS[:, None]
  places = cache.places(jnp.asarray(valid))
  key, value = np.asarray(
    jax.random.normal(jax.random.key(0), (2, LOOPS, LAYERS, ROWS, 5, 2, 4))
  )
  for loop in range(LOOPS):
    for layer in range(LAYERS):
      slot = jnp.asarray(loop * LAYERS + layer)
      cache = cache.write(slot, key[loop, layer], value[loop, layer], places)
      found = cache.read(slot)
      for got, own in zip(found, (key, value), strict=True):
        expected = kept(kind, loop, own[:, layer])
        for row, length in enumerate(LENGTHS):
          np.testing.assert_allclose(
            np.swapaxes(got[row], 0, 1)[:length], expected[row, :length],
            rtol=1e-5, atol=1e-6,
          )  # fmt: skip
  cache = cache.extended(places)
  assert cache.length.tolist() == LENGTHS.tolist()


class Text:
  """Writes rows of tokens, whose keys are their numbers, to a cache."""

  def __init__(self, kind):
    self.cache = empty(kind)
    self.rows = [[] for _ in range(ROWS)]

  def read(self, valid):
    """Processes a part [B, S] and checks what tokens see.

    Checks every token's position in the text, and that in the last loop it sees
    all tokens of its row up to itself.
    """
    num = valid.shape[1]
    start = np.array([len(row) for row in self.rows])[:, None]
    place = start + np.cumsum(valid, axis=1) - 1
    places = self.cache.places(jnp.asarray(valid))
    np.testing.assert_array_equal(places[valid], place[valid])
    number = 100.0 * np.arange(1, ROWS + 1)[:, None] + place
    key = jnp.broadcast_to(
      jnp.float32(number)[..., None, None], (ROWS, num, 2, 4)
    )
    for slot in range(SLOTS):  # Loops differ by a sign, except the last.
      sign = 1.0 if slot >= SLOTS - LAYERS else -1.0
      self.cache = self.cache.write(jnp.asarray(slot), sign * key, key, places)
    seen = np.asarray(self.cache.read(jnp.asarray(SLOTS - 1))[0])[:, 0, :, 0]
    visible = np.asarray(self.cache.visible(places))
    self.cache = self.cache.extended(places)
    for row, column in zip(*np.nonzero(valid), strict=True):
      self.rows[row].append(number[row, column])
    for row, column in zip(*np.nonzero(valid), strict=True):
      found = sorted(seen[row, visible[row, column]].tolist())
      assert found == self.rows[row][: place[row, column] + 1]


@pytest.mark.parametrize("kind", ["per_loop", "last_loop"])
def test_tokens_see_those_before_them(kind):
  """Prompts in two parts, then token by token, then another part.

  A row skips one of the two parts, and a row skips a token.
  """
  text, place = Text(kind), np.arange(3)
  text.read(place[None] < np.array([[3], [2], [1]]))
  text.read(place[None, :2] < np.array([[2], [0], [1]]))
  for live in ([1, 1, 1], [1, 0, 1], [0, 1, 1]):
    text.read(np.array(live, bool)[:, None])
  assert text.cache.length.tolist() == [len(row) for row in text.rows]


def test_a_span_is_the_first_places():
  for max_tokens in (6, 4):
    part = empty("per_loop", max_tokens).within(5)
    assert part.span == min(5, max_tokens)
    key = jnp.arange(float(part.key.size)).reshape(part.key.shape)
    part = cache_lib.Cache(key, -key, part.length, part.weight, part.span)
    got, other = part.read(jnp.asarray(1))
    width = min(5, part.capacity)
    np.testing.assert_array_equal(got, key[1, :, :, :width])
    np.testing.assert_array_equal(other, -got)


@pytest.mark.parametrize("unstack", [False, True])
@pytest.mark.parametrize("kind", cache_lib.KINDS)
def test_rows_are_read_and_written_apart_from_others(kind, unstack):
  """As in the whole cache; rows out of range are absent."""

  def filled(cache, valid, unstack=False):
    places = cache.places(jnp.asarray(valid))
    shape = (*valid.shape, 2, 4)
    for number in range(SLOTS):
      slot = number if unstack else jnp.asarray(number)
      key = jnp.sin(number + jnp.arange(1.0, 1 + np.prod(shape)))
      cache = cache.write(slot, key.reshape(shape), -key.reshape(shape), places)
    return cache.extended(places)

  whole = filled(empty(kind), np.arange(2)[None] < [[2], [1], [0]])
  rows = jnp.asarray([2, ROWS, 0])
  part = filled(
    whole.of_rows(rows, 5, unstack=unstack), np.ones((3, 2), bool), unstack
  )
  assert part.capacity == 5 and part.is_unstacked == unstack
  found = whole.with_rows(part, rows, 3)
  assert found.length.tolist() == [4, 1, 2]
  for old, some, new in (
    (whole.key, part.key, found.key), (whole.value, part.value, found.value),
  ):  # fmt: skip
    some = jnp.stack(some) if unstack else some
    np.testing.assert_array_equal(new[:, 1], old[:, 1])
    for place, row in ((0, 2), (2, 0)):
      length = found.length[row]
      np.testing.assert_array_equal(
        new[:, row, :, :length], some[:, place, :, :length]
      )
      np.testing.assert_array_equal(
        new[:, row, :, : whole.length[row]], old[:, row, :, : whole.length[row]]
      )


@pytest.mark.parametrize("with_own", [False, True])
def test_skipped_loops_are_filled(with_own):
  """With the keys and values of the row's last loop, or of its state."""
  ran = np.array([4, 1, 2])
  cache = empty("per_loop")
  places = cache.places(jnp.array([[True], [True], [False]]))
  key, value = np.asarray(
    jax.random.normal(jax.random.key(0), (2, LOOPS, LAYERS, ROWS, 1, 2, 4))
  )
  for loop in range(LOOPS):
    alive = jnp.where(jnp.asarray(ran > loop)[:, None], places, cache.capacity)
    for layer in range(LAYERS):
      slot = jnp.asarray(loop * LAYERS + layer)
      cache = cache.write(slot, key[loop, layer], value[loop, layer], alive)
  own = np.asarray(
    jax.random.normal(jax.random.key(1), (2, LAYERS, ROWS, 1, 2, 4))
  )
  filled = cache.with_skipped(
    LOOPS,
    jnp.asarray(ran),
    places,
    cache_lib.KeyValues(*map(jnp.asarray, own)) if with_own else None,
  )
  for got, wrote, other in zip(
    (filled.key, filled.value), (key, value), own, strict=True
  ):
    for row in (0, 1):
      for loop in range(LOOPS):
        last = min(loop, ran[row] - 1)
        skipped = with_own and loop >= ran[row]
        expected = other[:, row, 0] if skipped else wrote[last, :, row, 0]
        slots = slice(loop * LAYERS, (loop + 1) * LAYERS)
        np.testing.assert_array_equal(got[slots, row, :, 0], expected)
    assert np.isnan(got[:, 2]).all()  # Not a token.
