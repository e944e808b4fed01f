"""Checkpoints of the whole train state: by Orbax, with checksums of our own.

Orbax writes asynchronously and atomically and restores onto any mesh, but it
does not notice a changed byte and takes an empty directory for a checkpoint.
So each checkpoint carries a record of its arrays, and what does not match it
is never used.
"""

import errno
import hashlib
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from loopjax.errors import UserError
from loopjax.run import integrity, processes, retention

_STATE, _META = "state", "meta"


class Damaged(Exception):
  """A checkpoint that is not what was written; the message is one line."""


class Checkpoints:
  """The checkpoints of one run.

  Each holds the train state and "meta", a JSON object: what the caller gives,
  beside shape, dtype and checksum of every array, all under a sha256.

  Attributes:
    scores: of steps, higher is better; what `keep_best` and "best" go by.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    keep: int = 1,
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
    read_only: bool = False,
  ):
    """Opens workdir/checkpoints.

    Args:
      workdir: of the run; the caller holds it, unless `read_only`.
      keep: how many of the newest stay.
      keep_best: how many of those with the highest scores stay beside them.
      scores: what is known of them already.
      read_only: only read, also while its run goes on.
    """
    # They report every step of a save, and again whatever it raises.
    for name in ("absl", "asyncio"):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self.directory = workdir / "checkpoints"
    self.scores: dict[int, float] = dict(scores or {})
    if jax.process_index() == 0 and not read_only:
      # What a save that was killed left.
      for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)
    processes.wait_for_all()
    kept = retention.NewestAndBest(keep, keep_best, self.scores)
    self._manager = ocp.CheckpointManager(
      self.directory.absolute(),
      item_names=(_STATE, _META),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=kept, read_only=read_only
      ),
    )
    # JAX counts the questions after preemption, and `preemption` asks them.
    self._manager.reached_preemption = lambda step: False

  def steps(self) -> list[int]:
    """Steps with a checkpoint, damaged or not, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Starts saving in the background; a step that is there already stays.

    Raises:
      OSError: there is no room for it.
      UserError: this save or the one before cannot be written.
      processes.Lost: the same, with several processes.
    """
    if step in self.steps():
      return
    self._check_room(state)
    arrays = integrity.describe(state)
    for name, checksum in integrity.checksums(state).items():
      arrays[name].append(checksum)
    content = {**meta, "arrays": arrays}
    saved = self._writing(
      lambda: self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state),
          meta=ocp.args.JsonSave(
            {"content": content, "sha256": _digest(content)}
          ),
        ),
      )
    )
    assert saved, f"step {step} is older than {self.steps()}"

  def wait(self) -> None:
    """Waits for saves under way; raises UserError if one failed."""
    self._writing(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits, and lets go of the directory."""
    self.wait()
    self._manager.close()

  def newest(
    self, restore: Callable[[int], Any], *, set_aside: bool
  ) -> Any | None:
    """`restore(step)` of the newest step that is intact; None if none exist.

    Prints a line for every damaged one.

    Args:
      restore: raises Damaged if it cannot.
      set_aside: move damaged ones to workdir/damaged, so that the run can
        save these steps again.

    Raises:
      UserError: there are checkpoints, and all of them are damaged.
    """
    steps, damaged = self.steps(), []
    for step in reversed(steps):
      try:
        restored = restore(step)
      except Damaged as error:
        print(f"checkpoint {step} is not used: {error}", flush=True)
        damaged.append(step)
        continue
      if set_aside:  # Only now: with none intact all must stay.
        self._set_aside(damaged)
      return restored
    if steps:
      raise UserError(
        f"{self.directory}: none of the checkpoints {steps} is intact; nothing"
        " to go on from"
      )
    return None

  def best(self) -> int:
    """The step with the highest score.

    Raises:
      UserError: no checkpoint has one.
    """
    scored = [step for step in self.steps() if step in self.scores]
    if not scored:
      raise UserError(f"{self.directory}: no checkpoint has a score")
    return max(scored, key=lambda step: self.scores[step])

  def restore(
    self, abstract_state: Any, step: int
  ) -> tuple[Any, dict[str, Any]]:
    """Reads a train state onto the mesh of `abstract_state`: (state, meta).

    Raises:
      UserError: its arrays have other names, shapes or dtypes.
      Damaged: it is not what was written.
    """
    meta = self.meta(step)
    where = self.directory / str(step)
    integrity.compare(integrity.describe(abstract_state), meta["arrays"], where)
    state = self._read(step, abstract_state)
    self._verify(state, meta["arrays"])
    return state, meta

  def restore_params(
    self, abstract_params: Any, step: int, fresh: str = ""
  ) -> dict[str, Any]:
    """Reads parameters alone: the averaged ones, if the run averaged.

    Args:
      abstract_params: nested dict with target shardings.
      step: which.
      fresh: regular expression of parameters that may be missing.

    Returns:
      Nested dict as `abstract_params`, without those that are missing.

    Raises:
      UserError: missing, extra or mis-shaped parameters.
      Damaged: it is not what was written.
    """
    meta = self.meta(step)
    tree = (
      "ema" if any(n.startswith("ema/") for n in meta["arrays"]) else ("params")
    )
    there = {
      name.partition("/")[2]: array
      for name, array in meta["arrays"].items()
      if name.startswith(f"{tree}/")
    }
    wanted = integrity.describe(abstract_params)
    missing = {
      name
      for name in wanted
      if name not in there and fresh and re.search(fresh, name)
    }
    known = {k: v for k, v in wanted.items() if k not in missing}
    integrity.compare(known, there, self.directory / str(step))
    target = integrity.without(abstract_params, missing)
    restored = self._read(step, {tree: target})
    self._verify(restored, meta["arrays"])
    return restored[tree]

  def meta(self, step: int) -> dict[str, Any]:
    """What was saved beside the arrays; raises Damaged or UserError."""
    if step not in self.steps():
      raise UserError(
        f"{self.directory}: no checkpoint of step {step}; there are"
        f" {self.steps() or 'none'}"
      )
    # The file that Orbax's JSON handler writes.
    path = self.directory / str(step) / _META / "metadata"
    envelope = _intact(lambda: json.loads(path.read_text()))
    content = envelope.get("content") if isinstance(envelope, dict) else None
    if content is None or _digest(content) != envelope.get("sha256"):
      raise Damaged("its record of itself was changed")
    return content

  def _read(self, step: int, abstract: Any) -> Any:
    """Those arrays of the state that `abstract` names.

    By the handler alone: the manager would wait for the other processes, and
    one that cannot read would not come.
    """
    arguments = ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
    )
    path = epath.Path(self.directory.absolute()) / str(step) / _STATE
    handler = ocp.PyTreeCheckpointHandler()
    return _intact(lambda: handler.restore(path, args=arguments))

  def _verify(self, tree: Any, arrays: Mapping[str, Sequence[Any]]) -> None:
    changed = [
      name
      for name, checksum in integrity.checksums(tree).items()
      if arrays[name][2] != checksum
    ]
    if changed:
      raise Damaged(f"bytes were changed in {integrity.some(changed)}")

  def _set_aside(self, steps: Sequence[int]) -> None:
    for step in steps if jax.process_index() == 0 else ():
      directory = self.directory.parent / "damaged"
      directory.mkdir(exist_ok=True)
      names = (directory / f"{step}.{number}" for number in itertools.count())
      free = next(name for name in names if not name.exists())
      (self.directory / str(step)).rename(free)
    if steps:
      processes.wait_for_all()
      self._manager.reload()

  def _check_room(self, state: Any) -> None:
    """Beforehand: what Orbax says of a full disk is hundreds of lines long."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self.directory).free
    if free < needed:
      reason = (
        f"{os.strerror(errno.ENOSPC)}: a checkpoint takes {needed >> 10} KiB,"
        f" {free >> 10} KiB are free; those that are complete stay"
      )
      raise OSError(errno.ENOSPC, reason, str(self.directory))

  def _writing(self, function: Callable[[], Any]) -> Any:
    try:
      return function()
    except (OSError, ValueError, RuntimeError) as error:
      line = (
        f"{self.directory}: a checkpoint cannot be written: {_one_line(error)};"
        " those that are complete stay"
      )
      # Saving is where processes wait for each other.
      if jax.process_count() > 1 and not isinstance(error, OSError):
        raise processes.Lost(line) from error
      raise UserError(line) from error


def _intact(read: Callable[[], Any]) -> Any:
  """What `read` gives; Damaged on every process if it fails on one.

  A broken file can make Orbax raise anything, but not what a lack of memory,
  of permissions or of a device raises.
  """
  value, problem = None, ""
  try:
    value = read()
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    problem = f"{type(error).__name__}: {_one_line(error)}"
  if problem := processes.everywhere(problem):
    raise Damaged(problem)
  return value


def _digest(content: Any) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _one_line(error: BaseException) -> str:
  return " ".join(str(error).split())[:200]
