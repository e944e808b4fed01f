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


def setting(name: str, value: Any) -> Any:
  """A setting's value as a config has it: paths are text, joined by commas."""
  is_list = isinstance(value, list | tuple) and name.endswith("_files")
  paths = [str(x) for x in value] if is_list else []
  if isinstance(value, os.PathLike):
    paths = [str(value)]
  for path in paths:
    if "," in path and name.endswith("_files"):
      raise UserError(f"{name}: {path!r} has a comma, which separates files")
  return ",".join(paths) if paths else value


def loops(settings: config_lib.Settings, given: Any, default: int) -> int:
  """The number of loops to run; raises UserError unless the model can."""
  number = integer("num_loops", default if given is None else given, 1)
  config_lib.check_loops(settings, number, f"num_loops={number}")
  return number


def ids(settings: config_lib.Settings, name: str, given: Any) -> Array:
  """Token ids [B, T]; raises UserError if the model lacks them."""
  found = _integers(name, given)
  spec = settings.spec
  if settings.reads_whole_rows and found.shape[1] != spec.sequence_length:
    raise UserError(
      f"{name}: {settings.model_name!r} expects rows of {spec.sequence_length}"
      f" tokens, not {found.shape[1]}"
    )
  if found.size and not isinstance(found, jax.core.Tracer):
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= spec.vocab_size:
      hint = ""
      if name == "targets" and low < 0:
        hint = "; to omit a target, give it weight 0 in weights, f32 [B, T]"
      raise UserError(
        f"{name}: ids from {low} to {high} are not in [0, {spec.vocab_size})"
        + hint
      )
  return jnp.asarray(found, jnp.int32)


def documents(
  settings: config_lib.Settings, given: Any, shape: tuple[int, ...]
) -> Array:
  """Numbers of documents, i32 [B, T], see `TaskSpec.packs_documents`.

  Raises:
    UserError: they are not of this shape, or rows of the task have only one.
  """
  if not settings.spec.packs_documents:
    raise UserError(
      "documents has no effect: a row of the task"
      f" {settings.plain['task']['name']!r} is one document"
    )
  found = _integers("documents", given)
  _check_shape("documents", found, shape)
  return jnp.asarray(found, jnp.int32)


def batch(
  settings: config_lib.Settings,
  given: Batch,
  first: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """A batch with all that a loss reads, of the same shapes as the first."""
  if not isinstance(given, Mapping):
    if isinstance(given, str) or len(given) != 2:
      raise UserError("a batch is (inputs, targets), or a dict that has them")
    given = dict(zip(("inputs", "targets"), given, strict=True))
  found = {}
  for name in ("inputs", "targets"):
    if name not in given:
      raise UserError(f"a batch needs {name!r}, token ids [B, T]")
    found[name] = ids(settings, name, given[name])
  found |= {k: jnp.asarray(x) for k, x in given.items() if k not in found}
  shape = found["targets"].shape
  found.setdefault("weights", jnp.ones(shape))
  found["weights"] = found["weights"].astype(jnp.float32)
  for name in ("inputs", "weights"):
    _check_shape(name, found[name], shape)
  if settings.spec.packs_documents or "documents" in found:
    one = jnp.ones(shape, jnp.int32)
    found["documents"] = documents(settings, found.get("documents", one), shape)
  if first and first["targets"].shape != shape:
    raise UserError(
      f"a batch of shape {shape} after one of {first['targets'].shape}"
    )
  return found


def _integers(name: str, given: Any) -> Any:
  """An integer array [B, T]; raises UserError if it is another one."""
  found = given if isinstance(given, jax.Array) else np.asarray(given)
  if found.ndim != 2 or not jnp.issubdtype(found.dtype, jnp.integer):
    raise UserError(
      f"{name} of shape {found.shape} and dtype {found.dtype} are invalid:"
      " expected integer ids [B, T]"
    )
  return found


def _check_shape(name: str, array: Any, shape: tuple[int, ...]) -> None:
  """Raises UserError unless the array has the shape of the tokens."""
  if array.shape != shape:
    raise UserError(f"{name} of shape {array.shape} beside tokens of {shape}")
