"""Compiles a config's train step for a machine and measures the result."""

import contextlib
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.errors import UserError
from loopjax.fit import counts, hlo, topology, values
from loopjax.fit import ranking as ranking_lib
from loopjax.fit.topology import Machine
from loopjax.program import teacher as teacher_lib
from loopjax.run import profiling

_NUM_VALUES = 10
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Measured(NamedTuple):
  """One train step on one chip of a machine; sizes in bytes.

  Attributes:
    fits: whether the machine has enough memory.
    needed: memory of one chip while the program runs.
    arguments: parameters, EMA, optimizer, batch and teacher, if any; without
      padding.
    memory: the terms of `needed`: arguments, temporaries, outputs not written
      into arguments, program. Empty if compilation failed.
    refusal: why compilation failed; "" if it did not.
    traffic: collectives of a call; None if compilation failed.
    largest: the largest values.
    ranking: the parts of an optimizer step by time; None if compilation failed.
    model_flops: the model's operations on one chip in an optimizer step,
      without recomputation and teacher; a backward pass counts as two forward
      passes.
    mesh: devices along its axes.
    seconds: compilation time.
  """

  fits: bool
  needed: int
  arguments: dict[str, int]
  memory: dict[str, int]
  refusal: str
  traffic: counts.Traffic | None
  largest: list[values.Value]
  ranking: ranking_lib.Ranking | None
  model_flops: float
  mesh: dict[str, int]
  seconds: float


class Attempt(NamedTuple):
  """A program, compiled for a chip; sizes in bytes.

  Attributes:
    compiled: the program; None if it is too large.
    needed, memory, refusal, seconds: as in `Measured`.
  """

  compiled: Any
  needed: int
  memory: dict[str, int]
  refusal: str
  seconds: float


def measure(config: ml_collections.ConfigDict, machine: Machine) -> Measured:
  """Compiles the train step that `loopjax.main` would run for a machine.

  Raises:
    UserError: the config is invalid, or does not work on this many devices.
  """
  settings = config_lib.resolve(config)
  program = program_lib.make_program(
    settings, machine.devices, teacher_lib.read(settings), machine.memory
  )
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
  mesh = dict(program.mesh.shape)
  num_chips = math.prod(mesh.values())
  per_example = profiling.training_flops(program.costs)
  lowered = program.train.lower(state, batches, program.abstract_teacher)
  result = attempt(lowered, machine, sum(arguments.values()))
  traffic, largest, ranking = None, [], None
  if result.compiled:
    module = hlo.parse(result.compiled.as_text())
    traffic = counts.collectives(module)
    largest = values.largest(module, _NUM_VALUES)
    kind = topology.parse(machine.name).kind
    ranking = ranking_lib.rank(module, kind, settings.run.steps_per_call)
  return Measured(
    fits=bool(result.compiled) and result.needed <= machine.memory,
    needed=result.needed,
    arguments=arguments,
    memory=result.memory,
    refusal=result.refusal,
    traffic=traffic,
    largest=largest,
    ranking=ranking,
    model_flops=settings.run.batch_size * per_example / num_chips,
    mesh=mesh,
    seconds=result.seconds,
  )


def attempt(lowered: Any, machine: Machine, argument_bytes: int) -> Attempt:
  """Compiles a program for a machine, unless it is too large.

  Of its arguments the size is given, in bytes.
  """
  started = time.monotonic()
  try:
    with quiet_stderr():
      compiled = lowered.compile(compiler_options=machine.compiler_options)
  except jax.errors.JaxRuntimeError as error:
    refusal = " ".join(str(error).split())
    needed = needed_bytes(refusal, argument_bytes)
    if needed is None:
      raise
    seconds = time.monotonic() - started
    return Attempt(None, needed, {}, refusal, seconds)
  seconds = time.monotonic() - started
  program = compiled.memory_analysis().generated_code_size_in_bytes
  memory = {**profiling.memory(compiled), "program": program}
  return Attempt(compiled, sum(memory.values()), memory, "", seconds)


def needed_bytes(message: str, argument_bytes: int) -> int | None:
  """Memory that a TPU's compiler requested; None for other failures.

  The arguments' bytes are added if its message counts only temporaries.
  """
  if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
    return None
  number = r"([\d.]+)([KMGT])"
  if match := re.search(rf"HLO temporaries \({number}\)", message):
    return int(float(match[1]) * _UNITS[match[2]]) + argument_bytes
  if match := re.search(rf"[Uu]sed {number} of", message):
    return int(float(match[1]) * _UNITS[match[2]])
  return None


def _chip_bytes(tree: Any) -> int:
  """Bytes of the arrays on one chip."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
  """Captures file descriptor 2, and shows it only if something fails."""
  sys.stderr.flush()
  saved = os.dup(2)
  with tempfile.TemporaryFile() as log:
    os.dup2(log.fileno(), 2)
    try:
      yield
    except UserError:
      raise
    except Exception:
      log.seek(0)
      os.write(saved, log.read())
      raise
    finally:
      sys.stderr.flush()
      os.dup2(saved, 2)
      os.close(saved)
