"""Checkpoints of the whole train state, by Orbax."""

import logging
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from loopjax.errors import UserError

_STATE, _META = "state", "meta"


class Checkpoints:
  """Asynchronous, atomic checkpoints in a directory, the newest few kept.

  A checkpoint holds the train state and "meta": the number of batches that
  were consumed, which is all that the data iterator needs.
  """

  def __init__(self, directory: pathlib.Path, keep: int):
    # Orbax reports every step of every save.
    logging.getLogger("absl").setLevel(logging.ERROR)
    self.directory = directory
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      item_names=(_STATE, _META),
      options=ocp.CheckpointManagerOptions(
        preservation_policy=preservation_policy.LatestN(keep)
      ),
    )

  def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
    """Starts saving in the background."""
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
      ),
    )

  def steps(self) -> list[int]:
    """Steps with a checkpoint, oldest first."""
    return sorted(self._manager.all_steps())

  def restore(
    self, abstract_state: Any, step: int = -1
  ) -> tuple[Any, dict[str, Any]]:
    """Reads a checkpoint.

    Args:
      abstract_state: shapes, dtypes and target shardings.
      step: which; -1 for the newest.

    Raises:
      UserError: there is no such checkpoint, or it does not fit.
    """
    steps = self.steps()
    wanted = steps[-1] if step == -1 and steps else step
    if wanted not in steps:
      raise UserError(
        f"{self.directory}: no checkpoint of step {wanted}; there are"
        f" {steps or 'none'}"
      )
    try:
      restored = self._manager.restore(
        wanted,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract_state),
          meta=ocp.args.JsonRestore(),
        ),
      )
    except (ValueError, KeyError, FileNotFoundError, TypeError) as error:
      reason = " ".join(str(error).split())[:300]
      raise UserError(
        f"{self.directory / str(wanted)}: cannot be restored: {reason}"
      ) from error
    return restored[_STATE], restored[_META]

  def close(self) -> None:
    """Waits for saves under way."""
    self._manager.wait_until_finished()
    self._manager.close()
