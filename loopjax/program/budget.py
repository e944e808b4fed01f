"""The MLP width that gives models equal size or equal cost.

In every family, parameters and FLOPs are linear in the MLPs' width, and
measurements at two widths determine any other.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.errors import UserError
from loopjax.program import state as state_lib

# Settings -> number of parameters or FLOPs.
Measure = Callable[[config_lib.Settings], float]


def parameters(settings: config_lib.Settings) -> int:
  """Number of parameters, without allocating them."""
  _, params = program_lib.abstract_model(settings)
  return state_lib.num_elements(params)


def flops(settings: config_lib.Settings) -> float:
  """Forward FLOPs of an example, including all loops and the read-out."""
  costs = settings.family.costs(
    settings.model, settings.spec, settings.model.num_loops
  )
  return costs["flops_per_example"][-1]


def mlp_ratio(
  config: ml_collections.ConfigDict,
  target: float,
  measure: Measure = parameters,
  multiple: int = 1,
) -> float:
  """The `model.mlp_ratio` with which a model comes closest to a target.

  Args:
    config: the model's settings; their `mlp_ratio` is ignored.
    target: the target, for example `measure` of another model.
    measure: `parameters` or `flops`.
    multiple: the MLP's width is a multiple of this.
  """
  width = config.model.width

  def amount(features: int) -> float:
    changed = config.copy_and_resolve_references()
    changed.model.mlp_ratio = ratio_of(features, width)
    return measure(config_lib.resolve(changed))

  first, second = amount(multiple), amount(2 * multiple)
  steps = round(1 + (target - first) / (second - first))
  if steps < 1:
    raise UserError(
      f"model.mlp_ratio: no MLP width gives {measure.__name__}={target:,.0f};"
      f" the other parts of the model have {2 * first - second:,.0f}"
    )
  return ratio_of(steps * multiple, width)


def matched(
  config: ml_collections.ConfigDict,
  item: Mapping[str, Any],
  like: Mapping[str, Any],
  measure: Measure = parameters,
  multiple: int = 1,
) -> dict[str, Any]:
  """Overrides with the MLP width that matches another model's size.

  Args:
    config: the settings that both models override.
    item: overrides of the model, to which its `model.mlp_ratio` is added.
    like: overrides of the other model.
    measure, multiple: as in `mlp_ratio`.
  """
  changed, other = (config.copy_and_resolve_references() for _ in range(2))
  config_lib.override(changed, item)
  config_lib.override(other, like)
  target = measure(config_lib.resolve(other))
  ratio = mlp_ratio(changed, target, measure, multiple)
  return {**item, "model.mlp_ratio": ratio}


def ratio_of(features: int, width: int) -> float:
  """A ratio r with floor(r width) = features, despite rounding."""
  ratio = features / width
  return (
    ratio if int(ratio * width) == features else math.nextafter(ratio, math.inf)
  )
