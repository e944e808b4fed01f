"""The Sudoku task's batches and scores."""

import dataclasses
import functools
import itertools

import data_examples
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.data import pipeline
from loopjax.data.sudoku import board as boards
from loopjax.data.sudoku import puzzles as puzzles_lib
from loopjax.data.sudoku import symmetry, task
from loopjax.errors import UserError
from loopjax.types import Output

pytestmark = pytest.mark.usefixtures("user_cache")
CONFIG = task.Config(box_rows=2, box_cols=2)
HEADER = "source,question,answer,rating\n"


@pytest.fixture
def read_from(tmp_path):
  """A config with 4x4 grids without blanks from two files."""

  def make(train, test, **values):
    paths = {}
    for name, grids in (("train_csv", train), ("test_csv", test)):
      path = tmp_path / f"{name}.csv"
      lines = [f"here,{grid},{grid},{i}\n" for i, grid in enumerate(grids)]
      path.write_text(HEADER + "".join(lines))
      paths[name] = str(path)
    return task.Config(box_rows=2, box_cols=2, **paths, **values)

  return make


batches = functools.partial(data_examples.read, task, num=3, batch_size=8)


@pytest.mark.parametrize("augment", [False, True])
def test_batches_are_puzzles_and_their_solutions(augment):
  config = task.Config(box_rows=2, box_cols=3, augment=augment)
  dataset, got = batches(config, "train")
  assert dataset.facts["train_examples"] > 10_000
  for batch in got:
    question, answer = batch["inputs"] - 1, batch["targets"] - 1
    assert boards.is_solution(config.board, answer).all()
    given = question > 0
    np.testing.assert_array_equal(question[given], answer[given])
    assert (batch["weights"] == 1).all()


def test_augmentation_changes_puzzles_but_not_their_class():
  plain = batches(CONFIG, "train")[1][0]
  config = task.Config(box_rows=2, box_cols=2, augment=True)
  changed = batches(config, "train")[1][0]
  assert not np.array_equal(plain["inputs"], changed["inputs"])
  keys = [
    symmetry.class_key(CONFIG.board, (batch["targets"] - 1).astype(np.uint8))
    for batch in (plain, changed)
  ]
  np.testing.assert_array_equal(*keys)


def test_test_puzzles_are_never_augmented():
  config = task.Config(box_rows=2, box_cols=2, augment=True)
  packed = puzzles_lib.load_bank(config.board)
  questions, _ = puzzles_lib.unpack(config.board, packed.givens, packed.answers)
  there_are = {x.tobytes() for x in questions}
  for split, as_they_are in (("test", True), ("train", False)):
    got = np.concatenate([b["inputs"] for b in batches(config, split)[1]])
    asked = {x.tobytes() for x in (got - 1).astype(np.uint8)}
    assert (asked <= there_are) == as_they_are


def test_splits_share_no_class():
  keys, num = {}, {}
  config = task.Config(box_rows=2, box_cols=3)
  for split in ("train", "validation", "test"):
    dataset, got = batches(config, split, num=30, batch_size=64)
    answers = np.concatenate([b["targets"] - 1 for b in got]).astype(np.uint8)
    keys[split] = set(symmetry.class_key(config.board, answers).tolist())
    num[split] = dataset.facts[f"{split}_examples"]
  for one, other in itertools.combinations(keys.values(), 2):
    assert one.isdisjoint(other)
  assert sum(num.values()) == 20_000
  assert 500 < num["validation"] < 1_500 < 3_000 < num["test"] < 5_000


def test_too_few_solutions_are_split_by_puzzle():
  """4x4 boards have two solutions up to symmetry, one of them for the test."""
  train, validation = (
    batches(CONFIG, split, num=400, batch_size=1)[0]
    for split in ("train", "validation")
  )
  assert train.facts["train_examples"] == 1403
  assert validation.facts["validation_examples"] == 74  # 5 % of 1,477.


def test_one_puzzle_cannot_be_split(read_from):
  with pytest.raises(
    UserError, match=r"train_csv.csv: 1 puzzle\(s\); training"
  ):
    batches(read_from([LARGER], [SMALLER]), "train", num=1)


