"""Runs that continue with more steps, or with batches of another size."""

import json
import shutil

import pytest
from tests_support import load_config, refused, rows_of_metrics, smoke

from loopjax import config as config_lib
from loopjax import main, train
from loopjax.run.checkpoints import restore

pytestmark = pytest.mark.usefixtures("sketches")

# A rate that does not depend on the number of steps.
OPTIONS = {
  "optim__schedule": "constant", "eval__every": 15, "eval__batch_size": 64,
  "eval__depth_factor": 0, "run__checkpoint_every": 10,
}  # fmt: skip
LONG = {**OPTIONS, "run__num_steps": 40}


def run(workdir, options, extend=False, mode="train_and_eval"):
  return train.run(smoke(**options), workdir, mode, extend=extend)


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
  summary = json.loads((copied / "summary.json").read_text())
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

  def iterated(batches, start=0, **others):
    if start:
      starts.append(start)
    return iterate(batches, start=start, **others)

  monkeypatch.setattr(train.loop.pipeline, "iterate", iterated)
  done = run(copied, options, extend=True)
  assert starts == [40]  # 20 batches of 16 are 40 of 8.
  cut = shutil.copytree(copied, tmp_path / "cut")
  (cut / "summary.json").unlink()
  shutil.rmtree(cut / "checkpoints" / "40")
  again = run(cut, options)
  assert restore.meta(cut, 30)["batches"] == starts[1] == 50
  for name in ("digest", "extended", "steps"):
    assert again[name] == done[name]
  larger = {**LONG, "run__num_steps": 45, "run__batch_size": 48}
  more = run(copied, larger, extend=True)
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
