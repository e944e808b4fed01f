"""How a process detects its job."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.errors import UserError
from loopjax.run import processes


@pytest.fixture(autouse=True)
def parsed(monkeypatch):
  for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"):
    monkeypatch.delenv(name, raising=False)


@pytest.fixture
def joined(monkeypatch):
  """The arguments for JAX."""
  calls = []
  monkeypatch.setattr(
    processes.jax.distributed, "initialize", lambda **kw: calls.append(kw)
  )
  return calls


def test_alone_nothing_is_started(joined):
  processes.start()
  assert joined == []


def test_flags_win_over_the_environment(joined, monkeypatch):
  monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "elsewhere:1")
  monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
  processes.start(coordinator_address="here:2")
  (call,) = joined
  assert call["coordinator_address"] == "here:2"
  assert (call["num_processes"], call["process_id"]) == (4, 3)
  assert call["heartbeat_timeout_seconds"] <= 30


def test_a_scheduler_that_started_several_tasks_is_noticed(joined, monkeypatch):
  monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
  processes.start()
  assert "coordinator_address" not in joined[0]  # JAX queries SLURM.


@pytest.mark.parametrize(
  ("given", "environment", "message"),
  [
    ({"num_processes": 2}, {}, "need --coordinator_address"),
    ({"coordinator_address": "a:1"}, {}, "needs --num_processes"),
    (
      {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
      {},
      "smaller --process_id; got 2 and 2",
    ),
    (
      {"coordinator_address": "a:1"},
      {"JAX_NUM_PROCESSES": "two"},
      "JAX_NUM_PROCESSES='two' is not a number",
    ),
  ],
)
def test_contradictions_are_named(
  joined, monkeypatch, given, environment, message
):
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(UserError, match=message):
    processes.start(**given)
  assert joined == []


def test_alone_a_process_agrees_with_itself():
  assert processes.from_process_0(lambda: {"a": 1}) == {"a": 1}
  assert processes.gather_messages("x") == "x"
  whole = processes.gather_array(jnp.arange(3))
  np.testing.assert_array_equal(whole, [0, 1, 2])
