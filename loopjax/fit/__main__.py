"""Command line: does a config fit into the memory of an absent machine?

  loopjax fit --config=FILE[:preset] --topology=v5e:16x16
  loopjax fit --config=FILE[:preset] --topology=h200:1 --time
  loopjax fit --config=FILE[:preset] --topology=v5e:1x1 --generate

The first compiles the train step; the second also ranks its operations by their
minimum time; the third compiles the programs that generate texts.

Exit status: 0 it fits, 1 it does not, 2 a mistake by the user.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from loopjax import checks
from loopjax.commands import command_line
from loopjax.errors import UserError, leave, one_line_errors, writing

# Must be set before JAX is imported: disables the search for accelerators,
# locally and in the cloud, and compilers' warnings about absent machines.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
}


def parser() -> command_line.ConfigParser:
  """The parser of the command line."""
  result = command_line.ConfigParser("loopjax fit", __doc__ or "")
  result.add_argument(
    "--topology",
    metavar="NAME",
    help="machine: v5e:16x16, v4:2x2x1, h200:8, h200:2x8, cpu:8, ...",
  )
  result.add_argument(
    "--memory_gib",
    type=float,
    default=0.0,
    metavar="GIB",
    help="memory per chip [the known value]",
  )
  result.add_argument(
    "--generate",
    action="store_true",
    help="report how many texts one chip can generate at once",
  )
  result.add_argument(
    "--time",
    action="store_true",
    help="rank the operations of a step by the chip's roofline",
  )
  result.add_argument(
    "--json",
    default="",
    metavar="FILE",
    help="with --time: write all counts to this file",
  )
  result.add_argument(
    "--lengths",
    default="",
    metavar="N,...",
    help="with --generate: tokens per text [the config's]",
  )
  result.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    help="with --generate: dtype of the parameters [bfloat16]; a run stores"
    " float32",
  )
  return result


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Prints the report; returns the exit status."""
  if "jax" not in sys.modules:
    os.environ.update(_ENVIRONMENT)
  options = parser().parse_config(argv)
  import jax

  from loopjax import config as config_lib
  from loopjax import program as program_lib
  from loopjax import sections, sharding
  from loopjax.fit import measure, report, suggest, topology
  from loopjax.program import teacher as teacher_lib

  config = options.config
  given = {
    "--config=FILE": config is not None,
    "--topology=NAME": options.topology,
  }
  if missing := [flag for flag, there in given.items() if not there]:
    raise UserError(
      f"the following arguments are required: {', '.join(missing)}"
    )
  if options.workdir:
    raise UserError("--workdir has no effect: nothing is written")
  checks.flags_at_least(options, memory_gib=0)
  if options.time and options.generate:
    raise UserError("--time has no effect with --generate")
  needed = {"json": "time", "lengths": "generate", "dtype": "generate"}
  for flag, other in needed.items():
    if (value := getattr(options, flag)) and not getattr(options, other):
      raise UserError(f"--{flag}={value} needs --{other}")
  where = topology.parse(options.topology)
  if where.kind == "cpu":
    jax.config.update("jax_num_cpu_devices", where.sizes[0])
  jax.config.update("jax_enable_compilation_cache", False)
  settings = config_lib.resolve(config)
  with measure.quiet_stderr():
    machine = topology.machine(where, options.memory_gib)
  if options.generate:
    return _generation(settings, machine, options)
  settings.check_trains()
  settings.check_schedule()
  mesh = sharding.make_mesh(settings.mesh, machine.devices)
  settings = program_lib.with_remat(
    settings, mesh, machine.memory, teacher_lib.read(settings)
  )
  config_lib.override(config, {"loop.remat": settings.loop.remat})
  print(report.headline(settings, machine), flush=True)
  measured = measure.measure(config, machine)
  print(report.table(settings, machine, measured))
  if options.time:
    _ranking(measured, settings.run.steps_per_call, options.json)
  print(f"\n{report.verdict(machine, measured)}", flush=True)
  if measured.fits:
    return 0

  def attempt(change: suggest.Change) -> measure.Measured | None:
    candidate = config.copy_and_resolve_references()
    config_lib.override(candidate, change.overrides)
    text = " ".join(sections.flags(change.overrides))
    try:
      result = measure.measure(candidate, machine)
    except UserError as error:
      print(f"  {text}: impossible: {error}", flush=True)
      return None
    verdict = report.verdict(machine, result)
    print(f"  {text}: {verdict}, in {result.seconds:.0f} s", flush=True)
    return result

  print("tried:")
  change = suggest.suggest(settings, measured.mesh, attempt)
  if change is None:
    print("none of the suggested changes makes it fit")
  else:
    print("add", *sections.flags(change.overrides), f"({change.effect})")
  return 1


def _ranking(measured: Any, steps: int, file: str) -> None:
  """Prints what takes the time, and writes it to a file, if any."""
  from loopjax.fit import report
  from loopjax.run import workdir as workdir_lib

  if measured.ranking is None:
    return  # Not compiled.
  result = measured.ranking, measured.model_flops
  print(f"\n{report.ranking_table(*result)}")
  if file:
    record = report.ranking_record(
      *result, measured.memory, measured.traffic, steps
    )
    with writing(f"--json={file}"):
      workdir_lib.write_json(pathlib.Path(file), record)


def _generation(settings: Any, machine: Any, options: Any) -> int:
  """Prints how many texts fit; returns the exit status."""
  from loopjax.fit import generation

  try:
    words = options.lengths.split(",") if options.lengths else []
    lengths = [int(length) for length in words]
  except ValueError:
    lengths = [0]
  if any(length < 2 for length in lengths):
    raise UserError(
      f"--lengths={options.lengths}: expected lengths of at least 2"
    )
  model = generation.model_of(settings, machine, options.dtype or "bfloat16")
  print(generation.headline(model, machine), flush=True)
  results = [
    generation.most(model, machine, length)
    for length in lengths or [settings.spec.sequence_length]
  ]
  print(generation.table(results))
  return 0 if all(texts.num_texts for texts in results) else 1


if __name__ == "__main__":
  leave(main())
