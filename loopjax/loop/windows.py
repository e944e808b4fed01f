"""Windows of a sequence, read one after another.

Attention sees the window that is read and P tokens before it. What a window
knows of others beside that, it knows from states that are carried along.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array


class Window(NamedTuple):
  """How a window of S tokens behind P others is read.

  Attributes:
    positions: of all P + S tokens, counted from the first, [P + S, 1].
    visible: bool [B, S, P + S], the tokens that a token sees.
    mask: bool [B, S], False for padding; None if there can be none.
    known: bool [B, P + S], which tokens are there at all.
  """

  positions: Array
  visible: Array
  mask: Array | None
  known: Array


def split(inputs: Array, length: int, num_last: int) -> tuple[Array, Array]:
  """Cuts sequences into whole windows and what is behind them.

  Args:
    inputs: [B, T, ...].
    length: L, of a window.
    num_last: S, tokens behind the windows; 0 for what is left over, at least
      one token and at most L.

  Returns:
    Windows [W, B, L, ...], and [B, S, ...].
  """
  num_tokens = inputs.shape[1]
  num_last = num_last or (num_tokens - 1) % length + 1
  num_windows, rest = divmod(num_tokens - num_last, length)
  assert rest == 0 and num_windows >= 0, (inputs.shape, length, num_last)
  read, last = jnp.split(inputs, [num_windows * length], axis=1)
  windows = read.reshape(len(inputs), num_windows, length, *read.shape[2:])
  return jnp.swapaxes(windows, 0, 1), last


def join(windows: Array) -> Array:
  """[W, B, L, ...] -> [B, W L, ...]."""
  x = jnp.swapaxes(windows, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def view(
  seen: Array, mask: Array | None, num_tokens: int, reach: int
) -> Window:
  """What the tokens of a window see: themselves and those before them.

  Args:
    seen: bool [B, P], which of the tokens before are there.
    mask: bool [B, S], False for padding; None for none.
    num_tokens: S.
    reach: a token sees as many, itself included.
  """
  num_past = seen.shape[1]
  shape = (len(seen), num_tokens)
  present = jnp.ones(shape, bool) if mask is None else mask
  known = jnp.concatenate([seen, present], axis=1)
  there = jnp.arange(num_past + num_tokens)
  distance = there[num_past:, None] - there[None]
  near = (distance >= 0) & (distance < reach)
  return Window(there[:, None], near[None] & known[:, None], mask, known)


def last(x: Array, size: int, axis: int = 1) -> Array:
  """The last `size` along an axis."""
  end = x.shape[axis]
  return jax.lax.slice_in_dim(x, end - size, end, axis=axis)
