"""Sweeps: directory names, skipping, resuming, failing."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
from tests_support import (
  CONFIGS,
  ROOT,
  command,
  crossing,
  load_config,
  namespace,
  refused,
  smoke,
)

from loopjax import config as config_lib
from loopjax.commands import command_line
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib
from loopjax.sweep import __main__ as sweep_main
from loopjax.sweep import items as items_lib
from loopjax.sweep import runner as runner_lib

PRESETS = ["paper", "gpu", "extreme", "nine", "tiny", "smoke"]


def items_of(name, preset="smoke", common=None):
  sweeps = namespace("sudoku_utm")["sweeps"]
  config = load_config("sudoku_utm", preset)
  config_lib.set_by_user(config, common or {})
  return items_lib.make_items(config, sweeps, name, common or {})


ENDS = {
  0: {"status": "completed", "metrics": {}, "parameters": 1, "steps": 20},
  3: {"status": "diverged", "reason": "loss is not finite at step 7"},
  4: {"status": "preempted"},
}


class Runner:
  """Replaces processes: writes a run's files, or fails."""

  def __init__(self, items, fail=None):
    self.configs = {item.slug: item.config for item in items}
    self.fail = fail or {}
    self.commands = []

  def __call__(self, command, log, stop, cores=None):
    self.commands.append(command)
    directory = log.parent / command[-1].rpartition("/")[2]
    log.write_text("what it said\n")
    status, said = self.fail.get(directory.name, (0, ""))
    if status in (0, 3, 4) and not said:
      directory.mkdir(exist_ok=True)
      config = self.configs[directory.name]
      workdir_lib.write_json(directory / "config.json", config)
      summary = {
        **ENDS[status],
        "metrics": {
          "train/exact_match": 0.75,
          "validation/exact_match": 0.25,
          "validation/exact_match/rating=0": 0.5,
          "test/exact_match": 0.125,
        },
        "wall_seconds": 7.0,
      }
      workdir_lib.write_json(directory / "summary.json", summary)
    return status, said

  @property
  def names(self):
    return [command[-1].rpartition("/")[2] for command in self.commands]


@pytest.fixture
def items():
  return items_of("tradeoff")


def start(monkeypatch, items, tmp_path, fail=None, **options):
  runner = Runner(items, fail)
  monkeypatch.setattr(runner_lib, "run_command", runner)
  failed, status = runner_lib.run_items(
    items, tmp_path, ["--config=c.py:smoke"], **options
  )
  return runner, failed, status


@pytest.mark.parametrize("preset", PRESETS)
def test_an_experiment_has_one_directory(preset, tmp_path):
  """Also if it is an item of several sweeps with the same work directory."""
  sweeps, config = (
    namespace("sudoku_utm")["sweeps"],
    load_config("sudoku_utm", preset),
  )
  by_slug, by_config = {}, {}
  for name in sweeps(config):
    items = items_lib.make_items(config, sweeps, name, {}, tmp_path)
    items_lib.write_manifest(tmp_path, name, "c.py", {}, items)
    for item in items:
      assert by_slug.setdefault(item.slug, item.config) == item.config
      key = json.dumps(item.config, sort_keys=True)
      assert by_config.setdefault(key, item.slug) == item.slug
      assert "/" not in item.slug
      assert len(item.slug) < 200


def loops(config):
  """Items of which one has the config's own value, and are named by it."""
  own = config.model.num_loops
  both = config_lib.axis("model.num_loops", own, own + 1)
  same = [{"model.num_loops": own, "optim.weight_decay": 0.25}]
  return {
    "loops": both,
    "decay": [*same, *config_lib.product(both, [{"optim.weight_decay": 0.5}])],
    "twice": [{}, {"run.seed": config.run.seed}, *both],
  }


def loops_in(workdir, name):
  return items_lib.make_items(smoke(), loops, name, {}, workdir)


