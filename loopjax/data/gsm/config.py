"""The settings of the word problems."""

import dataclasses
import math

from loopjax import checks
from loopjax.data import pipeline
from loopjax.data.gsm import language
from loopjax.errors import UserError

MAX_OPERATIONS = 8
# Maximum number of decoy problems in a text: without the question, only a guess
# can select the problem.
NUM_DECOYS = 15
# Every total has its own place. A problem has at most four totals: each costs
# an operation, and one of its items another.
NUM_TOTAL_PLACES = 1 + NUM_DECOYS
_MAX_SIDE = min(language.NUM_ITEMS, language.NUM_PLACES - NUM_TOTAL_PLACES)


@dataclasses.dataclass(frozen=True)
class Config:
  """Numbers of operations, and lengths of the texts.

  The operations and the counts to evaluate are from Language Models Need
  Sleep, section 6.3; its texts have 2000 tokens and more.

  Attributes:
    train_ops: numbers of operations in training, 1 to 8, all equally likely.
    eval_ops: numbers of operations in evaluation, with equally many examples.
    context_length: tokens of the question and the text, including the padding
      before them.
    min_length: minimum tokens of the question and the text without padding. The
      paper's have 2000 to 3300.
    max_length: lengths are roughly uniform between min_length and max_length;
      distractors fill the rest of the text.
    reverse_fraction: fraction of the examples of two and more operations that
      state a total and ask for one of its parts.
    max_constant: constants and addends are uniform over 1 .. max_constant.
    max_value: maximum of every quantity.
    num_eval_examples: number in validation, and in the test split.
    eval_seed: seed of both; training uses the run's seed.
  """

  train_ops: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
  eval_ops: tuple[int, ...] = (2, 4, 6, 8)
  context_length: int = 512
  min_length: int = checks.setting(320, least=0)
  max_length: int = 512
  reverse_fraction: float = checks.setting(0.5, within="[0, 1]")
  # With fewer, there may be no held-out problem of four operations.
  max_constant: int = checks.setting(20, least=10)
  max_value: int = checks.setting(
    999, within=f"[100, {10**language.NUM_DIGITS})"
  )
  num_eval_examples: int = checks.setting(1600, least=1)
  eval_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.at_least("task", self, max_length=self.min_length)
    for field in ("train_ops", "eval_ops"):
      self._check_operations(field)
    if self.max_constant > self.max_value:
      raise UserError(
        f"task.max_constant={self.max_constant} is greater than "
        f"task.max_value={self.max_value}"
      )
    self._check_length()
    pipeline.check_equal_numbers(
      self.num_eval_examples, self.eval_ops, "operations (task.eval_ops)"
    )

  def _check_operations(self, field: str) -> None:
    """Raises UserError unless these are distinct numbers from 1 to 8."""
    values = getattr(self, field)
    allowed = range(1, MAX_OPERATIONS + 1)
    if (
      not values
      or not all(type(v) is int and v in allowed for v in values)
      or len(set(values)) < len(values)
    ):
      raise UserError(
        f"task.{field}={values} must be distinct operation counts from 1 to "
        f"{MAX_OPERATIONS}"
      )

  def _check_length(self) -> None:
    """Raises UserError unless all problems fit and there are enough names."""
    operations = max(*self.train_ops, *self.eval_ops)
    # A constant, and every other quantity equal to the previous one.
    longest = (
      language.QUESTION_LENGTH
      + language.EQUAL_LENGTH * (operations - 1)
      + language.CONSTANT_LENGTH
      + len(str(self.max_constant))
    )
    if self.context_length < longest:
      raise UserError(
        f"task.context_length={self.context_length} is too short: the longest "
        f"problem with {operations} operations has {longest} tokens"
      )
    if self.max_length > self.context_length:
      raise UserError(
        f"task.max_length={self.max_length} is greater than "
        f"task.context_length={self.context_length}"
      )
    if self.num_names > _MAX_SIDE**2:
      raise UserError(
        f"task.max_length={self.max_length} may need {self.num_names} "
        f"quantities, but only {_MAX_SIDE**2} have a name"
      )

  @property
  def max_distractors(self) -> int:
    """How many of the shortest distractors fit into a text."""
    return self.max_length // language.SHORTEST_LENGTH

  @property
  def num_names(self) -> int:
    """Maximum number of quantities of an example."""
    return MAX_OPERATIONS + self.max_distractors

  @property
  def grid_side(self) -> int:
    """Number of items, and of places, that name the quantities of an example.

    There are twice as many pairs as quantities: most items are in several
    places and most places have several items. Neither alone then identifies a
    quantity.
    """
    return min(math.isqrt(2 * self.num_names) + 1, _MAX_SIDE)
