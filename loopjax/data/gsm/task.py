"""The GSM task: answer a word problem within a long text directly.

The question comes first: a model knows what to look for in the text, which it
may have dropped when it answers, without intermediate steps (Language Models
Need Sleep, arXiv 2605.26099, section 6.3). Problems are in the spirit of
GSM-Infinite (arXiv 2502.05252), with our own vocabulary.

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

Floors are scores of heuristics that do not solve the problem.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
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
from loopjax.losses import tokens as token_losses
from loopjax.types import Array, Batch, Dataset, Output, TaskSpec

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
  decoy_indices = (
    NUM_DECOYS * indices[:, None] + np.arange(NUM_DECOYS)
  ).ravel()
  operations, reverse = (
    np.repeat(part, NUM_DECOYS) for part in (operations, reverse)
  )

  def draw(attempt, rows):
    numbers = pipeline.uniforms(
      pipeline.stream_seed(seed, attempt),
      decoy_indices[rows],
      MAX_NODES * graphs.COLUMNS,
    ).reshape(-1, MAX_NODES, graphs.COLUMNS)
    return graphs.draw(config, numbers, operations[rows], reverse[rows])

  return Graphs(*graphs.until_good(draw, len(decoy_indices)))


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
  present = graph.kinds != ABSENT
  nodes = np.argsort(~present, axis=1, kind="stable")  # Present ones first.
  num_nodes = present.sum(axis=1)[:, None]
  num_kinds = np.where(num_nodes > 1, len(_KINDS), len(_KINDS) - 2)
  kind = (which * num_kinds).astype(np.int64)
  kinds, num_operands = _KINDS[kind], _NUM_OPERANDS[kind]
  numbers = graphs.draw_numbers(config, kinds, constant)
  first_operand = (first * num_nodes).astype(np.int64)
  further = 1 + (second * (num_nodes - 1)).astype(np.int64)
  places = np.stack(
    [first_operand, (first_operand + further) % num_nodes, first_operand],
    axis=2,
  )
  operands, values = graphs.arrange(
    kinds,
    numbers,
    num_operands,
    nodes[np.arange(len(nodes))[:, None, None], places],
    graph.values,
  )
  invalid = (values < 1) | (values > config.max_value)
  kinds[invalid], num_operands[invalid] = EQUAL, 1
  return Statements(kinds, numbers, num_operands, operands)


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
  totals_places = np.take_along_axis(names.total_places, rank, axis=1)
  counted_places = np.take_along_axis(
    totals_places, np.maximum(counted_by, 0), axis=1
  )
  node = np.arange(kinds.shape[1]) % MAX_NODES
  counted = names.counted_items[:, node]
  items = np.where(is_total, -1, np.where(is_counted, counted, items))
  places = np.where(
    is_total, totals_places, np.where(is_counted, counted_places, places)
  )
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
  names, graph = _draw(config, seed, indices, operations, reverse, split)
  statement_seed, decoy_seed = (
    pipeline.stream_seed(_DISTRACTORS, kind, seed) for kind in range(2)
  )
  decoy_graphs = draw_decoys(config, decoy_seed, indices, operations, reverse)
  graph = graphs.joined(graph, decoy_graphs)
  statements = _stated(graph, reverse)
  room = _lengths(config, modes[:, 1]) - language.QUESTION_LENGTH
  graph, statements, room = _without_long_decoys(graph, statements, room)
  further = draw_statements(config, statement_seed, indices, graph)
  lengths = language.present(further).sum(axis=2)
  fits = np.cumsum(lengths, axis=1) <= room[:, None]
  further = further._replace(kinds=np.where(fits, further.kinds, ABSENT))
  statements = Statements(
    *(np.concatenate(x, axis=1) for x in zip(statements, further, strict=True))
  )
  quantities = named_quantities(
    names,
    np.concatenate([graph.kinds, further.kinds], axis=1),
    np.pad(graph.counted_by, ((0, 0), (0, fits.shape[1])), constant_values=-1),
  )
  rows, answer_node = np.arange(len(indices)), graph.answer_node[:, 0]
  question = language.questions(names.themes, quantities[rows, answer_node])
  tokens = language.statements(statements, quantities)
  present = language.present(statements)
  keys = pipeline.uniforms(
    pipeline.stream_seed(_ORDERS, 0, seed), indices, present.shape[1]
  )
  order = np.argsort(keys, axis=1, kind="stable")[..., None]
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
) -> tuple[Names, Graphs]:
  """Names and graphs; redraws problems of other splits."""
  num, num_names = num_columns(config), len(Names._fields)

  def draw(attempt, rows):
    numbers = pipeline.uniforms(
      pipeline.stream_seed(_PROBLEMS, attempt, seed),
      indices[rows],
      num + MAX_NODES * graphs.COLUMNS,
    )
    names = draw_names(config, numbers[:, :num])
    graph, good = graphs.draw(
      config,
      numbers[:, num:].reshape(-1, MAX_NODES, graphs.COLUMNS),
      operations[rows],
      reverse[rows],
    )
    good &= graphs.in_split(graph, operations[rows], titles_of(names), split)
    return (*names, *graph), good

  parts = graphs.until_good(draw, len(indices))
  return Names(*parts[:num_names]), Graphs(*parts[num_names:])


def _stated(graph: Graphs, reverse: np.ndarray) -> Statements:
  """Statements about all nodes of graphs from `graphs.joined`."""
  kinds, numbers = graph.kinds.copy(), graph.numbers.copy()
  num_operands = graph.num_operands.copy()
  rows = np.flatnonzero(reverse)[:, None]
  first_nodes = MAX_NODES * np.arange(graph.answer_node.shape[1])
  kinds[rows, first_nodes], num_operands[rows, first_nodes] = CONSTANT, 0
  numbers[rows, first_nodes] = graph.values[rows, first_nodes]
  kinds[rows, graph.answer_node[reverse]] = UNKNOWN
  return Statements(kinds, numbers, num_operands, graph.operands)


def _lengths(config: Config, uniform: np.ndarray) -> np.ndarray:
  """Target lengths of texts, met to within one statement, int [B]."""
  longest = config.max_length
  shortest = min(config.min_length + language.PAIR_LENGTH - 1, longest)
  return shortest + (uniform * (longest - shortest + 1)).astype(np.int64)


def _without_long_decoys(
  graph: Graphs, statements: Statements, room: np.ndarray
) -> tuple[Graphs, Statements, np.ndarray]:
  """Removes decoys that do not fit; returns the tokens left [B]."""
  by_problem = (len(room), -1, MAX_NODES)
  lengths = (
    language.present(statements).sum(axis=2).reshape(by_problem).sum(axis=2)
  )
  fits = fitting(graph.kinds.reshape(by_problem), lengths, room - lengths[:, 0])
  is_kept = np.repeat(fits, MAX_NODES, axis=1)
  masked_kinds = (
    np.where(is_kept, x.kinds, ABSENT) for x in (graph, statements)
  )
  return (
    graph._replace(kinds=next(masked_kinds)),
    statements._replace(kinds=next(masked_kinds)),
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
  always = np.ones((num, 1), bool)
  chunk, expected = (
    pipeline.in_a_row(
      np.concatenate(tokens, axis=1),
      np.concatenate(present, axis=1),
      ANSWER_LENGTH,
      language.PADDING,
    )
    for tokens, present in (
      ((mark, digits), (always, has_digit)),
      ((digits, end), (has_digit, always)),
    )
  )
  inputs = np.concatenate([context, chunk], axis=1)
  return pipeline.with_answers(inputs, expected, expected != language.PADDING)


RULES = ("most_frequent", "lone_constant", "sum_of_constants")
_CHUNK = 128  # Examples in memory at once.


def floors_of(
  config: Config, make: Callable[[np.ndarray], Mapping[str, np.ndarray]]
) -> dict[str, float]:
  """Floors over all evaluation examples, not only this process's.

  Constants are the numbers that a quantity is said to equal, including given
  totals but not addends and factors.

  "most_frequent" gives the most common answer; "lone_constant" copies a random
  constant, or the only one (the floor is the expected score);
  "sum_of_constants" adds up all constants.

  Args:
    make: function from indices of examples [b] to their batch.

  Returns:
    Exact match, 0 to 1, by "floor/<rule>/operations=<number>".
  """
  indices = np.arange(config.num_eval_examples)
  parts = [
    _answers_and_hits(make(indices[start : start + _CHUNK]))
    for start in range(0, len(indices), _CHUNK)
  ]
  groups, answers, *hits = (np.concatenate(x) for x in zip(*parts, strict=True))
  floors = {}
  for group, number in enumerate(config.eval_ops):
    of_group = groups == group
    values = (
      np.bincount(answers[of_group]).max() / of_group.sum(),
      *(hit[of_group].mean() for hit in hits),
    )
    for name, value in zip(RULES, values, strict=True):
      floors[f"floor/{name}/operations={number}"] = float(value)
  return floors


def _answers_and_hits(
  batch: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, ...]:
  """Groups and answers int [b]; scores of the last two rules, f64 [b]."""
  inputs = batch["inputs"]
  answers = numbers_after(inputs, language.ANSWER).max(axis=1)
  constants = numbers_after(inputs, language.word("equal"))
  right = (constants == answers[:, None]).sum(axis=1)
  copied = right / (constants > 0).sum(axis=1)
  added = (constants.sum(axis=1) == answers).astype(np.float64)
  return batch["group/operations"], answers, copied, added


def numbers_after(tokens: np.ndarray, before: int) -> np.ndarray:
  """Numbers that directly follow a token.

  Args:
    tokens: ids, int [B, T].
    before: id of the token.

  Returns:
    int64 [B, T]: at the position of the token, the number after it; 0 if there
    is none.
  """
  values = np.zeros(tokens.shape, np.int64)
  is_number = tokens == before
  for place in range(1, language.NUM_DIGITS + 1):
    digits = np.full_like(tokens, language.PADDING)
    digits[:, :-place] = tokens[:, place:]
    is_number &= digits < 10
    values = np.where(is_number, 10 * values + digits, values)
  return values


TRACES: tuple[str, ...] = ()  # `score` uses no trace.
HEADLINE = ("exact_match",)
# Different from the streams above.
_STREAMS, _OPERATIONS = {"train": 4, "test": 5, "validation": 7}, 6


def spec(config: Config) -> TaskSpec:
  """Vocabulary, and the length of the context and the answer chunk."""
  length = config.context_length + ANSWER_LENGTH
  return TaskSpec(
    vocab_size=language.PADDING + 1,
    sequence_length=length,
    num_padding_tokens=1,
    num_answer_tokens=ANSWER_LENGTH,
    predicts_next=True,
  )


def abstract_batch(config: Config, batch_size: int) -> pipeline.Shapes:
  """Shapes and dtypes of a training batch, without making the data."""
  return pipeline.abstract_rows(batch_size, spec(config).sequence_length)


def make_dataset(
  config: Config,
  split: str,
  *,
  batch_size: int,
  seed: int,
  rows: pipeline.Rows | None = None,
) -> Dataset:
  """Batches of a split.

  All splits are drawn, with separate random streams and from disjoint sets of
  problems: problems that differ only in names and order are in the same set.
  There are few problems of up to three operations; for these, the name of the
  final quantity is part of the problem (`graphs.in_split`).

  Returns:
    Batches of `abstract_batch`'s entries, and in evaluation "valid" bool [b]
    and "group/operations" i32 [b]. Weights are 1 in the answer chunk where a
    digit or END is next; other targets are 0. The facts of the test split
    include the scores of simple rules on it (`floors_of`).
  """
  base = seed if split == "train" else config.eval_seed
  stream = pipeline.stream_seed(_STREAMS[split], 0, base)
  train_ops, eval_ops = np.array(config.train_ops), np.array(config.eval_ops)

  def make(indices):
    if split == "train":
      numbers = pipeline.uniforms(
        pipeline.stream_seed(_OPERATIONS, 0, stream), indices, 1
      )
      operations = train_ops[(numbers[:, 0] * len(train_ops)).astype(np.int64)]
      return examples(config, stream, indices, operations, split)
    group = indices % len(eval_ops)  # Any prefix is a fair sample.
    batch = examples(config, stream, indices, eval_ops[group], split)
    return {**batch, "group/operations": group.astype(np.int32)}

  return pipeline.generated(
    make,
    split,
    config.num_eval_examples,
    batch_size,
    rows,
    groups={"operations": tuple(map(str, config.eval_ops))},
    facts=floors_of(config, make) if split == "test" else {},
  )


def score(output: Output, batch: Batch) -> dict[str, Array]:
  """Per-example scores, f32 [B].

  "exact_match": all digits and END are correct (the paper's accuracy); "loss":
  their mean cross-entropy in nats.
  """
  losses, right, weights = token_losses.graded(output, batch)
  is_right = jnp.all((right == 1) | (weights == 0), axis=1)
  return {
    "exact_match": is_right.astype(jnp.float32),
    "loss": token_losses.row_means(losses, weights),
  }
