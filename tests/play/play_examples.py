"""Runs with a saved first state, and the data embedded in a page."""

import json
import re

import jax

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import checkpoint as checkpoint_lib


def untrained(workdir, config):
  """A run with a saved first state."""
  workdir.mkdir()
  workdir_lib.write_json(workdir / "config.json", config_lib.to_dict(config))
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[:1])
  checkpoints = checkpoint_lib.Checkpoints(workdir)
  checkpoints.save(0, program.init(jax.random.key(0)), {})
  checkpoints.close()
  return workdir


def data_of(text):
  """The data embedded in a page."""
  return json.loads(re.search(r"const data = (.*);\n", text)[1])
