"""`loopjax score` on files of one's own."""

import dataclasses
import json
import pathlib
import shutil

import hub_examples
import jax
import numpy as np
import pytest
import text_examples
from tests_support import refused

import loopjax
from loopjax import config as config_lib
from loopjax import score
from loopjax.errors import UserError
from loopjax.hub import convert
from loopjax.saved import trained
from loopjax.train import score as score_lib
from loopjax.train.score import score_model

ENTRY = pathlib.Path("zoo:sudoku_6x6")
LOOPS = 3  # Fewer than it needs: some puzzles are solved, others are not.


def config_of(where, **settings):
  config = config_lib.config_of_run(where, str(where))
  values = {name.replace("__", "."): x for name, x in settings.items()}
  config_lib.set_by_user(config, values)
  return config


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
  """(file, inputs, targets, cells that count) of 12 puzzles."""
  board = {"box_rows": 2, "box_cols": 3}
  batch = loopjax.datasets("sudoku", batch_size=12, **board)["validation"][0]
  inputs, targets, weights = (
    batch[name] for name in ("inputs", "targets", "weights")
  )

  def text(ids):
    return "".join(".123456"[one - 1] for one in ids)

  rows = [
    f"mine,{text(question)},{text(answer)},0"
    for question, answer in zip(inputs, targets, strict=True)
  ]
  path = tmp_path_factory.mktemp("puzzles") / "mine.csv"
  path.write_text("\n".join(["source,question,answer,rating", *rows]))
  return path, inputs, targets, weights


def test_own_puzzles_have_the_scores_of_a_loop_over_them(
  puzzles, tmp_path, monkeypatch
):
  """Of a model of the zoo, from the command's function and from Python."""
  monkeypatch.chdir(tmp_path)
  path, inputs, targets, weights = puzzles
  model, right = trained.read(ENTRY).model(), []
  logits_of = jax.jit(lambda tokens: model(tokens, num_loops=LOOPS).logits)
  for question, answer, weight in zip(inputs, targets, weights, strict=True):
    logits = logits_of(question[None])[0]
    right.append(((logits.argmax(-1) == answer) | (weight == 0)).all())
  assert 0 < np.mean(right) < 1
  config = config_of(
    ENTRY,
    task__test_csv=str(path),
    eval__num_loops=LOOPS,
    eval__batch_size=16,
  )
  found = score_model(config, ENTRY)
  there = pathlib.Path("runs/sudoku_6x6/evaluation/summary.json")
  assert (
    json.loads(there.read_text(encoding="utf-8"))["metrics"] == found["metrics"]
  )
  assert found["metrics"]["test/count"] == len(right)
  expected = pytest.approx(np.mean(right))
  assert found["metrics"]["test/exact_match"] == expected
  loaded = loopjax.load(ENTRY)
  scores = loaded.evaluate("test", num_loops=LOOPS, test_csv=path)
  assert scores["exact_match"] == expected
  data = loopjax.datasets(
    "sudoku", batch_size=12, test_csv=path, box_rows=2, box_cols=3
  )
  with refused("task.box_cols=2: the model was trained with 3, which its"):
    loaded.evaluate("test", test_csv=path, box_cols=2)
  with refused("evaluate: box_cols with a dataset"):
    loaded.evaluate(data["test"], box_cols=3)


@pytest.mark.parametrize(
  ("settings", "number"),
  [({"eval__batch_size": 16}, 4), ({"mesh__fsdp": 4}, 8)],
)
def test_a_model_is_scored_on_devices_that_share_its_batches(
  settings, number, monkeypatch
):
  """Of 8, with batches of 24 rows in two parts: 12 and 16 rows on 4."""
  batches = {"run__batch_size": 24, "run__num_microbatches": 2}
  found = config_lib.resolve(config_of(ENTRY, **batches, **settings))
  monkeypatch.setattr(jax, "devices", lambda: list(range(8)))
  assert len(score_lib._devices(found)) == number


