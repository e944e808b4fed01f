"""Injects faults into real runs and prints a table of the results.

  python benchmarks/fault_drill.py [--out=FILE.md] [--only=PART_OF_A_NAME]

Takes about a quarter of an hour on two CPU cores. Exit status 1 if a guarantee
did not hold.
"""

import argparse
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

import drills  # noqa: E402

from loopjax.run import provenance  # noqa: E402


def cases(tmp: pathlib.Path, reference: pathlib.Path):
  """(name, function without arguments) of every drill."""
  both = (tmp, reference)
  yield "SIGKILL, 24 times", lambda: drills.sigkill(*both, kills=24)
  yield "SIGTERM", lambda: drills.sigterm(*both)
  for how in drills.DAMAGES:
    seeds = range(8) if how is drills.flip else range(4)
    if how in (drills.empty, drills.edit_record):
      seeds = range(1)
    for seed in seeds:
      yield (
        f"newest checkpoint: {how.__name__} {seed}",
        lambda how=how, seed=seed: drills.damage(*both, how, seed),
      )
  yield "all checkpoints emptied", lambda: drills.damage_all(*both)
  yield "disk full", lambda: drills.disk_full(*both)
  yield "directory not writable", lambda: drills.read_only(tmp)
  yield "two runs in one directory", lambda: drills.second_run(tmp)
  for count, then in ((2, 2), (2, 1), (4, 2), (2, 4)):
    yield (
      f"{count} processes, then {then}",
      lambda count=count, then=then: drills.processes(*both, count, then),
    )
  yield "SIGTERM to one of 2", lambda: drills.group_sigterm(*both, 2)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path)
  parser.add_argument("--only", default="")
  options = parser.parse_args()
  environment = provenance.environment()
  lines = [
    f"`{environment['command']}` at {environment['revision']};"
    f" {environment['devices']}; {environment['versions']}",
    "",
    "| drill | held | seconds | what happened |",
    "|---|---|---|---|",
  ]
  print("\n".join(lines), flush=True)
  failed = 0
  with tempfile.TemporaryDirectory() as name:
    tmp = pathlib.Path(name)
    reference = tmp / "reference"
    drills.run(reference)
    for drill, function in cases(tmp, reference):
      if options.only not in drill:
        continue
      start = time.monotonic()
      try:
        held, said = "yes", function()
      except (AssertionError, OSError) as error:
        held, said = "NO", repr(error)
        failed += 1
      said = said.replace(str(tmp), "TMP").replace("|", "/")[:200]
      seconds = time.monotonic() - start
      lines.append(f"| {drill} | {held} | {seconds:.0f} | {said} |")
      print(lines[-1], flush=True)
  if options.out:
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