def test_an_item_is_named_by_all_that_its_sweep_varies(tmp_path):
  own = smoke().model.num_loops
  assert [item.slug for item in loops_in(tmp_path, "loops")] == [
    f"model.num_loops={own}",
    f"model.num_loops={own + 1}",
  ]
  assert [item.slug for item in loops_in(tmp_path, "decay")] == [
    f"model.num_loops={own},weight_decay=0.25",
    f"model.num_loops={own},weight_decay=0.5",
    f"model.num_loops={own + 1},weight_decay=0.5",
  ]
  # Equal experiments of one sweep are one run.
  assert [item.slug for item in loops_in(tmp_path, "twice")] == [
    *["base"] * 3,
    f"model.num_loops={own + 1}",
  ]

  tiny = [item.slug for item in items_of("memory_curve", "tiny")]
  assert tiny[:2] == [
    "num_memory_tokens=0,seed=0",
    "num_memory_tokens=0,seed=42",
  ]


def test_a_sweep_that_was_started_keeps_its_directories(monkeypatch, tmp_path):
  """Whatever they were called: earlier versions left out the config's value."""
  items = loops_in(tmp_path, "loops")
  before = [items[0]._replace(slug="base"), items[1]]
  items_lib.write_manifest(tmp_path, "loops", "c.py", {}, before)
  start(monkeypatch, before[:1], tmp_path)
  found = loops_in(tmp_path, "loops")
  assert found == before
  runner, _, _ = start(monkeypatch, found, tmp_path)
  assert runner.names == [items[1].slug]
  # Another sweep that has the experiment finds its run as well.
  assert [item.slug for item in loops_in(tmp_path, "twice")][0] == "base"
  path = tmp_path / "sweep-loops.json"
  manifest = workdir_lib.read_json(path)
  for item in manifest["items"]:  # As of a version with fewer settings.
    del item["config"]["eval"]
  workdir_lib.write_json(path, manifest)
  assert loops_in(tmp_path, "loops") == before
  workdir_lib.write_json(path, {"sweep": "loops", "items": [3]})
  with pytest.raises(UserError, match="sweep-loops.json: is not a list of"):
    loops_in(tmp_path, "loops")


def test_items_that_start_from_others_keep_their_directories(tmp_path):
  """Also where the sweep's directory is given by another path."""
  before = [
    item._replace(slug=f"old-{number}")
    for number, item in enumerate(chained(tmp_path))
  ]
  paths = {1: "old-0", 2: "old-1"}
  before = [
    item._replace(
      overrides=item.overrides
      | {k: f"elsewhere/{paths[n]}" for k in item.overrides if "init" in k}
    )
    for n, item in enumerate(before)
  ]
  items_lib.write_manifest(tmp_path, "chain", "c.py", {}, before)
  found = chained(tmp_path)
  assert [item.slug for item in found] == ["old-0", "old-1", "old-2"]
  assert found[2].overrides["run.init_from"] == str(tmp_path / "old-1")


def slug_of(**overrides):
  overrides = {k.replace("__", "."): v for k, v in overrides.items()}
  config = smoke()
  base = config_lib.to_dict(config)
  config_lib.override(config, overrides)
  return items_lib.slug(base, config_lib.to_dict(config), list(overrides))


def test_different_changes_have_different_slugs():
  slugs = [
    slug_of(),
    slug_of(run__seed=1),
    slug_of(run__batch_size=8),
    slug_of(eval__batch_size=8),
    slug_of(task__train_csv="a/b"),
    slug_of(task__train_csv="a b"),
    slug_of(task__train_csv="a,seed=1"),
    slug_of(task__train_csv="a", run__seed=1),
    slug_of(task__train_csv="a" * 300),
    slug_of(task__train_csv="a" * 301),
  ]
  assert len(set(slugs)) == len(slugs)
  assert slugs[0] == "base"
  assert slugs[2] == "run.batch_size=8"
  assert all("/" not in slug and len(slug) <= 200 for slug in slugs)


def test_every_item_is_run_with_its_overrides(monkeypatch, items, tmp_path):
  runner, failed, status = start(monkeypatch, items, tmp_path)
  assert (failed, status) == ({}, 0)
  assert runner.names == [item.slug for item in items]
  command = runner.commands[0]
  assert command[-1] == f"--workdir={tmp_path / items[0].slug}"
  before = command.index("--config=c.py:smoke")
  assert command[before - 3 : before] == ["-m", "loopjax", "train"]
  assert "--config.model.num_memory_tokens=8" in command


