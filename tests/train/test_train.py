"""Whole runs: output, resuming, refusals."""

import contextlib
import errno
import fcntl
import json
import shutil
import threading
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tests_support import load_config, refused, smoke, summary_of
from tests_support import rows_of_metrics as rows

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.analysis import figures, sudoku
from loopjax.errors import UserError
from loopjax.optim import chain
from loopjax.run import metrics, preemption, profiling
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import restore
from loopjax.sweep import items
from loopjax.train import evaluate
from loopjax.train.score import score_model

pytestmark = pytest.mark.usefixtures("sketches", "programs")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """One finished smoke run, shared by tests that do not modify it."""
  workdir = tmp_path_factory.mktemp("finished")
  train.run(smoke(), workdir, "train_and_eval", figures.finish)
  return workdir


def test_a_run_writes_what_the_contract_says(finished):
  done = summary_of(finished)
  assert done["status"] == "completed"
  assert done["steps"] == 20
  assert done["parameters"] > 0
  assert len(done["digest"]) == 64
  assert {"devices", "versions", "revision", "command"} <= set(done)
  for name in ("test/exact_match", "test/blank_accuracy", "test/loss"):
    assert np.isfinite(done["metrics"][name])
  assert 0 < done["metrics"]["test/attention_sequence_to_memory"] < 1
  assert [(r["step"], r["split"]) for r in rows(finished)] == [
    (10, "train"),
    (20, "train"),
    (20, "validation"),
    (20, "test"),
    (20, "depth"),
  ]
  settings = config_lib.resolve(smoke())
  rate = chain.make_schedule(settings.optim, 20)
  assert [
    row["learning_rate"] for row in rows(finished) if row["split"] == "train"
  ] == pytest.approx([float(rate(9)), float(rate(19))])
  assert abs(float(rate(10)) / float(rate(9)) - 1) > 1e-3
  assert (finished / "figures" / "puzzle.png").stat().st_size > 0
  assert any((finished / "tb").iterdir())


def test_a_row_has_the_means_since_the_last_one(finished, tmp_path):
  """Two rows of as many steps each have the mean of one over both."""
  train.run(smoke(run__log_every=5), tmp_path, "train_and_eval")
  often = [row for row in rows(tmp_path) if row["split"] == "train"]
  seldom = [row for row in rows(finished) if row["split"] == "train"]
  assert [row["step"] for row in often] == [5, 10, 15, 20]
  assert [row["step"] for row in seldom] == [10, 20]
  assert len({row["loss"] for row in often}) == 4
  for number, row in enumerate(seldom):
    pair = often[2 * number : 2 * number + 2]
    for name in ("loss", "grad_norm", "ponder_steps"):
      mean = np.mean([one[name] for one in pair])
      np.testing.assert_allclose(row[name], mean, rtol=2e-6)
    assert row["learning_rate"] == pair[-1]["learning_rate"]


def test_an_evaluation_is_no_time_of_training(tmp_path, monkeypatch):
  late = [0.0]
  monkeypatch.setattr(
    metrics,
    "time",
    types.SimpleNamespace(perf_counter=lambda: late[0] + time.perf_counter()),
  )

  def evaluator(params, split, num_examples=0):
    late[0] += 1e6
    return {split: {}}

  monkeypatch.setattr(evaluate, "make_evaluator", lambda *_: evaluator)
  train.run(smoke(eval__every=10), tmp_path, "train_and_eval")
  assert late == [3e6]  # In training and, of two splits, at the end.
  rates = [
    row["steps_per_second"]
    for row in workdir_lib.read_metrics(tmp_path)
    if row["split"] == "train"
  ]
  assert len(rates) == 2
  assert min(rates) > 10 / 1000


def test_the_memory_of_the_step_is_printed(tmp_path, monkeypatch, capsys):
  mib = 2**20
  memory = {"arguments": 3 * mib, "temporaries": 4 * mib, "outputs": 0}
  monkeypatch.setattr(profiling, "memory", lambda _: memory)
  done = train.run(smoke(), tmp_path, "train")
  assert done["memory_bytes"] == memory
  assert " s; 7 MiB per device\n" in capsys.readouterr().out


