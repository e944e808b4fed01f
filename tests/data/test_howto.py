"""The files of docs/howto: a task and a family that users copy."""

import importlib.util
import itertools
import re
import shutil
import sys
import textwrap
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import ROOT, command, refused

import loopjax
from loopjax import config as config_lib
from loopjax import main as main_lib
from loopjax.data import TASKS, check_dataset, check_scores, pipeline
from loopjax.errors import UserError
from loopjax.models import MODELS
from loopjax.train import procedure
from loopjax.types import Dataset

HOWTO = ROOT / "docs" / "howto"


@pytest.fixture(scope="module")
def parity():
  spec = importlib.util.spec_from_file_location("parity", HOWTO / "parity.py")
  module = importlib.util.module_from_spec(spec)
  sys.modules["parity"] = module
  spec.loader.exec_module(module)
  return module


def rows_of(parity, split, num=None, **kwargs):
  config = parity.Config(length=8, num_eval_examples=50)
  kwargs = {"batch_size": 16, "seed": 0, **kwargs}
  batches = parity.make_dataset(config, split, **kwargs).batches
  return list(itertools.islice(pipeline.iterate(batches, 0, 0), num))


def test_its_answers_are_parities_and_its_splits_share_no_row(parity):
  seen = {}
  for split, num in (("validation", None), ("test", None), ("train", 20)):
    seen[split] = set()
    for batch in rows_of(parity, split, num):
      there = batch.get("valid", np.ones(16, bool))
      for bits, odd in zip(
        batch["inputs"][there], batch["targets"][there], strict=True
      ):
        ones = 0
        for bit, got in zip(bits.tolist(), odd.tolist(), strict=True):
          ones += bit
          assert got == ones % 2
        seen[split].add(tuple(bits.tolist()))
  assert [len(x) for x in seen.values()] == [50, 50, 2**8 - 100]
  assert len(set().union(*seen.values())) == 2**8


def test_two_processes_read_the_same_stream_as_one(parity):
  whole = rows_of(parity, "train", 3)
  for part in (np.arange(0, 16, 2), np.arange(1, 16, 2)):
    for batch, own in zip(
      whole, rows_of(parity, "train", 3, rows=part), strict=True
    ):
      np.testing.assert_array_equal(batch["inputs"][part], own["inputs"])


def test_too_many_test_rows_are_refused(parity):
  with pytest.raises(UserError, match="leaves no row to train on"):
    parity.Config(length=4, num_eval_examples=8)


def variant(parity, **changes):
  """The task with other functions."""
  names = vars(parity) | changes
  return types.SimpleNamespace(**names)


def batches_with(parity, change):
  """A `make_dataset` whose batches are changed."""

  def make_dataset(*args, **kwargs):
    dataset = parity.make_dataset(*args, **kwargs)
    return Dataset(dataset.batches.map(change))

  return make_dataset


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (
      lambda x: {k: v for k, v in x.items() if k != "targets"},
      r"split 'train': batches have no 'targets', int32 \[4, 8\]",
    ),
    (
      lambda x: x | {"weights": x["weights"][:, 1:]},
      r"'weights' is float32 \[4, 7\], but float32 \[4, 8\] in abstract_ba",
    ),
    (
      lambda x: x | {"inputs": x["inputs"].astype(np.int64)},
      r"'inputs' is int64 \[4, 8\], but int32",
    ),
    (
      lambda x: {k: v.astype(np.float16) for k, v in x.items() if k > "j"},
      "no 'inputs', .*; 'targets' is float16 .*; 'weights' is float16",
    ),
    (
      lambda x: x | {"targets": x["targets"] + np.int32(1)},
      r"'targets' has tokens from 1 to 2, which are not in \[0, 2\)",
    ),
  ],
)
def test_batches_that_are_not_as_described_are_one_line(parity, change, says):
  task = variant(parity, make_dataset=batches_with(parity, change))
  TASKS["broken"] = task
  try:
    with refused(f"parity.make_dataset.*{says}"):
      loopjax.datasets("broken", batch_size=4, length=8, num_eval_examples=9)
  finally:
    del TASKS["broken"]


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (lambda x: Dataset(x.batches[:3]), r"ends after batch 3, .*\.repeat\(\)"),
    (lambda x: Dataset(x.batches[:0]), "there are no batches"),
    (lambda x: x.batches, "returned .* expected Dataset with a grain.MapD"),
    (lambda x: Dataset(x.batches.to_iter_dataset()), "returned .*IterD.*, exp"),
    (lambda x: None, "returned NoneType"),
  ],
)
def test_a_pipeline_of_another_kind_is_one_line(parity, change, says):
  """A run would end in the middle, or could not be resumed."""
  config = parity.Config()
  made = parity.make_dataset(config, "train", batch_size=4, seed=0)
  with refused(f"^parity.make_dataset, split 'train': {says}"):
    check_dataset(parity, config, "train", 4, change(made))


def test_a_repeated_data_set_has_no_end(parity):
  config = parity.Config()
  made = parity.make_dataset(config, "train", batch_size=4, seed=0)
  repeated = Dataset(made.batches[:3].repeat())
  assert check_dataset(parity, config, "train", 4, repeated) is repeated


