"""Estimates of a run's time on this machine."""

import jax.numpy as jnp
import pytest
from tests_support import load_config

from loopjax import config as config_lib
from loopjax.run import durations, machine


@pytest.mark.parametrize(
  ("seconds", "said"),
  [
    (0.2, "a few seconds"),
    (10.0, "10 s"),
    (119.0, "119 s"),
    (120.0, "2 minutes"),
    (7199.0, "120 minutes"),
    (9001.0, "2.5 hours"),
    (63 * 86_400.0, "63 days"),
    (1e9 * 365 * 86_400.0, "1,000,000,000 years"),
  ],
)
def test_durations_are_as_people_say_them(seconds, said):
  assert durations.text(seconds) == said


@pytest.fixture
def two_cores(monkeypatch):
  monkeypatch.setattr(machine, "matrix_rate", lambda: 160e9)


@pytest.mark.parametrize(
  ("preset", "low", "high"),
  [("tiny", 180, 300), ("paper", 30 * 86_400, 120 * 86_400)],
)
def test_a_prediction_is_of_the_right_size(two_cores, preset, low, high):
  """tiny was measured: 4 minutes on two cores."""
  settings = config_lib.resolve(load_config("sudoku_utm", preset))
  run = settings.training_flops, settings.model.width
  assert low < machine.training_seconds(*run) < high
  assert "160 GFLOP/s" in machine.prediction(*run)


def test_half_the_steps_take_half_the_time(two_cores):
  runs = [
    config_lib.resolve(load_config("sudoku_utm", f"run.num_steps={steps}"))
    for steps in (2000, 1000)
  ]
  seconds = [
    machine.training_seconds(run.training_flops, run.model.width)
    for run in runs
  ]
  assert seconds[0] == 2 * seconds[1]


def test_the_probe_finds_a_rate_and_keeps_it():
  rate = machine.matrix_rate()
  assert 1e8 < rate < 1e17
  assert machine.matrix_rate() == rate


def test_the_first_calls_correct_it(monkeypatch):
  times, said = iter([10.0, 10.5, 12.0, 99.0]), []
  monkeypatch.setattr(machine.time, "perf_counter", lambda: next(times))
  calls = machine.FirstCalls(2600, said.append)
  calls.after(610, jnp.ones(()))  # Warm-up.
  calls.after(620, jnp.ones(()))
  assert not said  # Half a second is too short.
  calls.after(630, jnp.ones(()))
  calls.after(640, jnp.ones(()))
  assert said == ["10 steps per second; 3 minutes left"]
  assert next(times) == 99.0  # Does not wait for later calls.
