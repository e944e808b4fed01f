"""Saves checkpoints of the whole train state, and decides which to keep.

Orbax writes asynchronously and atomically. A record next to the arrays has our
own checksums, which `restore` verifies.
"""

import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from loopjax.errors import UserError, one_line
from loopjax.run import processes
from loopjax.run.checkpoints import integrity, restore


class Checkpoints:
  """The checkpoints of one run, open in a `with` block.

  However the block ends, no save is in progress after it: the lock of a block
  around it outlives all of them.

  Each holds the train state and "meta", a JSON object with the caller's
  metadata and the shape, dtype and checksum of every array, protected by a
  sha256.

  Attributes:
    directory: the directory of the checkpoints.
    scores: score of each step, higher is better; `keep_best` uses them.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    keep: int = 1,
    keep_best: int = 0,
    scores: Mapping[int, float] | None = None,
  ):
    """Opens workdir/checkpoints; damaged ones must have been set aside before.

    Args:
      workdir: the run's work directory; the caller holds its lock.
      keep: number of newest checkpoints to keep.
      keep_best: number of checkpoints with the highest scores to keep as well.
      scores: the scores known so far, by step.
    """
    restore.quiet_orbax()
    self.directory = workdir / restore.DIRECTORY
    self.scores: dict[int, float] = dict(scores or {})
    if jax.process_index() == 0:
      # Left by a save that was killed.
      for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)
    processes.wait_for_all()
    kept = NewestAndBest(keep, keep_best, self.scores)
    self._manager = ocp.CheckpointManager(
      self.directory.absolute(),
      item_handlers={
        # Trained numbers compress by a tenth, at three times the time to save,
        # twice the time to read, and a second copy in memory.
        restore.STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
        restore.META: ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(preservation_policy=kept),
    )
    # JAX counts the queries for preemption, which only `preemption` may make.
    self._manager.reached_preemption = lambda step: False

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    # With several processes any other error ends this one immediately: a save
    # would wait for the others, which may be gone.
    ends = error is None or isinstance(error, OSError)
    if ends or jax.process_count() == 1:
      self.close()

  def steps(self) -> list[int]:
    """Steps with a checkpoint, damaged or not, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Starts saving in the background; an existing step is not overwritten.

    Raises:
      OSError: there is not enough disk space.
      UserError: this save or the previous one cannot be written.
      processes.ProcessLostError: the same, in a run with several processes.
    """
    if step in self.steps():
      return
    self._check_room(state)
    content = {**meta, "arrays": integrity.record(state)}
    saved = self._writing(
      lambda: self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeSave(state),
          meta=ocp.args.JsonSave(
            {"content": content, "sha256": integrity.digest(content)}
          ),
        ),
      )
    )
    assert saved, f"step {step} is older than {self.steps()}"

  def wait(self) -> None:
    """Waits for pending saves; raises UserError if one failed."""
    self._writing(self._manager.wait_until_finished)

  def close(self) -> None:
    """Waits for pending saves and closes the directory."""
    try:
      self.wait()
    finally:
      self._manager.close()  # Waits again if Ctrl-C ended the wait.

  def _check_room(self, state: Any) -> None:
    """Checks disk space first: Orbax's own error is hundreds of lines long."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self.directory).free
    if free < needed:
      reason = (
        f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {needed >> 10} KiB,"
        f" {free >> 10} KiB are free; existing checkpoints are intact"
      )
      raise OSError(errno.ENOSPC, reason, str(self.directory))

  def _writing(self, function: Callable[[], Any]) -> Any:
    try:
      return function()
    except (OSError, ValueError, RuntimeError) as error:
      line = (
        f"{self.directory}: cannot write a checkpoint: {one_line(error)};"
        " existing checkpoints are intact"
      )
      # Saving is where processes wait for each other.
      if jax.process_count() > 1 and not isinstance(error, OSError):
        raise processes.ProcessLostError(line) from error
      raise UserError(line) from error


class NewestAndBest:
  """Keeps the newest checkpoints and those with the best scores.

  Orbax calls `should_preserve`. Its own policies could delete the newest.
  """

  def __init__(self, newest: int, best: int, scores: Mapping[int, float]):
    self._newest, self._best, self._scores = newest, best, scores

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Whether to keep each checkpoint, oldest first."""
    del context
    steps = [checkpoint.step for checkpoint in checkpoints]
    scored = [step for step in steps if step in self._scores]
    scored.sort(key=lambda step: self._scores[step], reverse=True)
    kept = {*sorted(steps)[-self._newest :], *scored[: self._best]}
    return [step in kept for step in steps]