def test_files_of_the_folder_do_not_replace_modules(
  monkeypatch, items, tmp_path
):
  """As in `loopjax train`, whose own folder comes last in the path."""
  (tmp_path / "argparse.py").write_text("raise RuntimeError\n")
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  monkeypatch.chdir(tmp_path)
  run_command = runner_lib.run_command
  runner, _, _ = start(monkeypatch, items, tmp_path, only=0)
  command, stop = runner.commands[0], runner_lib.StopRequest()
  command = [*command[: command.index("--config=c.py:smoke")], "--help"]
  log = tmp_path / "help.log"
  assert run_command(command, log, stop)[0] == 0, log.read_text()

  monkeypatch.chdir(ROOT)  # A clone need not be installed.
  assert "-P" not in start(monkeypatch, items, tmp_path, only=1)[0].commands[0]


def test_complete_is_skipped_and_unfinished_goes_on(
  monkeypatch, items, tmp_path, capsys
):
  start(monkeypatch, items, tmp_path)
  (tmp_path / items[1].slug / "summary.json").unlink()
  path = tmp_path / items[2].slug / "summary.json"
  workdir_lib.write_json(path, {"status": "preempted"})
  # Settings that do not affect the parameters have no effect.
  path = tmp_path / items[3].slug / "config.json"
  config = workdir_lib.read_json(path)
  config["eval"]["batch_size"] = 5
  workdir_lib.write_json(path, config)
  capsys.readouterr()
  runner, failed, status = start(monkeypatch, items, tmp_path)
  assert (failed, status) == ({}, 0)
  assert runner.names == [items[1].slug, items[2].slug]
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == len(items)
  assert lines[0].startswith(f"1/4  {items[0].slug}  complete")
  scores = "  validation/exact_match 0.25  test/exact_match 0.125  7 s in total"
  assert lines[0].endswith(scores)


def test_failures_are_named_and_the_rest_is_run(monkeypatch, items, tmp_path):
  """A diverged run, or a damaged one, is not run again; others are."""
  first, second, third, fourth = (item.slug for item in items)
  (tmp_path / fourth).mkdir()
  config = {**items[3].config, "optim": {"learning_rate": 1.0}}
  workdir_lib.write_json(tmp_path / fourth / "config.json", config)
  ends = {
    first: (2, "error: it is wrong"),
    second: (3, ""),
    third: (-9, "half"),
  }
  runner, failed, status = start(monkeypatch, items, tmp_path, fail=ends)
  assert (runner.names, status) == ([first, second, third], 1)
  assert failed[first] == "it is wrong"
  assert "exit status -9: half; see" in failed[third]
  assert "optim.learning_rate" in failed[fourth]
  assert all("\n" not in message for message in failed.values())
  summary = tmp_path / second / "summary.json"
  again = f"loss is not finite at step 7; remove {summary} to run it again"
  assert failed[second] == again
  # One that ends well but leaves no summary has failed, too.
  runner, failed, _ = start(monkeypatch, items, tmp_path, {third: (0, "bye")})
  assert (runner.names, failed[second]) == ([first, third], again)
  assert set(failed) == {second, third, fourth}
  summary.unlink()
  (tmp_path / first / "summary.json").write_text('{"status": "completed"}')
  runner, failed, _ = start(monkeypatch, items, tmp_path)
  assert runner.names == [second, third]
  said = "was not written by loopjax: metrics is missing or malformed"
  assert failed[first] == f"{tmp_path / first / 'summary.json'}: {said}"


@pytest.mark.parametrize("status", [4, 5])
def test_the_sweep_stops_with_an_item_that_was_stopped(
  monkeypatch, items, tmp_path, capsys, status
):
  stopping = {items[1].slug: (status, "")}
  runner, failed, got = start(monkeypatch, items, tmp_path, fail=stopping)
  assert (failed, got) == ({}, status)
  assert runner.names == [items[0].slug, items[1].slug]
  assert "the same command resumes" in capsys.readouterr().out
  runner, failed, got = start(monkeypatch, items, tmp_path)
  assert (failed, got) == ({}, 0)
  assert runner.names == [item.slug for item in items[1:]]


