"""Records that pass between the windows of a model that sleeps."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.nn import hybrid
from loopjax.types import Array


class Tokens(NamedTuple):
  """Tokens. hidden: [..., D]; mask: bool [...], False for padding."""

  hidden: Array
  mask: Array | None = None


def padded(tokens: Tokens, size: int) -> Tokens:
  """Left-pads the tokens by `size` masked ones."""
  hidden, mask = tokens
  mask = jnp.ones(hidden.shape[:2], bool) if mask is None else mask
  front = ((0, 0), (size, 0))
  return Tokens(jnp.pad(hidden, (*front, (0, 0))), jnp.pad(mask, front))


class Kept(NamedTuple):
  """State passed from one window to the next.

  Attributes:
    parts: of prelude, core and coda.
    seen: bool [B, P], which of the P past tokens are not padding.
  """

  parts: tuple[hybrid.Memory, ...]
  seen: Array
