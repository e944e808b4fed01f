"""Contracts of families and tasks that the type checker cannot see."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tests_support import SMOKE, load_config, strict_dtypes

from loopjax import config as config_lib
from loopjax import program
from loopjax.data import TASKS
from loopjax.models import MODELS
from loopjax.nn import remat
from loopjax.types import Output


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_has_the_scores_of_its_headline(name):
  task = TASKS[name]
  config = task.Config()
  spec = task.spec(config)
  batch = task.abstract_batch(config, 4)
  shape = (*batch["targets"].shape, spec.vocab_size)
  output = Output(jax.ShapeDtypeStruct(shape, jnp.float32), {}, {}, {}, {})
  with strict_dtypes():
    scores = jax.eval_shape(task.score, output, batch)
  assert task.HEADLINE
  assert set(task.HEADLINE) <= scores.keys()
  assert {value.shape for value in jax.tree.leaves(scores)} == {(4,)}


@pytest.mark.parametrize("name", sorted(SMOKE))
def test_a_family_has_the_metrics_of_its_headline(name):
  settings = config_lib.resolve(load_config(*SMOKE[name]))
  settings = settings._replace(loop=remat.resolve(settings.loop, "cpu"))
  graphdef, params = program.abstract_model(settings)
  batch = settings.task_module.abstract_batch(settings.task, 4)
  batch = {**batch, "mean_weight": jax.ShapeDtypeStruct((), jnp.float32)}
  if settings.family.init_carried:
    batch["carried"] = settings.family.init_carried(
      settings.model, settings.spec, 4
    )

  def metrics_of(params, batch, key):
    model = nnx.merge(graphdef, params)
    return settings.family.loss(model, batch, key, jnp.int32(0), None)[1]

  with strict_dtypes():
    metrics = jax.eval_shape(metrics_of, params, batch, jax.random.key(0))
  assert {*settings.family.headline} <= {"loss", *metrics}  # The step adds it.


def test_models_take_the_arguments_that_their_family_promises():
  """Figures, evaluation and inspection ask the record alone."""
  halting = {}
  for name, family in MODELS.items():
    parameters = inspect.signature(family.Model.__call__).parameters
    assert bool(family.halting_trace) == ("exit_threshold" in parameters)
    assert bool(family.reads_out_every_loop) == ("targets" in parameters)
    if family.halting_trace:
      halting[name] = family.halting_trace
      assert family.halting_trace in family.traces
  assert halting == {"adaptive": "halting"}
