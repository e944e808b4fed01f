"""Runs a named sweep of a config file, one run after another.

  python -m loopjax.sweep --config=FILE[:preset] --sweep=NAME --workdir=DIR

What is complete is skipped and what was cut off goes on, so that the same
command can be given again. Jobs that run at the same time share a --workdir,
each with one --item. Exit status: 0 done, 1 an item failed, 2 a mistake of the
user's, 4 asked to stop, 5 an item lost a process of its own. After 4 and 5 the
same command goes on.
"""

import hashlib
import pathlib
import runpy
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

from loopjax import child, command_line
from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.run import workdir as workdir_lib

_MAX_SLUG = 120  # File systems take 255 bytes; a log's name is longer by 4.
# What a person wants to see first of a run's scores, if it is there.
_SHOWN = ("eval/exact_match", "test_id_2/accuracy", "test_ood_2/accuracy")
_DIVERGED, _PREEMPTED, _LOST = 3, 4, 5  # Exit statuses of loopjax.main.

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
_SWEEP = flags.DEFINE_string("sweep", None, "Name of a sweep of the config.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print only what would be done.")
_LIMIT = flags.DEFINE_integer(
  "limit", 0, "Run at most this many items that are not complete; 0 for all.", 0
)
_ITEM = flags.DEFINE_integer("item", None, "Run only this item, from 0.", 0)
_COUNT = flags.DEFINE_bool("count", False, "Print only how many items it has.")


class Item(NamedTuple):
  """One run of a sweep.

  Attributes:
    overrides: {"section.key": value} on top of the config.
    config: resolved, as plain data.
    slug: name of its directory; the same for the same experiment.
  """

  overrides: dict[str, Any]
  config: dict[str, Any]
  slug: str


def main(argv: list[str]) -> int:
  """Runs what the flags say; returns the exit status."""
  del argv
  config, name = command_line.CONFIG.value, _SWEEP.value
  directory = command_line.WORKDIR.value
  if config is None or not name or not (directory or _COUNT.value):
    raise UserError("--config=FILE, --sweep=NAME and --workdir=DIR are needed")
  for other in (_LIMIT, _DRY_RUN, _ITEM) if _COUNT.value else ():
    if other.present:
      raise UserError(f"--{other.name} has no effect with --count")
  if _ITEM.present and _LIMIT.present:
    raise UserError("--limit has no effect with --item")
  flag = flags.FLAGS["config"]
  config_name = config_flags.get_config_filename(flag)
  common = config_flags.get_override_values(flag)
  items = make_items(config, _load(config_name), name, common)
  if _COUNT.value:
    print(len(items))
    return 0
  if _ITEM.value is not None and _ITEM.value >= len(items):
    raise UserError(
      f"--item={_ITEM.value}: sweep {name} has {len(items)} items, from 0"
    )
  assert directory
  workdir = pathlib.Path(directory)
  if not _DRY_RUN.value:
    write_manifest(workdir, name, config_name, common, items)
  failed, status = run_items(
    items,
    workdir,
    [f"--config={config_name}", *_arguments(common)],
    dry_run=_DRY_RUN.value,
    limit=_LIMIT.value,
    only=_ITEM.value,
  )
  for slug, message in failed.items():
    print(f"failed: {slug}: {message}", file=sys.stderr)
  return status


def make_items(
  config: ml_collections.ConfigDict,
  sweeps: Any,
  name: str,
  common: Mapping[str, Any],
) -> list[Item]:
  """The items of a sweep, all checked before any of them runs.

  Args:
    config: with the overrides of the command line.
    sweeps: the config file's function.
    name: of the sweep.
    common: the overrides of the command line.

  Raises:
    UserError: no such sweep, or an item that is impossible with this config.
  """
  there_are = sweeps(config)
  if name not in there_are:
    raise UserError(
      f"--sweep={name}: no such sweep; there are {', '.join(sorted(there_are))}"
    )
  base = config_lib.to_dict(config)
  items = []
  for overrides in there_are[name]:
    if clash := sorted(set(common) & set(overrides)):
      raise UserError(
        f"--config.{clash[0]} has no effect: sweep {name} sets it itself"
      )
    changed = config.copy_and_resolve_references()
    changed.lock()
    try:
      config_lib.override(changed, overrides)
      config_lib.resolve(changed)
    except UserError as error:
      raise UserError(f"sweep {name}, item {overrides}: {error}") from error
    plain = config_lib.to_dict(changed)
    items.append(Item(dict(overrides), plain, slug(base, plain, overrides)))
  return items


def slug(
  base: Mapping[str, Any], changed: Mapping[str, Any], keys: Sequence[str]
) -> str:
  """A directory name for what an item changes: `num_memory_tokens=8,seed=42`.

  What an item sets to the value that is there anyway is left out, so that the
  same experiment of two sweeps is run once; the seed always shows. Different
  changes of one base have different names.

  Args:
    base: config without the item's overrides, as plain data.
    changed: with them.
    keys: that the item sets, "section.key".
  """
  before, after = config_lib.flatten(base), config_lib.flatten(changed)
  names = [key.partition(".")[2] for key in after]
  parts = []
  for key in sorted(keys, key=lambda key: (key == "run.seed", key)):
    if before[key] != after[key] or key == "run.seed":
      short = key.partition(".")[2]
      label = short if names.count(short) == 1 else key
      parts.append(f"{label}={_quoted(after[key])}")
  text = ",".join(parts) or "base"
  if len(text) <= _MAX_SLUG:
    return text
  digest = hashlib.sha256(text.encode()).hexdigest()
  return f"{text[: _MAX_SLUG - 16]}~{digest[:16]}"  # Longer than a short one.