def test_evaluation_marks_its_rows(parity):
  config, found = (
    parity.Config(),
    parity.make_dataset(parity.Config(), "train", batch_size=4, seed=0),
  )
  with refused("split 'test': batches have no 'valid', bool"):
    check_dataset(parity, config, "test", 4, found)


def test_scores_are_of_rows_and_have_the_headline(parity):
  score = {"exact_match": np.ones(4), "accuracy": (np.ones(4), np.ones(4))}
  check_scores(parity, score, 4)
  with refused(r"parity.score: 'loss' has shape \[\], expected \[4\]"):
    check_scores(parity, score | {"loss": np.float32(1)}, 4)
  del score["exact_match"]
  with refused("HEADLINE: score returns no 'exact_match', but accuracy"):
    check_scores(parity, score, 4)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    (
      {"score": lambda output, batch: {"loss": jnp.zeros(())}},
      r"parity.score: 'loss' has shape \[\], expected \[256\]",
    ),
    (
      {"HEADLINE": ("accuracy", "f1")},
      "parity.HEADLINE: score returns no 'f1', but loss, accuracy, exact_match",
    ),
    (
      {"make_dataset": lambda x: {"inputs": x["inputs"]}},
      "parity.make_dataset, split 'train': batches have no 'target",
    ),
  ],
)
def test_a_run_checks_batches_and_scores(parity, tmp_path, changes, says):
  """Before the first step: nothing is trained and then lost."""
  if change := changes.get("make_dataset"):
    changes = {"make_dataset": batches_with(parity, change)}
  TASKS["broken"] = variant(parity, **changes)
  try:
    config = config_lib.make("looped", "broken")
    small = {"width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 1}
    config_lib.override(config, {f"model.{k}": v for k, v in small.items()})
    steps = {"run.num_steps": 10, "run.batch_size": 8, "optim.warmup_steps": 0}
    config_lib.override(config, steps)
    with refused(says):
      procedure.run(config, tmp_path / "run", "train_and_eval")
  finally:
    del TASKS["broken"]
  assert not (tmp_path / "run").exists()


@pytest.fixture
def copied(tmp_path, monkeypatch):
  """The folder into which a user has copied the files."""
  for name in ("parity", "gated", "parity_gated"):
    shutil.copy(HOWTO / f"{name}.py", tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  yield tmp_path
  for registry, name in ((MODELS, "gated"), (TASKS, "parity")):
    registry._entries.pop(name, None)
    sys.modules.pop(name, None)


# Numbers of the pages, and smaller ones.
SMALLER = {
  "width=64": "width=16", "num_loops=4": "num_loops=2",
  "sequence_length=64": "sequence_length=16", "steps=200": "steps=2",
  "steps=100": "steps=2",
}  # fmt: skip


def run_block(page):
  """The names of the page's example in Python, which is run, smaller."""
  text = (HOWTO / page).read_text()
  blocks = re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", text)
  (code,) = (textwrap.dedent(x) for x in blocks if "    import loopjax" in x)
  for number, smaller in SMALLER.items():
    code = code.replace(number, smaller)
  names = {}
  exec(compile(code, page, "exec"), names)
  return names


@pytest.mark.long
def test_the_copied_files_train_and_are_read(copied, capsys):
  """As on the pages: the command, then in Python."""
  for page in ("task.md", "model.md"):
    text = (HOWTO / page).read_text()
    assert "loopjax train --config=parity_gated.py" in text
    assert "cp docs/howto/gated.py docs/howto/parity.py docs/" in text
  arguments = ("--config=parity_gated.py:smoke",)
  assert command(main_lib.main, *arguments, directory=copied) == 0
  said = capsys.readouterr().out
  assert "test: exact_match 0" in said and "on 512 examples" in said
  model = loopjax.load("runs/parity_gated-smoke")
  assert model.about.settings.plain["model"]["name"] == "gated"
  assert np.any(model.params["keep_logit"][...] != -2)  # It was trained.
  assert run_block("task.md")["m"].about.settings.spec.vocab_size == 2


@pytest.mark.long
def test_the_copied_family_is_a_language_model(copied):
  """A token at a time, with a cache, as in one call; saved, it is the same."""
  (copied / "mine.txt").write_text("Once there was a house.\n\n" * 4000)
  model = run_block("model.md")["m"]
  text = model.generate("abc", max_new_tokens=3, temperature=0.0, bos="none")
  ids = np.array([[97, 98, 99, 0, 0, 0]], np.int32)  # It reads no later token.
  for end in range(3, 6):
    ids[0, end] = np.argmax(model.logits(ids)[0, end - 1, :256])
  assert text == bytes(ids[0, 3:].tolist()).decode(errors="replace")
  found = loopjax.dynamics(model, ids, num_loops=4)  # Without more code.
  assert len(found.loops) == 4 and len(found.positions) == 6
  again = loopjax.load("runs/mine")
  np.testing.assert_array_equal(again.logits(ids), model.logits(ids))
