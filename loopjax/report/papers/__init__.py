"""The papers' numbers: one TOML file for each paper and kind of task.

A file has the fields of `paper.Paper`. Columns and panels are described once
(`[column.NAME]`, `[panel.NAME]`) and named where a table has them. A column's
value is a `metric` of summary.json times a `factor`, at `depth` times the
trained number of loops if that is given; or a `function` of
`report.quantities`, with its `arguments`; or neither, for a benchmark that
`loopjax.eval.harness` scores. A row has a label, the settings that identify it,
and the paper's value of each column: a number, a text, or the fields of
`paper.Number`. `{any = [...]}` stands for any of these values of a setting.
"""

import functools
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from loopjax.report import paper as paper_lib
from loopjax.report import quantities
from loopjax.report.paper import Column, Number, Panel, Paper, Row, Scale, Sweep

_HERE = pathlib.Path(__file__).parent


@functools.cache
def read(name: str) -> Paper:
  """The paper of NAME.toml."""
  found = _content(name)
  columns = {key: _column(key, **x) for key, x in found["column"].items()}
  panels = {key: _panel(**x) for key, x in found.get("panel", {}).items()}

  def sweep(title, source, **parts: Any) -> Sweep:
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
      Scale(x, _fact(*of), paper) for x, *of, paper in found["scale"]
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


def _column(
  name: str, label: str, key: str = "", digits: int = 1, **value: Any
) -> Column:
  function = value.pop("function", "")
  of_rows = function in quantities.ONSETS
  of: Callable[..., Any]
  if of_rows:
    of = quantities.ONSETS[function]
  elif function:
    of = _function(function, **value.get("arguments", {}))
  elif "depth" in value:
    of = paper_lib.AtDepth(value["metric"], value["factor"], value["depth"])
  elif value:
    of = paper_lib.Metric(value["metric"], value.get("factor", 1.0))
  else:
    of = paper_lib.not_scored
  return Column(key or name, label, of, digits, of_rows)


def _function(name: str, **arguments: Any) -> Any:
  function = quantities.FUNCTIONS[name]
  return functools.partial(function, **arguments) if arguments else function


def _fact(value: str, arguments: Mapping[str, Any] | None = None) -> Any:
  """The `value` of a `Scale`."""
  known = value in quantities.FUNCTIONS
  return _function(value, **(arguments or {})) if known else value


def _panel(**found: Any) -> Panel:
  if "band" in found:
    *numbers, function = found["band"]
    found["band"] = (*numbers, quantities.ONSETS[function])
  found["names"] = tuple(found["names"])
  found["settings"] = _settings(found.get("settings", {}))
  return Panel(**found)


def _row(label: str, settings: Mapping[str, Any], **values: Any) -> Row:
  return Row(
    label, _settings(settings), {k: _number(x) for k, x in values.items()}
  )


def _number(value: Any) -> Number:
  if isinstance(value, str):
    return Number(text=value)
  if not isinstance(value, dict):
    return Number(value)
  seeds = {int(seed): x for seed, x in value.pop("seeds", {}).items()}
  return Number(**value, seeds=seeds)


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