def test_a_part_of_the_sweep_alone(monkeypatch, items, tmp_path, capsys):
  """One item, or as many as --limit says that are not complete."""
  slugs = [item.slug for item in items]
  for options, ran in (
    ({"only": 2}, [2]), ({"only": 2}, []), ({"limit": 1}, [0]),
    ({"limit": 2}, [1, 3]),
  ):  # fmt: skip
    runner, failed, status = start(monkeypatch, items, tmp_path, **options)
    assert runner.names == [slugs[place] for place in ran]
    assert (failed, status) == ({}, 0)
  assert capsys.readouterr().out.startswith(f"3/4  {slugs[2]}  done")


def test_the_log_keeps_all_and_the_last_line_is_of_the_last_run(tmp_path):
  log = tmp_path / "x.log"
  script = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))"
  command, stop = [sys.executable, "-c", script], runner_lib.StopRequest()
  assert runner_lib.run_command([*command, "first", "2"], log, stop) == (
    2,
    "first",
  )
  assert runner_lib.run_command([sys.executable, "-c", ""], log, stop) == (
    0,
    "",
  )
  assert log.read_text() == "first\n"


# Saves at the first signal and is killed by the second, like a run.
SAVES = """
import os, signal, sys, threading
asked = threading.Event()
def save(which, frame):
  signal.signal(which, signal.SIG_DFL)
  asked.set()
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
assert os.getpgid(0) != os.getpgid(os.getppid())  # Ctrl-C passes it by.
os.kill(os.getppid(), int(sys.argv[1]))
assert asked.wait(10)
print("saved", flush=True)
sys.exit(4)
"""


@pytest.mark.parametrize("which", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_what_stops_the_sweep_lets_the_run_save(tmp_path, which):
  before = signal.getsignal(signal.Signals[which])
  stop, log = runner_lib.StopRequest(), tmp_path / "x.log"
  command = [sys.executable, "-c", SAVES, str(int(signal.Signals[which]))]
  with stop.listening():
    assert runner_lib.run_command(command, log, stop) == (4, "saved")
  assert stop.received
  assert signal.getsignal(signal.Signals[which]) == before


WAITS = SAVES.replace("os.kill(os.getppid(), int(sys.argv[1]))", "print(1)")


def test_what_stops_the_sweep_stops_all_its_runs(tmp_path):
  """Each by one signal: a second one would end it before it saved."""
  stop = runner_lib.StopRequest()
  scripts = [WAITS, WAITS, SAVES]
  with stop.listening(), futures.ThreadPoolExecutor(len(scripts)) as pool:
    logs = [tmp_path / f"{number}.log" for number in range(len(scripts))]
    runs = []
    for script, log in zip(scripts, logs, strict=True):
      command = [sys.executable, "-uc", script, str(int(signal.SIGINT))]
      runs.append(pool.submit(runner_lib.run_command, command, log, stop))
      while script is WAITS and not (log.exists() and log.read_text()):
        time.sleep(0.01)
    assert [run.result() for run in runs] == [(4, "saved")] * 3
  assert stop.received and not stop._processes


def test_cores_are_split_evenly(monkeypatch, capsys):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, *range(6)})
  assert runner_lib.split_cores(1) == [None]
  assert runner_lib.split_cores(2) == [{0, 1, 2}, {3, 4, 5, 9}]
  assert runner_lib.split_cores(7) == [{0}, {1}, {2}, {3}, {4}, {5}, {9}]
  with pytest.raises(UserError, match="--jobs=8: there are only 7 CPU cores"):
    runner_lib.split_cores(8)
  assert not capsys.readouterr().err
  monkeypatch.delattr(os, "sched_getaffinity")
  assert runner_lib.split_cores(8) == [None] * 8
  assert "cannot bind a run to CPU cores" in capsys.readouterr().err


