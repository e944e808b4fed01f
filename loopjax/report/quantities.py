"""Quantities of tables that a metric alone does not give: functions of a run.

Papers' tables (`loopjax/report/papers`) name them. A function is of (config,
summary), the contents of a run's config.json and summary.json; `ONSETS` are of
the rows of its metrics.jsonl.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loopjax.analysis import onset
from loopjax.report.paper import Metric

Record = Mapping[str, Any]
# Rules whose exact match is in a summary (`data/gsm/task.py`).
FLOORS = ("most_frequent", "lone_constant", "sum_of_constants")


def token_steps(config: Record, summary: Record) -> float | None:
  """Loops times tokens of a board, with its memory tokens."""
  task = config["task"]
  cells = (task["box_rows"] * task["box_cols"]) ** 2
  tokens = config["model"]["num_memory_tokens"] + cells
  steps = Metric("test/ponder_steps")(config, summary)
  return None if steps is None else tokens * steps


def board(config: Record, summary: Record) -> str:
  """The size of a board."""
  del summary
  size = config["task"]["box_rows"] * config["task"]["box_cols"]
  return f"{size} x {size}"


def train_examples(config: Record, summary: Record) -> int:
  """Number of training examples."""
  del config
  return summary["data"]["train_examples"]


def test_count(config: Record, summary: Record) -> float | None:
  """Number of examples of the evaluation."""
  return Metric("test/count")(config, summary)


def graph(config: Record, summary: Record) -> str:
  """Entities, relations and facts of a graph."""
  del summary
  return "2 x {num_entities}, {num_relations} relations, {out_degree}".format(
    **config["task"]
  )


def ood_at_best_depth(
  config: Record, summary: Record, hops: int
) -> float | None:
  """Accuracy out of distribution, in percent, at the depth that validation
  selects.
  """
  del config
  chosen_by = f"depth/validation_ood_{hops}/accuracy/loop="
  scores = summary.get("metrics", {})
  found = {v: name for name, v in scores.items() if name.startswith(chosen_by)}
  if not found:
    return None
  return 100.0 * scores[found[max(found)].replace("validation", "test", 1)]


def cache_bytes(config: Record, summary: Record) -> float:
  """Cache bytes of a token over all layers, and over loops if not shared."""
  del summary
  model = config["model"]
  heads = model["num_key_value_heads"] or model["num_heads"]
  width = model["head_width"] or model["width"] // model["num_heads"]
  size = 4 if model["precision"] == "float32" else 2
  loops = model["num_loops"] if model["name"] == "looped" else 1
  return 2 * size * heads * width * model["num_layers"] * loops


def mean_gate(config: Record, summary: Record, bank: str) -> float | None:
  """The mean over layers of a bank's gate."""
  layers = range(config["model"]["num_layers"])
  names = [f"test/{bank}_gate/layer={i}" for i in layers]
  found = [Metric(name)(config, summary) for name in names]
  gates = [gate for gate in found if gate is not None]
  return sum(gates) / len(gates) if len(gates) == len(found) else None


def constant_floor(config: Record, summary: Record) -> float:
  """Exact match of the best constant answer, in percent."""
  del config
  return 100.0 * summary["data"]["constant_floor"]


def _floors(summary: Record, operations: int) -> dict[str, float]:
  """Scores of simple rules at this many operations, in percent, by name."""
  found = {
    rule: summary.get("data", {}).get(f"floor/{rule}/operations={operations}")
    for rule in FLOORS
  }
  return {rule: 100 * x for rule, x in found.items() if x is not None}


def best_floor(
  config: Record, summary: Record, operations: int
) -> float | None:
  """The highest of the floors at this many operations, in percent."""
  del config
  return max(_floors(summary, operations).values(), default=None)


def floors(config: Record, summary: Record, rule: str) -> str:
  """Score of a rule at every number of operations."""
  return ", ".join(
    f"{number}: {_floors(summary, number)[rule]:.1f}"
    for number in config["task"]["eval_ops"]
  )


def _of_onsets(
  statistic: Callable[..., Any], least: int, rows: list[dict[str, Any]]
) -> float:
  """Of the losses at which layers begin; NaN if too few do."""
  found = onset.losses(rows)
  found = found[~np.isnan(found)]
  return float(statistic(found)) if found.size >= least else np.nan


FUNCTIONS: dict[str, Callable[..., Any]] = {
  function.__name__: function
  for function in (
    token_steps, board, train_examples, test_count, graph, ood_at_best_depth,
    cache_bytes, mean_gate, constant_floor, best_floor, floors,
  )
}  # fmt: skip
ONSETS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
  "onset_losses": onset.losses,
  "onset_mean": functools.partial(_of_onsets, np.mean, 1),
  "onset_deviation": functools.partial(
    _of_onsets, functools.partial(np.std, ddof=1), 2
  ),
  "onset_number": functools.partial(_of_onsets, np.size, 0),
}
