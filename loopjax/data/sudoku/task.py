"""The Sudoku task: read a board, predict every cell at once.

Tokens: 0 is padding (never seen), 1 a blank, digit d is d + 1 (the encoding of
every published Sudoku-Extreme baseline).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.data.sudoku import board as boards
from loopjax.data.sudoku import puzzles as puzzles_lib
from loopjax.data.sudoku import symmetry
from loopjax.errors import Moot, UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

TEST_SHARE = 0.2  # Fraction of the packaged solutions.


@dataclasses.dataclass(frozen=True)
class Config:
  """Sources of the puzzles, and how training uses them.

  Attributes:
    box_rows, box_cols: size of a box: 2x2, 2x3 or 3x3 cells and so on.
    train_csv, test_csv: CSV files, see `puzzles`, plain or gzip, or
      hf://OWNER/NAME/FILE; empty for the puzzles shipped with the package. With
      train_csv, test_csv is needed; alone it replaces the test split.
    on_bad_row: "error" stops at a malformed row, "skip" skips it and counts it
      in the summary.
    on_overlap: if puzzles of test_csv have, up to symmetry, the solution of a
      training puzzle: "report" warns and counts them in the summary of
      training, "error" stops.
    check_solutions: also check that every puzzle has exactly one solution.
    augment: apply a random symmetry to a puzzle each time it is used in
      training.
    max_revealed: a curriculum: training fills in a fraction of each puzzle's
      blanks, drawn uniformly from 0 to a bound each time. The bound falls
      linearly from this to 0 over the first num_revealed_examples examples; 0
      fills in none.
    validation_share: fraction of all solutions, packaged or from train_csv,
      that is held out and evaluated during training. Symmetric solutions stay
      together, unless there are too few classes (4x4 has two): then it is a
      fraction of the puzzles.
    num_train_puzzles: train on this many puzzles, drawn by the run's seed; 0
      for all.
  """

  box_rows: int = 3
  box_cols: int = 3
  train_csv: str = ""
  test_csv: str = ""
  on_bad_row: str = "error"
  on_overlap: str = "report"
  check_solutions: bool = False
  augment: bool = False
  max_revealed: float = checks.setting(0.0, within="[0, 1]")
  num_revealed_examples: int = checks.setting(0, least=0)
  validation_share: float = checks.setting(0.05, within="(0, 0.5]")
  num_train_puzzles: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    boards.Board(self.box_rows, self.box_cols)  # Validates the boxes.
    checks.one_of(
      "task",
      self,
      on_bad_row=("error", "skip"),
      on_overlap=("report", "error"),
    )
    if (self.max_revealed > 0) != (self.num_revealed_examples > 0):
      names = "task.max_revealed", "task.num_revealed_examples"
      zero, other = names if not self.max_revealed else names[::-1]
      raise UserError(
        f"task.max_revealed={self.max_revealed} and task.num_revealed_examples="
        f"{self.num_revealed_examples} must be set"
        " together",
        (Moot(other, 0, (zero,)),),
      )
    if self.train_csv and not self.test_csv:
      raise UserError(
        "task.train_csv needs task.test_csv: the packaged puzzles have another"
        " distribution and other splits than your file"
      )
    if self.train_csv and self.train_csv == self.test_csv:
      raise UserError(f"task.test_csv={self.test_csv!r} is the training file")
    if not self.test_csv:
      checks.without_effect(
        "task", self, "test_csv", "on_bad_row", "on_overlap", "check_solutions"
      )

  @property
  def board(self) -> boards.Board:
    return boards.Board(self.box_rows, self.box_cols)


RATING_EDGES = (0, 1, 3, 10, 30, 100)
TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match", "blank_accuracy")


def spec(config: Config) -> TaskSpec:
  """Vocabulary, length and (row, column, box) of every cell."""
  board = config.board
  coordinates = np.stack([board.row, board.column, board.box], axis=1)
  return TaskSpec(
    vocab_size=board.size + 2,
    sequence_length=board.num_cells,
    coordinates=tuple(map(tuple, coordinates.tolist())),
    coordinate_names=("row", "column", "box"),
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, config.board.num_cells)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split.

  Args:
    seed: seed of the order, the augmentation and the choice of a subset.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b],
    "group/rating" and "group/source" i32 [b].
  """
  puzzles = _puzzles(config, split)
  indices = _split_indices(config, split, puzzles)
  if not len(indices):
    raise UserError(
      f"{config.train_csv}: {len(puzzles.ratings)} puzzle(s); training and "
      "validation need at least one each"
    )
  if split == "train" and config.num_train_puzzles:
    indices = _subset(indices, config.num_train_puzzles, seed)
  board, num_examples = config.board, len(indices)
  facts: dict[str, int | float | str] = {
    f"{split}_examples": num_examples,
    f"{split}_rows_skipped": puzzles.num_skipped,
  }
  if puzzles.sha256:
    facts[f"{split}_sha256"] = puzzles.sha256
  if split == "train" and config.test_csv:
    facts["test_solutions_in_train"] = _overlap(config, puzzles, indices)

  def boards_of(examples):
    givens, answers = puzzles.givens[examples], puzzles.answers[examples]
    return puzzles_lib.unpack(board, givens, answers)

  def make_training(examples, positions):
    questions, answers = boards_of(indices[examples])
    if config.augment:
      numbers = pipeline.uniforms(seed, positions, symmetry.num_uniforms(board))
      transform = symmetry.from_uniforms(board, numbers)
      questions = symmetry.apply(transform, questions)
      answers = symmetry.apply(transform, answers)
    if config.max_revealed:
      revealed = _revealed(config, seed, positions)
      questions = np.where(revealed, answers, questions)
    return _encoded(questions, answers)

  def make_evaluation(places, _):
    # Files are sorted by difficulty; after shuffling, any prefix is a fair
    # sample.
    examples = indices[pipeline.shuffled(places, num_examples, 0)]
    rating = np.searchsorted(RATING_EDGES, puzzles.ratings[examples], "right")
    return {
      **_encoded(*boards_of(examples)),
      "group/rating": (rating - 1).astype(np.int32),
      "group/source": puzzles.source_ids[examples],
    }

  if split == "train":
    batches = pipeline.training_batches(
      make_training, num_examples, batch_size, seed, rows
    )
  else:
    batches = pipeline.evaluation_batches(
      make_evaluation, num_examples, batch_size, rows
    )
  return Dataset(
    batches=batches,
    groups={
      "rating": pipeline.range_names(RATING_EDGES),
      "source": puzzles.sources,
    },
    facts=facts,
  )


