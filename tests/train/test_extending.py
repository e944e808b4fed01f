"""Runs that end early, and runs that continue with more or other steps."""

import json
import shutil

import pytest
from tests_support import (
  crossing,
  load_config,
  refused,
  rows_of_metrics,
  smoke,
  summary_of,
)

from loopjax import config as config_lib
from loopjax import main, train
from loopjax.config import settings as settings_lib
from loopjax.run.checkpoints import restore
from loopjax.train import loop

pytestmark = pytest.mark.usefixtures("sketches", "programs")

# A rate that does not depend on the number of steps.
OPTIONS = {
  "optim__schedule": "constant", "eval__every": 15, "eval__batch_size": 64,
  "eval__depth_factor": 0, "run__checkpoint_every": 10,
}  # fmt: skip
LONG = {**OPTIONS, "run__num_steps": 40}


def run(workdir, options, extend=False, mode="train_and_eval"):
  return train.run(smoke(**options), workdir, mode, extend=extend)


def trained(workdir, options, extend=False):
  """Without scores."""
  return run(workdir, options, extend, "train")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
  """A finished run of 20 steps."""
  workdir = tmp_path_factory.mktemp("short")
  run(workdir, OPTIONS)
  return workdir


@pytest.fixture
def copied(short, tmp_path):
  return shutil.copytree(short, tmp_path / "run")


def test_without_the_flag_the_refusal_names_it(short):
  message = r"run.num_steps \(20 there, 40 here\); --extend continues it"
  with refused(message):
    run(short, LONG)
  with refused(r"batch_size \(16 there, 8 here\); --extend continues it"):
    run(short, {**OPTIONS, "run__batch_size": 8})
  with refused(r"run.seed \(0 there, 1 here\)$"):
    run(short, {**LONG, "run__seed": 1})
  with refused(r"run.seed \(0 there, 1 here\)$"):
    run(short, {**LONG, "run__seed": 1}, extend=True)


def test_more_steps_are_those_of_a_longer_run(copied, tmp_path):
  straight = run(tmp_path / "straight", LONG)
  extended = run(copied, LONG, extend=True)
  for name in ("digest", "steps", "status"):
    assert extended[name] == straight[name]
  assert rows_of_metrics(copied) == rows_of_metrics(tmp_path / "straight")
  assert "extended" not in straight
  said = [{"step": 20, "num_steps": 20, "batch_size": 16}]
  assert extended["extended"] == said
  summary = summary_of(copied)
  assert summary["extended"] == said
  assert run(copied, LONG) == summary  # Complete, and no longer extended.
  assert run(copied, LONG, extend=True) == summary


def test_another_size_of_batches_reads_on_where_it_stopped(
  copied, tmp_path, monkeypatch
):
  """Examples are neither repeated nor left out, over restarts as well."""
  options = {**LONG, "run__batch_size": 8}
  starts = []
  iterate = train.loop.pipeline.iterate

  def iterated(batches, start, **others):
    if start:
      starts.append(start)
    return iterate(batches, start=start, **others)

  monkeypatch.setattr(train.loop.pipeline, "iterate", iterated)
  done = trained(copied, options, extend=True)
  assert starts == [40]  # 20 batches of 16 are 40 of 8.
  cut = shutil.copytree(copied, tmp_path / "cut")
  (cut / "summary.json").unlink()
  shutil.rmtree(cut / "checkpoints" / "40")
  again = trained(cut, options)
  assert restore.meta(cut, 30)["batches"] == starts[1] == 50
  for name in ("digest", "extended", "steps"):
    assert again[name] == done[name]
  larger = {**LONG, "run__num_steps": 45, "run__batch_size": 48}
  more = trained(copied, larger, extend=True)
  assert starts[2] == 10  # 480 examples.
  assert [part["batch_size"] for part in more["extended"]] == [16, 8]


def test_a_run_that_cannot_be_extended_says_so(copied, tmp_path):
  with refused("--extend: .* contains no run; --workdir=DIR names it"):
    run(tmp_path / "nothing", LONG, extend=True)
  with refused("run.num_steps=10 is less than the 20 there"):
    run(copied, {**OPTIONS, "run__num_steps": 10}, extend=True)
  assert not (tmp_path / "nothing").exists()


