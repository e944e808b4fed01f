"""Distractors: statements that are irrelevant to the question.

Decoys are problems drawn in the same way and as hard, with their own constants,
totals and unknowns: only the question identifies the real problem. Single
statements define further quantities, which are constants or computed from one
or two quantities of any of the problems. No problem depends on quantities of
another, or on further quantities.
"""

import numpy as np

from loopjax.data import pipeline
from loopjax.data.gsm import graphs
from loopjax.data.gsm.config import NUM_DECOYS, NUM_TOTAL_PLACES, Config
from loopjax.data.gsm.graphs import Graphs
from loopjax.data.gsm.language import (
  ABSENT,
  CONSTANT,
  DIFFERENCE,
  EQUAL,
  PLUS,
  SUM,
  TIMES,
  TOTAL,
  Statements,
)
from loopjax.data.gsm.structures import MAX_NODES

# Kinds of single statements; the last two need two quantities.
_KINDS = np.array([CONSTANT, EQUAL, PLUS, TIMES, SUM, DIFFERENCE])
_NUM_OPERANDS = np.array([0, 1, 1, 1, 2, 2])


def decoys(
  config: Config,
  seed: int,
  indices: np.ndarray,
  operations: np.ndarray,
  reverse: np.ndarray,
) -> Graphs:
  """Draws the maximum number of decoy problems for each example.

  Decoys are drawn regardless of splits, since their answers are never given.

  Args:
    config: the task.
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


def statements(
  config: Config, seed: int, indices: np.ndarray, graph: Graphs
) -> Statements:
  """Draws the maximum number of single statements that could fit.

  All kinds are equally likely, as are all quantities; a statement with an
  invalid value becomes EQUAL.

  Args:
    config: the task.
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
