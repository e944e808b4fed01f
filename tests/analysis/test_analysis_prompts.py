"""Which part of a row is a prompt, and what follows it."""

import numpy as np

from loopjax.analysis import prompts


def test_the_first_document_of_a_row_is_divided_in_the_middle():
  batch = {
    "inputs": np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9],
                        [7, 1, 2, 3, 4, 5], [9, 9, 9, 9, 9, 9]]),
    "documents": np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0],
                           [1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]]),
  }  # fmt: skip
  expected = [((1, 2), (3, 4, 5, 6)), ((1,), (2, 3)), ((7,), ())]
  assert prompts.halves(batch, 2, 9) == expected
  del batch["documents"]
  expected = [((1, 2, 3), (4, 5, 6)), ((1,), (2, 3)), ((7, 1, 2), (3, 4, 5))]
  assert prompts.halves(batch, 3, 9) == expected
