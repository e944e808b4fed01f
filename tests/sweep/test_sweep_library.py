"""`loopjax.run_sweep`: the items that it runs, and the table it returns."""

import threading

import pytest
from tests_support import ROOT, load_config, namespace

import loopjax
from loopjax import config as config_lib
from loopjax.commands import command_line
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib
from loopjax.sweep import runner as runner_lib

CONFIG = f"{ROOT}/configs/sudoku_utm.py:smoke"
LOOPS = [{"model.num_loops": 2}, {"model.num_loops": 3}]


@pytest.fixture
def ran(monkeypatch):
  """Stands in for the runs: the score is 1 over loops plus the seed."""
  commands = []

  def run(command, log, stop, cores):
    commands.append(command)
    parser = command_line.ConfigParser("main", "")
    options = parser.parse_config(command[command.index("train") + 1 :])
    directory = log.parent / command[-1].rpartition("/")[2]
    directory.mkdir()
    config = config_lib.to_dict(options.config)
    workdir_lib.write_json(directory / "config.json", config)
    score = 1 / (config["model"]["num_loops"] + config["run"]["seed"])
    status = "completed" if score < 1 / 2 else "diverged"
    summary = {
      "status": status, "metrics": {"test/exact_match": score}, "steps": 1,
      "parameters": 2, "wall_seconds": 3.0,
    }  # fmt: skip
    workdir_lib.write_json(directory / "summary.json", summary)
    return (0 if status == "completed" else 3), ""

  monkeypatch.setattr(runner_lib, "run_command", run)
  return commands


def test_a_list_is_run_with_each_seed(ran, tmp_path, capsys):
  call = (CONFIG, LOOPS)
  options = {"seeds": (1, 2), "workdir": tmp_path / "mine"}
  found = loopjax.run_sweep(*call, **options, metrics="test/exact_match")
  assert [
    (row["model.num_loops"], row["run.seed"], row["test/exact_match"])
    for row in found
  ] == [(2, 1, 1 / 3), (2, 2, 1 / 4), (3, 1, 1 / 4), (3, 2, 1 / 5)]
  assert {row["state"] for row in found} == {"completed"}
  assert found[0]["run"] == f"{tmp_path}/mine/model.num_loops=2,seed=1"
  said = capsys.readouterr()
  assert said.out.startswith(f"work directory: {tmp_path}/mine\n1/4  model.")
  assert len(ran) == 4 and not said.err
  # It is resumed by the same call; it is a sweep that the report reads.
  assert loopjax.run_sweep(*call, **options)[3]["test/exact_match"] == 1 / 5
  assert len(ran) == 4
  (row, _) = loopjax.table(tmp_path / "mine", rows="model.num_loops")
  assert row["test/exact_match/runs"] == 2
  # The table has this sweep's runs alone.
  assert len(loopjax.run_sweep(CONFIG, LOOPS[:1], **options)) == 2


def test_a_sweep_of_the_config_is_run(ran, tmp_path, monkeypatch, capsys):
  """In the command's own directory; what failed has no score."""
  monkeypatch.chdir(tmp_path)
  config = load_config("sudoku_utm", "smoke")
  items = namespace("sudoku_utm")["sweeps"](config)["depth"]
  found = loopjax.run_sweep(f"{CONFIG},model.num_loops=2,run.seed=0", "depth")
  assert len(found) == len(items) == len(ran)
  place = tmp_path / "runs" / "sudoku_utm-smoke,model.num_loops=2,seed=0-depth"
  assert (place / "sweep-depth.json").exists()
  assert {row["state"] for row in found} >= {"completed"}
  manifest = workdir_lib.read_json(place / "sweep-depth.json")
  assert manifest["config"].startswith(CONFIG)
  (row,) = loopjax.run_sweep(CONFIG, LOOPS[:1], seeds=[0], workdir="failing")
  assert row["state"] == "diverged"
  said = capsys.readouterr().err
  assert "failed: model.num_loops=2,seed=0: " in said
  assert "failing/model.num_loops=2,seed=0: diverged; its scores are" in said


def test_jobs_run_at_once(ran, tmp_path, monkeypatch):
  together, run = threading.Barrier(2, timeout=60), runner_lib.run_command

  def both(*arguments):
    together.wait()
    return run(*arguments)

  monkeypatch.setattr(runner_lib, "run_command", both)
  monkeypatch.setattr(runner_lib, "split_cores", lambda jobs: [None] * jobs)
  found = loopjax.run_sweep(CONFIG, LOOPS, seeds=[1], workdir=tmp_path, jobs=2)
  assert len(found) == 2


def test_another_thread_can_run_it(ran, tmp_path):
  """For example a notebook's; only a main thread can handle signals."""
  found = []
  thread = threading.Thread(
    target=lambda: found.extend(
      loopjax.run_sweep(CONFIG, LOOPS, seeds=[1], workdir=tmp_path)
    )
  )
  thread.start()
  thread.join()
  assert len(found) == 2


def test_a_sweep_that_was_stopped_says_so(tmp_path, monkeypatch):
  monkeypatch.setattr(runner_lib, "run_command", lambda *_: (4, ""))
  with pytest.raises(UserError, match="was stopped; the same call resumes it"):
    loopjax.run_sweep(CONFIG, LOOPS, workdir=tmp_path)


@pytest.mark.parametrize(
  ("items", "options", "says"),
  [
    ("dept", {}, "--sweep=dept: no such sweep.*did you mean 'depth'"),
    (LOOPS, {"jobs": 0}, "jobs=0 must be at least 1"),
    ([{"model.num_lops": 2}], {}, "unknown setting 'model.num_lops'"),
    ([{"run.seed": 1}], {"seeds": (1, 2)}, "seeds has no effect: the items"),
    (
      [{}, {"run.init_from": config_lib.WorkdirOf(0)}],
      {"seeds": (1, 2)},
      "seeds: items that start from each other",
    ),
  ],
)
def test_mistakes_of_a_call(ran, tmp_path, items, options, says):
  place = tmp_path / "new"
  with pytest.raises(UserError, match=says):
    loopjax.run_sweep(CONFIG, items, workdir=place, **options)
  assert not ran and not place.exists()


def test_the_folder_of_a_sweep_may_begin_with_the_home(
  ran, tmp_path, monkeypatch
):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.chdir(tmp_path)
  (row, _) = loopjax.run_sweep(CONFIG, LOOPS, workdir="~/mine")
  assert row["run"] == f"{tmp_path}/mine/model.num_loops=2"
  assert not (tmp_path / "~").exists()
