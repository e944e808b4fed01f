"""The papers' numbers: one TOML file for each paper and kind of task.

A file has the fields of `Paper`. Columns and panels are described once
(`[column.NAME]`, `[panel.NAME]`) and named where a table has them; they have
the fields of `Column` and `Panel`. A row has a label, the settings that
identify it, and the paper's value of each column: a number, a text, or the
fields of `Number`. `{any = [...]}` stands for any of these values of a setting.
"""

import functools
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from loopjax.report import quantities
from loopjax.report.quantities import Run

_HERE = pathlib.Path(__file__).parent
ERROR = "/standard_error"  # Ends the name of a score's error over examples.


class Number(NamedTuple):
  """The paper's value of one cell.

  Attributes:
    mean: mean over seeds, or the only run's number; None if not given.
    std: sample standard deviation over seeds.
    seeds: the numbers of single runs, by seed.
    text: additional or alternative text from the paper, such as a range.
  """

  mean: float | None = None
  std: float | None = None
  seeds: Mapping[int, float] = {}
  text: str = ""

  @property
  def standard_error(self) -> float:
    """Standard error of the mean over seeds; 0 if the paper has one run."""
    runs = len(self.seeds)
    return self.std / math.sqrt(runs) if self.std and runs else 0.0


class Column(NamedTuple):
  """One quantity of a table.

  Attributes:
    key: key by which rows refer to the column.
    label: column heading, with the unit.
    metric: name of a score of summary.json; "" for benchmarks, which
      `loopjax.eval.harness` scores, and for a function.
    factor: multiplies the metric.
    depth: if not 0, the metric is that after `depth` times the trained number
      of loops.
    function: a function of `report.quantities`, with its arguments.
    digits: number of digits after the decimal point.
  """

  key: str
  label: str
  metric: str = ""
  factor: float = 1.0
  depth: float = 0.0
  function: str = ""
  arguments: Mapping[str, Any] = {}
  digits: int = 1

  def of(self, run: Run, more: str = "") -> float | None:
    """The quantity of a run, or of its metric with an ending; None without."""
    if self.function:
      return quantities.FUNCTIONS[self.function](run, **self.arguments)
    name = self.metric + more
    if self.depth:
      loops = int(self.depth * run.config["model"]["num_loops"])
      name += f"/loop={loops - 1}"
    found = quantities.scores(run).get(name)
    return None if found is None else self.factor * found

  def standard_error(self, run: Run) -> float | None:
    """Standard error over the examples of the evaluation; None if unknown."""
    return self.of(run, ERROR) if self.metric else None


class Row(NamedTuple):
  """One row of a table.

  Attributes:
    label: the paper's name of the row.
    settings: settings, without the seed, that identify the row among the items
      of the sweep; an item belongs to the row that shares the most settings
      with it, whether set by the item or by the sweep's config. A frozenset
      stands for any of its values.
    values: the paper's numbers, by column.
  """

  label: str
  settings: Mapping[str, Any]
  values: Mapping[str, Number]


class Panel(NamedTuple):
  """One plot with the curves of all items overlaid.

  Attributes:
    title: title, with the unit.
    names: "split/metric" of one or two curves per item, the second dashed.
    over: "examples" seen in training, or another "split/metric" of the same
      evaluations, from metrics.jsonl; "loops", or a setting, "section.key",
      from summary.json.
    lines: if `over` is a setting, a second setting, with one line per value.
    settings: settings of the items to draw.
    factor: multiplies the values.
    band: (mean, deviation, function) of a position on the axis: the paper's
      value, and a function of `report.quantities` for ours.
  """

  title: str
  names: tuple[str, ...]
  over: str = "examples"
  lines: str = ""
  settings: Mapping[str, Any] = {}
  factor: float = 100.0
  band: tuple[float, float, str] | None = None


class Sweep(NamedTuple):
  """A table or figure of the paper, or one of our comparisons.

  Attributes:
    title: the subject of the comparison.
    source: the paper's table or figure; "ours" if it has no such comparison.
    columns: the columns, in order.
    rows: the paper's rows; empty if it gives no numbers.
    caveats: caveats of the comparison, one sentence each.
    panels: the paper's figures that overlay several runs.
  """

  title: str
  source: str
  columns: tuple[Column, ...]
  rows: tuple[Row, ...] = ()
  caveats: tuple[str, ...] = ()
  panels: tuple[Panel, ...] = ()


