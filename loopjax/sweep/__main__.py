"""Runs a named sweep of a config file, one run after another.

  python -m loopjax.sweep --config=FILE[:preset] --sweep=NAME

Its runs are written to runs/<config>[-<preset>]-<sweep>, or to --workdir=DIR.
Complete runs are skipped and interrupted ones resumed, so that the same command
can be repeated. Concurrent jobs share a --workdir, each with one --item. Exit
status: 0 done, 1 an item failed, 2 a mistake by the user, 4 asked to stop, 5 an
item lost one of its processes. After 4 and 5 the same command resumes the
sweep.
"""

import sys

from absl import flags

from loopjax import config as config_lib
from loopjax import sections
from loopjax.commands import command_line
from loopjax.errors import UserError, local_path
from loopjax.run import naming
from loopjax.sweep import items as items_lib
from loopjax.sweep import runner

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
_SWEEP = flags.DEFINE_string(
  "sweep", None, "Name of a sweep that the config defines."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Only print what would run.")
_LIMIT = flags.DEFINE_integer(
  "limit", 0, "Run at most this many incomplete items; 0 for all.", 0
)
_ITEM = flags.DEFINE_integer(
  "item", None, "Run only this item, counted from 0.", 0
)
_COUNT = flags.DEFINE_bool("count", False, "Only print the number of items.")


def main(argv: list[str]) -> int:
  """Runs the sweep or item that the flags name; returns the exit status."""
  del argv
  config, name = command_line.CONFIG.value, _SWEEP.value
  if config is None:
    raise UserError("--config=FILE is missing; `loopjax --list` shows them")
  if not name:
    there_are = ", ".join(
      items_lib.load_sweeps(command_line.config_name())(config)
    )
    raise UserError(
      f"--sweep=NAME is missing; available: {there_are or 'none'}"
    )
  for other in (_LIMIT, _DRY_RUN, _ITEM) if _COUNT.value else ():
    if other.present:
      raise UserError(f"--{other.name} has no effect with --count")
  if _ITEM.present and _LIMIT.present:
    raise UserError("--limit has no effect with --item")
  config_name, common = command_line.config_name(), command_line.overrides()
  base = naming.workdir(config_name, common, config_lib.to_dict(config))
  workdir = local_path(command_line.WORKDIR.value or f"{base}-{name}")
  items = items_lib.make_items(
    config, items_lib.load_sweeps(config_name), name, common, workdir
  )
  if _COUNT.value:
    print(len(items))
    return 0
  if _ITEM.value is not None and _ITEM.value >= len(items):
    raise UserError(
      f"--item={_ITEM.value}: sweep {name} has {len(items)} items, counted from"
      " 0"
    )
  print(f"work directory: {workdir}", flush=True)
  if not _DRY_RUN.value:
    items_lib.write_manifest(workdir, name, config_name, common, items)
  failed, status = runner.run_items(
    items,
    workdir,
    [f"--config={config_name}", *sections.flags(common)],
    dry_run=_DRY_RUN.value,
    limit=_LIMIT.value,
    only=_ITEM.value,
  )
  for slug, message in failed.items():
    print(f"failed: {slug}: {message}", file=sys.stderr)
  return status


if __name__ == "__main__":
  command_line.run(main)
