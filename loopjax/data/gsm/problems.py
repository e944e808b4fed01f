"""Word problems: names, distractors, and how all is put together.

An example is a question, the statements that its answer needs and others, all
statements in random order, then the answer's digits. Other statements are made
of one or two of the quantities that are needed, and none is made of theirs. A
place of which a total is told has no items but those that the total counts.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import graphs, language, names
from loopjax.data.gsm.config import Config
from loopjax.data.gsm.language import (
  ABSENT,
  CONSTANT,
  DIFFERENCE,
  EQUAL,
  PLUS,
  SUM,
  TIMES,
  UNKNOWN,
)
from loopjax.data.gsm.structures import MAX_NODES

ANSWER_LENGTH = language.NUM_DIGITS + 1  # END is one of the tokens.
# Of every stream of random numbers, so that no two of them are the same.
_PROBLEMS, _MODES, _DISTRACTORS, _ORDERS = range(4)
# What a distractor can be; the last two of two needed quantities.
_KINDS = np.array([EQUAL, PLUS, TIMES, SUM, DIFFERENCE])


def examples(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  held_out: bool,
) -> dict[str, np.ndarray]:
  """Draws and writes problems.

  Args:
    config: the task.
    seed: of the stream of examples.
    indices: in the stream, int [B].
    operations: of each problem, 1 to 8, int [B].
    held_out: whether problems are those of evaluation, or of training.

  Returns:
    "inputs", "targets" and "weights" [B, T]: question and statements with
    padding in front, then ANS and the answer's digits with padding after them.
    Targets of the answer chunk are the digits and END; weights are 1 there, and
    the other targets are 0.
  """
  modes = pipeline.uniforms(pipeline.stream_seed(_MODES, 0, seed), indices, 1)
  reverse = (modes[:, 0] < config.reverse_fraction) & (operations > 1)
  called, graph = _draw(config, seed, indices, operations, reverse, held_out)
  quantities = names.quantities(called, graph)
  kinds, numbers, num_operands, operands = _statements(
    config, seed, indices, graph, reverse
  )
  tokens, present = language.statements(
    kinds, numbers, num_operands, operands, quantities
  )
  rows = np.arange(len(indices))
  question = language.questions(called.themes, quantities[rows, graph.asked])
  lengths = present.sum(axis=2)
  needed = question.shape[1] + lengths[:, :MAX_NODES].sum(axis=1)
  room = config.noise_fraction * (config.context_length - needed)
  ends = np.cumsum(lengths[:, MAX_NODES:], axis=1)
  present[:, MAX_NODES:] &= (ends <= room[:, None])[..., None]
  order = _permutations(_ORDERS, seed, indices, present.shape[1])[..., None]
  tokens, present = (
    np.take_along_axis(part, order, axis=1).reshape(len(rows), -1)
    for part in (tokens, present)
  )
  context = pipeline.in_a_row(
    np.concatenate([question, tokens], axis=1),
    np.concatenate([np.ones_like(question, bool), present], axis=1),
    config.context_length,
    language.PADDING,
    front=True,
  )
  return _with_answers(context, graph.values[rows, graph.asked])


def text(config: Config, tokens: Sequence[int] | np.ndarray) -> str:
  """An example as a person reads it: one sentence a line, then the answer.

  Args:
    config: the task.
    tokens: of the context and, if there, the answer chunk, int [T].
  """
  parts = tokens[: config.context_length], tokens[config.context_length :]
  return "\n".join(filter(None, map(language.text, parts)))


def _draw(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  reverse: np.ndarray,
  held_out: bool,
) -> tuple[names.Names, graphs.Graphs]:
  """Names and graphs, drawn again where they are not as they should be."""
  num = names.num_columns(config)
  left = np.arange(len(indices))
  for attempt in itertools.count():
    numbers = pipeline.uniforms(
      pipeline.stream_seed(_PROBLEMS, attempt, seed),
      indices[left],
      num + MAX_NODES * graphs.COLUMNS,
    )
    called = names.draw(config, numbers[:, :num])
    graph, good = graphs.draw(
      config,
      numbers[:, num:].reshape(-1, MAX_NODES, graphs.COLUMNS),
      operations[left],
      reverse[left],
    )
    good &= held_out == graphs.held_out(
      graph, operations[left], names.titles(called)
    )
    if attempt == 0:
      result = called, graph
    for whole, part in zip(
      (*result[0], *result[1]), (*called, *graph), strict=True
    ):
      whole[left] = part
    left = left[~good]
    if not left.size:
      break
  return result


def _statements(
  config: Config,
  seed: int,
  indices: np.ndarray,
  graph: graphs.Graphs,
  reverse: np.ndarray,
) -> tuple[np.ndarray, ...]:
  """What is said of all nodes, and as many distractors as could ever fit.

  Returns:
    Kinds, numbers, num_operands [B, S] and operands [B, S, 3], int, as
    `language.statements` takes them.
  """
  kinds, numbers = graph.kinds.copy(), graph.numbers.copy()
  num_operands = graph.num_operands.copy()
  kinds[reverse, 0], num_operands[reverse, 0] = CONSTANT, 0
  numbers[reverse, 0] = graph.values[reverse, 0]
  kinds[reverse, graph.asked[reverse]] = UNKNOWN
  needed = kinds, numbers, num_operands, graph.operands
  others = _distractors(config, seed, indices, graph)
  return tuple(
    np.concatenate(parts, axis=1) for parts in zip(needed, others, strict=True)
  )


def _distractors(
  config: Config, seed: int, indices: np.ndarray, graph: graphs.Graphs
) -> tuple[np.ndarray, ...]:
  """Statements about further quantities, made of one or two nodes.

  Every kind is equally likely, and every node; one whose value would not do
  becomes EQUAL.
  """
  num = config.max_distractors
  uniforms = pipeline.uniforms(
    pipeline.stream_seed(_DISTRACTORS, 0, seed), indices, 4 * num
  )
  which, first, second, constant = uniforms.reshape(-1, 4, num).swapaxes(0, 1)
  num_nodes = (graph.kinds != ABSENT).sum(axis=1)[:, None]
  num_kinds = np.where(num_nodes > 1, len(_KINDS), len(_KINDS) - 2)
  kinds = _KINDS[(which * num_kinds).astype(np.int64)]
  numbers = graphs.draw_numbers(config, kinds, constant)
  num_operands = 1 + np.isin(kinds, _KINDS[-2:])
  one = (first * num_nodes).astype(np.int64)
  further = 1 + (second * (num_nodes - 1)).astype(np.int64)
  operands = np.stack([one, (one + further) % num_nodes, one], axis=2)
  operands, values = graphs.arrange(
    kinds, numbers, num_operands, operands, graph.values
  )
  wrong = (values < 1) | (values > config.max_value)
  kinds[wrong], num_operands[wrong] = EQUAL, 1
  return kinds, numbers, num_operands, operands


def _with_answers(
  context: np.ndarray, answers: np.ndarray
) -> dict[str, np.ndarray]:
  """Batches: [B, context] and int [B] -> arrays [B, T] by name."""
  num = len(answers)
  digits, has_digit = language.number(answers)
  end, mark = (
    np.full((num, 1), i, np.int32) for i in (language.END, language.ANSWER)
  )
  one = np.ones((num, 1), bool)
  chunk, expected = (
    pipeline.in_a_row(
      np.concatenate(tokens, axis=1),
      np.concatenate(present, axis=1),
      ANSWER_LENGTH,
      language.PADDING,
    )
    for tokens, present in (
      ((mark, digits), (one, has_digit)),
      ((digits, end), (has_digit, one)),
    )
  )
  is_answer = expected != language.PADDING
  inputs = np.concatenate([context, chunk], axis=1)
  targets = np.zeros_like(inputs)  # Not padding: its logit may be -inf.
  targets[:, -ANSWER_LENGTH:] = np.where(is_answer, expected, 0)
  weights = np.zeros(inputs.shape, np.float32)
  weights[:, -ANSWER_LENGTH:] = is_answer
  return {
    "inputs": inputs,
    "targets": targets,
    "weights": weights,
  }


def _permutations(
  stream: int, seed: int, indices: np.ndarray, num: int
) -> np.ndarray:
  """Random orders of 0 .. num - 1, int [B, num]."""
  keys = pipeline.uniforms(pipeline.stream_seed(stream, 0, seed), indices, num)
  return np.argsort(keys, axis=1, kind="stable")
