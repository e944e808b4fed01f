"""Word problems: names and distractors, assembled into examples.

An example is a question, the statements that its answer needs mixed with others
in random order, then the answer's digits. A place with a total has no items
except those that the total counts.
"""

from collections.abc import Sequence

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import distractors, graphs, language, names
from loopjax.data.gsm.config import Config
from loopjax.data.gsm.language import ABSENT, CONSTANT, UNKNOWN, Statements
from loopjax.data.gsm.structures import MAX_NODES

ANSWER_LENGTH = language.NUM_DIGITS + 1  # END is one of the tokens.
# Indices of the random streams, all different.
_PROBLEMS, _MODES, _DISTRACTORS, _ORDERS = range(4)


def examples(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  split: str,
) -> dict[str, np.ndarray]:
  """Draws and writes problems.

  Args:
    config: the task.
    seed: seed of the stream of examples.
    indices: in the stream, int [B].
    operations: number of operations of each problem, 1 to 8, int [B].
    split: "train", "validation" or "test"; they share no problem.

  Returns:
    "inputs", "targets" and "weights" [B, T]: question and statements with
    padding before them, then ANS and the answer's digits with padding after
    them. Targets of the answer chunk are the digits and END; weights are 1
    there, and other targets are 0.
  """
  modes = pipeline.uniforms(pipeline.stream_seed(_MODES, 0, seed), indices, 2)
  reverse = (modes[:, 0] < config.reverse_fraction) & (operations > 1)
  called, graph = _draw(config, seed, indices, operations, reverse, split)
  singles, decoys = (
    pipeline.stream_seed(_DISTRACTORS, kind, seed) for kind in range(2)
  )
  others = distractors.decoys(config, decoys, indices, operations, reverse)
  graph = graphs.joined(graph, others)
  stated = _stated(graph, reverse)
  room = _lengths(config, modes[:, 1]) - language.QUESTION_LENGTH
  graph, stated, room = _without_long_decoys(graph, stated, room)
  more = distractors.statements(config, singles, indices, graph)
  fits = distractors.within(language.present(more).sum(axis=2), room)
  more = more._replace(kinds=np.where(fits, more.kinds, ABSENT))
  stated = Statements(
    *(np.concatenate(x, axis=1) for x in zip(stated, more, strict=True))
  )
  quantities = names.quantities(
    called,
    np.concatenate([graph.kinds, more.kinds], axis=1),
    np.pad(graph.counted_by, ((0, 0), (0, fits.shape[1])), constant_values=-1),
  )
  rows, answer_node = np.arange(len(indices)), graph.answer_node[:, 0]
  question = language.questions(called.themes, quantities[rows, answer_node])
  tokens = language.statements(stated, quantities)
  present = language.present(stated)
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
  return _with_answers(context, graph.values[rows, answer_node])


def text(config: Config, tokens: Sequence[int] | np.ndarray) -> str:
  """An example as readable text: one sentence per line, then the answer.

  Args:
    config: the task.
    tokens: tokens of the context and optionally the answer chunk, int [T].
  """
  parts = tokens[: config.context_length], tokens[config.context_length :]
  return "\n".join(filter(None, map(language.text, parts)))


def _draw(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  reverse: np.ndarray,
  split: str,
) -> tuple[names.Names, graphs.Graphs]:
  """Names and graphs; redraws problems of other splits."""
  num, num_names = names.num_columns(config), len(names.Names._fields)

  def draw(attempt, rows):
    numbers = pipeline.uniforms(
      pipeline.stream_seed(_PROBLEMS, attempt, seed),
      indices[rows],
      num + MAX_NODES * graphs.COLUMNS,
    )
    called = names.draw(config, numbers[:, :num])
    graph, good = graphs.draw(
      config,
      numbers[:, num:].reshape(-1, MAX_NODES, graphs.COLUMNS),
      operations[rows],
      reverse[rows],
    )
    good &= graphs.in_split(
      graph, operations[rows], names.titles(called), split
    )
    return (*called, *graph), good

  parts = graphs.until_good(draw, len(indices))
  return names.Names(*parts[:num_names]), graphs.Graphs(*parts[num_names:])


def _stated(graph: graphs.Graphs, reverse: np.ndarray) -> Statements:
  """Statements about all nodes of graphs from `graphs.joined`."""
  kinds, numbers = graph.kinds.copy(), graph.numbers.copy()
  num_operands = graph.num_operands.copy()
  rows = np.flatnonzero(reverse)[:, None]
  given = MAX_NODES * np.arange(graph.answer_node.shape[1])
  kinds[rows, given], num_operands[rows, given] = CONSTANT, 0
  numbers[rows, given] = graph.values[rows, given]
  kinds[rows, graph.answer_node[reverse]] = UNKNOWN
  return Statements(kinds, numbers, num_operands, graph.operands)


def _lengths(config: Config, uniform: np.ndarray) -> np.ndarray:
  """Target lengths of texts, met to within one statement, int [B]."""
  longest = config.max_length
  shortest = min(config.min_length + language.PAIR_LENGTH - 1, longest)
  return shortest + (uniform * (longest - shortest + 1)).astype(np.int64)


def _without_long_decoys(
  graph: graphs.Graphs, stated: Statements, room: np.ndarray
) -> tuple[graphs.Graphs, Statements, np.ndarray]:
  """Removes decoys that do not fit; returns the tokens left [B]."""
  by_problem = (len(room), -1, MAX_NODES)
  lengths = language.present(stated).sum(axis=2).reshape(by_problem).sum(axis=2)
  fits = distractors.fitting(
    graph.kinds.reshape(by_problem), lengths, room - lengths[:, 0]
  )
  is_there = np.repeat(fits, MAX_NODES, axis=1)
  kept = (np.where(is_there, x.kinds, ABSENT) for x in (graph, stated))
  return (
    graph._replace(kinds=next(kept)),
    stated._replace(kinds=next(kept)),
    room - (lengths * fits).sum(axis=1),
  )


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
  targets = np.zeros_like(inputs)  # Not padding, whose logit may be -inf.
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
