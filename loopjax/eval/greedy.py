"""Greedy decoding in static shapes, every token computed from the text so far.

Without a cache: each new token costs a forward pass over the whole context
length. A token is predicted from as many tokens before it as that holds.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.kernels import vocabulary
from loopjax.subject import Subject
from loopjax.types import PRECISIONS, Array

_BATCH_TOKENS = 8192
_AT_ONCE = 16  # New tokens between two looks at what was written.


class Writer:
  """Continues texts."""

  def __init__(self, subject: Subject):
    """Compiles nothing yet."""
    self._subject = subject
    self._run = jax.jit(
      functools.partial(extend, graphdef=subject.graphdef, call=subject.call)
    )

  def __call__(
    self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int
  ) -> list[str]:
    """What greedy decoding adds to each text.

    Args:
      contexts: texts; an empty one is the beginning of a document.
      stops: texts before the first of which a continuation ends; it also ends
        with the document.
      max_tokens: that are added, at most.
    """
    rows = max(1, _BATCH_TOKENS // self._subject.context_length)
    return [
      text
      for start in range(0, len(contexts), rows)
      for text in self._some(
        contexts[start : start + rows], rows, stops, max_tokens
      )
    ]

  def _some(
    self,
    contexts: Sequence[str],
    rows: int,
    stops: Sequence[str],
    max_tokens: int,
  ) -> list[str]:
    """The same of a batch."""
    tokenizer = self._subject.tokenizer
    length = self._subject.context_length
    tokens = np.full((rows, length), tokenizer.padding, np.int32)
    lengths = np.ones(rows, np.int32)
    for row, ids in enumerate(tokenizer.encode(contexts)):
      text = np.append(tokenizer.end, ids)[-length:]
      tokens[row, : len(text)] = text
      lengths[row] = len(text)
    new: list[list[int]] = [[] for _ in contexts]
    while len(new[0]) < max_tokens:
      tokens, lengths, added = self._run(self._subject.params, tokens, lengths)
      for written, more in zip(new, np.asarray(added), strict=False):
        written += more.tolist()
      if all(_ended(tokenizer, written, stops) for written in new):
        break
    return [_cut(tokenizer, written[:max_tokens], stops) for written in new]


def _cut(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> str:
  """Text up to the end of the document or the first stop."""
  ids = list(ids)
  if tokenizer.end in ids:
    ids = ids[: ids.index(tokenizer.end)]
  text = tokenizer.decode(ids)
  ends = [text.index(stop) for stop in stops if stop and stop in text]
  return text[: min(ends, default=len(text))]


def _ended(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> bool:
  if tokenizer.end in ids:
    return True
  text = tokenizer.decode(ids)
  return any(stop and stop in text for stop in stops)


def extend(
  params: Any,
  tokens: Array,
  lengths: Array,
  *,
  graphdef: nnx.GraphDef,
  call: dict[str, Any],
) -> tuple[Array, Array, Array]:
  """Adds the most likely next tokens, 16 of them.

  A full row loses its first token for every new one.

  Args:
    params: of the model.
    tokens: i32 [B, T].
    lengths: i32 [B], tokens of each row, 1 .. T.
    graphdef: the model without its parameters.
    call: keyword arguments of its call.

  Returns:
    Tokens and lengths after that, and the new tokens, i32 [B, 16].
  """
  model: Any = nnx.merge(graphdef, params)
  compute = PRECISIONS[model.config.precision].compute
  table = model.readout_table().astype(compute)
  rows, size = jnp.arange(len(tokens)), tokens.shape[1]

  def step(carry: tuple[Array, Array], _: None) -> tuple[Any, Array]:
    tokens, lengths = carry
    hidden = model(tokens, **call).hidden.astype(compute)
    new = vocabulary.most_likely(
      hidden[rows, lengths - 1],
      table,
      num_padding_tokens=model.spec.num_padding_tokens,
    )
    full = (lengths == size)[:, None]
    tokens = jnp.where(full, jnp.roll(tokens, -1, axis=1), tokens)
    lengths = jnp.minimum(lengths + 1, size)
    tokens = tokens.at[rows, lengths - 1].set(new)
    return (tokens, lengths), new

  (tokens, lengths), new = jax.lax.scan(
    step, (tokens, lengths), None, length=_AT_ONCE
  )
  return tokens, lengths, new.T
