"""The inputs and the state of a window."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn import hybrid
from loopjax.types import Array


class Tokens(NamedTuple):
  """Embedded tokens.

  Attributes:
    hidden: [..., D].
    mask: bool [...], False for padding; None without padding.
  """

  hidden: Array
  mask: Array | None = None


def padded(tokens: Tokens, size: int) -> Tokens:
  """Adds `size` padding tokens before tokens [B, S, D]."""
  hidden, mask = tokens
  mask = jnp.ones(hidden.shape[:2], bool) if mask is None else mask
  front = ((0, 0), (size, 0))
  return Tokens(jnp.pad(hidden, (*front, (0, 0))), jnp.pad(mask, front))


class WindowState(NamedTuple):
  """The state that a window passes to the next one.

  Attributes:
    parts: the memories of prelude, core and coda.
    past_mask: bool [B, P], False for padding among the P past tokens.
  """

  parts: tuple[hybrid.Memory, ...]
  past_mask: Array
