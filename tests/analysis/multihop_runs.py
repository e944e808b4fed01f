"""Runs of seconds, and the command's results for them."""

import json

from tests_support import load_config

from loopjax.analysis.multihop import __main__ as command

PICTURES = {
  "stages", "lens", "cosines", "intervention_loop1", "patching", "role_exposure"
}  # fmt: skip


def config_of(family, *arguments):
  """The smoke config of a family, with section.key=value arguments."""
  arg = ",".join(["smoke", f"model.name={family}", *arguments])
  return load_config("multihop_disco", arg)


def analyse(workdir, *flags):
  """(exit status, rows of analysis.jsonl, names of pictures)."""
  status = command.main([str(workdir), *flags])
  output = workdir / "analysis"
  lines = (output / "analysis.jsonl").read_text().splitlines()
  names = {path.stem for path in output.glob("*.png")}
  return status, [json.loads(line) for line in lines], names