@pytest.mark.skipif(
  not hasattr(os, "sched_getaffinity"), reason="no CPU affinity"
)
def test_a_run_has_the_cores_of_its_job(tmp_path):
  core = max(os.sched_getaffinity(0))
  script = "import os, time; time.sleep(0.2); print(os.sched_getaffinity(0))"
  for cores in ({core}, None):
    _, said = runner_lib.run_command(
      [sys.executable, "-c", script],
      tmp_path / "x.log",
      runner_lib.StopRequest(),
      cores,
    )
    assert said == str(cores or os.sched_getaffinity(0))


class Pairs(Runner):
  """Runs that end only when two run at once, on different cores."""

  def __init__(self, items):
    super().__init__(items)
    self.together, self.cores = threading.Barrier(2, timeout=60), []

  def __call__(self, command, log, stop, cores):
    self.cores.append(cores)
    self.together.wait()
    return super().__call__(command, log, stop)


def test_items_run_at_once(monkeypatch, items, tmp_path, capsys):
  runner = Pairs(items)
  monkeypatch.setattr(runner_lib, "run_command", runner)
  arguments = items, tmp_path, ["--config=c.py:smoke"]
  found = runner_lib.run_items(*arguments, cores=[{0}, {1}])
  assert found == ({}, 0)
  assert sorted(runner.names) == sorted(item.slug for item in items)
  assert sorted(map(str, runner.cores)) == ["{0}"] * 2 + ["{1}"] * 2
  lines = capsys.readouterr().out.splitlines()
  assert {line.split()[0] for line in lines} == {"1/4", "2/4", "3/4", "4/4"}
  assert all("  done in " in line for line in lines)


def test_items_wait_for_those_that_they_start_from(monkeypatch, tmp_path):
  """An item that starts from none goes first."""
  items = [*chained(tmp_path), *loops_in(tmp_path, "loops")[1:]]
  first, second, third, alone = (item.slug for item in items)
  runner = Runner(items)
  began = threading.Event()

  def run(command, log, stop, cores):
    if command[-1].endswith(alone):
      began.set()
    assert began.wait(60)  # The first one ends only after it began.
    return runner(command, log, stop)

  monkeypatch.setattr(runner_lib, "run_command", run)
  done = runner_lib.run_items(
    items, tmp_path, ["--config=c.py"], cores=[None] * 3
  )
  assert done == ({}, 0)
  assert [name for name in runner.names if name != alone] == [
    first,
    second,
    third,
  ]


@pytest.mark.parametrize("status", [4, 5])
def test_an_item_that_was_stopped_stops_those_beside_it(
  monkeypatch, items, tmp_path, status
):
  names = []

  def run(command, log, stop, cores):
    names.append(command[-1].rpartition("/")[2])
    if command[-1].endswith(items[1].slug):
      return status, ""
    while not stop.received:
      time.sleep(0.01)
    return -signal.SIGTERM, ""

  monkeypatch.setattr(runner_lib, "run_command", run)
  arguments = items, tmp_path, ["--config=c.py"]
  found = runner_lib.run_items(*arguments, cores=[None, None])
  assert found == ({}, status)
  assert sorted(names) == sorted(item.slug for item in items[:2])


def test_what_goes_wrong_in_the_sweep_stops_its_runs(
  monkeypatch, items, tmp_path
):
  stopped = []

  def run(command, log, stop, cores):
    if command[-1].endswith(items[0].slug):
      raise OSError("the disk is full")
    while not stop.received:
      time.sleep(0.01)
    stopped.append(command[-1])
    return 4, ""

  monkeypatch.setattr(runner_lib, "run_command", run)
  arguments = items, tmp_path, ["--config=c.py"]
  with pytest.raises(OSError, match="the disk is full"):
    runner_lib.run_items(*arguments, cores=[None, None])
  assert len(stopped) == 1


def test_a_signal_between_two_runs_is_not_lost(tmp_path):
  stop, log = runner_lib.StopRequest(), tmp_path / "x.log"
  with stop.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    status, _ = runner_lib.run_command(command, log, stop)
  assert status == -signal.SIGTERM


