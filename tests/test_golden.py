"""One training step of every family, against numbers that are kept.

After a change that is meant to move them:

  PYTHONPATH=.:tests python -c "import conftest, test_golden as t; t.write()"
"""

import functools
import json

import jax
import numpy as np
from tests_support import (
  ROOT,
  SMOKE,
  by_size,
  crossing,
  load_config,
  make_datasets,
)

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import pipeline

FILE = ROOT / "tests" / "golden" / "one_step.json"
CASES = {
  **SMOKE,
  # Tokens that stop at different steps, some of them before the last one.
  "utm_halting": (
    "sudoku_utm",
    "smoke,model.router_bias=0.55,model.ponder_weight=0.1",
  ),
}
# Another CPU or compiler rounds by less, a wrong term moves more.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def one_step(name):
  """Metrics of the first step on one device, numbers or lists by name."""
  settings = config_lib.resolve(load_config(*CASES[name]))
  program = program_lib.make_program(settings, jax.devices()[:1])
  dataset = make_datasets(settings)["train"]
  batch = next(pipeline.iterate(dataset.batches, num_threads=0))
  batches = sharding.put_batch(
    program.mesh,
    jax.tree.map(lambda x: x[None], batch),
    settings.run.batch_size,
    stacked=True,
  )
  state = program.init(jax.random.key(0))
  _, metrics = program.train(state, batches, {})
  return {key: np.asarray(x[0]).tolist() for key, x in metrics.items()}


@functools.cache
def golden():
  return json.loads(FILE.read_text())


@crossing("name", by_size(CASES))
def test_one_step(name):
  expected, found = golden()[name], one_step(name)
  assert found.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_allclose(found[key], value, **TOLERANCE, err_msg=key)


def test_the_numbers_are_of_what_they_are_for():
  """Families differ; UTM has memory; tokens stop early, and others go on."""
  assert golden().keys() == CASES.keys()
  assert len({case["loss"] for case in golden().values()}) == len(CASES)
  halting = golden()["utm_halting"]
  assert any(0.05 < running < 0.95 for running in halting["running"])
  assert "ponder_steps_memory" in halting


def write():
  """Replaces the numbers."""
  FILE.parent.mkdir(exist_ok=True)
  found = {name: one_step(name) for name in sorted(CASES)}
  FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
