"""The Sudoku task: read a board, predict every cell at once.

Tokens: 0 is padding (never seen), 1 a blank, digit d is d + 1 (the encoding of
every published Sudoku-Extreme baseline).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.data import pipeline
from loopjax.data.sudoku import bank, files, symmetry
from loopjax.data.sudoku.config import TEST_SHARE, Config
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

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


def abstract_batch(
  config: Config, batch_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
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
    config: the task.
    split: "train", "validation" or "test".
    batch_size: global batch size, over all processes.
    seed: seed of the order, the augmentation and the choice of a subset.
    rows: the rows of every global batch that this process reads; all if None.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b],
    "group/rating" and "group/source" i32 [b].

  Raises:
    UserError: a file is missing or malformed, or the files share solutions.
  """
  puzzles = _puzzles(config, split)
  chosen = _chosen(config, split, puzzles)
  if not len(chosen):
    raise UserError(
      f"{config.train_csv}: {len(puzzles.ratings)} puzzle(s); training and "
      "validation need at least one each"
    )
  if split == "train" and config.num_train_puzzles:
    chosen = _subset(chosen, config.num_train_puzzles, seed)
  board, num_examples = config.board, len(chosen)
  facts: dict[str, int | float | str] = {
    f"{split}_examples": num_examples,
    f"{split}_rows_skipped": puzzles.num_skipped,
  }
  if puzzles.sha256:
    facts[f"{split}_sha256"] = puzzles.sha256
  if split == "train" and config.train_csv:
    facts["test_solutions_in_train"] = _overlap(
      config, puzzles.class_keys[chosen]
    )

  def boards_of(examples):
    givens, answers = puzzles.givens[examples], puzzles.answers[examples]
    return bank.unpack(board, givens, answers)

  def make_training(examples, positions):
    questions, answers = boards_of(chosen[examples])
    if config.augment:
      numbers = pipeline.uniforms(seed, positions, symmetry.num_uniforms(board))
      change = symmetry.from_uniforms(board, numbers)
      questions = symmetry.apply(change, questions)
      answers = symmetry.apply(change, answers)
    if config.max_revealed:
      numbers = pipeline.uniforms(
        pipeline.stream_seed(seed, 1), positions, 1 + board.num_cells
      )
      left = 1 - positions / config.num_revealed_examples
      bound = config.max_revealed * np.maximum(left, 0)
      shown = numbers[:, 1:] < bound[:, None] * numbers[:, :1]
      questions = np.where(shown, answers, questions)
    return _encoded(config, questions, answers)

  def make_evaluation(places, _):
    # Files are sorted by difficulty; after shuffling, any prefix is a fair
    # sample.
    examples = chosen[pipeline.shuffled(places, num_examples, 0)]
    rating = np.searchsorted(RATING_EDGES, puzzles.ratings[examples], "right")
    return {
      **_encoded(config, *boards_of(examples)),
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
    groups={"rating": _rating_names(), "source": puzzles.sources},
    facts=facts,
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": every cell is correct; "blank_accuracy": fraction of blank
  cells that are correct; "all_cell_accuracy": fraction of all cells, including
  givens, as UTM's authors count; "loss": mean cross-entropy of the counted
  cells in nats.
  """
  inputs, targets = batch["inputs"], batch["targets"]
  losses, predicted = token_losses.scores(output, targets)
  right = (predicted == targets).astype(jnp.float32)
  blank = (inputs == 1).astype(jnp.float32)
  weights = batch["weights"]
  return {
    "exact_match": jnp.min(right, axis=1),
    "blank_accuracy": jnp.sum(right * blank, axis=1)
    / jnp.maximum(jnp.sum(blank, axis=1), 1.0),
    "all_cell_accuracy": jnp.mean(right, axis=1),
    "loss": jnp.sum(losses * weights, axis=1)
    / jnp.maximum(jnp.sum(weights, axis=1), 1.0),
  }


def _encoded(
  config: Config, questions: np.ndarray, answers: np.ndarray
) -> dict[str, np.ndarray]:
  """Tokens and weights of boards."""
  blank = questions == 0
  counted = blank if config.loss_on == "blanks" else np.ones_like(blank)
  return {
    "inputs": questions.astype(np.int32) + 1,
    "targets": answers.astype(np.int32) + 1,
    "weights": counted.astype(np.float32),
  }


def _puzzles(config: Config, split: str) -> bank.Puzzles:
  """The puzzles that contain a split: from a file, or the packaged ones."""
  if not config.train_csv:
    return bank.load_bank(config.board)
  return files.read(
    config.board,
    config.test_csv if split == "test" else config.train_csv,
    on_bad_row=config.on_bad_row,
    check_solutions=config.check_solutions,
  )


def _chosen(config: Config, split: str, puzzles: bank.Puzzles) -> np.ndarray:
  """Which of the puzzles are in the split, int64, ascending."""
  if config.train_csv and split == "test":
    return np.arange(len(puzzles.ratings))
  place = symmetry.place(puzzles.class_keys)
  in_test = (place < TEST_SHARE) & (not config.train_csv)
  in_validation = place >= 1 - config.validation_share
  if not in_validation.any():
    rows = np.flatnonzero(~in_test)
    number = symmetry.place(rows.astype(np.uint64))
    wanted = math.ceil(config.validation_share * len(rows))
    in_validation[rows[np.argsort(number)[-wanted:]]] = True
  members = {
    "train": ~(in_test | in_validation),
    "validation": in_validation,
    "test": in_test,
  }
  return np.flatnonzero(members[split])


def _subset(chosen: np.ndarray, num: int, seed: int) -> np.ndarray:
  """`num` puzzles drawn without replacement."""
  available = len(chosen)
  if num > available:
    raise UserError(
      f"task.num_train_puzzles={num} exceeds the {available} available"
    )
  rng = np.random.default_rng(seed)
  return chosen[rng.choice(available, num, replace=False)]


def _overlap(config: Config, train_keys: np.ndarray) -> int:
  """Number of test puzzles with the solution of a training puzzle.

  Symmetric solutions count as equal.
  """
  test = _puzzles(config, "test")
  seen = np.isin(test.class_keys, train_keys)
  num = int(seen.sum())
  message = (
    f"{config.test_csv}: {num:,} of {len(seen):,} puzzles have the same "
    f"solution, up to symmetry, as a puzzle of {config.train_csv}"
  )
  if num and config.on_overlap == "error":
    raise UserError(
      f"{message}, first puzzle {np.argmax(seen) + 1}; remove them, or set "
      "task.on_overlap=report to count them in the summary"
    )
  if num:
    print(f"warning: {message}", flush=True)
  return num


def _rating_names() -> tuple[str, ...]:
  """ "0", "1-2", "3-9", ...: the buckets between RATING_EDGES."""
  pairs = zip(RATING_EDGES, RATING_EDGES[1:], strict=False)
  names = [
    str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in pairs
  ]
  return (*names, f"{RATING_EDGES[-1]}+")
