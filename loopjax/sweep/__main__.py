"""Runs a named sweep of a config file, one or --jobs=N runs at a time.

  loopjax sweep --config=FILE[:preset] --sweep=NAME

Its runs are written to runs/<config>[-<preset>]-<sweep>, or to --workdir=DIR.
Complete runs are skipped and interrupted ones resumed, so that the same command
can be repeated. What an item prints is in <item>.log. On one machine --jobs=N
splits the cores between N items; jobs of a cluster share a --workdir, each with
one --item. Exit status: 0 done, 1 an item failed, 2 a mistake by the user, 4
asked to stop, 5 an item lost one of its processes. After 4 and 5 the same
command resumes the sweep.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from loopjax import checks, sections
from loopjax import config as config_lib
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, local_path, one_line_errors
from loopjax.run import naming
from loopjax.sweep import items as items_lib
from loopjax.sweep import runner


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax sweep", __doc__ or "")
  result.importer = _imported
  result.add_argument(
    "--sweep", metavar="NAME", help="a sweep that the config defines"
  )
  result.add_argument(
    "--dry_run", action="store_true", help="only print what would run"
  )
  result.add_argument(
    "--limit",
    type=int,
    metavar="N",
    help="run at most this many incomplete items [all]",
  )
  result.add_argument(
    "--item", type=int, metavar="I", help="run only this item, counted from 0"
  )
  result.add_argument(
    "--jobs",
    type=int,
    metavar="N",
    help="run N items at once, each on its share of the CPU cores [1]",
  )
  result.add_argument(
    "--count", action="store_true", help="only print the number of items"
  )
  return result


def _imported(_: Any, where: str) -> str:
  from loopjax.hub import imported

  return imported.run_of(where)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the sweep or item that the flags name; returns the exit status."""
  options = parser().parse_config(argv)
  config, name = options.config, options.sweep
  config_name, common = options.config_name, options.overrides
  if config is not None and not config_name:
    raise UserError(
      "--config: a sweep needs a config file, FILE.py; the config of a run"
      " defines none"
    )
  if not config_name:
    raise UserError("--config=FILE is missing; `loopjax --list` shows them")
  if not name:
    there_are = ", ".join(items_lib.load_sweeps(config_name)(config))
    raise UserError(
      f"--sweep=NAME is missing; available: {there_are or 'none'}"
    )
  flags = {"limit": options.limit, "item": options.item}
  checks.flags_at_least(options, limit=0, item=0, jobs=1)
  part_of_it = any(flags.values()) or options.item is not None
  flags |= {"dry_run": options.dry_run or None, "jobs": options.jobs}
  for flag, value in flags.items() if options.count else ():
    if value is not None:
      raise UserError(f"--{flag} has no effect with --count")
  for flag in ("limit", "jobs") if options.item is not None else ():
    if flags[flag] is not None:
      raise UserError(f"--{flag} has no effect with --item")
  by_user = config_lib.by_user(config)
  plain = config_lib.to_dict(config)
  base = naming.workdir(config_name, {*common, *by_user}, plain)
  workdir = local_path(options.workdir or f"{base}-{name}")
  items = items_lib.make_items(
    config, items_lib.load_sweeps(config_name), name, common, workdir
  )
  if options.count:
    print(len(items))
    return 0
  if options.item is not None and options.item >= len(items):
    raise UserError(
      f"--item={options.item}: sweep {name} has {len(items)} items,"
      " counted from 0"
    )
  cores = runner.split_cores(options.jobs or 1)
  print(f"work directory: {workdir}", flush=True)
  if not options.dry_run:
    items_lib.write_manifest(workdir, name, config_name, common, items)
  _, status = runner.run_items(
    items,
    workdir,
    [f"--config={config_name}", *sections.flags(common)],
    dry_run=options.dry_run,
    limit=options.limit or 0,
    only=options.item,
    cores=cores,
  )
  if not (status or options.dry_run or part_of_it):
    print(f"next: loopjax report {shlex.quote(str(workdir))}")
  return status


if __name__ == "__main__":
  leave(main())
