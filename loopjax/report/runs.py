"""Finds the runs and sweeps under a directory, and reads them."""

import hashlib
import json
import os
import pathlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax import sections
from loopjax.errors import UserError
from loopjax.report import papers
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo

VERDICTS = ("reproduced", "same direction", "not here", "not run")
_DAMAGED = "damaged: "
# Beside the settings of a config: what runs learned from, see `data_apart`.
DATA = "data.sha256"
KEPT = ".runs.json"  # What the name of a file of kept runs ends with.


class Run(NamedTuple):
  """One run, planned or existing.

  Attributes:
    directory: its work directory, which may not exist yet.
    overrides: the settings that its sweep sets; empty outside of a sweep.
    settings: all settings planned by its sweep, by "section.key"; empty outside
      of a sweep.
    state: "completed", "not run", "incomplete, step 10 of 20", "damaged: ...",
      ...
    config: content of its config.json; empty if there is none.
    summary: content of its summary.json if the run is complete, else empty.
    kept: its evaluations, if it is one that `report.keep` kept.
  """

  directory: pathlib.Path
  overrides: Mapping[str, Any]
  settings: Mapping[str, Any]
  state: str
  config: Mapping[str, Any]
  summary: Mapping[str, Any]
  kept: list[dict[str, Any]] | None = None

  @property
  def rows(self) -> list[dict[str, Any]]:
    """The rows of its metrics.jsonl."""
    if self.kept is not None:
      return self.kept
    return workdir_lib.read_metrics(self.directory)

  @property
  def paper(self) -> papers.Paper | None:
    """The paper of its task and family, if any."""
    names = [self.config.get(x, {}).get("name") for x in ("task", "model")]
    return papers.of(*names)

  @property
  def done(self) -> bool:
    """Whether the run is complete, so that its numbers count."""
    return self.state == "completed"

  @property
  def damaged(self) -> bool:
    """Whether one of its files cannot be read; its state says which."""
    return self.state.startswith(_DAMAGED)


class Plan(NamedTuple):
  """A sweep as planned in its sweep-NAME.json, or kept in a NAME.runs.json.

  Attributes:
    directory: of the sweep; of kept runs, their file without its ending.
    name: name of the sweep.
    command: the command that runs it; "" if each run was started by itself.
    task: task.name of its config. model: model.name of its first item.
    runs: its runs, in order.
    title: heading of its table; "" for the paper's.
    verdict: one of VERDICTS on the paper's claim, by who kept the runs; "" if
      it says nothing of a paper's.
    chosen_for: settings for each of whose values one of the rows was chosen by
      validation; None if the runs were kept to show, or were not kept.
  """

  directory: pathlib.Path
  name: str
  command: str
  task: str
  model: str
  runs: list[Run]
  title: str = ""
  verdict: str = ""
  chosen_for: tuple[str, ...] | None = None

  @property
  def paper(self) -> papers.Paper | None:
    """The paper of its task and family, if any."""
    return papers.of(self.task, self.model)


def collect(roots: Sequence[pathlib.Path]) -> tuple[list[Plan], list[Run]]:
  """The sweeps under the given directories, and the runs outside of sweeps.

  Args:
    roots: directories; or files, sweep-NAME.json or NAME.runs.json.
  """
  plans: dict[pathlib.Path, Plan] = {}
  found: dict[pathlib.Path, pathlib.Path] = {}  # Runs, by their real path.
  for root in roots:
    if _is_list(root) and root.is_file():
      plans |= {root.resolve(): _read_plan(root)}
      continue
    if root.suffix == ".log" and root.with_suffix("").is_dir():
      continue  # A sweep's log of a run, from a shell's sw/*.
    if root.is_file():
      raise UserError(f"{root}: is a file; expected a directory of runs")
    if not root.is_dir():
      near = zoo.suggestion(root)
      raise UserError(f"{root}: there is no such directory{near}")
    directories = list(_directories(root))
    sweeps = [
      path
      for directory in directories
      for path in sorted(directory.glob("*.json"))
      if _is_list(path)
    ]
    runs = [d for d in directories if _may_be_run(d)]
    if not sweeps and not runs:
      raise UserError(f"{root}: contains no run and no sweep")
    plans |= {path.resolve(): _read_plan(path) for path in sweeps}
    found |= {path.resolve(): path for path in runs}
  known = {run.directory.resolve() for p in plans.values() for run in p.runs}
  others = [read_run(found[key], {}, {}) for key in found if key not in known]
  others += [run for p in plans.values() if not p.name for run in p.runs]
  return [plan for plan in plans.values() if plan.name], others


def each_once(plans: Iterable[Plan], others: Iterable[Run]) -> list[Run]:
  """All runs in order; sweeps may share some, in one directory."""
  runs: dict[pathlib.Path, Run] = {}
  for run in (*(run for plan in plans for run in plan.runs), *others):
    runs.setdefault(run.directory.resolve(), run)
  return list(runs.values())


def check_readable(runs: Sequence[Run]) -> None:
  """Raises UserError if all of the runs are damaged."""
  if runs and all(run.damaged for run in runs):
    raise UserError("\n".join(f"{run.directory}: {run.state}" for run in runs))


