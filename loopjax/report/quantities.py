"""Quantities of tables that a metric alone does not give: functions of a run.

Papers' tables (`loopjax/report/papers`) name them. A run has the contents of
its config.json and summary.json, and the rows of its metrics.jsonl.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from loopjax.analysis import onset

# Rules whose exact match is in a summary (`data/gsm/task.py`).
FLOORS = ("most_frequent", "lone_constant", "sum_of_constants")


class Run(Protocol):
  """What a quantity is of; `runs.Run` is one."""

  @property
  def config(self) -> Mapping[str, Any]: ...

  @property
  def summary(self) -> Mapping[str, Any]: ...

  @property
  def rows(self) -> list[dict[str, Any]]: ...


def scores(run: Run) -> Mapping[str, float]:
  """The final scores, "split/metric"; none if the run is not complete."""
  return run.summary.get("metrics", {})


def token_steps(run: Run) -> float | None:
  """Loops times tokens of a board, with its memory tokens."""
  task = run.config["task"]
  cells = (task["box_rows"] * task["box_cols"]) ** 2
  tokens = run.config["model"]["num_memory_tokens"] + cells
  steps = scores(run).get("test/ponder_steps")
  return None if steps is None else tokens * steps


def board(run: Run) -> str:
  """The size of a board."""
  size = run.config["task"]["box_rows"] * run.config["task"]["box_cols"]
  return f"{size} x {size}"


def train_examples(run: Run) -> int:
  """Number of training examples."""
  return run.summary["data"]["train_examples"]


def test_count(run: Run) -> float | None:
  """Number of examples of the evaluation."""
  return scores(run).get("test/count")


def graph(run: Run) -> str:
  """Entities, relations and facts of a graph."""
  return "2 x {num_entities}, {num_relations} relations, {out_degree}".format(
    **run.config["task"]
  )


def versions(run: Run) -> str:
  """The versions of the libraries."""
  found = run.summary["versions"].items()
  return " ".join(f"{name} {version}" for name, version in found)


def revision(run: Run) -> str:
  """The revision of the code."""
  return run.summary["revision"] or "not in a checkout"


def ood_at_best_depth(run: Run, hops: int) -> float | None:
  """Accuracy out of distribution, in percent, at the depth that validation
  selects.
  """
  chosen_by = f"depth/validation_ood_{hops}/accuracy/loop="
  found = scores(run)
  names = [name for name in found if name.startswith(chosen_by)]
  if not names:
    return None
  best = max(names, key=lambda name: found[name])
  return 100.0 * found[best.replace("validation", "test", 1)]


def cache_bytes(run: Run) -> float:
  """Cache bytes of a token over all layers, and over loops if not shared."""
  model = run.config["model"]
  heads = model["num_key_value_heads"] or model["num_heads"]
  width = model["head_width"] or model["width"] // model["num_heads"]
  size = 4 if model["precision"] == "float32" else 2
  loops = model["num_loops"] if model["name"] == "looped" else 1
  return 2 * size * heads * width * model["num_layers"] * loops


def mean_gate(run: Run, bank: str) -> float | None:
  """The mean over layers of a bank's gate."""
  layers = range(run.config["model"]["num_layers"])
  gates = [scores(run).get(f"test/{bank}_gate/layer={i}") for i in layers]
  there = [gate for gate in gates if gate is not None]
  return sum(there) / len(there) if len(there) == len(gates) else None


def constant_floor(run: Run) -> float:
  """Exact match of the best constant answer, in percent."""
  return 100.0 * run.summary["data"]["constant_floor"]


def _floors(run: Run, operations: int) -> dict[str, float]:
  """Scores of simple rules at this many operations, in percent, by name."""
  data = run.summary.get("data", {})
  found = {
    rule: data.get(f"floor/{rule}/operations={operations}") for rule in FLOORS
  }
  return {rule: 100 * x for rule, x in found.items() if x is not None}


def best_floor(run: Run, operations: int) -> float | None:
  """The highest of the floors at this many operations, in percent."""
  return max(_floors(run, operations).values(), default=None)


def floors(run: Run, rule: str) -> str:
  """Score of a rule at every number of operations."""
  return ", ".join(
    f"{number}: {_floors(run, number)[rule]:.1f}"
    for number in run.config["task"]["eval_ops"]
  )


def onset_losses(run: Run) -> np.ndarray:
  """The losses at which layers begin to loop, of those that do."""
  found = onset.losses(run.rows)
  return found[~np.isnan(found)]


def onset_mean(run: Run) -> float | None:
  """Their mean."""
  found = onset_losses(run)
  return float(found.mean()) if len(found) else None


def onset_deviation(run: Run) -> float | None:
  """Their sample standard deviation."""
  found = onset_losses(run)
  return float(found.std(ddof=1)) if len(found) > 1 else None


def onset_number(run: Run) -> float:
  """The number of layers that begin."""
  return float(len(onset_losses(run)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
  function.__name__: function
  for function in (
    token_steps, board, train_examples, test_count, graph, versions, revision,
    ood_at_best_depth, cache_bytes, mean_gate, constant_floor, best_floor,
    floors, onset_losses, onset_mean, onset_deviation, onset_number,
  )
}  # fmt: skip
