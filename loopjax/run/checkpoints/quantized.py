"""8-bit and 4-bit weights, for inference.

The matrices of linear maps and of embeddings become arrays of qwix: integers,
and a scale for each output in float32. They are dequantised where a product
needs them (`nn.linear.dense`), one layer at a time; all other parameters are
unchanged. qwix's own `quantize_model` is not used: it finds the weights of a
product among the attributes of the module that is being called, which do not
include a layer of a stack, a slice within a scan.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError, needing
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity, tensors
from loopjax.run.checkpoints.restore import QUANTIZED
from loopjax.types import Array

WEIGHTS: Mapping[str, Any] = {"int8": jnp.int8, "int4": jnp.int4}
_LEAST = 16  # Rows and columns of a matrix; gates are smaller, and precise.
# The axis that a product sums over; an embedding is also the read-out's table.
_SUMMED = {"kernel": -2, "embedding": -1}


def quantized(params: Any, weights: str) -> Any:
  """The parameters, with quantised matrices.

  Args:
    params: nested dict of arrays.
    weights: a key of WEIGHTS.

  Raises:
    UserError: qwix is not installed, there is no such matrix, or it is already
      quantised.
  """
  with needing("qwix", "quantize", f"--weights={weights} needs"):
    import qwix
  if there := kind(params):
    raise UserError(f"--weights={weights}: the weights are already in {there}")

  def one(path: Any, leaf: Array) -> Any:
    if not _is_covered(path, leaf):
      return leaf
    summed = _SUMMED[path[-1].key] % leaf.ndim
    return qwix.quantize(
      leaf.astype(jnp.float32),
      WEIGHTS[weights],
      channelwise_axes=[n for n in range(leaf.ndim) if n != summed],
    )

  made = jax.tree_util.tree_map_with_path(one, params)
  if not kind(made):
    raise UserError(
      f"--weights={weights} has no effect: no matrix of this model has at least"
      f" {_LEAST} rows and columns"
    )
  return made


def kind(params: Any) -> str | None:
  """The key of WEIGHTS of the quantised parameters; None if there are none."""
  names = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
  return next((name for name in WEIGHTS if name in names), None)


def num_bytes(params: Any) -> int:
  """Bytes of parameters on a device, where two integers of int4 share one."""
  return sum(
    leaf.size // 2 if leaf.dtype == jnp.int4 else leaf.nbytes
    for leaf in jax.tree.leaves(params)
  )


def write(workdir: pathlib.Path, params: Any) -> dict[str, Array]:
  """Writes quantised parameters to a work directory; returns the tensors."""
  return tensors.write(workdir / QUANTIZED, jax.tree.map(_packed, params))


def read(workdir: pathlib.Path, abstract_params: Any, weights: str) -> Any:
  """Reads what `write` wrote.

  Args:
    workdir: the work directory.
    abstract_params: nested dict of shapes and dtypes before `quantized`, and
      of shardings.
    weights: the key of WEIGHTS that they were quantised with.

  Raises:
    UserError: the file is damaged, or its parameters do not fit.
  """
  path = workdir / QUANTIZED
  there = tensors.read(path)
  target = jax.eval_shape(lambda x: quantized(x, weights), abstract_params)
  if WEIGHTS[weights] == jnp.int4:
    there = {
      name: _unpacked(x) if x.dtype == jnp.uint8 else x
      for name, x in there.items()
    }
  integrity.compare(integrity.describe(target), integrity.describe(there), path)
  names = integrity.names(target)
  return jax.tree.unflatten(
    jax.tree.structure(target), [there[name] for name in names]
  )


def stored_weights(workdir: pathlib.Path) -> str | None:
  """The key of WEIGHTS of a work directory; None if it is not quantised."""
  if not (workdir / QUANTIZED).is_file():
    return None
  path = workdir / "summary.json"
  weights = workdir_lib.read_json(path).get("weights")
  if weights not in WEIGHTS:
    raise UserError(
      f"{path}: weights={weights!r} is not {' or '.join(WEIGHTS)}"
    )
  return str(weights)


def _is_covered(path: Any, leaf: Any) -> bool:
  """Whether a parameter is a matrix that can be quantised."""
  is_matrix = path[-1].key in _SUMMED and leaf.ndim > 1
  return (
    is_matrix
    and min(leaf.shape[-2:]) >= _LEAST
    and leaf.shape[-1] % 2 == 0  # In int4 two share a byte.
  )


def _packed(x: Array) -> Array:
  """A tensor that files can have: two integers of int4 in a byte."""
  if x.dtype != jnp.int4:
    return x
  pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
  return jax.lax.bitcast_convert_type(pairs, jnp.uint8)


def _unpacked(x: Array) -> Array:
  pairs = jax.lax.bitcast_convert_type(x, jnp.int4)
  return pairs.reshape(*x.shape[:-1], 2 * x.shape[-1])