def _revealed(config: Config, seed: int, positions: np.ndarray) -> np.ndarray:
  """The cells that the curriculum fills in, bool [b, cells].

  Args:
    seed: the run's seed.
    positions: positions of the examples in the training stream, int [b].
  """
  numbers = pipeline.uniforms(
    pipeline.stream_seed(seed, 1), positions, 1 + config.board.num_cells
  )
  remaining = 1 - positions / config.num_revealed_examples
  bound = config.max_revealed * np.maximum(remaining, 0)
  return numbers[:, 1:] < bound[:, None] * numbers[:, :1]


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": every cell is correct; "blank_accuracy": fraction of blank
  cells that are correct; "all_cell_accuracy": fraction of all cells, including
  givens, as UTM's authors count; "loss": mean cross-entropy of the counted
  cells in nats.
  """
  inputs, targets = batch["inputs"], batch["targets"]
  losses, predicted = token_losses.scores(output, targets)
  correct = (predicted == targets).astype(jnp.float32)
  blank = (inputs == 1).astype(jnp.float32)
  weights = batch["weights"]
  return {
    "exact_match": jnp.min(correct, axis=1),
    "blank_accuracy": jnp.sum(correct * blank, axis=1)
    / jnp.maximum(jnp.sum(blank, axis=1), 1.0),
    "all_cell_accuracy": jnp.mean(correct, axis=1),
    "loss": jnp.sum(losses * weights, axis=1)
    / jnp.maximum(jnp.sum(weights, axis=1), 1.0),
  }


def check_answer(config: Config, batch: Batch, predicted: Array) -> Array:
  """1 for a board that obeys the rules and keeps the givens, else 0, f32 [B].

  Does not read the solution.

  Args:
    predicted: tokens, i32 [B, cells].
  """
  board, inputs = config.board, batch["inputs"]
  digits = predicted[:, board.units] - 2  # From 0: [B, 3 size, size].
  present = jnp.any(jax.nn.one_hot(digits, board.size, dtype=bool), axis=2)
  keeps = jnp.all((inputs == 1) | (predicted == inputs), axis=1)
  return (jnp.all(present, axis=(1, 2)) & keeps).astype(jnp.float32)


def _encoded(
  questions: np.ndarray, answers: np.ndarray
) -> dict[str, np.ndarray]:
  """Tokens of boards, and weights: givens count as well, as in the paper."""
  return {
    "inputs": questions.astype(np.int32) + 1,
    "targets": answers.astype(np.int32) + 1,
    "weights": np.ones(questions.shape, np.float32),
  }


def _puzzles(config: Config, split: str) -> puzzles_lib.Puzzles:
  """The puzzles that contain a split: from a file, or the packaged ones."""
  path = config.test_csv if split == "test" else config.train_csv
  if not path:
    return puzzles_lib.load_bank(config.board)
  return puzzles_lib.read(
    config.board,
    path,
    on_bad_row=config.on_bad_row,
    check_solutions=config.check_solutions,
  )


def _split_indices(
  config: Config, split: str, puzzles: puzzles_lib.Puzzles
) -> np.ndarray:
  """Which of the puzzles are in the split, int64, ascending."""
  if config.test_csv and split == "test":
    return np.arange(len(puzzles.ratings))
  place = symmetry.place(puzzles.class_keys)
  in_test = (place < TEST_SHARE) & (not config.train_csv)
  in_validation = place >= 1 - config.validation_share
  if not in_validation.any():
    rows = np.flatnonzero(~in_test)
    number = symmetry.place(rows.astype(np.uint64))
    num_validation = math.ceil(config.validation_share * len(rows))
    in_validation[rows[np.argsort(number)[-num_validation:]]] = True
  members = {
    "train": ~(in_test | in_validation),
    "validation": in_validation,
    "test": in_test,
  }
  return np.flatnonzero(members[split])


def _subset(indices: np.ndarray, num: int, seed: int) -> np.ndarray:
  """`num` puzzles drawn without replacement."""
  available = len(indices)
  if num > available:
    raise UserError(
      f"task.num_train_puzzles={num} exceeds the {available} available"
    )
  rng = np.random.default_rng(seed)
  return indices[rng.choice(available, num, replace=False)]


def _overlap(
  config: Config, train: puzzles_lib.Puzzles, indices: np.ndarray
) -> int:
  """Number of test puzzles with the solution of a training puzzle.

  Symmetric solutions count as equal. The same file twice is refused.

  Args:
    train: the puzzles that contain the training split.
    indices: which of them are trained on.
  """
  test = _puzzles(config, "test")
  if test.sha256 == train.sha256:
    raise UserError(
      f"{config.test_csv}: has the same puzzles as {config.train_csv}"
    )
  overlaps = np.isin(test.class_keys, train.class_keys[indices])
  num = int(overlaps.sum())
  message = (
    f"{config.test_csv}: {num:,} of {len(overlaps):,} puzzles have the same "
    f"solution, up to symmetry, as a puzzle of"
    f" {config.train_csv or 'the package'}"
  )
  if num and config.on_overlap == "error":
    raise UserError(
      f"{message}, first puzzle {np.argmax(overlaps) + 1}; remove them, or set "
      "task.on_overlap=report to count them in the summary"
    )
  if num:
    print(f"warning: {message}", flush=True)
  return num