def test_the_schedule_is_compiled_before_the_first_step(tmp_path, monkeypatch):
  """Its operations would take a second of the first rows of metrics."""
  order, make = [], chain.make_schedule
  annotation = jax.profiler.StepTraceAnnotation  # Around each step.

  def noted_schedule(*args):
    schedule = make(*args)

    def noted(step):
      order.append("schedule")
      return schedule(step)

    return noted

  def noted_step(*args, **kwargs):
    order.append("step")
    return annotation(*args, **kwargs)

  monkeypatch.setattr(chain, "make_schedule", noted_schedule)
  monkeypatch.setattr(jax.profiler, "StepTraceAnnotation", noted_step)
  train.run(smoke(optim__learning_rate=2e-3), tmp_path, "train")
  first = order.index("step")
  assert "schedule" in order[:first]
  assert set(order[first:]) == {"step"}


def test_groups_add_up(finished):
  metrics = summary_of(finished)["metrics"]
  total = metrics["test/count"]
  by_rating = {
    k.rsplit("/", 1)[1]: v
    for k, v in metrics.items()
    if k.startswith("test/count/rating=")
  }
  assert sum(by_rating.values()) == total
  mean = sum(
    count * metrics[f"test/blank_accuracy/{group}"]
    for group, count in by_rating.items()
  )
  np.testing.assert_allclose(mean / total, metrics["test/blank_accuracy"])


@pytest.mark.parametrize("cut_at", [10, 20])
def test_resuming_is_bitwise(finished, tmp_path, cut_at):
  """Interrupted after a checkpoint, a run ends like an uninterrupted one.

  At 20 the final scores already exist and are computed again.
  """
  cut = tmp_path / "cut"
  shutil.copytree(finished, cut)
  (cut / "summary.json").unlink()
  if cut_at == 10:
    shutil.rmtree(cut / "checkpoints" / "20")
  train.run(smoke(), cut, "train_and_eval", figures.finish)
  assert summary_of(cut)["digest"] == summary_of(finished)["digest"]
  assert rows(cut) == rows(finished)


def size(params):
  """One number that summarises all parameters."""
  leaves = jax.tree.leaves(jax.device_get(params))
  return float(sum(np.abs(leaf).sum() for leaf in leaves))


@pytest.mark.long
def test_a_run_scores_its_average_and_goes_on_as_if_it_had_not_stopped(
  tmp_path, monkeypatch
):
  """Stopped between two rows of metrics, after the best of its checkpoints."""
  config = smoke(
    eval__every=10, eval__depth_factor=0, run__num_steps=40, run__keep_best=1,
    run__keep_checkpoints=1, run__best_metric="validation/exact_match",
  )  # fmt: skip
  scored, calls, now = [], [], [0.0]

  def make_evaluator(program, datasets, notice):
    def evaluator(params, split, num_examples=0):
      scored.append((split, size(params)))
      return {split: {"exact_match": -len(scored), "size": size(params)}}

    return evaluator

  def finish(one):
    scored.append(("finish", size(one.params)))
    return train.Extras({}, [], [])

  def check(notice):
    calls.append(notice)
    if len(calls) == 6:  # Before the 26th step.
      now[0] += 100
      raise preemption.Preempted

  clock = types.SimpleNamespace(
    monotonic=lambda: now[0], perf_counter=time.perf_counter
  )
  for module in (train.procedure, train.loop):
    monkeypatch.setattr(module, "time", clock)
  monkeypatch.setattr(evaluate, "make_evaluator", make_evaluator)
  plain, cut = tmp_path / "plain", tmp_path / "cut"
  whole = train.run(config, plain, "train_and_eval", finish)
  expected = scored.copy()
  scored.clear()
  monkeypatch.setattr(preemption.Notice, "check", check)
  stopped = train.run(config, cut, "train_and_eval", finish)
  assert stopped["status"] == "preempted"
  resumed = train.run(config, cut, "train_and_eval", finish)
  assert scored == expected and rows(cut) == rows(plain)
  assert resumed["digest"] == whole["digest"]
  assert (resumed["wall_seconds"], whole["wall_seconds"]) == (100, 0)
  names = ["validation"] * 4 + ["test", "finish"]
  assert [name for name, _ in scored] == names
  for workdir in (plain, cut):
    kept = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    assert kept == {10, 40}
  program = program_lib.make_program(config_lib.resolve(config))
  for step, found in ((10, scored[:1]), (40, scored[3:])):
    state, _ = restore.state(cut, step, program.abstract_state)
    average, raw = size(state.ema), size(state.params)
    assert abs(average - raw) > 4e-6 * raw
    assert [x for _, x in found] == pytest.approx([average] * len(found))


