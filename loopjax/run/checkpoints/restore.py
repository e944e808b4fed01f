"""Reads checkpoints: verifies them, falls back, and sets damaged ones aside.

Orbax restores onto any mesh, but it does not detect a changed byte and accepts
an empty directory as a checkpoint. Therefore a checkpoint is rejected if it
does not match the record that `loopjax.run.checkpoints.checkpoint` wrote next
to the arrays.

Every function takes the work directory of a run, which may be in progress, and
is called by all processes.
"""

import itertools
import json
import logging
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from loopjax import sharding
from loopjax.errors import UserError, one_line
from loopjax.nn import lora
from loopjax.run import processes, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity

DIRECTORY = "checkpoints"  # In a work directory; has one folder per step.
STATE, META = "state", "meta"  # The items of each step.


class DamagedCheckpointError(Exception):
  """A checkpoint differs from what was written; the message is one line."""


def steps(workdir: pathlib.Path) -> list[int]:
  """Steps with a checkpoint, damaged or not, oldest first."""
  return processes.from_process_0(
    lambda: sorted(
      int(path.name)
      for path in (workdir / DIRECTORY).glob("*")
      if path.name.isdecimal()  # Orbax marks incomplete ones by a suffix.
    )
  )


def newest(
  workdir: pathlib.Path, read: Callable[[int], Any], *, set_aside: bool
) -> Any | None:
  """`read(step)` of the newest intact checkpoint; None if there are none.

  Prints a line for every damaged checkpoint.

  Args:
    read: raises DamagedCheckpointError if the checkpoint is damaged.
    set_aside: move damaged checkpoints to workdir/damaged, so the run can save
      these steps again.
  """
  there_are, damaged = steps(workdir), []
  for step in reversed(there_are):
    try:
      value = read(step)
    except DamagedCheckpointError as error:
      print(f"checkpoint {step} is skipped: {error}", flush=True)
      damaged.append(step)
      continue
    if set_aside:  # Only now: if none is intact, all must stay in place.
      _set_aside(workdir, damaged)
    return value
  if there_are:
    raise UserError(
      f"{workdir / DIRECTORY}: cannot resume: all checkpoints {there_are} are"
      " damaged"
    )
  return None


def best(workdir: pathlib.Path, scores: Mapping[int, float]) -> int:
  """The checkpointed step with the highest score."""
  scored = [step for step in steps(workdir) if step in scores]
  if not scored:
    raise UserError(f"{workdir / DIRECTORY}: no checkpoint has a score")
  return max(scored, key=lambda step: scores[step])


def state(
  workdir: pathlib.Path, step: int, abstract_state: Any
) -> tuple[Any, dict[str, Any]]:
  """Reads a train state onto the mesh of `abstract_state`: (state, meta).

  Raises:
    UserError: its arrays have other names, shapes or dtypes.
    DamagedCheckpointError: the checkpoint differs from its record.
  """
  record = meta(workdir, step)
  where = workdir / DIRECTORY / str(step)
  try:
    integrity.compare(
      integrity.describe(abstract_state), record["arrays"], where
    )
  except UserError as error:  # With equal settings: of an earlier version.
    raise UserError(
      f"{error}; a run of another version cannot be resumed, but"
      f" --config.run.init_from={workdir} starts from its parameters"
    ) from error
  return _read(where, abstract_state, record["arrays"]), record


def params(
  workdir: pathlib.Path, step: int, abstract_params: Any, optional: str = ""
) -> dict[str, Any]:
  """Reads only parameters: the averaged ones if the run averaged.

  Pairs of `nn.lora` are added to their matrices.

  Args:
    step: step of the checkpoint.
    abstract_params: nested dict with target shardings.
    optional: regular expression of parameters that may be missing.

  Returns:
    Nested dict as `abstract_params`, without those that are missing.

  Raises:
    UserError: missing, extra or mis-shaped parameters.
    DamagedCheckpointError: the checkpoint differs from its record.
  """
  arrays = meta(workdir, step)["arrays"]
  averaged = any(name.startswith("ema/") for name in arrays)
  tree = "ema" if averaged else "params"
  trained, base = _below(arrays, tree), _below(arrays, "base")
  pairs = {
    name: array
    for name, array in trained.items()
    if name.rpartition("/")[0] in base
  }
  there = {**base, **trained}
  there = {name: x for name, x in there.items() if name not in pairs}
  wanted = integrity.describe(abstract_params)
  missing = {
    name
    for name in wanted
    if name not in there and optional and re.search(optional, name)
  }
  known = {k: v for k, v in wanted.items() if k not in missing}
  where = workdir / DIRECTORY / str(step)
  integrity.compare(known, there, where)
  target = integrity.without(abstract_params, missing)
  if not base:
    return _read(where, {tree: target}, arrays)[tree]
  found = _read(where, _parts(target, base, pairs, tree), arrays)
  alpha = workdir_lib.read_json(workdir / "config.json")["optim"]["lora_alpha"]
  return lora.merge(found["base"], found[tree], alpha)


def _below(arrays: Mapping[str, Any], tree: str) -> dict[str, Any]:
  """The arrays of a part of the state, by path within it."""
  return {
    name.partition("/")[2]: array
    for name, array in arrays.items()
    if name.startswith(f"{tree}/")
  }