CONFIG = "--config=configs/sudoku_utm.py:smoke"


def sweep_depth(*arguments):
  return command(sweep_main.main, CONFIG, "--sweep=depth", *arguments)


def test_a_sweep_lies_beside_the_runs_of_its_config(capsys, tmp_path):
  """A dry run, or one that only counts, writes nothing."""
  assert sweep_depth("--dry_run", "--config.model.width=32") == 0
  first, *rest = capsys.readouterr().out.splitlines()
  assert first == "work directory: runs/sudoku_utm-smoke,width=32-depth"
  assert len(rest) == 3 and all("would run" in line for line in rest)
  there = tmp_path / "none"
  assert sweep_depth("--dry_run", f"--workdir={there}") == 0
  capsys.readouterr()
  assert sweep_depth("--count", f"--workdir={there}") == 0
  assert capsys.readouterr().out == "3\n" and not there.exists()


def test_no_sweep_has_the_name_of_a_preset():
  """Their default work directories would be one."""
  for name in CONFIGS:
    there = namespace(name)
    sweeps = there.get("sweeps", lambda config: {})(load_config(name, "smoke"))
    assert not {*there["PRESETS"], *there.get("CHANGES", ())} & {*sweeps}


@pytest.mark.parametrize(
  ("returned", "says"),
  [
    ("config.model.no_such", "its sweeps do not support .* lacks no_such"),
    ("steps", "mine.py, line 4: NameError: name 'steps' is not defined"),
    ("{}.steps", "line 4: AttributeError: 'dict' object has no attribute 's"),
    ("{'a': {'run.seed': 1}}", "sweep a is not as in docs/howto/sweep.md"),
    ("{'a': ['run.seed']}", "sweep a is not as in docs/howto/sweep.md: lis"),
    ("None", "sweeps returns not as in docs/howto/sweep.md"),
    (
      "{'a': [{'run.init_from': config_lib.WorkdirOf(0)}]}",
      r"sweep a, item 0: run.init_from=WorkdirOf\(item=0\) is not an earlier",
    ),
  ],
)
def test_a_mistake_in_sweeps_says_where_it_is(returned, says, tmp_path):
  """A setting that the family lacks is not the file's fault."""
  file = tmp_path / "mine.py"
  file.write_text(
    f"""from loopjax import config as config_lib

def sweeps(config):
  return {returned}
"""
  )
  config = load_config("sudoku_utm", "smoke")
  with refused(says):
    items_lib.make_items(config, items_lib.load_sweeps(str(file)), "a", {})


def test_an_axis_may_be_of_numpys_numbers(tmp_path):
  def sweeps(_):
    loops = config_lib.axis("model.num_loops", *np.arange(2, 4))
    rates = config_lib.axis("optim.learning_rate", *np.float32([0.5, 0.25]))
    return {"a": config_lib.product(loops, rates)}

  config = load_config("sudoku_utm", "smoke")
  first, *_, last = items_lib.make_items(config, sweeps, "a", {})
  assert first.slug == "model.num_loops=2,learning_rate=0.5"
  assert last.config["model"]["num_loops"] == 3
  assert last.overrides["optim.learning_rate"] == 0.25
  items_lib.write_manifest(tmp_path, "a", "c.py", {}, [first, last])


@pytest.mark.parametrize(
  ("setting", "value", "says"),
  [
    ("optim.lora_rank", 4, "optim.lora_rank=4 needs run.init_from"),
    ("model.precision", "bfloat16_params", "is for inference only"),
    ("run.best_metric", "test/loss", "run.best_metric has no effect"),
    ("eval.checkpoint", "best", "eval.checkpoint has no effect in training"),
    ("eval.split", "validation", "eval.split has no effect in training"),
    ("run.num_microbatches", 7, "must be a multiple of run.num_microbatches=7"),
  ],
)
def test_an_item_that_cannot_train_is_refused_before_any_runs(
  setting, value, says
):
  config = load_config("sudoku_utm", "smoke")
  with refused(f"sweep a, item .*{says}"):
    items_lib.make_items(
      config, lambda _: {"a": [{}, {setting: value}]}, "a", {}
    )