@pytest.mark.long
def test_a_figure_that_fails_costs_no_summary(finished, tmp_path, monkeypatch):
  copy = tmp_path / "copy"
  shutil.copytree(finished, copy)
  (copy / "summary.json").unlink()

  def fail(evaluated):
    raise ValueError("drawn wrong")

  monkeypatch.setattr(sudoku, "choose", fail)
  train.run(smoke(), copy, "train_and_eval", figures.finish)
  assert summary_of(copy)["figures_failed"] == [
    "puzzle", "puzzle_failed", "halting_map"
  ]  # fmt: skip
  assert "figures_failed" not in summary_of(finished)
  assert summary_of(copy)["metrics"] == summary_of(finished)["metrics"]


@pytest.mark.long
def test_a_trained_run_is_scored_when_asked(tmp_path, finished):
  train.run(smoke(), tmp_path, "train")
  assert not any(k.startswith("test/") for k in summary_of(tmp_path)["metrics"])
  train.run(smoke(), tmp_path, "train_and_eval", figures.finish)
  assert summary_of(tmp_path)["digest"] == summary_of(finished)["digest"]
  assert rows(tmp_path) == rows(finished)


@pytest.mark.long
def test_a_checkpoint_is_scored_on_other_puzzles(finished, tmp_path):
  """Only the model has to be the run's own."""
  copy = tmp_path / "copy"
  shutil.copytree(finished, copy)
  path = tmp_path / "puzzles.csv"
  path.write_text(
    "source,question,answer,rating\nmine,1.3434..4.2.2341,1234341241232341,0\n"
  )
  files = {"task__train_csv": "unused.csv", "task__test_csv": str(path)}
  result = score_model(smoke(**files), copy)
  assert result["metrics"]["test/count/source=mine"] == 1
  assert result["steps"] == 20  # The newest checkpoint.


@pytest.mark.long
def test_the_digest_sees_the_seed(finished, tmp_path):
  train.run(smoke(run__seed=1), tmp_path, "train")
  assert summary_of(tmp_path)["digest"] != summary_of(finished)["digest"]


def test_a_finished_run_is_not_run_again(finished, capsys):
  before = (finished / "metrics.jsonl").read_bytes()
  train.run(smoke(), finished, "train_and_eval")
  assert "already complete" in capsys.readouterr().out
  assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_is_not_scored_otherwise(finished):
  with pytest.raises(UserError, match="eval.num_loops=0; use loopjax score"):
    train.run(smoke(eval__num_loops=5), finished, "train_and_eval")


@pytest.mark.long
def test_data_that_have_changed_are_refused(tmp_path, capsys):
  """A score of other data than the run's is only said to be one."""
  path, workdir = tmp_path / "puzzles.csv", tmp_path / "run"
  other = tmp_path / "test.csv"

  def write(path, digits):
    solution = "1234341221434321".translate(str.maketrans("1234", digits))
    rows = [
      f"mine,{solution[:place]}.{solution[place + 1 :]},{solution},0\n"
      for place in range(16)
    ]
    path.write_text("source,question,answer,rating\n" + "".join(rows))

  write(path, "1234")
  write(other, "4321")
  files = {"task__train_csv": str(path), "task__test_csv": str(other)}
  files |= {"task__validation_share": 0.5}
  train.run(smoke(**files), workdir, "train")
  (workdir / "summary.json").unlink()  # As if interrupted.
  train.run(smoke(**files), workdir, "train")
  (workdir / "summary.json").unlink()
  write(path, "2143")
  with pytest.raises(UserError, match="changed .*train_sha256"):
    train.run(smoke(**files), workdir, "train")
  said = []
  for digits in ("4321", "3412"):
    write(other, digits)
    score_model(smoke(**files, eval__depth_factor=0), workdir, limit=1)
    said.append("test_sha256 is not the run's" in capsys.readouterr().out)
  assert said == [False, True]


