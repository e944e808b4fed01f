"""The task of docs/howto/task.md works as copied."""

import importlib.util
import itertools
import sys

import numpy as np
import pytest
from tests_support import ROOT, command

from loopjax import main as main_lib
from loopjax.data import TASKS, pipeline
from loopjax.errors import UserError

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


@pytest.mark.long
def test_it_trains_with_its_config(parity, monkeypatch, tmp_path, capsys):
  """A line in TASKS and the config, as on the page; no preset "paper"."""
  page = (HOWTO / "task.md").read_text()
  assert '`"parity": "loopjax.data.parity",`' in page
  assert "--config=configs/parity_looped.py" in page
  monkeypatch.setitem(TASKS, "parity", parity)
  config = f"--config={HOWTO}/parity_looped.py:smoke"
  assert command(main_lib.main, config, f"--workdir={tmp_path}/run") == 0
  said = capsys.readouterr().out
  assert "test: exact_match 0" in said
  assert "on 512 examples" in said