def test_settings_that_a_sweep_cannot_have():
  for name, common, says in (
    ("tradeoff", {"run.seed": 3}, "--config.run.seed has no effect"),
    (
      "fixed_depth",
      {"model.epsilon": 0.2},
      "sweep fixed_depth, item .*epsilon",
    ),
  ):
    with refused(says):
      items_of(name, common=common)
  config = load_config("multihop_disco", "smoke,model.name=looped")
  sweeps = namespace("multihop_disco")["sweeps"]
  with refused("item .*unknown setting 'model.gate_value'"):
    items_lib.make_items(config, sweeps, "gate", {})


def test_scores_of_other_settings_are_not_the_sweeps(
  monkeypatch, tmp_path, capsys
):
  """Repeated with another evaluation it refuses, as `loopjax train` does.

  The plan, from which reports are made, remains that of the scores.
  """
  monkeypatch.setattr(runner_lib, "run_command", Runner(items_of("depth")))
  there = f"--workdir={tmp_path}"
  assert sweep_depth(there) == 0
  plan = (tmp_path / "sweep-depth.json").read_text()
  capsys.readouterr()
  for setting, changes in (
    ("num_loops=0", ["num_loops=9"]),
    ("num_starts=1", ["num_starts=4", "start_noise=0.5"]),
  ):
    changed = [f"--config.eval.{change}" for change in changes]
    for more in ([], ["--dry_run"]):
      assert sweep_depth(there, *changed, *more) == 2
      said = capsys.readouterr()
      assert f"is complete, scored with eval.{setting}; use" in said.err
      assert "complete  " not in said.out
  assert (tmp_path / "sweep-depth.json").read_text() == plan
  # What is not complete is scored as the command says.
  first = next(tmp_path.glob("*/summary.json")).parent
  for path in tmp_path.glob("*/summary.json"):
    path.unlink()
  assert sweep_depth(there, "--config.eval.num_loops=9", "--dry_run") == 0
  assert f"{first.name}  unfinished, would run" in capsys.readouterr().out


def test_a_sweep_that_is_done_says_what_is_next(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(runner_lib, "run_command", Runner(items_of("depth")))
  there = f"--workdir={tmp_path}/my runs"
  for arguments in (["--dry_run"], ["--limit=1"], ["--item=1"], ["--count"]):
    assert sweep_depth(there, *arguments) == 0
    assert "next:" not in capsys.readouterr().out
  assert sweep_depth(there) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  assert last == f"next: loopjax report '{tmp_path}/my runs'"


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--jobs=0"], "--jobs=0 must be at least 1"),
    (["--jobs=9"], "--jobs=9: there are only 2 CPU cores"),
    (["--jobs=2", "--item=0"], "--jobs has no effect with --item"),
    (["--limit=2", "--item=0"], "--limit has no effect with --item"),
    (["--jobs=2", "--count"], "--jobs has no effect with --count"),
  ],
)
def test_flags_that_contradict_each_other(
  monkeypatch, tmp_path, refusal, arguments, said
):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  place = f"--workdir={tmp_path / 'new'}"
  words = [CONFIG, "--sweep=depth", place, *arguments]
  with contextlib.chdir(ROOT):
    assert said in refusal(sweep_main.main, words)
  assert not (tmp_path / "new").exists()


def test_a_run_that_ended_before_it_could_save_was_preempted(
  monkeypatch, tmp_path, capsys
):
  """The command has the cores of its jobs, and the status of its items."""
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  found = []

  def run(command, log, stop, cores):
    found.append(cores)
    stop.received = True
    return -signal.SIGTERM, ""

  monkeypatch.setattr(runner_lib, "run_command", run)
  there = f"--workdir={tmp_path}"
  assert [sweep_depth(there), sweep_depth(there, "--jobs=2")] == [4, 4]
  said = capsys.readouterr()
  assert "preempted; the same command resumes it" in said.out and not said.err
  assert found[:2] == [None, {0}] and all(x in ({0}, {1}) for x in found[1:])


