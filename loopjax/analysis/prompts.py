"""Prompts from evaluation texts, for models that continue them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Halves(NamedTuple):
  """A text in two parts, token ids.

  Attributes:
    prompt: the first part, at least one token.
    rest: the text after it, which may be empty.
  """

  prompt: tuple[int, ...]
  rest: tuple[int, ...]


def first_document(
  batch: Mapping[str, np.ndarray], num_tokens: int
) -> np.ndarray:
  """Mask of each row's first document, without padding, bool [N, T].

  Arguments as in `halves`.
  """
  is_text = batch["inputs"] < num_tokens
  if "documents" in batch:
    is_text &= batch["documents"] == batch["documents"][:, :1]
  return is_text


def halves(
  batch: Mapping[str, np.ndarray], max_prompt: int, num_tokens: int
) -> list[Halves]:
  """The first document of each row, divided in the middle.

  Args:
    batch: evaluation examples, "inputs" [N, T] and, if rows have several
      documents, their numbers, "documents" [N, T].
    max_prompt: maximum length of a prompt.
    num_tokens: number of token ids; larger ones are padding. Rows of padding
      are skipped.
  """
  is_text = first_document(batch, num_tokens)
  found = []
  for row, kept in zip(batch["inputs"], is_text, strict=True):
    text = tuple(row[kept].tolist())
    if text:
      length = min(max(len(text) // 2, 1), max_prompt)
      found.append(Halves(text[:length], text[length:]))
  return found
