"""Word problems: names and distractors, assembled into examples.

An example is a question, the statements that its answer needs mixed with others
in random order, then the answer's digits.

Names: an example has a theme, and a grid of some of the theme's items and
places. A place with a total has no items except those that the total counts.

Distractors are irrelevant to the question. Decoys are problems drawn in the
same way and as hard, with their own constants, totals and unknowns: only the
question identifies the real problem. Single statements define further
quantities, which are constants or computed from one or two quantities of any of
the problems. No problem depends on quantities of another, or on further
quantities.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import graphs, language
from loopjax.data.gsm.config import NUM_DECOYS, NUM_TOTAL_PLACES, Config
from loopjax.data.gsm.graphs import MAX_NODES, Graphs
from loopjax.data.gsm.language import (
  ABSENT,
  CONSTANT,
  DIFFERENCE,
  EQUAL,
  PLUS,
  SUM,
  TIMES,
  TOTAL,
  UNKNOWN,
  Statements,
)

# Kinds of single statements; the last two need two quantities.
_KINDS = np.array([CONSTANT, EQUAL, PLUS, TIMES, SUM, DIFFERENCE])
_NUM_OPERANDS = np.array([0, 1, 1, 1, 2, 2])


def draw_decoys(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  reverse: np.ndarray,
) -> Graphs:
  """Draws the maximum number of decoy problems for each example.

  Decoys are drawn regardless of splits, since their answers are never given.

  Args:
    seed: seed of a stream of random numbers.
    indices: indices of the examples, int [B].
    operations: number of operations of each example's problems, int [B].
    reverse: as in `graphs.draw`, bool [B].

  Returns:
    Graphs of B x 15 problems; an example's problems are adjacent.
  """
  of_decoys = (NUM_DECOYS * indices[:, None] + np.arange(NUM_DECOYS)).ravel()
  operations, reverse = (
    np.repeat(part, NUM_DECOYS) for part in (operations, reverse)
  )

  def draw(attempt, rows):
    numbers = pipeline.uniforms(
      pipeline.stream_seed(seed, attempt),
      of_decoys[rows],
      MAX_NODES * graphs.COLUMNS,
    ).reshape(-1, MAX_NODES, graphs.COLUMNS)
    return graphs.draw(config, numbers, operations[rows], reverse[rows])

  return Graphs(*graphs.until_good(draw, len(of_decoys)))


def fitting(
  kinds: np.ndarray, lengths: np.ndarray, room: np.ndarray
) -> np.ndarray:
  """Selects the problem and the first decoys that fit into half of the space.

  Args:
    kinds: kinds of the nodes of P problems, int [B, P, 8].
    lengths: tokens of their statements, int [B, P].
    room: tokens left by the first problem, int [B].

  Returns:
    bool [B, P]. The selected problems have at most NUM_TOTAL_PLACES totals.
  """
  ends = np.cumsum(lengths[:, 1:], axis=1)
  totals = np.cumsum((kinds == TOTAL).sum(axis=2), axis=1)
  fits = totals <= NUM_TOTAL_PLACES
  fits[:, 1:] &= 2 * ends <= room[:, None]
  return fits


def draw_statements(
  config: Config, seed: int, indices: np.ndarray, graph: Graphs
) -> Statements:
  """Draws the maximum number of single statements that could fit.

  All kinds are equally likely, as are all quantities; a statement with an
  invalid value becomes EQUAL.

  Args:
    seed: seed of a stream of random numbers.
    indices: indices of the examples, int [B].
    graph: all problems of an example as one graph of N nodes.
  """
  num = config.max_distractors
  uniforms = pipeline.uniforms(seed, indices, 4 * num)
  which, first, second, constant = np.split(uniforms, 4, axis=1)
  is_there = graph.kinds != ABSENT
  nodes = np.argsort(~is_there, axis=1, kind="stable")  # Present ones first.
  num_nodes = is_there.sum(axis=1)[:, None]
  num_kinds = np.where(num_nodes > 1, len(_KINDS), len(_KINDS) - 2)
  kind = (which * num_kinds).astype(np.int64)
  kinds, num_operands = _KINDS[kind], _NUM_OPERANDS[kind]
  numbers = graphs.draw_numbers(config, kinds, constant)
  one = (first * num_nodes).astype(np.int64)
  further = 1 + (second * (num_nodes - 1)).astype(np.int64)
  places = np.stack([one, (one + further) % num_nodes, one], axis=2)
  operands, values = graphs.arrange(
    kinds,
    numbers,
    num_operands,
    nodes[np.arange(len(nodes))[:, None, None], places],
    graph.values,
  )
  wrong = (values < 1) | (values > config.max_value)
  kinds[wrong], num_operands[wrong] = EQUAL, 1
  return Statements(kinds, numbers, num_operands, operands)


def within(lengths: np.ndarray, room: np.ndarray) -> np.ndarray:
  """The first statements [B, S] that fit into `room` tokens [B], bool."""
  return np.cumsum(lengths, axis=1) <= room[:, None]


class Names(NamedTuple):
  """Names of quantities.

  Attributes:
    themes: int [B].
    items, places: items and places of quantities that are neither totals nor
      counted by one, in order, int [B, num_names].
    counted_items: items that a total counts, by node of their problem, int [B,
      8].
    total_places: places that have only such items, int [B, 16].
  """

  themes: np.ndarray
  items: np.ndarray
  places: np.ndarray
  counted_items: np.ndarray
  total_places: np.ndarray


def num_columns(config: Config) -> int:
  """Number of uniform numbers that `draw` needs per example."""
  return 1 + language.NUM_ITEMS + language.NUM_PLACES + config.grid_side**2


def draw_names(config: Config, numbers: np.ndarray) -> Names:
  """Names from uniform numbers [B, num_columns]."""
  ends = np.cumsum([1, language.NUM_ITEMS, language.NUM_PLACES])
  theme, *keys = np.split(numbers, ends, axis=1)
  items, places, cells = (
    np.argsort(part, axis=1, kind="stable") for part in keys
  )
  row, column = np.divmod(cells[:, : config.num_names], config.grid_side)
  return Names(
    themes=(theme[:, 0] * len(language.THEMES)).astype(np.int64),
    items=np.take_along_axis(items, column, axis=1),
    places=np.take_along_axis(places, NUM_TOTAL_PLACES + row, axis=1),
    counted_items=items[:, :MAX_NODES],
    total_places=places[:, :NUM_TOTAL_PLACES],
  )


def titles_of(names: Names) -> np.ndarray:
  """Numbers of the names of node 0 as a total and as an item, int [B, 2]."""
  items = np.stack([np.full_like(names.themes, -1), names.items[:, 0]], axis=1)
  places = np.stack([names.total_places[:, 0], names.places[:, 0]], axis=1)
  nouns = names.themes[:, None] * (1 + language.NUM_ITEMS) + 1 + items
  return nouns * language.NUM_PLACES + places


def named_quantities(
  names: Names, kinds: np.ndarray, counted_by: np.ndarray
) -> np.ndarray:
  """Names of quantities; each one present has a distinct name.

  Args:
    names: to choose from.
    kinds: kinds of the nodes of all problems, then of further quantities, int
      [B, S]; names of ABSENT ones are arbitrary.
    counted_by: index of the total that counts each quantity, or -1, int [B, S].

  Returns:
    Token ids i32 [B, S, 4].
  """
  is_total, is_counted = kinds == TOTAL, counted_by >= 0
  on_grid = (kinds != ABSENT) & ~is_total & ~is_counted
  rank = np.maximum(np.cumsum(on_grid, axis=1) - 1, 0)
  items, places = (
    np.take_along_axis(part, rank, axis=1)
    for part in (names.items, names.places)
  )
  rank = np.maximum(np.cumsum(is_total, axis=1) - 1, 0)
  own = np.take_along_axis(names.total_places, rank, axis=1)
  of_total = np.take_along_axis(own, np.maximum(counted_by, 0), axis=1)
  node = np.arange(kinds.shape[1]) % MAX_NODES
  counted = names.counted_items[:, node]
  items = np.where(is_total, -1, np.where(is_counted, counted, items))
  places = np.where(is_total, own, np.where(is_counted, of_total, places))
  return language.quantities(names.themes, items, places)


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
  others = draw_decoys(config, decoys, indices, operations, reverse)
  graph = graphs.joined(graph, others)
  stated = _stated(graph, reverse)
  room = _lengths(config, modes[:, 1]) - language.QUESTION_LENGTH
  graph, stated, room = _without_long_decoys(graph, stated, room)
  more = draw_statements(config, singles, indices, graph)
  fits = within(language.present(more).sum(axis=2), room)
  more = more._replace(kinds=np.where(fits, more.kinds, ABSENT))
  stated = Statements(
    *(np.concatenate(x, axis=1) for x in zip(stated, more, strict=True))
  )
  quantities = named_quantities(
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
) -> tuple[Names, graphs.Graphs]:
  """Names and graphs; redraws problems of other splits."""
  num, num_names = num_columns(config), len(Names._fields)

  def draw(attempt, rows):
    numbers = pipeline.uniforms(
      pipeline.stream_seed(_PROBLEMS, attempt, seed),
      indices[rows],
      num + MAX_NODES * graphs.COLUMNS,
    )
    called = draw_names(config, numbers[:, :num])
    graph, good = graphs.draw(
      config,
      numbers[:, num:].reshape(-1, MAX_NODES, graphs.COLUMNS),
      operations[rows],
      reverse[rows],
    )
    good &= graphs.in_split(graph, operations[rows], titles_of(called), split)
    return (*called, *graph), good

  parts = graphs.until_good(draw, len(indices))
  return Names(*parts[:num_names]), graphs.Graphs(*parts[num_names:])


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
  fits = fitting(graph.kinds.reshape(by_problem), lengths, room - lengths[:, 0])
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