def test_revealed_cells_are_the_solutions_and_as_many_as_asked():
  plain = task.Config(box_rows=2, box_cols=3)
  shown = dataclasses.replace(
    plain, max_revealed=0.8, num_revealed_examples=1920
  )
  shares = []
  for before, after in zip(
    batches(plain, "train", num=30, batch_size=64)[1],
    batches(shown, "train", num=30, batch_size=64)[1],
    strict=True,
  ):
    np.testing.assert_array_equal(before["targets"], after["targets"])
    blank = before["inputs"] == 1
    np.testing.assert_array_equal(
      before["inputs"][~blank], after["inputs"][~blank]
    )
    revealed = blank & (after["inputs"] != 1)
    np.testing.assert_array_equal(
      after["inputs"][revealed], after["targets"][revealed]
    )
    shares.append(revealed.sum(axis=1) / blank.sum(axis=1))
  shares = np.concatenate(shares)
  # Up to 0.8 at first, then decreasing: the mean is a quarter of that.
  assert shares[:192].mean() == pytest.approx(0.38, abs=0.04)
  assert shares[:192].std() == pytest.approx(0.76 / 12**0.5, abs=0.04)
  assert shares.mean() == pytest.approx(0.2, abs=0.02)
  assert shares[-64:].mean() < 0.03
  for split in ("validation", "test"):
    np.testing.assert_array_equal(
      batches(plain, split, num=1)[1][0]["inputs"],
      batches(shown, split, num=1)[1][0]["inputs"],
    )


def test_any_prefix_of_the_evaluation_split_is_a_fair_sample(tmp_path):
  """A file sorted by difficulty is not scored in that order."""
  path = tmp_path / "sorted.csv"
  rows = [f"x,1.3434..4.2.2341,1234341241232341,{i}\n" for i in range(64)]
  path.write_text(HEADER + "".join(rows))
  config = task.Config(
    box_rows=2, box_cols=2, train_csv="unused.csv", test_csv=str(path)
  )
  (batch,) = batches(config, "test", num=1, batch_size=16)[1]
  # The first sixteen of the file are of the first four groups.
  assert len(set(batch["group/rating"].tolist())) > 2
  assert max(batch["group/rating"]) > 3


def test_a_subset_is_the_seeds():
  config = task.Config(box_rows=2, box_cols=2, num_train_puzzles=16)
  dataset, first = batches(config, "train")
  assert dataset.facts["train_examples"] == 16
  again = batches(config, "train")[1]
  other = batches(config, "train", seed=1)[1]
  np.testing.assert_array_equal(first[0]["inputs"], again[0]["inputs"])
  assert not np.array_equal(first[0]["inputs"], other[0]["inputs"])
  seen = np.unique(np.concatenate([b["inputs"] for b in first]), axis=0)
  assert len(seen) <= 16


def test_more_puzzles_than_there_are_is_named():
  config = task.Config(box_rows=2, box_cols=2, num_train_puzzles=10**6)
  with pytest.raises(UserError, match="num_train_puzzles=1000000"):
    batches(config, "train")


def test_scores_of_hand_made_answers():
  inputs = jnp.array([[1, 2, 1, 3], [1, 2, 1, 3], [1, 2, 1, 3]])
  targets = jnp.array([[4, 2, 5, 3]] * 3)
  answers = jnp.array([[4, 2, 5, 3], [4, 2, 4, 3], [4, 5, 5, 3]])
  logits = 50.0 * (answers[..., None] == jnp.arange(6)[None, None])
  output = Output(logits, {}, {}, {}, {})
  weights = jnp.ones((3, 4))
  scores = task.score(
    output, {"inputs": inputs, "targets": targets, "weights": weights}
  )
  assert scores["exact_match"].tolist() == [1, 0, 0]
  assert scores["blank_accuracy"].tolist() == [1, 0.5, 1]  # Only blanks.
  assert scores["all_cell_accuracy"].tolist() == [1, 0.75, 0.75]
  np.testing.assert_allclose(scores["loss"], [0, 12.5, 12.5], atol=1e-4)


def test_rating_buckets():
  names = pipeline.range_names(task.RATING_EDGES)
  assert names == ("0", "1-2", "3-9", "10-29", "30-99", "100+")
  ratings = np.array([0, 1, 2, 3, 9, 10, 99, 100, 5000])
  ids = np.searchsorted(task.RATING_EDGES, ratings, side="right") - 1
  assert [names[i] for i in ids] == [
    "0", "1-2", "1-2", "3-9", "3-9", "10-29", "30-99", "100+", "100+",
  ]  # fmt: skip


