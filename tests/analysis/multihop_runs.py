"""Runs of seconds, and the command's results for them."""

import json

import jax
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis.multihop import __main__ as command
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import checkpoint as checkpoint_lib

PICTURES = {
  "stages", "lens", "cosines", "intervention_loop1", "patching", "role_exposure"
}  # fmt: skip


def config_of(family, *arguments):
  """The smoke config of a family, with section.key=value arguments."""
  arg = ",".join(["smoke", f"model.name={family}", *arguments])
  return load_config("multihop_disco", arg)


def make_untrained(workdir, family, *arguments):
  """A run that has saved its first state and evaluated nothing."""
  config = config_of(family, *arguments)
  settings = config_lib.resolve(config)
  workdir.mkdir()
  workdir_lib.write_json(workdir / "config.json", config_lib.to_dict(config))
  program = program_lib.make_program(settings, jax.devices()[:1])
  checkpoints = checkpoint_lib.Checkpoints(workdir)
  checkpoints.save(0, program.init(jax.random.key(0)), {})
  checkpoints.close()


def analyse(workdir, *flags):
  """(exit status, rows of analysis.jsonl, names of pictures)."""
  status = command.main([str(workdir), *flags])
  output = workdir / "analysis"
  lines = (output / "analysis.jsonl").read_text().splitlines()
  names = {path.stem for path in output.glob("*.png")}
  return status, [json.loads(line) for line in lines], names
