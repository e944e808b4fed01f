"""Greedy continuations of a model and of its teacher."""

import types
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.analysis import agreement


def test_what_is_shared_ends_with_the_first_difference():
  assert agreement.shared_length([1, 2, 3], [1, 2, 3]) == 3
  assert agreement.shared_length([1, 2, 3], [1, 5, 3]) == 1
  assert agreement.shared_length([1, 2, 3], [5, 2, 3]) == 0


def params_of(settings, seed):
  model = settings.family.Model(
    settings.model, settings.spec, settings.loop, rngs=nnx.Rngs(params=seed)
  )
  return nnx.to_pure_dict(nnx.state(model))


def test_a_model_writes_with_the_loops_of_its_evaluation(monkeypatch):
  model, teacher = (
    config_lib.resolve(load_config("lm_looped", f"smoke,{changes}"))
    for changes in ("model.num_loops=2,eval.num_loops=3", "model.num_loops=2")
  )
  engine = mock.Mock()
  engine.return_value.generate.side_effect = lambda requests: (
    [[]] * len(requests)
  )
  monkeypatch.setattr(agreement, "Engine", engine)
  batch = {"inputs": np.ones((2, 8), int), "valid": np.ones(2, bool)}
  agreement.measure(
    types.SimpleNamespace(settings=model, teacher=teacher),
    {},
    {},
    types.SimpleNamespace(batches=[batch]),
  )
  loops = [call.kwargs["num_loops"] for call in engine.call_args_list]
  assert loops == [3, 2]


@pytest.mark.long
def test_a_model_agrees_with_a_teacher_that_it_is(monkeypatch):
  """With one loop MELT is the looped model; with other parameters it is not."""
  monkeypatch.setattr(agreement, "_NUM_PROMPTS", 4)
  base = "smoke,model.num_loops=1,model.init_std=0.5"
  taught, teacher = (
    config_lib.resolve(load_config("lm_melt", f"{base},{change}"))
    for change in ("model.gate=last,optim.rates=()", "model.name=looped")
  )
  program = program_lib.make_program(taught, jax.devices()[:1], teacher=teacher)
  dataset = train.make_datasets(taught, program.mesh, ("test",))["test"]
  teacher_params = params_of(teacher, 0)
  same = agreement.measure(program, teacher_params, teacher_params, dataset)
  assert same == {"agreement": 1.0, "agreement/standard_error": 0.0}
  other = agreement.measure(
    program, params_of(teacher, 1), teacher_params, dataset
  )
  assert other["agreement"] < 0.5
  alone = program._replace(teacher=None)
  assert agreement.measure(alone, teacher_params, {}, dataset) == {}
