"""What a config would build, without building it."""

import math
from typing import Any

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib


def describe(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Resolved config, parameters and costs, as JSON-ready data.

  Returns:
    "config"; "parameters" and "parameters_by_module"; "flops_per_example":
    forward floating-point operations (a multiply-add is two) up to and with
    each loop; "cache_bytes_per_token" of generation.
  """
  settings = config_lib.resolve(config)
  _, params = program_lib.abstract_model(settings)
  return {
    "config": settings.plain,
    "parameters": _size(params),
    "parameters_by_module": {k: _size(v) for k, v in sorted(params.items())},
    **settings.family.costs(settings.model, settings.spec, settings.eval_loops),
  }


def _size(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