class Scale(NamedTuple):
  """One fact about the size of an experiment.

  Attributes:
    label: name of the quantity.
    value: where our value is: a setting, "section.key"; a key of summary.json;
      a format of a run's sections; or a function of `report.quantities`.
    paper: the paper's value.
    arguments: of the function.
  """

  label: str
  value: str
  paper: str = ""
  arguments: Mapping[str, Any] = {}

  def of(self, run: Run) -> Any:
    """Our value; raises KeyError if the run has none."""
    if self.value in quantities.FUNCTIONS:
      return quantities.FUNCTIONS[self.value](run, **self.arguments)
    if "{" in self.value:
      return self.value.format(**run.config)
    section, _, key = self.value.rpartition(".")
    return (run.config[section] if section else run.summary)[key]


class Paper(NamedTuple):
  """Everything that the report knows about one paper.

  Attributes:
    name: what it is about, its author and source.
    about: its models and tasks in a sentence or two.
    sweeps: sweeps by name, as in the config file's `sweeps`.
    columns: columns for sweeps that are not in `sweeps`.
    scale: our sizes and the paper's, the most informative first.
    caveats: caveats of every comparison with the paper.
    size: settings of a run whose numbers can be compared with the paper's, as
      in `Row.settings`; None if no run here is of its size.
    panels: panels for sweeps that are not in `sweeps`.
  """

  name: str
  about: str
  sweeps: Mapping[str, Sweep]
  columns: tuple[Column, ...]
  scale: tuple[Scale, ...]
  caveats: tuple[str, ...]
  size: Mapping[str, Any] | None = None
  panels: tuple[Panel, ...] = ()


@functools.cache
def read(name: str) -> Paper:
  """The paper of NAME.toml."""
  found = _content(name)
  columns = {
    key: Column(**{"key": key, **x}) for key, x in found["column"].items()
  }
  panels = {key: _panel(**x) for key, x in found.get("panel", {}).items()}

  def sweep(title: str, source: str, **parts: Any) -> Sweep:
    return Sweep(
      title,
      source,
      tuple(columns[x] for x in parts["columns"]),
      tuple(_row(**row) for row in parts.get("rows", [])),
      tuple(parts.get("caveats", [])),
      tuple(panels[x] for x in parts.get("panels", [])),
    )

  return Paper(
    name=found["name"],
    about=found["about"],
    sweeps={key: sweep(**x) for key, x in found["sweeps"].items()},
    columns=tuple(columns[x] for x in found["columns"]),
    scale=tuple(
      Scale(label, value, paper, *arguments)
      for label, value, *arguments, paper in found["scale"]
    ),
    caveats=tuple(found.get("caveats", [])),
    size=_settings(found["size"]) if "size" in found else None,
    panels=tuple(panels[x] for x in found.get("panels", [])),
  )


def _content(name: str) -> dict[str, Any]:
  return tomllib.loads((_HERE / f"{name}.toml").read_text("utf-8"))


def _settings(found: Mapping[str, Any]) -> dict[str, Any]:
  return {
    key: frozenset(value["any"]) if isinstance(value, dict) else value
    for key, value in found.items()
  }


def _panel(names: list[str], **found: Any) -> Panel:
  found["settings"] = _settings(found.get("settings", {}))
  return Panel(names=tuple(names), **found)


def _row(label: str, settings: Mapping[str, Any], **values: Any) -> Row:
  return Row(
    label, _settings(settings), {k: _number(x) for k, x in values.items()}
  )


def _number(value: Any) -> Number:
  if isinstance(value, str):
    return Number(text=value)
  if not isinstance(value, dict):
    return Number(value)
  seeds = {int(seed): x for seed, x in value.get("seeds", {}).items()}
  return Number(**{**value, "seeds": seeds})


# In the order of the report.
NAMES = (
  "language", "adaptive", "looped", "loopformer", "melt", "recurrent",
  "automaton", "depo", "gsm", "disco", "utm",
)  # fmt: skip
# By task.name, or task.name/model.name if a task has several papers.
PAPERS: dict[str, Paper] = {
  task: read(name) for name in NAMES for task in _content(name)["tasks"]
}


def of(task: str, model: str) -> Paper | None:
  """The paper of a task, or of a task and a model family; None if unknown."""
  return PAPERS.get(f"{task}/{model}") or PAPERS.get(task)