def test_states_of_examples_keep_the_size_of_batches(tmp_path):
  config = load_config("sudoku_trm", "smoke")
  workdir = tmp_path / "run"
  workdir.mkdir()
  plain = config_lib.to_dict(config)
  (workdir / "config.json").write_text(json.dumps(plain))
  config_lib.override(config, {"run.batch_size": 8})
  with refused("run.batch_size must remain 16: 'trm' carries"):
    train.run(config, workdir, "train", extend=True)


def test_the_flag_is_for_training(capsys):
  words = ["--config=configs/sudoku_utm.py", "--extend"]
  assert main.main([*words, "--mode=eval"]) == 2
  assert "--extend has no effect with --mode=eval" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("losses", "at", "best"),
  [
    ((3, 2, 1), 15, None),
    ((1, 2), 10, None),
    ((1, 2, 2), 15, 5),
    ((1, 1, 1), 15, 5),  # Equal is not better.
    ((2, 3, 1, 2), 20, None),
    ((2, 3, 1, 2, 3), 25, 15),
    ((1, 2, 3), 10, None),  # A restart knows the scores of later steps.
    ((), 5, None),
  ],
)
def test_evaluations_are_counted_from_the_best_one(losses, at, best):
  scores = {5 * (i + 1): -float(loss) for i, loss in enumerate(losses)}
  options = settings_lib.Run(stop_after=2)
  said = loop.no_better(options, scores, at)
  if best is None:
    assert not said
  else:
    assert said == (
      f"validation/loss was not better than {-scores[best]:g}, of step {best},"
      " in 2 evaluations (run.stop_after=2)"
    )
  assert not loop.no_better(settings_lib.Run(), scores, at)


def test_higher_can_be_better():
  options = settings_lib.Run(stop_after=1, best_metric="validation/exact_match")
  said = loop.no_better(options, {5: 0.5, 10: 0.25}, 10)
  assert "exact_match was not better than 0.5, of step 5, in 1" in said


CONSTANT = {  # A score that never gets better.
  "eval__every": 5, "eval__batch_size": 64, "eval__depth_factor": 0,
  "run__stop_after": 2, "run__best_metric": "validation/count",
  "run__num_steps": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run of at most 40 steps that ended after the evaluation of step 15."""
  workdir = tmp_path_factory.mktemp("stopped")
  train.run(smoke(**CONSTANT), workdir, "train_and_eval")
  return workdir


def test_a_run_without_better_scores_is_complete(stopped, capsys):
  done = summary_of(stopped)
  assert (done["status"], done["steps"]) == ("completed", 15)
  assert "validation/count was not better" in done["reason"]
  assert "test/exact_match" in done["metrics"]
  assert restore.steps(stopped) == [10, 15]
  found = [(row["step"], row["split"]) for row in rows_of_metrics(stopped)]
  assert found == [
    *((at, split) for at in (5, 10, 15) for split in ("train", "validation")),
    *((15, "validation"), (15, "test")),
  ]
  assert train.run(smoke(**CONSTANT), stopped, "train_and_eval") == done
  assert "is already complete" in capsys.readouterr().out


def test_a_run_that_ended_early_can_be_extended(stopped, tmp_path):
  workdir = shutil.copytree(stopped, tmp_path / "run")
  config = smoke(**{**CONSTANT, "run__stop_after": 4})
  done = train.run(config, workdir, "train_and_eval", extend=True)
  assert (done["steps"], done["reason"][-13:]) == (25, "stop_after=4)")


@crossing("cut_at", [15, 10], manual=[10])
def test_a_restart_ends_at_the_same_step(stopped, tmp_path, cut_at):
  cut = tmp_path / "cut"
  shutil.copytree(stopped, cut)
  (cut / "summary.json").unlink()
  if cut_at == 10:
    shutil.rmtree(cut / "checkpoints" / "15")
  train.run(smoke(**CONSTANT), cut, "train_and_eval")
  before, after = summary_of(stopped), summary_of(cut)
  for name in ("digest", "reason", "steps"):
    assert after[name] == before[name]
  assert rows_of_metrics(cut) == rows_of_metrics(stopped)


def test_without_evaluations_nothing_ends_early():
  config = smoke(**CONSTANT)
  config_lib.set_by_user(config, {"eval.every": 0})
  assert config_lib.resolve(config).run.stop_after == 0