def test_another_configuration_is_refused_by_its_keys(finished):
  with pytest.raises(UserError, match=r"model.width \(16 there, 32 here\)"):
    train.run(smoke(model__width=32), finished, "train")


@pytest.mark.long
def test_eval_mode_at_another_depth(finished, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(finished, copy)
  config = smoke(
    eval__num_loops=7, eval__execution="while", eval__checkpoint="10"
  )
  before = {
    path.relative_to(copy): path.read_bytes()
    for path in (copy / "summary.json", copy / "metrics.jsonl")
  }
  result = score_model(config, copy, figures.finish)
  assert result["steps"] == 10
  assert result["metrics"]["test/loops_run"] == 7  # Nothing stops by then.
  assert (copy / "evaluation" / "summary.json").exists()
  assert (copy / "evaluation" / "figures" / "puzzle.png").exists()
  for name, content in before.items():
    assert (copy / name).read_bytes() == content


@pytest.mark.long
def test_eval_mode_of_the_best_checkpoint(finished, tmp_path):
  """According to the rows of evaluations in training."""
  copy = tmp_path / "copy"
  shutil.copytree(finished, copy)
  best = {"eval__every": 10, "run__keep_best": 1, "eval__checkpoint": "best"}
  with pytest.raises(UserError, match="no checkpoint has a score"):
    score_model(smoke(run__best_metric="validation/nothing", **best), copy)
  for metric, step in (("validation/fake", 10), ("-validation/fake", 20)):
    rows_there = [
      {"step": 10, "split": "validation", "fake": 0.9},
      {"step": 20, "split": "validation", "fake": 0.1},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows_there)
    (copy / "metrics.jsonl").write_text(text)
    config = smoke(run__best_metric=metric, eval__depth_factor=0, **best)
    scored = score_model(config, copy)
    assert scored["steps"] == step
  # Both score the average, which is far from the parameters after 20 steps.
  at_the_end = summary_of(finished)["metrics"]["test/loss"]
  assert scored["metrics"]["test/loss"] == pytest.approx(at_the_end, rel=1e-6)


def test_a_missing_checkpoint_is_named(finished, tmp_path):
  with pytest.raises(UserError, match="no checkpoint at step 13"):
    score_model(smoke(eval__checkpoint="13"), finished)
  with pytest.raises(UserError, match="contains no run"):
    score_model(smoke(), tmp_path / "nothing")
  assert not (tmp_path / "nothing").exists()
  copy = shutil.copytree(finished, tmp_path / "copy")
  shutil.rmtree(copy / "checkpoints")
  with pytest.raises(UserError, match=f"^{copy} contains no checkpoints"):
    score_model(smoke(), copy)


def test_a_directory_in_use_is_refused(tmp_path):
  in_use = pytest.raises(UserError, match=f"^{tmp_path}: another run is using")
  with workdir_lib.locked(tmp_path), in_use:
    train.run(smoke(), tmp_path, "train")
  assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_run_is_in_use_until_its_save_ends(
  tmp_path, monkeypatch, error
):
  """The save of step 5 ends when the failed run waits for it, or unlocks."""
  failed, may_end, order = threading.Event(), threading.Event(), []
  locked, handler = workdir_lib.locked, ocp.PyTreeCheckpointHandler
  wait, end = ocp.CheckpointManager.wait_until_finished, handler.finalize

  def fail(*_):
    failed.set()
    raise error

  def wait_for_save(manager):
    if failed.is_set():
      may_end.set()
    wait(manager)

  def end_save(*args):
    may_end.wait()
    end(*args)
    order.append("saved")

  @contextlib.contextmanager
  def watched(workdir):
    try:
      with locked(workdir):
        yield
    finally:
      order.append("unlocked")
      may_end.set()

  monkeypatch.setattr(metrics.Writer, "write", fail)
  monkeypatch.setattr(
    ocp.CheckpointManager, "wait_until_finished", wait_for_save
  )
  monkeypatch.setattr(handler, "finalize", end_save)
  monkeypatch.setattr(workdir_lib, "locked", watched)
  with pytest.raises(error):
    train.run(smoke(run__checkpoint_every=5), tmp_path, "train")
  assert order == ["saved", "unlocked"]
  assert restore.steps(tmp_path) == [5]


def test_a_file_system_without_locks_is_not_a_run_in_use(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", flock)
  no_locks = pytest.raises(UserError, match=f"^{tmp_path}: cannot be locked: ")
  with no_locks, workdir_lib.locked(tmp_path):
    pass


def test_an_unwritable_directory_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(UserError, match=f"^{tmp_path}.*: cannot be written"):
    train.run(smoke(), tmp_path / "file" / "run", "train")


# Settings, a mode, and the message.
REFUSED = [
  (
    smoke(task__train_csv="none.csv", task__test_csv="neither.csv"), "train",
    "none.csv",
  ),
  # In bfloat16 most updates would be lost to rounding.
  (
    load_config("lm_looped", "smoke,model.precision=bfloat16_params"), "train",
    "'bfloat16_params' is for inference only",
  ),
  (
    smoke(
      eval__every=10, run__keep_best=1,
      run__best_metric="validation/exactmatch",
    ),
    "train_and_eval", "score; expected one of .*/exact_match, ",
  ),
  (smoke(eval__every=10, run__keep_best=1), "train", "keep_best has no effect"),
  (
    smoke(eval__every=10, run__stop_after=1), "train",
    "run.stop_after has no effect with --mode=train",
  ),
  (smoke(run__stop_after=1), "train_and_eval", "stop_after=1 has no effect"),
  (smoke(optim__lora_rank=3), "train", "lora_rank=3 needs run.init_from"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "mode", "message"), REFUSED)
def test_a_run_that_cannot_be_writes_nothing(config, mode, message, tmp_path):
  with refused(message):
    train.run(config, tmp_path / "run", mode)
  assert not (tmp_path / "run").exists()


def test_growth_ends_before_training_does_and_earlier_runs_are_read(tmp_path):
  growth = "model.depth=fixed,model.growth_steps=(20,),model.growth_loops=(1,)"
  config = load_config("lm_recurrent", f"smoke,{growth}")
  message = r"growth_steps=\(20,\) must end before run.num_steps=20"
  with pytest.raises(UserError, match=message):
    train.run(config, tmp_path / "run", "train")
  assert not (tmp_path / "run").exists()
  one = {"one": [{"run.seed": 1}]}
  with pytest.raises(UserError, match=rf"^sweep one, item .*{message}"):
    items.make_items(config, lambda _: one, "one", {})
  # An earlier version allowed it.
  files = {
    "config": config_lib.to_dict(config),
    "summary": {"status": "completed", "steps": 20, "metrics": {}},
  }
  for name, content in files.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
  assert config_lib.of_run(tmp_path, "RUN").model.growth_steps == (20,)
  assert train.run(config, tmp_path, "train") == files["summary"]


@pytest.mark.long
def test_a_diverged_run_says_so(tmp_path):
  config = smoke(optim__learning_rate=1e30, optim__clip_norm=0.0)
  result = train.run(config, tmp_path, "train")
  assert result["status"] == "diverged"
  assert all(
    np.isfinite(value)
    for row in workdir_lib.read_metrics(tmp_path)
    for value in row.values()
    if not isinstance(value, str)
  )


@pytest.mark.long
def test_training_alone_keeps_the_rows_of_an_evaluation(tmp_path):
  """They would not be repeated."""
  options = {"eval__every": 10, "eval__batch_size": 64, "eval__depth_factor": 0}
  train.run(smoke(**options), tmp_path, "train_and_eval")
  expected = rows(tmp_path)
  (tmp_path / "summary.json").unlink()
  shutil.rmtree(tmp_path / "checkpoints" / "20")
  train.run(smoke(**options), tmp_path, "train")
  assert rows(tmp_path) == [
    r
    for r in expected
    if r["split"] == "train" or (r["split"], r["step"]) == ("validation", 10)
  ]


@pytest.mark.long
def test_a_source_can_be_corrected(tmp_path, finished):
  with pytest.raises(UserError, match="contains no checkpoints"):
    train.run(smoke(run__init_from="nowhere"), tmp_path, "train")
  done = train.run(smoke(run__init_from=str(finished)), tmp_path, "train")
  assert done["status"] == "completed"
