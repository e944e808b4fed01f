"""Compares counts of compiled train steps with budgets; runs nothing.

  python benchmarks/budgets.py                 # for virtual CPUs, in a minute
  python benchmarks/budgets.py h200-looped     # needs loopjax[fit]
  python benchmarks/budgets.py all

The budgets are in budgets.toml. Exit status: 0 if all are met, 1 if not.
"""

import argparse
import math
import os
import pathlib
import sys
import tomllib

import roofline  # In this folder.

from loopjax.fit import ENVIRONMENT

HERE = pathlib.Path(__file__).parent
MIB = 2**20


def budgets():
  """The entries of budgets.toml, by name."""
  text = (HERE / "budgets.toml").read_text("utf-8")
  return {entry["name"]: entry for entry in tomllib.loads(text)["budget"]}


def counts(entry):
  """Counts of the compiled step of a budget's config, by name."""
  import jax

  from loopjax import config as config_lib
  from loopjax import program as program_lib
  from loopjax.config import presets
  from loopjax.fit import measure, topology

  file, _, arg = entry["config"].partition(":")
  config = presets.read(HERE.parent / "configs" / file)["get_config"](arg)
  where = topology.parse(entry["machine"])
  with topology.quiet_stderr():
    machine = topology.machine(where, 16.0 if where.kind == "cpu" else 0.0)
  settings = config_lib.resolve(config)
  found = measure.measure(settings, machine)
  assert found.compiled, found.refusal
  module = roofline.parse(found.compiled.as_text())
  steps = settings.run.steps_per_call
  total = roofline.count(module, steps).total
  moved = roofline.collectives(module).num_bytes
  _, params = program_lib.abstract_model(settings)
  number = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  reduced = moved["all-reduce"] + found.mesh["fsdp"] * moved["reduce-scatter"]
  flops = sum(total[dtype] for dtype in roofline.DTYPES)
  return {
    "launches": total["kernels"],
    "float32": total["f32"] / max(1, flops),
    "memory": found.needed / MIB,
    "traffic": total["bytes"] / MIB,
    "gathered": moved["all-gather"] / steps / (2 * number),
    "reduced": reduced / steps / (2 * number),
  }


def over(entry, found):
  """Prints counts and budgets; returns the names of exceeded ones."""
  print(entry["name"])
  for name, value in found.items():
    most = entry["most"].get(name)
    beside = "" if most is None else f"of {most:g}"
    print(f"  {name:10} {value:14,.4g}  {beside}", flush=True)
  return [name for name, most in entry["most"].items() if found[name] > most]


def main(argv):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("names", nargs="*", metavar="NAME")
  names, known = parser.parse_args(argv).names, budgets()
  if names == ["all"]:
    names = list(known)
  names = names or [x for x in known if known[x]["machine"].startswith("cpu")]
  if unknown := [name for name in names if name not in known]:
    print(f"no budget {unknown[0]!r}; there are {', '.join(known)}")
    return 2
  broken = []
  for name in names:
    too_much = over(known[name], counts(known[name]))
    broken += [f"{name}: {what}" for what in too_much]
  print("over: " + ", ".join(broken) if broken else "all budgets are kept")
  return 1 if broken else 0


if __name__ == "__main__":
  os.environ.update(ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "8"})
  sys.exit(main(sys.argv[1:]))
