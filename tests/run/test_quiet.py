"""Log output while checkpoints are saved and restored."""

import logging

import jax
import jax.numpy as jnp
from absl import logging as absl_logging

from loopjax.run.checkpoints import checkpoint, restore


def test_orbax_is_silent_and_others_are_heard(tmp_path, caplog):
  before = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.INFO)
  caplog.set_level(logging.INFO)
  try:
    absl_logging.info("somebody else, before")
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(3)}, {})
    checkpoints.close()
    restore.state(tmp_path, 1, {"x": jax.ShapeDtypeStruct((3,), jnp.float32)})
    absl_logging.info("somebody else, after")
  finally:
    absl_logging.set_verbosity(before)
  heard = [r.getMessage() for r in caplog.records if r.name == "absl"]
  assert heard == ["somebody else, before", "somebody else, after"]


def test_an_event_loop_of_orbax_is_silent(caplog):
  restore.quiet_orbax()
  log = logging.getLogger("asyncio")
  log.error("Task was destroyed but it is pending: <coro=read() of orbax/a.py>")
  log.error("Task was destroyed but it is pending: <coro=mine() of mine.py>")
  assert ["mine.py" in line for line in caplog.messages] == [True]
