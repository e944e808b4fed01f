"""Numbers, token ids and batches that a Python program passes, checked."""

import numbers
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.types import Array

# Inputs and targets, each i32 [B, T], or a task's batch: a dict of arrays.
Batch = tuple[Any, Any] | Mapping[str, Any]


def integer(name: str, value: Any, low: int) -> int:
  """The value as an int; raises UserError unless it is one, at least `low`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise UserError(f"{name}={value!r} must be an integer")
  if value < low:
    raise UserError(f"{name}={value} must be at least {low}")
  return int(value)


def seed(value: Any) -> int:
  """A seed as an int; UserError unless JAX keeps all of its bits."""
  number = integer("seed", value, 0)
  if number >= 2**32:
    raise UserError(f"seed={number} must be less than 2**32")
  return number


def setting(name: str, value: Any) -> Any:
  """A setting's value as a config has it.

  Paths become text, joined by commas.
  """
  is_list = isinstance(value, list | tuple) and name.endswith("_files")
  if not is_list and not isinstance(value, os.PathLike):
    return value
  paths = [str(x) for x in value] if is_list else [str(value)]
  for path in paths:
    if "," in path and name.endswith("_files"):
      raise UserError(f"{name}: {path!r} has a comma, which separates files")
  return ",".join(paths)


def loops(settings: config_lib.Settings, num_loops: Any, default: int) -> int:
  """The number of loops to run; raises UserError unless the model can."""
  number = integer("num_loops", default if num_loops is None else num_loops, 1)
  config_lib.check_loops(settings, number, f"num_loops={number}")
  return number


def ids(settings: config_lib.Settings, name: str, value: Any) -> Array:
  """Token ids [B, T]; raises UserError if the model lacks them."""
  array = _integers(name, value)
  spec = settings.spec
  if settings.reads_whole_rows and array.shape[1] != spec.sequence_length:
    raise UserError(
      f"{name}: {settings.model_name!r} expects rows of {spec.sequence_length}"
      f" tokens, not {array.shape[1]}"
    )
  if not array.size:
    raise UserError(f"{name} of shape {array.shape} have no tokens")
  if not isinstance(array, jax.core.Tracer):
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= spec.vocab_size:
      hint = ""
      if name == "targets" and low < 0:
        hint = "; to omit a target, give it weight 0 in weights, f32 [B, T]"
      raise UserError(
        f"{name}: ids from {low} to {high} are not in [0, {spec.vocab_size})"
        + hint
      )
  return jnp.asarray(array, jnp.int32)


def documents(
  settings: config_lib.Settings, value: Any, shape: tuple[int, ...]
) -> Array:
  """Numbers of documents, i32 [B, T], see `TaskSpec.packs_documents`."""
  if not settings.spec.packs_documents:
    raise UserError(
      "documents has no effect: a row of the task"
      f" {settings.plain['task']['name']!r} is one document"
    )
  array = _integers("documents", value)
  _check_shape("documents", array, shape)
  return jnp.asarray(array, jnp.int32)


def batch(
  settings: config_lib.Settings,
  data: Batch,
  first: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """A batch with all that a loss reads, of the same shapes as the first."""
  if not isinstance(data, Mapping):
    try:
      inputs, targets = data
    except (TypeError, ValueError):
      raise UserError(
        "a batch is (inputs, targets), or a dict that has them"
      ) from None
    data = {"inputs": inputs, "targets": targets}
  arrays = {}
  for name in ("inputs", "targets"):
    if name not in data:
      raise UserError(f"a batch needs {name!r}, token ids [B, T]")
    arrays[name] = ids(settings, name, data[name])
  for name in data.keys() - arrays.keys():
    if not isinstance(name, str):
      raise UserError(f"a batch has arrays by name, not by {name!r}")
    arrays[name] = jnp.asarray(array(name, data[name]))
  shape = arrays["targets"].shape
  arrays.setdefault("weights", jnp.ones(shape))
  arrays["weights"] = arrays["weights"].astype(jnp.float32)
  for name in ("inputs", "weights"):
    _check_shape(name, arrays[name], shape)
  if settings.spec.packs_documents or "documents" in arrays:
    numbers = arrays.get("documents", jnp.ones(shape, jnp.int32))
    arrays["documents"] = documents(settings, numbers, shape)
  if first and first["targets"].shape != shape:
    raise UserError(
      f"a batch of shape {shape} follows one of {first['targets'].shape}; all"
      " must have the same shape"
    )
  return arrays


def array(name: str, value: Any) -> Any:
  """An array of the host or, if it already is there, of the device."""
  if isinstance(value, jax.Array):
    return value
  try:
    found = np.asarray(value)
  except ValueError:  # Rows of several lengths.
    found = np.asarray(None)
  if found.dtype != bool and not jnp.issubdtype(found.dtype, jnp.number):
    said = " ".join(repr(value).split())
    raise UserError(f"{name} is not an array of numbers: {said:.80}")
  return found


def _integers(name: str, value: Any) -> Any:
  """An integer array [B, T]; raises UserError if it is another one."""
  found = array(name, value)
  if found.ndim != 2 or not jnp.issubdtype(found.dtype, jnp.integer):
    raise UserError(
      f"{name} of shape {found.shape} and dtype {found.dtype} are invalid:"
      " expected integer ids [B, T]"
    )
  return found


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
  """Raises UserError unless the array has the shape of the tokens."""
  if array.shape != shape:
    raise UserError(f"{name} of shape {array.shape} for tokens of {shape}")
