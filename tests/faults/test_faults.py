"""Faults injected into real runs; `benchmarks/fault_drill.py` has more.

`.ci/run` runs these tests, `pytest -m manual` the ones that take minutes.
"""

import drills
import pytest

# Each starts several processes, which compile on two shared cores.
pytestmark = [pytest.mark.timeout(580), pytest.mark.long]


@pytest.fixture(autouse=True)
def _nothing_goes_on():
  yield
  drills.end_all()


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
  """An undisturbed run."""
  workdir = tmp_path_factory.mktemp("reference") / "run"
  drills.run(workdir)
  assert drills.summary(workdir)["status"] == "completed"
  return workdir


def test_killed_and_started_again(tmp_path, never_killed):
  assert "bit-identical" in drills.sigkill(tmp_path, never_killed, kills=1)


@pytest.mark.manual
def test_killed_twenty_times(tmp_path, never_killed):
  said = drills.sigkill(tmp_path, never_killed, kills=20, seed=1)
  assert "bit-identical" in said


@pytest.mark.manual  # tests/run/test_preemption.py stops runs everywhere.
def test_asked_to_stop(tmp_path, never_killed):
  assert "status 4" in drills.sigterm(tmp_path, never_killed)


@pytest.mark.manual  # tests/run/test_checkpoint.py damages them one by one.
@pytest.mark.parametrize(
  ("how", "seed"),
  [
    (drills.truncate, 0),
    (drills.flip, 4),
    (drills.empty, 0),
    (drills.edit_record, 0),
  ],
)
def test_a_damaged_checkpoint_is_not_loaded(tmp_path, never_killed, how, seed):
  assert drills.damage(tmp_path, never_killed, how, seed)


@pytest.mark.manual
def test_nothing_intact_is_refused(tmp_path, never_killed):
  assert "cannot resume: all checkpoints" in drills.damage_all(
    tmp_path, never_killed
  )


# tests/commands/test_main.py has the line, tests/run/test_checkpoint.py what
# an incomplete save leaves.
@pytest.mark.manual
def test_a_full_disk(tmp_path, never_killed):
  try:
    line = drills.disk_full(tmp_path, never_killed)
  except OSError as error:  # Mounting needs privileges.
    pytest.skip(f"no file system of its own: {error}")
  assert "No space left on device" in line


# tests/train/test_train.py has both within one process.
@pytest.mark.manual
def test_a_directory_that_cannot_be_written(tmp_path):
  assert "cannot be written" in drills.read_only(tmp_path)


@pytest.mark.manual
def test_a_second_run_is_refused(tmp_path):
  assert "another run" in drills.second_run(tmp_path)


def test_two_processes_and_one_of_them_killed(tmp_path, never_killed):
  """As a scheduler has it, which starts both again."""
  said = drills.processes(tmp_path, never_killed, 2, then=2)
  assert "went on after step" in said


@pytest.mark.manual
@pytest.mark.parametrize(("count", "then"), [(2, 1), (4, 2), (2, 4)])
def test_more_processes(tmp_path, never_killed, count, then):
  said = drills.processes(tmp_path, never_killed, count, then)
  assert "same losses" in said


@pytest.mark.manual
def test_one_of_two_processes_is_asked_to_stop(tmp_path, never_killed):
  assert "one went on" in drills.group_sigterm(tmp_path, never_killed, 2)
