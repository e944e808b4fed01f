"""Sweeps of a config, and tables of any runs, as records."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loopjax import config as config_lib
from loopjax.commands import command_line
from loopjax.errors import RESUMABLE, UserError, local_path
from loopjax.library import checked
from loopjax.run import naming
from loopjax.run import workdir as workdir_lib
from loopjax.sweep import items as items_lib
from loopjax.sweep import runner

Path = str | os.PathLike[str]
_OWN = "items"  # Name of a sweep that is a list.


def table(
  runs: Path | Sequence[Path],
  metrics: str | Sequence[str] = (),
  *,
  rows: str | Sequence[str] = (),
  columns: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
  """The final scores of runs, as `loopjax table` prints them.

  `pandas.DataFrame(loopjax.table("runs/a"))` is a data frame. Without `rows`
  and `columns` there is a record per run: its path, state, the settings in
  which the runs differ, and scores. With them, runs that differ only in their
  seeds are averaged: with a mean, "NAME/interval" is half the width of its 95 %
  interval (Student's t), and "NAME/runs" the number of runs. Scores of a run
  that is not complete are None, and standard error names it, as it names runs
  without a finite score; their paths are in "NAME/missing" of their mean.

  Args:
    runs: work directories, sweeps, stored runs (NAME.runs.json), folders of
      these, or patterns of paths.
    metrics: names of scores, such as "test/loss", or patterns; "steps",
      "parameters" and "wall_seconds" are among them. All scores except
      training's, standard errors, and those of groups and loops if empty.
    rows: the settings that identify a row, such as "model.num_loops"; all
      that differ if empty.
    columns: the settings by which columns are divided, such as "run.seed".
  """
  from loopjax.report import records  # Imports pandas, which takes long.

  if isinstance(runs, str | os.PathLike) or not isinstance(runs, Iterable):
    runs = [runs]
  read = records.read([workdir_lib.path_of(place) for place in runs])
  records.say_incomplete(read)
  rows, columns = _names(rows), _names(columns)
  if not (rows or columns):
    return records.records(read, _names(metrics))
  pivot = records.pivot(read, _names(metrics), rows, columns)
  records.say_missing(read, pivot)
  return pivot.records()


def run_sweep(
  config: str,
  items: str | Sequence[Mapping[str, Any]],
  *,
  seeds: Sequence[int] = (),
  workdir: Path | None = None,
  jobs: int = 1,
  metrics: str | Sequence[str] = (),
) -> list[dict[str, Any]]:
  """Runs a sweep as `loopjax sweep` does; returns the `table` of its runs.

  Each item runs in a process of its own. Complete items are skipped, and
  interrupted ones resumed: the same call can be repeated.

  Args:
    config: as in --config, "FILE[:preset][,section.key=value...]".
    items: the name of a sweep of the config file, or the settings of each item,
      {"section.key": value}.
    seeds: values of `run.seed`; each item runs once with each.
    workdir: the sweep's directory; by default the one of the command, and
      runs/<config>[-<preset>]-items for a list.
    jobs: number of items that run at once, each on its share of the CPU cores.
    metrics: as in `table`.
  """
  cores = runner.split_cores(checked.integer("jobs", jobs, 1))
  parsed = command_line.ConfigParser("loopjax.sweep", "").parse_config(
    [f"--config={config}"]
  )
  file = parsed.config_name
  if isinstance(items, str):
    name, recorded = items, file
    of_config = items_lib.load_sweeps(file)
  else:
    name, recorded = _OWN, ""  # No command runs a list again.
    by_name = {name: [_checked(item) for item in items]}
    of_config = lambda _: by_name  # noqa: E731

  def sweeps(config: Any) -> dict[str, Any]:
    sweep_items = dict(of_config(config))
    if name in sweep_items:
      sweep_items[name] = _with_seeds(sweep_items[name], seeds)
    return sweep_items

  base = naming.workdir(file, (), config_lib.to_dict(parsed.config))
  place = local_path(workdir or f"{base}-{name}")
  made = items_lib.make_items(parsed.config, sweeps, name, {}, place)
  print(f"work directory: {place}", flush=True)
  items_lib.write_manifest(place, name, recorded, {}, made)
  _, status = runner.run_items(made, place, [f"--config={file}"], cores=cores)
  if status in RESUMABLE:
    raise UserError(f"{place}: the sweep was stopped; the same call resumes it")
  return table(place / f"sweep-{name}.json", metrics)


def _checked(item: Any) -> dict[str, Any]:
  """The settings of an item; raises UserError if it has none by name."""
  if not isinstance(item, Mapping):
    raise UserError(f"item {item!r:.80} is not a dict of settings")
  return {name: checked.setting(name, value) for name, value in item.items()}


def _with_seeds(
  items: Sequence[Mapping[str, Any]], seeds: Sequence[int]
) -> list[dict[str, Any]]:
  """Each item with each seed."""
  copies = [dict(item) for item in items]
  numbers = list(map(checked.seed, seeds))
  if not numbers:
    return copies
  for item in copies:
    if "run.seed" in item:
      raise UserError("seeds has no effect: the items set run.seed")
    if any(isinstance(x, config_lib.WorkdirOf) for x in item.values()):
      raise UserError(
        "seeds: items that start from each other need their own run.seed"
      )
  return config_lib.product(copies, config_lib.axis("run.seed", *numbers))


def _names(names: str | Sequence[str]) -> list[str]:
  return [names] if isinstance(names, str) and names else list(names)