# From both classes of 4x4 grids; the first relabelled and transposed.
LARGER, RENAMED, TURNED = (
  "1234341221434321",
  "2134342112434312",
  "1324241331424231",
)
SMALLER = "1234341223414123"


@pytest.mark.parametrize("same", [LARGER, RENAMED, TURNED])
def test_solutions_in_both_files_are_counted(read_from, same, capsys):
  config = read_from([LARGER] * 3, [SMALLER, same, same])
  dataset, _ = batches(config, "train", num=1)
  checksum = dataset.facts.pop("train_sha256")
  assert len(checksum) == 64
  assert dataset.facts == {
    "train_examples": 2,
    "train_rows_skipped": 0,
    "test_solutions_in_train": 2,
  }
  said = capsys.readouterr().out.splitlines()[-1]
  assert said.startswith(f"warning: {config.test_csv}: 2 of 3 puzzles have the")


@pytest.mark.parametrize("same", [LARGER, RENAMED, TURNED])
def test_solutions_in_both_files_stop_if_asked(read_from, same):
  config = read_from([LARGER] * 2, [SMALLER, same], on_overlap="error")
  with pytest.raises(UserError) as caught:
    batches(config, "train")
  message = str(caught.value)
  assert message.startswith(f"{config.test_csv}: 1 of 2 puzzles")
  assert f"{config.train_csv}, first puzzle 2; " in message
  assert "on_overlap=report" in message
  batches(config, "test", num=1)  # No training data.


def test_a_copy_of_the_training_file_is_not_a_test(read_from):
  config = read_from([LARGER, SMALLER], [LARGER, SMALLER])
  with pytest.raises(UserError, match="has the same puzzles as"):
    batches(config, "train")


def test_files_without_overlap_say_nothing(read_from, capsys):
  config = read_from([LARGER] * 2, [SMALLER], on_overlap="error")
  dataset, _ = batches(config, "train", num=1)
  assert dataset.facts["test_solutions_in_train"] == 0
  assert "warning" not in capsys.readouterr().out


def test_only_what_is_trained_on_counts(read_from):
  """A subset of the training file may exclude the overlap."""
  config = read_from([LARGER, SMALLER] * 3, [SMALLER], num_train_puzzles=1)
  counts = {
    batches(config, "train", num=1, seed=seed)[0].facts[
      "test_solutions_in_train"
    ]
    for seed in range(8)
  }
  assert counts == {0, 1}


def test_read_through_the_csv_path(tmp_path):
  path = tmp_path / "puzzles.csv"
  path.write_text(
    "source,question,answer,rating\n"
    "here,1.3434..4.2.2341,1234341241232341,0\n"
    "there,.2343412.123234.,1234341241232341,12\n"
    "there,short,1234341241232341,1\n"
    "there,.2343412.1232341,1234341241232341,\n"
  )
  config = task.Config(
    box_rows=2,
    box_cols=2,
    train_csv="unused.csv",
    test_csv=str(path),
    on_bad_row="skip",
  )
  dataset, (batch,) = batches(config, "test", num=1)
  del dataset.facts["test_sha256"]
  assert dataset.facts == {"test_examples": 3, "test_rows_skipped": 1}
  assert dataset.groups["source"] == ("here", "there")
  groups = zip(
    batch["group/source"][batch["valid"]].tolist(),
    batch["group/rating"][batch["valid"]].tolist(),
    strict=True,
  )
  assert sorted(groups) == [(0, 0), (1, -1), (1, 3)]  # -1 is in no group.


def test_an_answer_is_checked_by_the_rules_and_the_givens():
  """Without its solution: another board that obeys the rules fails, too."""
  (batch,) = batches(CONFIG, "test", num=1)[1]
  solved = jnp.asarray(batch["targets"])
  given = np.argmax(batch["inputs"][0] > 1)
  blank = np.argmin(batch["inputs"][0] > 1)
  swapped = np.array([0, 1, 3, 2, 4, 5])  # Digits 1 and 2, everywhere.
  questions = {"inputs": jnp.asarray(batch["inputs"])}
  np.testing.assert_array_equal(
    task.check_answer(CONFIG, questions, solved), np.ones(len(solved))
  )
  for wrong in (
    solved.at[0, blank].add(1),
    solved.at[0, given].set(0),
    jnp.asarray(swapped)[solved],
  ):
    assert task.check_answer(CONFIG, questions, wrong.astype(jnp.int32))[0] == 0
