"""Command line: `python -m loopjax.report.keep WORKDIR... --out=FOLDER`.

Keeps of runs what a report reads, a few KiB each, so that it can be committed
and the report be made again without the runs: config.json, summary.json without
the scores of training, and the evaluations of metrics.jsonl. With --sweep they
are one table: seeds are averaged, and rows compared with a paper's.
"""

import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax import sections
from loopjax.errors import Parser, UserError, one_line_errors
from loopjax.run import workdir as workdir_lib

_RUNS = "runs"  # Written for the folder in which a run is.
_MACHINE = re.compile(r"(?<![\w.~])/(?:home|root|tmp|work|Users|content|mnt)/")


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Copies; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.report.keep",
    description="Keeps what a report reads of runs, for others to repeat it.",
  )
  parser.add_argument(
    "workdirs",
    nargs="+",
    type=pathlib.Path,
    metavar="WORKDIR",
    help="a run that is complete",
  )
  parser.add_argument(
    "--out", type=pathlib.Path, required=True, help="folder to write to"
  )
  parser.add_argument(
    "--sweep", help="they are its items, or were started as such by hand"
  )
  options = parser.parse_args(argv)
  keep(options.workdirs, options.out, options.sweep)
  print(options.out)
  return 0


def keep(
  workdirs: Sequence[pathlib.Path], out: pathlib.Path, sweep: str | None = None
) -> None:
  """Copies runs; with a sweep, into the folder and manifest of that.

  Raises:
    UserError: a run is not complete or names a path of this machine, two have
      one name, or nothing can be written.
  """
  found = {workdir.name: _of_run(workdir) for workdir in workdirs}
  if len(found) < len(workdirs):
    raise UserError("two of the runs have the same name")
  try:
    for name, (config, summary, rows) in found.items():
      (out / name).mkdir(parents=True, exist_ok=True)
      workdir_lib.write_json(out / name / "config.json", config)
      workdir_lib.write_json(out / name / "summary.json", summary)
      lines = (json.dumps(row) + "\n" for row in rows)
      (out / name / "metrics.jsonl").write_text("".join(lines))
    if sweep:
      configs = {name: config for name, (config, *_) in found.items()}
      workdir_lib.write_json(
        out / f"sweep-{sweep}.json", manifest(sweep, configs)
      )
  except OSError as error:
    raise UserError(f"{out}: cannot be written: {error.strerror}") from error


def manifest(sweep: str, configs: Mapping[str, Any]) -> dict[str, Any]:
  """That of a sweep whose items are these runs, by directory.

  An item's overrides are the settings in which the runs differ. There is no
  command of the sweep: each run has its own.
  """
  flat = {name: sections.flatten(config) for name, config in configs.items()}
  first = next(iter(flat.values()))
  keys = dict.fromkeys(key for settings in flat.values() for key in settings)
  differ = [
    key
    for key in keys
    if any(
      key not in settings or settings[key] != first.get(key)
      for settings in flat.values()
    )
  ]
  return {
    "sweep": sweep,
    "config": "",
    "overrides": {},
    "task": first["task.name"],
    "items": [
      {
        "overrides": {k: flat[name][k] for k in differ if k in flat[name]},
        "directory": name,
        "config": config,
      }
      for name, config in configs.items()
    ],
  }


def _of_run(
  workdir: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
  """Config, summary and evaluations of a run."""
  config = workdir_lib.read_json(workdir / "config.json")
  summary = workdir_lib.read_json(workdir / "summary.json")
  if summary.get("status") != "completed":
    raise UserError(f"{workdir}: the run is not complete")
  summary["metrics"] = {
    name: value
    for name, value in summary["metrics"].items()
    if not name.startswith("train/")
  }
  rows = [
    {k: v for k, v in row.items() if not k.endswith("/standard_error")}
    for row in workdir_lib.read_metrics(workdir)
    if row["split"] != "train"
  ]
  places = {
    str(folder): written
    for folder, written in (
      (workdir.resolve().parent, _RUNS),
      (workdir.parent, _RUNS),
      (pathlib.Path.home(), "~"),
    )
    if folder != pathlib.Path()
  }
  kept = _without(places, {"config": config, "summary": summary})
  if there := _MACHINE.search(text := json.dumps(kept)):
    path = text[there.start() :].split('"')[0].split(" ")[0]
    raise UserError(f"{workdir}: names {path}, which others do not have")
  return kept["config"], kept["summary"], rows


def _without(places: Mapping[str, str], value: Any) -> Any:
  """JSON with other names for folders of this machine."""
  if isinstance(value, str):
    for folder, written in places.items():
      value = value.replace(folder, written)
    return value
  if isinstance(value, list):
    return [_without(places, item) for item in value]
  if isinstance(value, dict):
    return {key: _without(places, item) for key, item in value.items()}
  return value


if __name__ == "__main__":
  sys.exit(main())
