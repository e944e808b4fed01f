"""Records for the numbers of a paper."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

HEADLINE = 4  # Number of facts about the scale that are always shown.


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
    value: function from (config, summary) of our run to the same quantity; None
      or NaN if unknown.
    digits: number of digits after the decimal point.
    of_rows: whether the function is of the rows of metrics.jsonl instead.
  """

  key: str
  label: str
  value: Callable[..., float | None]
  digits: int = 1
  of_rows: bool = False

  def of(self, run: Any) -> float | None:
    """The quantity of a `runs.Run`."""
    if self.of_rows:
      return self.value(run.rows)
    return self.value(run.config, run.summary)


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
      value, and a function that computes ours from the rows of a run's
      metrics.jsonl, NaN for none.
  """

  title: str
  names: tuple[str, ...]
  over: str = "examples"
  lines: str = ""
  settings: Mapping[str, Any] = {}
  factor: float = 100.0
  band: tuple[float, float, Callable[[list[dict[str, Any]]], Any]] | None = None


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
      a format of a run's sections, such as STEPS; or a function from (config,
      summary).
    paper: the paper's value.
  """

  label: str
  value: str | Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
  paper: str

  def of(self, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Any:
    """Our value; raises KeyError if the run has none."""
    if callable(self.value):
      return self.value(config, summary)
    if "{" in self.value:
      return self.value.format(**config)
    section, _, key = self.value.rpartition(".")
    return (config[section] if section else summary)[key]


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


@dataclasses.dataclass(frozen=True)
class Metric:
  """A `Column.value` that reads one metric of summary.json, times a factor."""

  name: str
  factor: float = 1.0

  def __call__(
    self, config: Mapping[str, Any], summary: Mapping[str, Any]
  ) -> float | None:
    del config
    found = summary.get("metrics", {}).get(self.name)
    return None if found is None else self.factor * found

  def of_validation(self) -> "Metric":
    """The same metric of the validation split that belongs to its split."""
    return dataclasses.replace(
      self, name=re.sub("^test", "validation", self.name)
    )

  def standard_error(
    self, config: Mapping[str, Any], summary: Mapping[str, Any]
  ) -> float | None:
    """Standard error over the examples of the evaluation; None if unknown."""
    error = dataclasses.replace(self, name=f"{self.name}/standard_error")
    return error(config, summary)


@dataclasses.dataclass(frozen=True)
class AtDepth(Metric):
  """A metric at `multiple` times the trained number of loops."""

  multiple: float = 1.0

  def __call__(
    self, config: Mapping[str, Any], summary: Mapping[str, Any]
  ) -> float | None:
    loop = int(self.multiple * config["model"]["num_loops"]) - 1
    return Metric(f"{self.name}/loop={loop}", self.factor)(config, summary)


def not_scored(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
  """A `Column.value` of benchmarks: other programs score them, not the run."""
  del config, summary
