"""Ten training steps of every family, against golden numbers; defaults.

Metrics are from the first step; summaries of the parameters, their average and
the optimizer's moments are from the last. After an intended change of all
numbers (of one family: `t.write("looped")`):

  PYTHONPATH=.:tests python -c "import conftest, test_golden as t; t.write()"

After an intended change of a default, t.write_defaults().
"""

import functools
import itertools
import json

import jax
import numpy as np
import optax
import pytest
from tests_support import (
  ROOT,
  SMOKE,
  by_size,
  load_config,
  long_case,
  stacked,
  train_batches,
)

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data import TASKS
from loopjax.models import MODELS
from loopjax.optim import parameters

FILE = ROOT / "tests" / "golden" / "ten_steps.json"
DEFAULTS = FILE.with_name("defaults.json")
CASES = {
  **SMOKE,
  # Tokens that stop at different steps, some before the last.
  "utm_halting": (
    "sudoku_utm",
    "smoke,model.router_bias=0.55,model.ponder_weight=0.1",
  ),
}
STEPS = 10
# Each of these changes some number by at least ten tolerances, see below.
SETTINGS = {
  "optim.learning_rate": 0.01,
  "optim.final_learning_rate": 0.002,
  "optim.schedule": "cosine",
  "optim.warmup_steps": 3,
  "optim.weight_decay": 3.0,
  "optim.decay": "tables",
  "optim.clip_norm": 0.5,
  "optim.ema_decay": 0.5,
  # Ignores gradients that are only rounding errors.
  "optim.eps": 1e-3,
  "run.steps_per_call": STEPS,
}
# Rounding of other CPUs and compilers is smaller, a wrong term larger.
FIRST = {"rtol": 1e-4, "atol": 1e-6}
LATER = {"rtol": 2e-3, "atol": 1e-6}


def defaults():
  """{section: {field: default}}, of models and tasks by name."""
  found = {}
  for model, task in itertools.zip_longest(MODELS, TASKS, fillvalue="text"):
    sections = config_lib.make(model, task).to_dict()
    for section in ("model", "task"):
      fields = sections.pop(section)
      found[f"{section}.{fields['name']}"] = fields
    found |= sections
  return json.loads(json.dumps(found))


def write_defaults():
  lines = (f'"{x}": {json.dumps(one)}' for x, one in sorted(defaults().items()))
  DEFAULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_defaults_stay():
  """Another one is another experiment by the same command."""
  now = defaults()
  changed = [
    f"{section}.{field} was {before!r}, is {now[section][field]!r}"
    for section, fields in json.loads(DEFAULTS.read_text()).items()
    for field, before in fields.items()
    if now.get(section, {}).get(field, before) != before
  ]
  assert not changed


def ten_steps(name, **changes):
  """Results of ten steps on one device, numbers or lists by name."""
  config = load_config(*CASES[name])
  config_lib.override(config, {**SETTINGS, **changes})
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[:1])
  batches = stacked(program, train_batches(settings, STEPS))
  state = program.init(jax.random.key(0))
  before = jax.device_get(state.params)
  state, metrics = program.train(state, batches, {})
  state, metrics = jax.device_get((state, metrics))
  first = {key: np.asarray(x[0]).tolist() for key, x in metrics.items()}
  return {
    "first": first,
    "last": {
      "loss": float(metrics["loss"][-1]),
      **moved(before, state.params),
      "average": norm(jax.tree.map(np.subtract, state.ema, before)),
      "mu": norm(optax.tree.get_all_with_path(state.opt_state, "mu")),
      "nu": norm(optax.tree.get_all_with_path(state.opt_state, "nu")),
    },
  }


def norm(tree):
  """The Euclidean norm of all numbers."""
  leaves = [np.float64(x) for x in jax.tree.leaves(tree) if np.ndim(x)]
  return float(np.sqrt(sum(np.sum(x**2) for x in leaves)))


def moved(before, after):
  """How far parameters have moved, by their row of the parameter table."""
  found = {}
  for row, x, y in zip(
    *map(jax.tree.leaves, (parameters.rows(after), before, after)), strict=True
  ):
    found.setdefault(row.pattern, []).append(np.float64(y) - x)
  return {f"moved/{pattern}": norm(x) for pattern, x in found.items()}


@functools.cache
def golden():
  return json.loads(FILE.read_text())


def largest(found, expected, tolerance):
  """(name of the number with the largest error, error in tolerances)."""
  assert found.keys() == expected.keys()
  off = {
    key: np.max(
      np.abs(np.subtract(found[key], value))
      / (tolerance["atol"] + tolerance["rtol"] * np.abs(value))
    )
    for key, value in expected.items()
  }
  return max(off.items(), key=lambda item: item[1])


# Single documents, segments, and halting; fifteen seconds together.
AT_ONCE = ("looped", "urm", "utm")


@pytest.mark.parametrize("name", [
  name if name in AT_ONCE else long_case(name) for name in by_size(CASES)
])  # fmt: skip
def test_ten_steps(name):
  expected, found = golden()[name], ten_steps(name)
  for part, tolerance in (("first", FIRST), ("last", LATER)):
    which, off = largest(found[part], expected[part], tolerance)
    assert off <= 1, which


# Another value of each setting; without the average there is none to check.
OTHER = {
  "optim.learning_rate": 0.011, "optim.final_learning_rate": 0.006,
  "optim.schedule": "linear", "optim.warmup_steps": 4,
  "optim.weight_decay": 1.5, "optim.decay": "matrices",
  "optim.clip_norm": 0.0, "optim.ema_decay": 0.1, "optim.eps": 2e-3,
}  # fmt: skip


@pytest.mark.manual
@pytest.mark.parametrize("setting", OTHER)
def test_no_setting_is_without_effect(setting):
  """Each changes a number by ten times its tolerance."""
  found, expected = ten_steps("looped", **{setting: OTHER[setting]}), golden()
  assert largest(found["first"], expected["looped"]["first"], FIRST)[1] <= 1
  assert largest(found["last"], expected["looped"]["last"], LATER)[1] > 10


def test_the_numbers_are_of_what_they_are_for():
  """Families differ; UTM has memory; some tokens stop early, others do not."""
  assert golden().keys() == CASES.keys()
  first = {name: case["first"] for name, case in golden().items()}
  assert len({case["loss"] for case in first.values()}) == len(CASES)
  halting = first["utm_halting"]
  assert any(0.05 < running < 0.95 for running in halting["running"])
  assert "ponder_steps_memory" in halting
  assert {*SETTINGS} == {*OTHER, "run.steps_per_call"}
  for case in golden().values():
    assert case["last"]["average"] > 0 and case["last"]["mu"] > 0


def write(*names):
  """Replaces the numbers of these cases, or of all."""
  found = {name: ten_steps(name) for name in names or CASES}
  found = {**(golden() if names else {}), **found}
  FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
