"""Describes the model and costs of a config without building it."""

import functools
import math
from typing import Any

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.optim import chain
from loopjax.program import step
from loopjax.program import teacher as teacher_lib


def describe(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Resolved config, parameters and costs, as JSON-ready data.

  Returns:
    "config"; "parameters" and "parameters_by_module"; "state_bytes", of the
    parameters, their average, the optimizer state and the family's carried
    state; "flops_per_example" and "flops_per_token", forward floating-point
    operations (a multiply-add counts as two) up to and including each loop;
    for generation, "cache_bytes_per_token" and "cache_bytes_per_row", the
    latter independent of the number of tokens. With a teacher, "teacher": its
    "parameters" and "flops_per_example".

  Raises:
    UserError: the config or the teacher is invalid.
  """
  settings = config_lib.resolve(config)
  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  state = jax.eval_shape(
    functools.partial(program_lib.fresh_state, settings, tx), jax.random.key(0)
  )
  costs = settings.family.costs(
    settings.model, settings.spec, settings.eval_loops
  )
  by_token, by_row = program_lib.cache_bytes(settings)
  return {
    "config": settings.plain,
    "parameters": _size(state.params),
    "parameters_by_module": {
      k: _size(v) for k, v in sorted(state.params.items())
    },
    "state_bytes": sum(
      leaf.size * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(step.learned(state))
    ),
    **costs,
    "flops_per_token": [
      flops / settings.spec.sequence_length
      for flops in costs["flops_per_example"]
    ],
    "cache_bytes_per_token": by_token,
    "cache_bytes_per_row": by_row,
    **_teacher(settings),
  }


def _teacher(settings: config_lib.Settings) -> dict[str, Any]:
  """The entry "teacher"; empty without a teacher."""
  teacher = teacher_lib.read(settings)
  if teacher is None:
    return {}
  _, params = program_lib.abstract_model(teacher)
  costs = teacher.family.costs(
    teacher.model, teacher.spec, teacher.model.num_loops
  )
  facts = {
    "parameters": _size(params),
    "flops_per_example": costs["flops_per_example"],
  }
  return {"teacher": facts}


def _size(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
