"""The settings that a model takes from the trained one that it starts from.

Imported transformers and LoopLMs are models of the family `looped`; with one
loop it is a transformer.
"""

import dataclasses
from typing import Any

from loopjax.errors import UserError
from loopjax.models import looped

# Settings of the loss, which are not taken.
_OF_TRAINING = ("dropout", "entropy_weight")


def check(source: Any, config_type: type) -> None:
  """Raises UserError for a model whose computation a family does not have.

  Args:
    source: the config of the trained model.
    config_type: the family's `Config`.
  """
  if not isinstance(source, looped.Config):
    raise UserError("its model is not of the family 'looped'")
  names = {field.name for field in dataclasses.fields(config_type)}
  for field in dataclasses.fields(source):
    value = getattr(source, field.name)
    if field.name in names or field.name in _OF_TRAINING:
      continue
    if field.name == "loop_norm" and source.num_loops == 1:
      continue  # Both are the norm before the read-out.
    if value != field.default:
      raise UserError(
        f"its {field.name} is {value!r}, expected {field.default!r}: this"
        " family has no such setting"
      )


def settings(source: Any, config_type: type) -> dict[str, Any]:
  """The settings that a model takes from the trained one it starts from.

  A transformer has none about loops.

  Args:
    source: the config of the trained model.
    config_type: the family's `Config`.
  """
  check(source, config_type)
  names = {field.name for field in dataclasses.fields(config_type)}
  values = {
    name: value
    for name, value in dataclasses.asdict(source).items()
    if name in names and name not in _OF_TRAINING
  }
  if source.num_loops == 1:
    for name in ("num_loops", "loop_norm"):
      values.pop(name, None)
  values["exit_gate"] = "none" if source.exit_gate == "none" else "unused"
  return values
