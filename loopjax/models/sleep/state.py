"""The inputs and the state of a window."""

from typing import NamedTuple

import jax.numpy as jnp

from loopjax.loop import windows
from loopjax.models.sleep.config import Config
from loopjax.nn import hybrid
from loopjax.types import Array, TaskSpec


class Tokens(NamedTuple):
  """Embedded tokens.

  Attributes:
    hidden: [..., D].
    mask: bool [...], False for padding; None without padding.
  """

  hidden: Array
  mask: Array | None = None


def split(
  tokens: Tokens, config: Config, spec: TaskSpec
) -> tuple[Tokens, Tokens]:
  """The windows [W, B, L] to sleep over, and the tokens after them [B, S]."""
  size, length = tokens.hidden.shape[1], config.window
  num_last = 0  # The remainder.
  if config.answer_chunk == "separate":
    num_last = spec.num_answer_tokens
    short = (num_last - size) % length
    tokens = _padded(tokens, short) if short else tokens
  parts = [windows.split(x, length, num_last) for x in tokens if x is not None]
  slept, last = zip(*parts, strict=True)
  assert last[0].shape[1] >= spec.num_answer_tokens, size
  return Tokens(*slept), Tokens(*last)


def _padded(tokens: Tokens, size: int) -> Tokens:
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