@pytest.mark.parametrize(
  ("settings", "says"),
  [
    ({"model__num_memory_tokens": 2}, "model.num_memory_tokens .* there, 2 h"),
    ({"optim__ema_decay": 0.5}, "optim.ema_decay "),
    (
      {"task__box_rows": 3, "task__box_cols": 2},
      "task.box_rows=3: zoo:sudoku_6x6 was trained with 2, which its",
    ),
    ({"task__test_csv": "nowhere.csv"}, "nowhere.csv: no such file"),
    ({"eval__checkpoint": "best"}, "no checkpoint has a score"),
  ],
)
def test_what_a_trained_model_cannot_have_is_refused(
  settings, says, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  with refused(says):
    score_model(config_of(ENTRY, **settings), ENTRY)


def test_rows_of_text_may_have_another_length_but_not_other_tokens(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  run, text = tmp_path / "run", tmp_path / "mine.txt"
  model = loopjax.build(
    "looped", width=16, num_heads=2, num_loops=2, task__sequence_length=16
  )
  loopjax.save(model, run)
  text.write_text("a house. \n\n" * 400)
  mine = {"task__test_files": str(text), "eval__depth_factor": 0}
  few = {"task__sequence_length": 8, "eval__batch_size": 4}
  shorter = score_model(config_of(run, **mine, **few), run, limit=5)
  assert shorter["metrics"]["test/loss"] > 0
  assert shorter["metrics"]["test/count"] == 8  # 5, in whole batches.
  with refused("task.vocab_size=300: .*run was trained with 0, which its"):
    score_model(config_of(run, **mine, task__vocab_size=300), run)


def test_a_folder_of_the_hub_is_scored_as_a_run(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  folder, asked = hub_examples.make_folder(tmp_path / "theirs"), []

  def scored(config, workdir, *_):
    asked.append((workdir.as_posix(), config.task.test_files))
    return {"status": "diverged"}

  monkeypatch.setattr(score_lib, "score_model", scored)
  flags = [str(folder), "--config.task.test_files=mine.txt"]
  for _ in range(2):  # It is imported once.
    assert score.main(flags) == 3
  assert asked == [("runs/theirs", "mine.txt")] * 2
  _, settings, _ = convert.read_folder(folder)
  there = config_lib.of_run(pathlib.Path("runs/theirs"), "")
  assert there.model == settings.model


def test_a_tokenizer_may_move_but_not_change(tmp_path):
  """Another one of the same size has the same shapes, and other words."""
  folder = hub_examples.make_folder(tmp_path / "theirs")
  settings = convert.read_folder(folder).settings
  task = dataclasses.asdict(settings.task)
  content = json.loads((folder / "tokenizer.json").read_text())
  words = content["model"]["vocab"]
  words["w1"], words["w2"] = words["w2"], words["w1"]
  moved, other = tmp_path / "moved.json", tmp_path / "other.json"
  shutil.copyfile(folder / "tokenizer.json", moved)
  other.write_text(json.dumps(content))

  def check(path):
    record = dataclasses.replace(settings.task, tokenizer=str(path))
    score_lib.check_tokens(task, settings._replace(task=record))

  check(moved)
  with refused("task.tokenizer=.*other.json': the model was trained with "):
    check(other)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
  """A text for the models of sums."""
  path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
  lines = [
    f"{a}+{b}+{a}={a + b},{2 * a + b}" for a in range(9) for b in range(9)
  ]
  path.write_bytes(text_examples.jsonl([{"text": line} for line in lines]))
  return path


@pytest.mark.parametrize(("name", "file", "says"), [
  ("novels", "", "own by --config.task.test_files=mine.txt"),
  ("sums_melt", "", 'own by --config.task.test_files=mine.jsonl, which has a'
   ' document per line, {"text": "..."}'),
  ("sums_melt", "mine.txt", "is plain text, but zoo:sums_melt knows other"),
  ("sums_melt", "none.jsonl", "none.jsonl: no such file"),
])  # fmt: skip
def test_texts_for_a_model_of_the_zoo_are_ones_own(
  name, file, says, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("mine.txt").write_text("3+4=7\n" * 99)
  flags = [f"--config.task.test_files={file}"] if file else []
  assert score.main([f"zoo:{name}", *flags]) == 2
  error = capsys.readouterr().err.splitlines()[-1]
  assert error.startswith("error: ") and says in error


def test_two_models_are_compared_on_the_same_examples(
  sums, tmp_path, monkeypatch, capsys
):
  """By the mean difference of their own scores."""
  monkeypatch.chdir(tmp_path)
  settings = {"task.test_files": sums, "eval.batch_size": 8}
  flags = [f"--config.{name}={value}" for name, value in settings.items()]
  names = "zoo:sums_looped", "zoo:sums_recurrent"
  scores = []
  for name in names:
    assert score.main([name, *flags]) == 0
    place = pathlib.Path("runs", name.removeprefix("zoo:"), "evaluation")
    summary = json.loads((place / "summary.json").read_text())
    scores.append(summary["metrics"])
  capsys.readouterr()
  assert score.main([names[0], f"--compare={names[1]}", *flags]) == 0
  rows = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines()}
  means = [one["test/loss"] for one in scores]
  expected = f"{means[0] - means[1]:+.4f}"
  assert rows["loss"][1:4] == [*(f"{x:.4f}" for x in means), expected]
  there = pathlib.Path("runs/sums_looped/evaluation/compared.json")
  found = json.loads(there.read_text())
  assert found["reference"] == names[1]
  loss = found["scores"]["loss"]
  assert loss["value"] == pytest.approx(means[0] - means[1], abs=1e-5)
  assert loss["low"] < loss["value"] < loss["high"] and 0 < loss["p"] <= 1


def test_a_score_that_is_not_finite_is_not_compared(monkeypatch, tmp_path):
  scores = {"loss": (np.array([1.0, np.nan, 2.0]), np.ones(3))}
  monkeypatch.setattr(score_lib, "_of_examples", lambda *_: ({}, scores))
  monkeypatch.chdir(tmp_path)
  source = pathlib.Path("zoo:sudoku_6x6")
  config = config_lib.config_of_run(source, str(source))
  with pytest.raises(UserError, match="loss of an example is not finite"):
    score_lib.compare_models(config, source, source, {})


def test_a_run_is_not_compared_with_a_link_to_it(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("link").symlink_to(ENTRY, target_is_directory=True)
  assert score.main([str(ENTRY), "--compare=link"]) == 2
  assert "--compare=link is the run itself" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("other", "says"),
  [
    ("zoo:sudoku_6x6", "--compare=zoo:sudoku_6x6 is the run itself"),
    ("zoo:sums_looped", "its task.name='text', that of"),
    ("zoo:sudoku_nine", "task.box_rows=2: zoo:sudoku_nine was trained with 3"),
    ("nowhere", "contains no run"),
  ],
)
def test_models_that_cannot_be_compared(
  other, says, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert score.main([str(ENTRY), f"--compare={other}", "--limit=8"]) == 2
  assert says in capsys.readouterr().err
