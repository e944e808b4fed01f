"""The settings of the Depo task, and its token ids."""

import dataclasses

from loopjax import checks
from loopjax.errors import UserError

# A word is drawn with part of one 53-bit random number.
_MAX_WORDS = 2**32


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the cycles, and hops of the questions.

  The defaults are from Language Models Need Sleep, section 6.2, where 75
  nodes in 300 tokens and 10 questions in 60 imply words of one or two tokens.

  Token ids: V0 that do not end a word, V0 that do, K that ask for 1 to K hops,
  one before the answer, padding.

  Attributes:
    num_nodes: N, nodes of the largest cycle, and of every cycle in evaluation.
    max_hops: K; in training the hops k of a question are uniform over 1 .. K.
    num_queries: questions about one cycle, at most one per node.
    word_base: V0, choices for each token of a word.
    min_word, max_word: tokens of a node's name.
    context_length: tokens of the cycle, including the padding before it.
    min_nodes: nodes of the smallest cycle in training.
    num_eval_examples: number in validation, and in the test split, divided
      equally among the numbers of hops.
    eval_seed: seed of both; training uses the run's seed.
  """

  num_nodes: int = 75
  max_hops: int = 16
  num_queries: int = 10
  word_base: int = 50
  min_word: int = 1
  max_word: int = 2
  context_length: int = 300
  min_nodes: int = 3
  num_eval_examples: int = 1000
  eval_seed: int = 0

  def __post_init__(self) -> None:
    checks.plain_values("task", self)
    checks.at_least(
      "task",
      self,
      num_nodes=2,
      max_hops=1,
      num_queries=1,
      word_base=1,
      min_word=1,
      min_nodes=2,
      num_eval_examples=1,
      eval_seed=0,
    )
    for small, large in (
      ("min_word", "max_word"),
      ("min_nodes", "num_nodes"),
      ("num_queries", "num_nodes"),  # Questions start at distinct nodes.
    ):
      if getattr(self, small) > getattr(self, large):
        raise UserError(
          f"task.{small}={getattr(self, small)} is greater than "
          f"task.{large}={getattr(self, large)}"
        )
    self._check_words()
    if self.num_eval_examples % len(self.eval_hops):
      hops = ", ".join(map(str, self.eval_hops))
      raise UserError(
        f"task.num_eval_examples={self.num_eval_examples} must be a multiple "
        f"of {len(self.eval_hops)}: equal numbers for {hops} hops"
      )

  def _check_words(self) -> None:
    """Raises UserError unless the largest cycle has enough names and fits."""
    if self.num_words > _MAX_WORDS:
      raise UserError(
        f"task.max_word={self.max_word} tokens with "
        f"task.word_base={self.word_base} gives more than {_MAX_WORDS} words"
      )
    if self.num_nodes > self.num_words:
      raise UserError(
        f"task.num_nodes={self.num_nodes} exceeds the {self.num_words} words "
        f"of {self.min_word} to {self.max_word} tokens with "
        f"task.word_base={self.word_base}"
      )
    longest = 2 * self.num_nodes * self.max_word
    if self.context_length < longest:
      raise UserError(
        f"task.context_length={self.context_length} is too short for "
        f"task.num_nodes={self.num_nodes}: the longest cycle has {longest} "
        "tokens"
      )

  @property
  def word_counts(self) -> tuple[int, ...]:
    """Number of words of min_word, ..., max_word tokens."""
    lengths = range(self.min_word, self.max_word + 1)
    return tuple(self.word_base**length for length in lengths)

  @property
  def num_words(self) -> int:
    return sum(self.word_counts)

  @property
  def eval_hops(self) -> tuple[int, ...]:
    """1, 2, 4, ..., K."""
    powers = range(self.max_hops.bit_length())
    return tuple(sorted({*(2**power for power in powers), self.max_hops}))

  @property
  def first_hop(self) -> int:
    """Id of the token that asks for one hop."""
    return 2 * self.word_base

  @property
  def answer(self) -> int:
    """Id of the token before an answer."""
    return self.first_hop + self.max_hops

  @property
  def padding(self) -> int:
    return self.answer + 1