def test_the_exit_status_is_that_of_the_item(monkeypatch, tmp_path, capsys):
  statuses = {"1": (4, ""), "2": (1, "error: the disk is full")}
  depth = items_of("depth")
  runner = Runner(
    depth, {depth[int(index)].slug: end for index, end in statuses.items()}
  )
  monkeypatch.setattr(runner_lib, "run_command", runner)
  assert [
    sweep_depth(f"--workdir={tmp_path}", f"--item={index}")
    for index in range(3)
  ] == [0, 4, 1]
  said = capsys.readouterr()
  assert "the disk is full" in said.err and "next:" not in said.out
  assert len(list(tmp_path.glob("sweep-depth.json"))) == 1


def test_another_family_goes_after_the_colon(monkeypatch, tmp_path):
  """Its settings must exist before they are overridden."""
  base = load_config("multihop_disco", "smoke")
  sweeps = lambda config: {"two": [{"model.name": "looped", "run.seed": 1}]}  # noqa: E731
  items = items_lib.make_items(base, sweeps, "two", {})
  assert items[0].slug == "model.name=looped,seed=1"
  assert "gate" not in items[0].config["model"]
  commands = []

  def run(command, log, stop, cores):
    commands.append(command[command.index("train") + 1 :])
    return 1, ""

  monkeypatch.setattr(runner_lib, "run_command", run)
  for config in ("--config=c.py", "--config=c.py:smoke"):
    runner_lib.run_items(items, tmp_path, [config])
  assert commands[0][:2] == [
    "--config=c.py:model.name=looped",
    "--config.run.seed=1",
  ]
  assert commands[1][0] == "--config=c.py:smoke,model.name=looped"


@crossing("name", CONFIGS)
def test_main_accepts_every_item(name):
  """As text on its command line, its only input."""
  base = load_config(name, "smoke")
  sweeps = namespace(name)["sweeps"]
  file = f"--config={ROOT / 'configs' / name}.py:smoke"
  for sweep in sweeps(base):
    for item in items_lib.make_items(base, sweeps, sweep, {}):
      arguments = runner_lib.item_arguments([file], item.overrides)
      parser = command_line.ConfigParser("main", "")
      config = parser.parse_config(arguments).config
      assert config_lib.to_dict(config) == item.config


def chain(config):
  """A run, one that starts from it, and one from both."""
  begun = {"run.init_from": config_lib.WorkdirOf(0), "run.seed": 1}
  both = {"run.init_from": config_lib.WorkdirOf(1), "run.seed": 1}
  return {"chain": [{}, begun, both], "end": [{"run.seed": 2}, begun]}


def chained(workdir, name="chain"):
  return items_lib.make_items(smoke(), chain, name, {}, workdir)


def test_items_go_on_from_earlier_ones(monkeypatch, tmp_path):
  """Each starts from the directory of the named run, once that is complete."""
  items = chained(tmp_path)
  first, second, third = (item.slug for item in items)
  assert items[1].config["run"]["init_from"] == str(tmp_path / first)
  assert items[2].overrides["run.init_from"] == str(tmp_path / second)
  assert (items[0].needs, items[2].needs) == ((), (second,))
  runner, failed, status = start(
    monkeypatch, items, tmp_path, {second: (3, "")}
  )
  assert (runner.names, status) == ([first, second], 1)
  assert failed[third] == f"needs {second}, which is not complete"
  runner, failed, _ = start(monkeypatch, items[1:], tmp_path)
  assert set(failed) == {second, third}  # It would diverge again.
  (tmp_path / second / "summary.json").unlink()
  runner, failed, status = start(monkeypatch, items, tmp_path)
  assert (runner.names, failed, status) == ([second, third], {}, 0)
  assert f"--config.run.init_from={tmp_path / second}" in runner.commands[1]


def test_names_of_items_that_go_on_tell_what_from(tmp_path):
  """And not where: equal experiments have equal names everywhere."""
  slugs = [item.slug for item in chained(tmp_path)]
  assert slugs == [item.slug for item in chained(tmp_path / "elsewhere")]
  assert len(set(slugs)) == 3
  assert chained(tmp_path, "end")[1].slug not in slugs  # From another run.
