"""Command line: `python -m loopjax.report.keep RUN... --out=NAME.runs.json`.

Stores the parts of runs that a report needs, a few KiB each, in one file that
can be committed: config, summary without training scores, evaluations, numbers
of figures, and the results of `loopjax analysis`. The report can then be
rebuilt without the runs. With --sweep they are one table: seeds are averaged,
and rows compared with a paper's. Runs are added to an existing file.
"""

import argparse
import json
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax import sections
from loopjax.data.text import files
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.report import runs as runs_lib
from loopjax.run import provenance, zoo
from loopjax.run import workdir as workdir_lib

_RUNS = "runs"  # Written for the folder in which a run is.
_MACHINE = re.compile(r"(?<![\w.~])/(?:home|root|tmp|work|Users|content|mnt)/")


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Copies; returns the exit status."""
  parser = Parser(
    prog="python -m loopjax.report.keep",
    description="Saves the parts of runs that a report needs, so that others"
    " can rebuild it.",
  )
  parser.add_argument(
    "workdirs",
    nargs="*",
    type=pathlib.Path,
    metavar="RUN",
    help="a run that is complete; omit it to edit the description in an"
    " existing file",
  )
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    required=True,
    help="output file, NAME.runs.json",
  )
  parser.add_argument("--sweep", help="the sweep whose items the runs are")
  parser.add_argument(
    "--title", help="heading of the table: the question that the runs answer"
  )
  parser.add_argument(
    "--verdict",
    choices=runs_lib.VERDICTS,
    help="whether the runs show what the paper claims",
  )
  parser.add_argument(
    "--chosen_for",
    type=lambda text: [name for name in text.split(",") if name],
    metavar="SETTING,...",
    help="the runs are a search: validation chose one for each value of these"
    " settings, or one overall if empty",
  )
  parser.add_argument(
    "--rename",
    type=_pair,
    action="append",
    default=[],
    metavar="FOLDER=NAME",
    help="replace a folder of this machine, such as the data folder, by a name",
  )
  options = parser.parse_args(argv)
  keep(**{**vars(options), "rename": dict(options.rename)})
  print(options.out)
  return 0


def _pair(text: str) -> tuple[str, str]:
  """FOLDER=NAME in two."""
  folder, _, name = text.rpartition("=")
  if not folder or not name:
    raise argparse.ArgumentTypeError(f"{text}: expected FOLDER=NAME")
  return folder, name


def keep(
  workdirs: Sequence[pathlib.Path],
  out: pathlib.Path,
  sweep: str | None = None,
  title: str | None = None,
  chosen_for: Sequence[str] | None = None,
  rename: Mapping[str, str] = {},
  verdict: str | None = None,
) -> None:
  """Adds runs to a file, as items of a sweep or each by itself.

  Args:
    workdirs: the runs.
    out: the file, which may contain runs.
    sweep: the sweep's name; runs are separate if None.
    title, chosen_for, verdict: as in `runs.Plan`; what the file has if None.
    rename: replacements for folders of this machine.
  """
  if not out.name.endswith(runs_lib.KEPT):
    raise UserError(f"--out={out}: the name must end with {runs_lib.KEPT}")
  before = workdir_lib.read_json(out) if out.exists() else {}
  kept = _kept(out, before, sweep or "")
  if not workdirs and not kept:
    raise UserError(f"{out}: contains no runs, and no RUN was passed")
  chosen_for = chosen_for and list(chosen_for)
  said = {"title": title, "verdict": verdict, "chosen_for": chosen_for}
  for flag, value in said.items():
    if value is not None and not sweep:
      raise UserError(f"--{flag} has no effect without --sweep")
    if value is None and flag in before:
      said[flag] = before[flag]
  for workdir in workdirs:
    zoo.refuse(workdir, "`loopjax report` shows its scores")
    run = {"directory": workdir.name, **_of_run(workdir, rename)}
    if kept.setdefault(workdir.name, run) != run:
      raise UserError(
        f"{out}: another run has the name {workdir.name}; rename this folder"
      )
  known = {
    key for run in kept.values() for key in sections.flatten(run["config"])
  }
  for key in said["chosen_for"] or ():
    sections.check_key(key, dict.fromkeys(known))
  content = {
    "sweep": sweep or "",
    "title": "",
    **{flag: value for flag, value in said.items() if value is not None},
    "config": "",  # No command runs them all: each has its own.
    "overrides": {},
    "task": next(iter(kept.values()))["config"]["task"]["name"],
    "items": _with_overrides(list(kept.values())),
  }
  with writing(out):
    out.parent.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_text(out, _as_text(content, levels=4) + "\n")


def _kept(
  out: pathlib.Path, content: Mapping[str, Any], sweep: str
) -> dict[str, dict[str, Any]]:
  """The runs that a file has, by name, without their overrides."""
  if not content:
    return {}
  try:
    kept = {
      item["directory"]: {k: v for k, v in item.items() if k != "overrides"}
      for item in content["items"]
    }
    theirs = content["sweep"]
  except (AttributeError, KeyError, TypeError) as error:
    raise UserError(f"{out}: is not a list of runs: {error!r}") from error
  if theirs != sweep:
    raise UserError(f"{out}: its runs are of --sweep={theirs}")
  return kept


def _with_overrides(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """The runs with "overrides", the settings in which they differ."""
  flat = [sections.flatten(run["config"]) for run in runs]
  differ = sections.differing(flat)
  return [
    {"overrides": {k: settings[k] for k in differ if k in settings}, **run}
    for run, settings in zip(runs, flat, strict=True)
  ]


def _as_text(value: Any, levels: int) -> str:
  """JSON whose outermost levels have a line for every entry."""
  if not levels or not value or not isinstance(value, dict | list):
    return json.dumps(value, allow_nan=False)
  if isinstance(value, list):
    entries, (first, last) = [_as_text(x, levels - 1) for x in value], "[]"
  else:
    first, last = "{}"
    entries = [
      f"{json.dumps(name)}: {_as_text(x, levels - 1)}"
      for name, x in value.items()
    ]
  inner = textwrap.indent(",\n".join(entries), " ")
  return f"{first}\n{inner}\n{last}"


def _of_run(workdir: pathlib.Path, rename: Mapping[str, str]) -> dict[str, Any]:
  """Config, summary, evaluations and results of analyses of a run."""
  if not (workdir / "config.json").exists():
    raise UserError(workdir_lib.no_run(workdir, str(workdir)))
  config = workdir_lib.read_config(workdir)
  ended = (workdir / "summary.json").exists()
  summary = workdir_lib.read_summary(workdir) if ended else {}
  if summary.get("status") != "completed":
    raise UserError(f"{workdir}: the run is not complete")
  revision = summary["revision"]
  if provenance.has_landed(revision) is False:
    raise UserError(
      f"{workdir}: its revision '{revision}' is not in the history of this"
      " checkout, so others cannot repeat it"
    )
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
  places = {**rename, str(workdir.resolve().parent): _RUNS}
  if workdir.parent != pathlib.Path():  # "bias" without a slash may be a word.
    places[f"{workdir.parent}/"] = f"{_RUNS}/"
  places[str(pathlib.Path.home())] = "~"
  results: dict[str, Any] = {
    path.stem: workdir_lib.read_json(path)
    for path in sorted((workdir / "figures").glob("*.json"))
  }
  if (states := workdir / "analysis" / "analysis.jsonl").exists():
    results[states.stem] = [row for _, row in files.json_lines(states)]
  kept: dict[str, Any] = _without(
    places,
    {
      "config": config,
      "summary": summary,
      "results": results,
      "evaluations": rows,
    },
  )
  if there := _MACHINE.search(text := json.dumps(kept)):
    path = text[there.start() :].split('"')[0].split(" ")[0]
    raise UserError(
      f"{workdir}: contains the path {path}, which others do not have;"
      " --rename=FOLDER=NAME replaces it"
    )
  return kept


def _without(places: Mapping[str, str], value: Any) -> Any:
  """JSON with other names for folders of this machine, in keys as well.

  Names of metrics contain those of files: `test/loss/source=/data/a.txt`.
  """
  if isinstance(value, str):
    for folder, written in places.items():
      # A whole path: not "/data/books" of "/data/books_2", nor "runs/" of
      # "old/runs/". An absolute one may follow a flag, as in "-I/data".
      before = "" if folder.startswith("/") else r"(?<![\w./~-])"
      whole = "" if folder.endswith("/") else r"(?![\w-]|\.\w)"
      pattern = rf"{before}{re.escape(folder)}{whole}"
      value = re.sub(pattern, written.replace("\\", "\\\\"), value)
    return value
  if isinstance(value, list):
    return [_without(places, item) for item in value]
  if isinstance(value, dict):
    return {
      _without(places, key): _without(places, item)
      for key, item in value.items()
    }
  return value


if __name__ == "__main__":
  leave(main())
