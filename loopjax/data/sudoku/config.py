"""The settings of Sudoku."""

import dataclasses

from loopjax import checks
from loopjax.data.sudoku import board as boards
from loopjax.errors import Moot, UserError

TEST_SHARE = 0.2  # Fraction of the packaged solutions.


@dataclasses.dataclass(frozen=True)
class Config:
  """Sources of the puzzles, and how training uses them.

  Attributes:
    box_rows, box_cols: size of a box: 2x2, 2x3 or 3x3 cells and so on.
    train_csv, test_csv: files in the Sudoku-Extreme schema, plain or gzip, or
      hf://OWNER/NAME/FILE; empty for the puzzles shipped with the package.
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
    loss_on: "all" cells, givens included (the paper), or "blanks".
  """

  box_rows: int = 3
  box_cols: int = 3
  train_csv: str = ""
  test_csv: str = ""
  on_bad_row: str = "error"
  on_overlap: str = "report"
  check_solutions: bool = False
  augment: bool = False
  max_revealed: float = 0.0
  num_revealed_examples: int = 0
  validation_share: float = 0.05
  num_train_puzzles: int = 0
  loss_on: str = "all"

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    boards.Board(self.box_rows, self.box_cols)  # Validates the boxes.
    checks.one_of(
      "task",
      self,
      on_bad_row=("error", "skip"),
      on_overlap=("report", "error"),
      loss_on=("all", "blanks"),
    )
    checks.at_least(
      "task",
      self,
      max_revealed=0,
      num_revealed_examples=0,
      num_train_puzzles=0,
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
    if self.max_revealed > 1:
      raise UserError(
        f"task.max_revealed={self.max_revealed} must be in [0, 1]"
      )
    if not 0 < self.validation_share <= 0.5:
      raise UserError(
        f"task.validation_share={self.validation_share} must be in (0, 0.5]"
      )
    if bool(self.train_csv) != bool(self.test_csv):
      raise UserError(
        "task.train_csv and task.test_csv must be set together: the packaged "
        "puzzles have another distribution and other splits than your file"
      )
    if self.train_csv and self.train_csv == self.test_csv:
      raise UserError(f"task.test_csv={self.test_csv!r} is the training file")
    if not self.train_csv:
      checks.without_effect(
        "task",
        self,
        "train_csv",
        "on_bad_row",
        "on_overlap",
        "check_solutions",
      )

  @property
  def board(self) -> boards.Board:
    return boards.Board(self.box_rows, self.box_cols)