def data_apart(runs: Sequence[Run]) -> list[str]:
  """The digest of each run's data, of eight digits, where it tells runs apart.

  It is "" for a run that is not complete or whose data have no checksum, and
  where all runs with the same settings of the task have the same data: a file
  is named by its path, which says nothing of its content.
  """
  tasks = [json.dumps(x.config.get("task", {}), sort_keys=True) for x in runs]
  digests = [_digest(run.summary.get("data", {})) for run in runs]
  known: dict[str, set[str]] = {task: set() for task in tasks}
  for task, digest in zip(tasks, digests, strict=True):
    known[task] |= {digest} - {""}
  pairs = zip(tasks, digests, strict=True)
  return [digest if len(known[task]) > 1 else "" for task, digest in pairs]


def _digest(data: Mapping[str, Any]) -> str:
  """The digest of the checksums of a summary's data; "" without any."""
  sums = {k: value for k, value in data.items() if k.endswith("_sha256")}
  text = json.dumps(sums, sort_keys=True).encode()
  return hashlib.sha256(text).hexdigest()[:8] if sums else ""


def has_runs(path: pathlib.Path) -> bool:
  """Whether a path is a list of runs, or has a run or a list of runs below."""
  if not path.is_dir():
    return _is_list(path)
  return any(
    _may_be_run(directory) or any(map(_is_list, directory.glob("*.json")))
    for directory in _directories(path)
  )


def _is_list(path: pathlib.Path) -> bool:
  """Whether a file has the name of a sweep's plan, or of kept runs."""
  name = path.name
  return name.endswith(KEPT) or (
    name.startswith("sweep-") and name.endswith(".json")
  )


def _may_be_run(directory: pathlib.Path) -> bool:
  """Whether there is a config.json that is not one of the Hub's."""
  path = directory / "config.json"
  if not path.is_file():
    return False
  try:
    return "model_type" not in workdir_lib.read_json(path)
  except UserError:
    return True  # Damaged; `read_run` says how.


def _directories(root: pathlib.Path) -> Iterator[pathlib.Path]:
  """A directory and its subdirectories, each once, except those inside a run.

  A directory may vanish meanwhile, as those of a run's checkpoints do.
  """
  seen = {root.resolve()}
  for path, folders, files in os.walk(root, followlinks=True):
    here = pathlib.Path(path)
    yield here
    below = {} if "config.json" in files else {here / x: x for x in folders}
    real = {name: path.resolve() for path, name in below.items()}
    folders[:] = sorted(name for name in real if real[name] not in seen)
    seen |= set(real.values())


def read_run(
  directory: pathlib.Path,
  overrides: Mapping[str, Any],
  settings: Mapping[str, Any],
) -> Run:
  """Reads a run and determines its state; a damaged one has no scores."""
  planned = directory, overrides, settings
  if not (directory / "config.json").is_file():
    return Run(*planned, "not run", {}, {})
  config: dict[str, Any] = {}
  try:
    config = workdir_lib.read_config(directory)
    flat = sections.flatten(config)
    if any(flat.get(key) != value for key, value in overrides.items()):
      return Run(*planned, "another configuration", {}, {})
    rows = workdir_lib.read_metrics(directory)
    if not (directory / "summary.json").exists():
      step = rows[-1]["step"] if rows else 0
      state = f"incomplete, step {step} of {flat.get('run.num_steps')}"
      return Run(*planned, state, config, {})
    summary = workdir_lib.read_summary(directory)
  except UserError as error:
    said = str(error).removeprefix(f"{directory}/")
    return Run(*planned, f"{_DAMAGED}{said}", config, {})
  state = summary["status"]
  return Run(*planned, state, config, summary if state == "completed" else {})


def _read_plan(path: pathlib.Path) -> Plan:
  """Reads a sweep-NAME.json and the runs that it names, or kept runs."""
  manifest = workdir_lib.read_json(path)
  is_kept = path.name.endswith(KEPT)
  directory = path.parent
  if is_kept:
    directory /= path.name.removesuffix(KEPT)
  try:
    items = manifest["items"]
    models = [item["config"]["model"]["name"] for item in items]
    # The first may belong to the family that the others start from.
    model = models[-1] if models else ""
    arguments = [
      f"--config={manifest['config']}",
      *sections.flags(manifest.get("overrides", {})),
      f"--sweep={manifest['sweep']}",
      f"--workdir={path.parent}",
    ]
    return Plan(
      directory=directory,
      # A file's name is safe as the name of a plot.
      name=manifest["sweep"] if is_kept else path.stem.removeprefix("sweep-"),
      command=(  # Runs that were kept have commands of their own.
        shlex.join(["python", "-m", "loopjax.sweep", *arguments])
        if manifest["config"]
        else ""
      ),
      task=manifest.get("task", ""),
      title=manifest.get("title", ""),
      verdict=manifest.get("verdict", ""),
      chosen_for=tuple(manifest["chosen_for"])
      if "chosen_for" in manifest
      else None,
      model=model,
      runs=[
        _kept_run(directory, item)
        if is_kept
        else read_run(
          directory / item["directory"],
          item["overrides"],
          {**sections.flatten(item["config"]), **item["overrides"]},
        )
        for item in items
      ],
    )
  except (AttributeError, KeyError, TypeError) as error:
    said = f"has no {error}" if isinstance(error, KeyError) else repr(error)
    raise UserError(f"{path}: is not a list of runs: {said}") from error


def _kept_run(directory: pathlib.Path, item: Mapping[str, Any]) -> Run:
  """A run that `report.keep` kept; only complete ones are."""
  return Run(
    directory=directory / item["directory"],
    overrides=item["overrides"],
    settings=sections.flatten(item["config"]),
    state="completed",
    config=item["config"],
    summary=item["summary"],
    kept=item["evaluations"],
  )