def _parts(
  target: Any, base: Mapping[str, Any], pairs: Mapping[str, Any], tree: str
) -> dict[str, Any]:
  """The abstract arrays of a checkpoint with pairs, its "base" and `tree`."""
  parts: dict[str, dict[lora.Path, Any]] = {"base": {}, tree: {}}
  for path, leaf in lora.flat(target).items():
    name = "/".join(map(str, path))
    parts["base" if name in base else tree][path] = leaf
    for part in ("A", "B"):
      if f"{name}/{part}" in pairs:
        shape, dtype = pairs[f"{name}/{part}"][:2]
        parts[tree][(*path, part)] = jax.ShapeDtypeStruct(
          shape, dtype, sharding=sharding.replicated(leaf.sharding.mesh)
        )
  return {name: lora.nested(leaves) for name, leaves in parts.items()}


def chosen_params(
  workdir: pathlib.Path,
  step: int | None,
  abstract_params: Any,
  label: str,
  optional: str = "",
) -> tuple[int, dict[str, Any]]:
  """The step and the `params` of a requested checkpoint.

  Args:
    workdir: the run's work directory, or zoo:NAME.
    step: step of the checkpoint; None for the newest intact one.
    abstract_params, optional: as in `params`.
    label: the run's name in messages.
  """
  folder = zoo.located(workdir)
  if folder != workdir:
    only = json.loads((folder / "summary.json").read_text(encoding="utf-8"))[
      "steps"
    ]
    if step not in (None, only):
      raise UserError(
        f"{label}: no checkpoint at step {step}; available: {only}"
      )
    return only, zoo.read(folder, abstract_params, optional)

  def read(at: int) -> tuple[int, Any]:
    return at, params(workdir, at, abstract_params, optional)

  try:
    found = (
      newest(workdir, read, set_aside=False) if step is None else read(step)
    )
  except DamagedCheckpointError as error:
    raise UserError(f"{label}: checkpoint {step}: {error}") from error
  if found is None:
    raise UserError(f"{label} contains no checkpoints")
  return found


def meta(workdir: pathlib.Path, step: int) -> dict[str, Any]:
  """The "meta" of a checkpoint.

  Raises:
    DamagedCheckpointError: it differs from its record.
    UserError: there is no such checkpoint.
  """
  if step not in steps(workdir):
    raise UserError(
      f"{workdir / DIRECTORY}: no checkpoint at step {step}; available:"
      f" {steps(workdir) or 'none'}"
    )
  # The file that Orbax's JSON handler writes.
  path = workdir / DIRECTORY / str(step) / META / "metadata"
  envelope = _intact(lambda: json.loads(path.read_text(encoding="utf-8")))
  content = envelope.get("content") if isinstance(envelope, dict) else None
  if content is None or integrity.digest(content) != envelope.get("sha256"):
    raise DamagedCheckpointError("its metadata record was changed")
  return content


def _read(
  where: pathlib.Path, abstract: Any, arrays: Mapping[str, Sequence[Any]]
) -> Any:
  """The arrays of the state that `abstract` names, verified.

  Uses Orbax's handler without a manager, which would wait for processes that
  failed to read.
  """
  import orbax.checkpoint as ocp  # Takes long: models of the zoo need none.
  from etils import epath

  quiet_orbax()
  arguments = ocp.args.PyTreeRestore(
    abstract,
    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
    partial_restore=True,
  )
  path = epath.Path(where.absolute()) / STATE
  handler = ocp.PyTreeCheckpointHandler()
  tree = _intact(lambda: handler.restore(path, args=arguments))
  changed = [
    name
    for name, checksum in integrity.checksums(tree).items()
    if arrays[name][2] != checksum
  ]
  if changed:
    raise DamagedCheckpointError(
      f"corrupt bytes in {integrity.abbreviate(changed)}"
    )
  return tree


def _set_aside(workdir: pathlib.Path, damaged: Sequence[int]) -> None:
  for step in damaged if jax.process_index() == 0 else ():
    directory = workdir / "damaged"
    directory.mkdir(exist_ok=True)
    names = (directory / f"{step}.{number}" for number in itertools.count())
    free = next(name for name in names if not name.exists())
    (workdir / DIRECTORY / str(step)).rename(free)
  if damaged:
    processes.wait_for_all()


def _intact(read: Callable[[], Any]) -> Any:
  """The result of `read`.

  Raises:
    DamagedCheckpointError: on all processes, if `read` fails on one. A broken
      file can make Orbax raise almost anything, so that only errors of memory,
      devices and the system are passed on, such as too many open files.
  """
  value, problem = None, ""
  try:
    value = read()
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    missing = FileNotFoundError, NotADirectoryError, IsADirectoryError
    if isinstance(error, OSError) and not isinstance(error, missing):
      raise
    problem = f"{type(error).__name__}: {one_line(error)}"
  if problem := processes.gather_messages(problem):
    raise DamagedCheckpointError(problem)
  return value


def quiet_orbax() -> None:
  """Drops the messages of Orbax and of the event loops that it starts.

  It logs every step of a save, and repeats whatever it raises. Other messages
  pass.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
  text = logging.Formatter().format(record)  # With the traceback, if any.
  return "orbax" not in record.pathname and "orbax" not in text
