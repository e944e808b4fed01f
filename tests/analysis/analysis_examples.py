"""Small runs shared by the tests of the analyses."""

import numpy as np
from flax import nnx

from loopjax import config as config_lib
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.data import pipeline
from loopjax.types import Dataset

# A 4x4 solution, and masks of blanks: the first puzzle has the fewest.
_ANSWER = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1])


_MODELS = {  # Small configs by family.
  "utm": {"num_memory_tokens": 2, "num_loops": 3},
  "adaptive": {
    "num_layers": 2, "num_loops": 3, "num_local_slots": 6,
    "num_global_slots": 4,
  },
  "looped": {"num_layers": 1, "num_loops": 3},
  "melt": {
    "num_layers": 2, "num_loops": 3, "mlp": "gelu", "distill": "none",
    "chunk_size": 1, "exit_gate": "unused", "precision": "float32",
    "init_std": 0.3, "rope_base": 1e4,
  },
  "sleep": {
    "num_layers": 1, "num_memory_layers": 1, "num_memory_heads": 2,
    "key_width": 8, "value_width": 8, "window": 8, "num_loops": 2,
  },
}  # fmt: skip


def make_settings(family="utm", **overrides) -> config_lib.Settings:
  """Settings of a tiny model on 4x4 boards; "model__width=8" overrides."""
  config = config_lib.make(family, "sudoku")
  config.lock()
  values = {
    "task.box_rows": 2,
    "task.box_cols": 2,
    "model.width": 16,
    "model.num_heads": 2,
    **{f"model.{key}": value for key, value in _MODELS[family].items()},
    "optim.warmup_steps": 1,
    "eval.batch_size": 8,
    "eval.depth_factor": 2,
    "eval.depth_examples": 16,
    **{key.replace("__", "."): value for key, value in overrides.items()},
  }
  if not values["eval.depth_factor"]:
    del values["eval.depth_examples"]
  config_lib.override(config, values)
  return config_lib.resolve(config)


def make_model(settings: config_lib.Settings):
  """An untrained model, (graphdef, params)."""
  model = settings.family.Model(
    settings.model,
    settings.task_module.spec(settings.task),
    settings.loop,
    rngs=nnx.Rngs(params=0),
  )
  graphdef, state = nnx.split(model)
  return graphdef, nnx.to_pure_dict(state)


def make_dataset(num_examples: int = 20, batch_size: int = 8) -> Dataset:
  """Relabelled copies of one puzzle with 4 to 11 blanks, easy ones first."""
  rng = np.random.default_rng(0)
  digits = rng.permuted(np.tile(np.arange(1, 5), (num_examples, 1)), axis=1)
  answers = digits[:, _ANSWER - 1]
  blanks = np.linspace(4, 11, num_examples).astype(int)
  order = rng.permuted(np.tile(np.arange(16), (num_examples, 1)), axis=1)
  questions = np.where(order < blanks[:, None], 0, answers)

  def make_batch(rows, positions):
    del positions
    return {
      "inputs": questions[rows].astype(np.int32) + 1,
      "targets": answers[rows].astype(np.int32) + 1,
      "weights": np.ones((len(rows), 16), np.float32),
      "group/rating": (blanks[rows] > 8).astype(np.int32),
      "group/source": np.zeros(len(rows), np.int32),
      "row": rows,
    }

  return Dataset(
    batches=pipeline.evaluation_batches(make_batch, num_examples, batch_size),
    groups={"rating": ("0", "1"), "source": ("test",)},
    facts={},
  )


def evaluate(directory, family="utm", rows=(), change=None, **overrides):
  """An untrained, possibly modified model with the inputs of its figures."""
  settings = make_settings(family, **overrides)
  graphdef, params = make_model(settings)
  if change:
    change(params)
  return evaluated_lib.evaluate_model(
    settings, graphdef, params, make_dataset(), list(rows), directory
  )


def sampled(directory, family="utm", change=None, **overrides):
  """An untrained model and 20 unseen boards."""
  sizes = {"eval__depth_examples": 20, "eval__batch_size": 20}
  settings = make_settings(family, **{**sizes, **overrides})
  graphdef, params = make_model(settings)
  if change:
    change(params)
  batch = evaluated_lib.sample(make_dataset(20, 20), 20)
  return evaluated_lib.EvaluatedModel(
    settings=settings,
    graphdef=graphdef,
    params=params,
    spec=settings.spec,
    num_memory=getattr(settings.model, "num_memory_tokens", 0),
    batch=batch,
    output=None,
    forward=evaluated_lib.make_forward(settings, graphdef, params, batch),
    rows=[],
    directory=directory,
  )
