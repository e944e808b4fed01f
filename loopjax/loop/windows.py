"""Windows of a sequence, processed one after another.

Attention sees the current window and P tokens before it. Any other information
about earlier windows must come from recurrent state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.types import Array


class Window(NamedTuple):
  """Positions and masks of a window of S tokens after P earlier tokens.

  Attributes:
    positions: positions of all P + S tokens, relative to the first, [P + S, 1].
    keys: bool [B, P + S], tokens that may be attended to; None for all.
    packing: packing of the tokens that are not padding; None without padding.
    mask: bool [B, P + S], False for padding.
  """

  positions: Array
  keys: Array | None
  packing: fast_weights.Packing | None
  mask: Array


def split(inputs: Array, length: int) -> tuple[Array, Array]:
  """Cuts sequences into whole windows and the 1 to L tokens after them.

  Args:
    inputs: [B, T, ...].
    length: L, tokens of a window.

  Returns:
    Windows [W, B, L, ...], and the other tokens, [B, S, ...].
  """
  num_windows = (inputs.shape[1] - 1) // length
  read, last = jnp.split(inputs, [num_windows * length], axis=1)
  windows = read.reshape(len(inputs), num_windows, length, *read.shape[2:])
  return jnp.swapaxes(windows, 0, 1), last


def join(windows: Array) -> Array:
  """[W, B, L, ...] -> [B, W L, ...]."""
  x = jnp.swapaxes(windows, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def make_window(
  past_mask: Array, mask: Array | None, num_tokens: int
) -> Window:
  """The positions and masks of a window.

  Args:
    past_mask: bool [B, P], False for padding among the earlier tokens.
    mask: bool [B, S], False for padding; None without padding.
    num_tokens: S.
  """
  num_past = past_mask.shape[1]
  shape = (len(past_mask), num_tokens)
  own_mask = jnp.ones(shape, bool) if mask is None else mask
  whole_mask = jnp.concatenate([past_mask, own_mask], axis=1)
  positions = jnp.arange(num_past + num_tokens)
  # Without padding and without a past (initially padding), all tokens are
  # valid.
  keys = None if mask is None and not num_past else whole_mask
  packing = None if mask is None else fast_weights.packing(mask)
  return Window(positions[:, None], keys, packing, whole_mask)


def last(x: Array, size: int, axis: int = 1) -> Array:
  """The last `size` entries along an axis."""
  end = x.shape[axis]
  return jax.lax.slice_in_dim(x, end - size, end, axis=axis)
