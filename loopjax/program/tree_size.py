"""Sizes of trees of arrays, which may be abstract."""

from typing import Any

import jax


def num_elements(tree: Any) -> int:
  """Elements of all arrays: the number of parameters, if the tree is these."""
  return sum(x.size for x in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
  """Bytes of all arrays."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
