"""Runs a named sweep of a config file, one run after another.

  python -m loopjax.sweep --config=FILE[:preset] --sweep=NAME --workdir=DIR

What is complete is skipped and what was cut off goes on, so that the same
command can be given again. Exit status: 0 done, 1 an item failed, 2 a mistake
of the user's.
"""

import hashlib
import os
import pathlib
import runpy
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
from absl import flags
from ml_collections import config_flags

from loopjax import command_line
from loopjax import config as config_lib
from loopjax import workdir as workdir_lib
from loopjax.errors import UserError

_MAX_SLUG = 120  # File systems take 255 bytes; a log's name is longer by 4.

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
_SWEEP = flags.DEFINE_string("sweep", None, "Name of a sweep of the config.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print only what would be done.")
_LIMIT = flags.DEFINE_integer(
  "limit", 0, "Run at most this many items that are not complete; 0 for all.", 0
)


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
  if config is None or not name or not command_line.WORKDIR.value:
    raise UserError("--config=FILE, --sweep=NAME and --workdir=DIR are needed")
  flag = flags.FLAGS["config"]
  config_name = config_flags.get_config_filename(flag)
  common = config_flags.get_override_values(flag)
  items = make_items(config, _load(config_name), name, common)
  workdir = pathlib.Path(command_line.WORKDIR.value)
  if not _DRY_RUN.value:
    write_manifest(workdir, name, config_name, common, items)
  failed = run_items(
    items,
    workdir,
    [f"--config={config_name}", *_arguments(common)],
    dry_run=_DRY_RUN.value,
    limit=_LIMIT.value,
  )
  for slug, message in failed.items():
    print(f"failed: {slug}: {message}", file=sys.stderr)
  return 1 if failed else 0


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
    changed = ml_collections.ConfigDict(base)
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
      value = urllib.parse.quote(str(after[key]), safe="+")
      parts.append(f"{label}={value}")
  text = ",".join(parts) or "base"
  if len(text) <= _MAX_SLUG:
    return text
  digest = hashlib.sha256(text.encode()).hexdigest()
  return f"{text[: _MAX_SLUG - 16]}~{digest[:16]}"  # Longer than a short one.


def run_items(
  items: Sequence[Item],
  workdir: pathlib.Path,
  arguments: Sequence[str],
  *,
  dry_run: bool = False,
  limit: int = 0,
) -> dict[str, str]:
  """Runs what is not complete and prints one line an item.

  Args:
    items: from `make_items`.
    workdir: of the sweep; each item has a directory and a log in it.
    arguments: of loopjax.main for all items.
    dry_run: say what would be done.
    limit: start at most this many; 0 for all.

  Returns:
    {slug: one-line message} of the items that failed.
  """
  failed, started = {}, 0
  for number, item in enumerate(items, 1):
    state, message = _state(workdir / item.slug, item.config)
    if state in ("new", "unfinished"):
      started += 1
      if limit and started > limit:
        state = f"{state}, past --limit"
      elif dry_run:
        state = f"{state}, would run"
      else:
        state, message = _run(item, workdir, arguments)
    if message:
      failed[item.slug] = message
    words = [f"{number}/{len(items)}", item.slug, state]
    words += [message] if message else _result(workdir / item.slug)
    print("  ".join(words), flush=True)
  return failed


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
    "model": items[0].config["model"]["name"] if items else "",
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


def run_command(command: Sequence[str], log: pathlib.Path) -> tuple[int, str]:
  """Runs a command and appends what it says to a log.

  Returns:
    Its exit status and the last line that it said.
  """
  with log.open("a+", errors="replace") as file:
    before = file.seek(0, os.SEEK_END)
    done = subprocess.run(
      command, stdout=file, stderr=subprocess.STDOUT, check=False
    )
    file.seek(before)
    said = file.read().strip().splitlines()
  return done.returncode, said[-1].strip() if said else ""


def _load(config_name: str) -> Any:
  """The function `sweeps` of a config file."""
  path = config_name.partition(":")[0]
  sweeps = runpy.run_path(path).get("sweeps")
  if sweeps is None:
    raise UserError(f"--config={path} names no sweeps")
  return sweeps


def _arguments(overrides: Mapping[str, Any]) -> list[str]:
  return [f"--config.{key}={value}" for key, value in overrides.items()]


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
  complete = summary.get("status") == "completed"
  return ("complete" if complete else "unfinished"), ""


def _run(
  item: Item, workdir: pathlib.Path, arguments: Sequence[str]
) -> tuple[str, str]:
  """Runs an item; returns its state and, if it failed, a one-line message."""
  directory, log = workdir / item.slug, workdir / f"{item.slug}.log"
  command = [
    sys.executable,
    "-m",
    "loopjax.main",
    *arguments,
    *_arguments(item.overrides),
    f"--workdir={directory}",
  ]
  start = time.monotonic()
  status, last_line = run_command(command, log)
  if status == 0 and _state(directory, item.config)[0] == "complete":
    return f"done in {time.monotonic() - start:.0f} s", ""
  if status == 3:
    return "failed", f"training diverged; see {log}"
  if last_line.startswith("error: "):  # A mistake that says it all.
    return "failed", last_line.removeprefix("error: ")
  return "failed", f"exit status {status}: {last_line}; see {log}"


def _result(directory: pathlib.Path) -> list[str]:
  """What a person wants to see first, if it is known."""
  if not (directory / "summary.json").exists():
    return []
  summary = workdir_lib.read_json(directory / "summary.json")
  exact = summary.get("metrics", {}).get("eval/exact_match")
  words = [] if exact is None else [f"exact match {100 * exact:.1f} %"]
  return [*words, f"{summary.get('wall_seconds', 0):.0f} s in all"]


if __name__ == "__main__":
  command_line.run(main)
