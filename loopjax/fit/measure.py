"""Compiles a config's train step for a machine and measures the result."""

import math
import re
import time
from typing import Any, NamedTuple

import jax

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.fit.topology import Machine, quiet_stderr
from loopjax.program import teacher as teacher_lib
from loopjax.run import profiling

_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Measured(NamedTuple):
  """One train step on one chip of a machine; sizes in bytes.

  Attributes:
    fits: whether the machine has enough memory.
    needed: memory of one chip while the program runs.
    arguments: parameters, EMA, optimizer, batch and teacher, if any; without
      padding.
    memory: the terms of `needed`: arguments, temporaries, outputs not written
      into arguments, program. Empty if the program was not compiled.
    compiled: the program; None if the compiler says that it is too large.
    refusal: what the compiler says then; "" otherwise.
    flops: the model's operations on one chip in an optimizer step, without
      recomputation and teacher (`Family.costs`).
    mesh: devices along its axes.
    remat: the policy of loop.remat for this machine.
    seconds: compilation time.
  """

  fits: bool
  needed: int
  arguments: dict[str, int]
  memory: dict[str, int]
  compiled: Any
  refusal: str
  flops: float
  mesh: dict[str, int]
  remat: str
  seconds: float


def measure(settings: config_lib.Settings, machine: Machine) -> Measured:
  """Compiles the train step that `loopjax train` would run on a machine.

  Raises:
    UserError: the config does not train, or not on this many devices.
  """
  settings.check_trains()
  settings.check_schedule()
  teacher = teacher_lib.read(settings)
  program = program_lib.make_program(settings, machine.devices, teacher)
  program_lib.check_step(program)
  batches = program_lib.abstract_batches(settings, program.mesh)
  state = program.abstract_state
  arguments = {
    "parameters": _chip_bytes((state.params, state.base)),
    "EMA": _chip_bytes(state.ema),
    "optimizer": _chip_bytes(state.opt_state),
    "batch": _chip_bytes(batches),
  }
  if program.abstract_teacher:
    arguments["teacher"] = _chip_bytes(program.abstract_teacher)
  lowered = program.train.lower(state, batches, program.abstract_teacher)
  started = time.monotonic()
  compiled, refusal, memory = None, "", {}
  try:
    with quiet_stderr():
      compiled = lowered.compile(compiler_options=machine.compiler_options)
  except jax.errors.JaxRuntimeError as error:
    refusal = " ".join(str(error).split())
    requested = needed_bytes(refusal, sum(arguments.values()))
    if requested is None:
      raise
    needed = requested
  else:
    code = compiled.memory_analysis().generated_code_size_in_bytes
    memory = {**profiling.memory(compiled), "program": code}
    needed = sum(memory.values())
  per_example = profiling.training_flops(program.costs)
  return Measured(
    fits=compiled is not None and needed <= machine.memory,
    needed=needed,
    arguments=arguments,
    memory=memory,
    compiled=compiled,
    refusal=refusal,
    flops=settings.run.batch_size * per_example / program.mesh.size,
    mesh=dict(program.mesh.shape),
    remat=program.settings.loop.remat,
    seconds=time.monotonic() - started,
  )


def headline(settings: config_lib.Settings, machine: Machine) -> str:
  """Machine and size of the step, one line."""
  run = settings.run
  return (
    f"{machine.name}: {len(machine.devices)} x"
    f" {machine.devices[0].device_kind}; {run.batch_size} examples per step in"
    f" {run.num_microbatches} part(s), {run.steps_per_call} step(s) per call"
  )


def page(machine: Machine, measured: Measured) -> str:
  """Mesh, memory by part, FLOPs and whether it fits, several lines."""
  mesh = ", ".join(f"{axis} {number}" for axis, number in measured.mesh.items())
  parts = dict(measured.arguments)
  padding = measured.memory.get("arguments", 0) - sum(parts.values())
  if padding > 0:
    parts["padding and other"] = padding
  notes = {
    "arguments": ", ".join(f"{name} {size(n)}" for name, n in parts.items()),
    "outputs": "excluding those that reuse an argument's memory",
    "program": "code and constants",
    "available": machine.memory_note,
  }
  rows = {"arguments": sum(parts.values()), **measured.memory}
  rows |= {"peak": measured.needed, "available": machine.memory}
  lines = [
    f"mesh: {mesh}; loop.remat={measured.remat}; compiled in"
    f" {measured.seconds:.1f} s",
    "",
    "memory per chip",
  ]
  for name, number in rows.items():
    note = notes.get(name, "")
    lines.append(f"  {name:<12}{size(number):>12}   {note}".rstrip())
  if measured.refusal:
    lines.append(f"  compiler: {measured.refusal}")
  peak = profiling.peak_flops(machine.devices[0].device_kind)
  at_peak = f", {measured.flops / peak:.3g} s at its peak" if peak else ""
  share = measured.needed / machine.memory
  lines += [
    "",
    "model FLOPs per optimizer step and chip:"
    f" {measured.flops / 1e12:.4g} TFLOP{at_peak}",
    "",
    f"{'fits' if measured.fits else 'does not fit'}: {size(measured.needed)} of"
    f" {size(machine.memory)} per chip ({share:.1%})",
  ]
  return "\n".join(lines)


def size(num_bytes: float) -> str:
  """Bytes with a binary unit."""
  unit = 0
  while abs(num_bytes) >= 1024 and unit < len(_UNITS) - 1:
    num_bytes, unit = num_bytes / 1024, unit + 1
  return f"{num_bytes:.{2 if unit else 0}f} {_UNITS[unit]}"


def needed_bytes(message: str, argument_bytes: int) -> int | None:
  """Memory that a TPU's compiler requested; None for other failures.

  The arguments' bytes are added if its message counts only temporaries.
  """
  if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
    return None
  number = r"([\d.]+)([KMGT])"
  if match := re.search(rf"HLO temporaries \({number}\)", message):
    return int(float(match[1]) * _SIZES[match[2]]) + argument_bytes
  if match := re.search(rf"[Uu]sed {number} of", message):
    return int(float(match[1]) * _SIZES[match[2]])
  return None


def _chip_bytes(tree: Any) -> int:
  """Bytes of the arrays on one chip."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )
