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
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.analysis import text as text_lib
from loopjax.generate import engine as engine_lib


def test_what_is_shared_ends_with_the_first_difference():
  assert text_lib.shared_length([1, 2, 3], [1, 2, 3]) == 3
  assert text_lib.shared_length([1, 2, 3], [1, 5, 3]) == 1
  assert text_lib.shared_length([1, 2, 3], [5, 2, 3]) == 0


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
  monkeypatch.setattr(engine_lib, "Engine", engine)
  batch = {"inputs": np.ones((2, 8), int), "valid": np.ones(2, bool)}
  text_lib.agreement(
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
  monkeypatch.setattr(text_lib, "_NUM_PROMPTS", 4)
  base = "smoke,model.num_loops=1,model.init_std=0.5"
  taught, teacher = (
    config_lib.resolve(load_config("lm_melt", f"{base},{change}"))
    for change in ("model.gate=last,optim.rates=()", "model.name=looped")
  )
  program = program_lib.make_program(taught, jax.devices()[:1], teacher=teacher)
  dataset = train.make_datasets(taught, program.mesh, ("test",))["test"]
  teacher_params = params_of(teacher, 0)
  same = text_lib.agreement(program, teacher_params, teacher_params, dataset)
  assert same == {"agreement": 1.0, "agreement/standard_error": 0.0}
  other = text_lib.agreement(
    program, params_of(teacher, 1), teacher_params, dataset
  )
  assert other["agreement"] < 0.5
  alone = program._replace(teacher=None)
  assert text_lib.agreement(alone, teacher_params, {}, dataset) == {}


def test_the_first_document_of_a_row_is_divided_in_the_middle():
  batch = {
    "inputs": np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9],
                        [7, 1, 2, 3, 4, 5], [9, 9, 9, 9, 9, 9]]),
    "documents": np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0],
                           [1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]]),
  }  # fmt: skip
  expected = [((1, 2), (3, 4, 5, 6)), ((1,), (2, 3)), ((7,), ())]
  assert evaluated_lib.halves(batch, 2, 9) == expected
  del batch["documents"]
  expected = [((1, 2, 3), (4, 5, 6)), ((1,), (2, 3)), ((7, 1, 2), (3, 4, 5))]
  assert evaluated_lib.halves(batch, 3, 9) == expected