def _quoted(value: Any) -> str:
  """As a part of a file name; a tuple (1, 2) is 1+2."""
  parts = value if isinstance(value, list) else [value]
  quoted = (urllib.parse.quote(str(part), safe="") for part in parts)
  return "+".join(quoted)


def run_items(
  items: Sequence[Item],
  workdir: pathlib.Path,
  arguments: Sequence[str],
  *,
  dry_run: bool = False,
  limit: int = 0,
  only: int | None = None,
) -> tuple[dict[str, str], int]:
  """Runs what is not complete and prints one line an item.

  Args:
    items: from `make_items`.
    workdir: of the sweep; each item has a directory and a log in it.
    arguments: of loopjax.main for all items.
    dry_run: say what would be done.
    limit: start at most this many; 0 for all.
    only: index of the one item that this is about; None for all.

  Returns:
    {slug: one-line message} of the items that failed, and the exit status.
  """
  failed, started, stopped, stop = {}, 0, 0, child.Stop()
  with stop.listening():
    for number, item in enumerate(items, 1):
      if only not in (None, number - 1):
        continue
      state, message = _state(workdir / item.slug, item.config)
      if state in ("new", "unfinished"):
        started += 1
        if limit and started > limit:
          state = f"{state}, past --limit"
        elif dry_run:
          state = f"{state}, would run"
        else:
          stopped, state, message = _run(item, workdir, arguments, stop)
      if message:
        failed[item.slug] = message
      words = [f"{number}/{len(items)}", item.slug, state]
      words += [message] if message else _result(workdir / item.slug)
      print("  ".join(words), flush=True)
      if stopped:
        return failed, stopped
  return failed, 1 if failed else 0


def write_manifest(
  workdir: pathlib.Path,
  name: str,
  config_name: str,
  common: Mapping[str, Any],
  items: Sequence[Item],
) -> None:
  """Writes sweep-NAME.json, from which the report knows what was planned."""
  manifest = {
    "sweep": name,
    "config": config_name,
    "overrides": dict(common),
    "task": items[0].config["task"]["name"] if items else "",
    "items": [
      {"overrides": item.overrides, "directory": item.slug} for item in items
    ],
  }
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    workdir_lib.write_json(workdir / f"sweep-{name}.json", manifest)
  except OSError as error:
    raise UserError(
      f"--workdir={workdir}: cannot be written: {error.strerror}"
    ) from error


def _load(config_name: str) -> Any:
  """The function `sweeps` of a config file."""
  path = config_name.partition(":")[0]
  sweeps = runpy.run_path(path).get("sweeps")
  if sweeps is None:
    raise UserError(f"--config={path} names no sweeps")
  return sweeps


def _arguments(overrides: Mapping[str, Any]) -> list[str]:
  return [f"--config.{key}={value}" for key, value in overrides.items()]


def _item_arguments(
  arguments: Sequence[str], overrides: Mapping[str, Any]
) -> list[str]:
  """Arguments of loopjax.main; another family goes behind --config's colon."""
  first, *others = arguments
  rest = dict(overrides)
  if name := rest.pop("model.name", ""):
    first += f"{',' if ':' in first else ':'}model.name={name}"
  return [first, *others, *_arguments(rest)]


def _state(
  directory: pathlib.Path, config: Mapping[str, Any]
) -> tuple[str, str]:
  """ "new", "unfinished", "complete" or "failed", then with its message."""
  try:
    workdir_lib.check_config(directory, config, "train_and_eval")
    if not (directory / "summary.json").exists():
      there = (directory / "config.json").exists()
      return ("unfinished" if there else "new"), ""
    summary = workdir_lib.read_json(directory / "summary.json")
  except UserError as error:
    return "failed", str(error)
  if summary.get("status") == "diverged":  # It would do so again.
    reason = summary.get("reason") or "training diverged"
    again = f"remove {directory / 'summary.json'} to run it again"
    return "failed", f"{reason}; {again}"
  complete = summary.get("status") == "completed"
  return ("complete" if complete else "unfinished"), ""


def _run(
  item: Item, workdir: pathlib.Path, arguments: Sequence[str], stop: child.Stop
) -> tuple[int, str, str]:
  """Runs an item.

  Returns:
    The exit status with which the sweep has to stop, or 0; the item's state;
    if it failed, a one-line message.
  """
  directory, log = workdir / item.slug, workdir / f"{item.slug}.log"
  command = [
    sys.executable,
    "-m",
    "loopjax.main",
    *_item_arguments(arguments, item.overrides),
    f"--workdir={directory}",
  ]
  start = time.monotonic()
  status, last_line = child.run_command(command, log, stop)
  if status == _PREEMPTED or (stop.asked and status < 0):
    return _PREEMPTED, "preempted; the same command goes on", ""
  if status == _LOST:
    return _LOST, "lost a process; the same command goes on", ""
  stopped = _PREEMPTED if stop.asked else 0
  state, message = _state(directory, item.config)
  if status == 0 and state == "complete":
    return stopped, f"done in {time.monotonic() - start:.0f} s", ""
  if status == _DIVERGED and state == "failed":
    return stopped, state, message
  if last_line.startswith("error: "):  # A mistake that says it all.
    return stopped, "failed", last_line.removeprefix("error: ")
  return stopped, "failed", f"exit status {status}: {last_line}; see {log}"


def _result(directory: pathlib.Path) -> list[str]:
  """What a person wants to see first, if it is known."""
  if not (directory / "summary.json").exists():
    return []
  summary = workdir_lib.read_json(directory / "summary.json")
  scores = summary.get("metrics", {})
  words = [
    f"{name} {100 * scores[name]:.1f} %" for name in _SHOWN if name in scores
  ]
  return [*words, f"{summary.get('wall_seconds', 0):.0f} s in all"]


if __name__ == "__main__":
  command_line.run(main)
