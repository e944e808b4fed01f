"""Command line: does a config fit into the memory of an absent machine?

  python -m loopjax.fit --config=FILE[:preset] --topology=v5e:16x16
  python -m loopjax.fit --config=FILE[:preset] --topology=h200:1 --time
  python -m loopjax.fit --config=FILE[:preset] --topology=v5e:1x1 --generate

The first compiles the train step; the second also ranks what it does by the
least time that it takes; the third compiles what generates texts.

Exit status: 0 it fits, 1 it does not, 2 a mistake by the user.
"""

import os
import pathlib
from typing import Any

from absl import flags

from loopjax.commands import command_line
from loopjax.errors import UserError, writing

# Must be set before JAX is imported: no search for accelerators, here or in the
# cloud, and no warnings from compilers for absent machines.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
}

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "Machine: v5e:16x16, v4:2x2x1, h200:8, h200:2x8, cpu:8, ..."
)
_MEMORY = flags.DEFINE_float(
  "memory_gib", 0.0, "Memory of a chip; 0 for the known value.", 0.0
)
_GENERATE = flags.DEFINE_bool(
  "generate", False, "How many texts can be generated at once, on one chip?"
)
_TIME = flags.DEFINE_bool(
  "time", False, "Rank what the step does by the chip's roofline."
)
_JSON = flags.DEFINE_string(
  "json", "", "With --time: a file for everything that was counted."
)
_LENGTHS = flags.DEFINE_list(
  "lengths", [], "With --generate: tokens of a text [the config's rows]."
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  None,
  ("float32", "bfloat16"),
  "With --generate: of the parameters [bfloat16]; those of a run are float32.",
)


def main(argv: list[str]) -> int:
  """Prints the report; returns the exit status."""
  del argv
  import jax

  from loopjax import config as config_lib
  from loopjax import program as program_lib
  from loopjax import sections, sharding
  from loopjax.fit import measure, report, suggest, topology
  from loopjax.program import teacher as teacher_lib

  config = command_line.CONFIG.value
  if config is None or not _TOPOLOGY.value:
    raise UserError("--config=FILE and --topology=NAME are needed")
  if command_line.WORKDIR.value:
    raise UserError("--workdir has no effect: nothing is written")
  if _TIME.value and _GENERATE.value:
    raise UserError("--time has no effect with --generate")
  if _JSON.value and not _TIME.value:
    raise UserError(f"--json={_JSON.value} needs --time")
  if _LENGTHS.value and not _GENERATE.value:
    raise UserError(f"--lengths={','.join(_LENGTHS.value)} needs --generate")
  if _DTYPE.value and not _GENERATE.value:
    raise UserError(f"--dtype={_DTYPE.value} needs --generate")
  where = topology.parse(_TOPOLOGY.value)
  if where.kind == "cpu":
    jax.config.update("jax_num_cpu_devices", where.sizes[0])
  jax.config.update("jax_enable_compilation_cache", False)
  settings = config_lib.resolve(config)
  with measure.quiet_stderr():
    machine = topology.machine(where, _MEMORY.value)
  if _GENERATE.value:
    return _generation(settings, machine)
  mesh = sharding.make_mesh(settings.mesh, machine.devices)
  settings = program_lib.with_remat(
    settings, mesh, machine.memory, teacher_lib.read(settings)
  )
  config_lib.override(config, {"loop.remat": settings.loop.remat})
  print(report.headline(settings, machine), flush=True)
  measured = measure.measure(config, machine)
  print(report.table(settings, machine, measured))
  if _TIME.value:
    _ranking(measured, settings.run.steps_per_call)
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
    print("none of the changes tried fits")
  else:
    print("add", *sections.flags(change.overrides), f"({change.effect})")
  return 1


def _ranking(measured: Any, steps: int) -> None:
  """Prints what takes the time, and writes it to --json."""
  from loopjax.fit import ranking_report
  from loopjax.run import workdir as workdir_lib

  if measured.ranking is None:
    return  # It was not compiled.
  found = measured.ranking, measured.model_flops
  print(f"\n{ranking_report.text(*found)}")
  if _JSON.value:
    record = ranking_report.record(
      *found, measured.memory, measured.traffic, steps
    )
    with writing(f"--json={_JSON.value}"):
      workdir_lib.write_json(pathlib.Path(_JSON.value), record)


def _generation(settings: Any, machine: Any) -> int:
  """Prints how many texts fit; returns the exit status."""
  from loopjax.fit import generation

  try:
    lengths = [int(length) for length in _LENGTHS.value]
  except ValueError:
    lengths = [0]
  if any(length < 2 for length in lengths):
    raise UserError(
      f"--lengths={','.join(_LENGTHS.value)}: lengths of at least 2"
    )
  model = generation.model_of(settings, machine, _DTYPE.value or "bfloat16")
  print(generation.headline(model, machine), flush=True)
  found = [
    generation.most(model, machine, length)
    for length in lengths or [settings.spec.sequence_length]
  ]
  print(generation.table(found))
  return 0 if all(texts.num_texts for texts in found) else 1


if __name__ == "__main__":
  os.environ.update(_ENVIRONMENT)
  command_line.run(main)
