"""The automaton task: the first cell of several states, t steps later.

The context is n independent states of W cells, one token per cell. The answer
chunk ANS, l0, ..., l(n-2) has the labels l0, ..., l(n-1) as its targets: the
model may have dropped the context before that chunk, and in the paper's layout
the context's last cell would have to predict the first label (Language Models
Need Sleep, arXiv 2605.26099, sections 4 and 6.1).

States are rings, which the paper does not specify. With zeros beyond the ends,
the first cell becomes c or r: nearly all its labels are 1 after a few steps. On
a ring, the best constant answer at t = 32 is right in about a tenth of the
examples, the accuracy that the paper calls random.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from loopjax import checks
from loopjax.data import pipeline
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

# Up to this width all states are enumerated; above, sampled.
_MAX_EXACT_WIDTH = 16
_NUM_SAMPLED = 2**18


def evolve(states: np.ndarray, num_steps: int, rule: int) -> np.ndarray:
  """Applies a rule to states on a ring: the ends are neighbours.

  Bit 4 l + 2 c + r of a rule is the next value of a cell c between the
  neighbours l and r (Cook 2004). One byte holds the same cell of eight states,
  updated by bitwise operations.

  Args:
    states: bool [N, W].
    num_steps: t >= 0.
    rule: number of the rule, 0 to 255.

  Returns:
    The states after t steps, bool [N, W].
  """
  cells = np.packbits(states.T, axis=1)
  cells = _evolve_packed(cells, num_steps, rule)
  return np.unpackbits(cells, axis=1, count=len(states)).T.astype(bool)


@functools.cache
def density(width: int, num_steps: int, rule: int) -> float:
  """The fraction of ones after t steps from uniform states of W cells.

  All cells of a ring are equivalent: this is the probability of each. Exact up
  to 16 cells, otherwise estimated on a fixed sample of 2^18 states.
  """
  if width <= _MAX_EXACT_WIDTH:
    numbers = np.arange(2**width)
    cells = np.packbits(numbers >> np.arange(width)[:, None] & 1, axis=1)
    count = len(numbers)
  else:
    count = _NUM_SAMPLED
    cells = np.random.default_rng(0).integers(
      256, size=(width, count // 8), dtype=np.uint8
    )
  cells = _evolve_packed(cells, num_steps, rule)
  ones = np.unpackbits(cells, axis=1, count=count)
  return float(ones.mean())


def _evolve_packed(cells: np.ndarray, num_steps: int, rule: int) -> np.ndarray:
  """`evolve` on uint8 [W, ceil(N / 8)]: row i has cell i of every state."""
  for _ in range(num_steps):
    left, right = np.roll(cells, 1, axis=0), np.roll(cells, -1, axis=0)
    values = [(~cell, cell) for cell in (left, cells, right)]
    cells = np.zeros_like(cells)
    for neighbourhood in range(8):
      if rule >> neighbourhood & 1:
        bits = neighbourhood >> 2 & 1, neighbourhood >> 1 & 1, neighbourhood & 1
        is_l, is_c, is_r = (v[b] for v, b in zip(values, bits, strict=True))
        cells |= is_l & is_c & is_r
  return cells


ANSWER = 2  # Token id; the ids of cells are their values.
TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match", "label_accuracy")
_STREAMS = {"train": 0, "test": 1, "validation": 2}


@dataclasses.dataclass(frozen=True)
class Config:
  """Which automaton, and the size of an example.

  The defaults are the paper's hard setting; its figure 2 varies num_steps.

  Attributes:
    num_states: n, independent uniform states of an example.
    state_width: W, cells of a state.
    num_steps: t, steps from a state to its label; 0 asks for the first cell.
    rule: number of the elementary rule, 0 to 255.
    num_eval_examples: number in validation, and in the test split.
    eval_seed: seed of both; training uses the run's seed.
  """

  num_states: int = checks.setting(4, least=1)
  state_width: int = checks.setting(24, least=3)
  num_steps: int = checks.setting(32, least=0)
  rule: int = checks.setting(110, within="[0, 255]")
  num_eval_examples: int = checks.setting(4096, least=1)
  eval_seed: int = checks.setting(0, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("task", self)

  @property
  def sequence_length(self) -> int:
    """T: tokens of the states and the answer chunk."""
    return self.num_states * self.state_width + answer_length(self)


def answer_length(config: Config) -> int:
  """Tokens of the answer chunk at the end of every sequence."""
  return config.num_states


def spec(config: Config) -> TaskSpec:
  """Vocabulary (0, 1, ANS) and length."""
  return TaskSpec(
    vocab_size=ANSWER + 1,
    sequence_length=config.sequence_length,
    num_answer_tokens=answer_length(config),
    predicts_next=True,
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, config.sequence_length)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split.

  All splits draw from the same distribution, with separate random streams. Of
  the default 2^96 examples no two are equal in practice; with few states of few
  cells, training contains examples of the other splits.

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b].
    Only the answer chunk has nonzero weights; other targets are 0. The fact
    "constant_floor" is the exact match of the best constant answer.
  """
  base = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], base)
  ones = density(config.state_width, config.num_steps, config.rule)
  return pipeline.generated(
    lambda indices: _examples(config, stream, indices),
    split,
    config.num_eval_examples,
    batch_size,
    rows,
    facts={"constant_floor": max(ones, 1 - ones) ** config.num_states},
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": all labels are right (the paper's accuracy); "label_accuracy":
  fraction of correct labels; "loss": mean cross-entropy of the labels in nats.
  """
  losses, right, weights = token_losses.graded(output, batch)
  is_right = jnp.all((right == 1) | (weights == 0), axis=1)
  return {
    "exact_match": is_right.astype(jnp.float32),
    "label_accuracy": token_losses.row_means(right, weights),
    "loss": token_losses.row_means(losses, weights),
  }


def _examples(
  config: Config, stream: int, indices: np.ndarray
) -> dict[str, np.ndarray]:
  """The examples at some indices of a stream, arrays [b, T] by name."""
  num, num_states, width = len(indices), config.num_states, config.state_width
  cells = pipeline.uniforms(stream, indices, num_states * width) < 0.5
  states = cells.reshape(num * num_states, width)
  later = evolve(states, config.num_steps, config.rule)
  labels = later[:, 0].reshape(num, num_states)
  mark = np.full((num, 1), ANSWER)
  inputs = np.concatenate([cells, mark, labels[:, :-1]], axis=1)
  return pipeline.with_answers(inputs, labels)
