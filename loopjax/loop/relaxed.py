"""Relaxed sharing: each loop adds a matrix of low rank to the shared ones.

Source: Relaxed Recursive Transformers (arXiv 2410.20672): in loop k a shared W
[inputs, outputs] becomes W + A_k B_k, with A_k [inputs, r] and B_k [r,
outputs]. From a trained transformer, they are truncated singular value
decompositions of the differences between W and the layers that it replaces.
Vectors (gains of norms, biases) also differ in every loop, without a rank.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.nn import lora
from loopjax.types import Array

# Parameters of one layer; stacks have a leading axis for the layers.
_MATRIX = "kernel"


class Differences(nnx.Module):
  """What K loops add to shared layers; initially 0.

  It has the layers' parameters by the same names: x of every loop [K, ...], or
  for a kernel "A" [K, L, inputs, r] and "B" [K, L, r, outputs], where r is at
  most the smaller of both sizes.
  """

  def __init__(
    self, layers: Mapping[str, Any], num_loops: int, rank: int, key: Array
  ):
    for index, (name, leaf) in enumerate(sorted(layers.items())):
      leaf_key = jax.random.fold_in(key, index)
      if isinstance(leaf, Mapping):
        setattr(self, name, Differences(leaf, num_loops, rank, leaf_key))
      elif name == _MATRIX:
        setattr(self, name, Pair(leaf, num_loops, rank, leaf_key))
      else:
        zeros = jnp.zeros((num_loops, *leaf.shape), leaf.dtype)
        setattr(self, name, nnx.Param(zeros))


class Pair(nnx.Module):
  """A, normal with variance 1 / inputs, and B, initially 0."""

  def __init__(self, matrix: Array, num_loops: int, rank: int, key: Array):
    shape, rank = (num_loops, *matrix.shape), min(rank, *matrix.shape[-2:])
    pair = lora.first_pair(shape, matrix.dtype, rank, key)
    self.A, self.B = nnx.Param(pair["A"]), nnx.Param(pair["B"])


def layers_of_loop(
  layers: Any, differences: Differences, k: Array | int
) -> Any:
  """The layers of loop k, i32 scalar below K, with their differences."""
  graphdef, state = nnx.split(layers)
  added = nnx.to_pure_dict(nnx.state(differences))
  loop_added = jax.tree.map(lambda x: x[k], added)
  return nnx.merge(graphdef, _sum(nnx.to_pure_dict(state), loop_added))


def _sum(shared: Any, added: Any) -> Any:
  if isinstance(shared, Mapping):
    return {name: _sum(x, added[name]) for name, x in shared.items()}
  if isinstance(added, Mapping):
    return shared + lora.product(added).astype(shared.dtype)
  return shared + added


def split(layers: Any, num_loops: int, rank: int) -> tuple[Any, Any]:
  """(shared layers, differences) that approximate trained layers.

  The shared layers are the means over loops.

  Args:
    layers: nested dict of stacked parameters [K L, ...].
    num_loops: K; loop k replaces layers k L to (k + 1) L - 1.
    rank: r. If it is the smaller dimension of every matrix, loops equal the
      layers, except for rounding.
  """
  blocks = jax.tree.map(
    lambda x: x.reshape(num_loops, -1, *x.shape[1:]), layers
  )
  shared = jax.tree.map(lambda x: jnp.mean(x, axis=0), blocks)
  return shared, _differences(blocks, shared, rank)


def _differences(blocks: Any, shared: Any, rank: int, name: str = "") -> Any:
  if isinstance(shared, Mapping):
    return {
      name: _differences(blocks[name], x, rank, name)
      for name, x in shared.items()
    }
  residuals = blocks - shared[None]
  if name != _MATRIX:
    return residuals
  u, s, vt = jnp.linalg.svd(residuals, full_matrices=False)
  root = jnp.sqrt(s[..., :rank])
  return {
    "A": u[..., :rank] * root[..., None, :],
    "B": root[..., None] * vt[..., :rank, :],
  }
