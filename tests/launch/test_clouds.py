"""SkyPilot and xpk: their arguments, and that a run accepts them."""

import shlex
import subprocess

import jax
import pytest
import yaml
from launch_support import CODES, LAUNCH, RUN, dry

from loopjax import main as main_lib
from loopjax.run import processes

XPK = {"NAME": "run1", "CLUSTER": "tpus", "TYPE": "v6e-64", "IMAGE": "i:tpu"}


def test_a_dry_run_with_xpk(world):
  arguments = [*RUN[:1], "--workdir=/a b/it's"]
  options = {"STORAGE": "runs", "ZONE": "z", "SLICES": "2", **XPK}
  (words,) = dry(world, LAUNCH / "xpk.sh", arguments, **options)
  assert words[:3] == ["xpk", "workload", "create"]
  assert {
    "--workload=run1",
    "--cluster=tpus",
    "--tpu-type=v6e-64",
    "--num-slices=2",
    "--docker-image=i:tpu",
    "--storage=runs",
    "--zone=z",
    "--max-restarts=100",
    f"--restart-on-exit-codes={','.join(map(str, CODES))}",
  } <= set(words)
  command = shlex.split(words[-1].removeprefix("--command="))
  program = ["python", "-m", "loopjax.main", "--distributed"]
  assert command == [*program, *arguments]


def test_xpk_is_given_only_what_is_set(world):
  done = world.start(LAUNCH / "xpk.sh", RUN, **XPK)
  assert done.returncode == 0, done.stderr
  (call,) = world.calls
  assert call.startswith("xpk workload create --workload=run1")
  for flag in ("--storage", "--zone", "--project"):
    assert flag not in call


@pytest.mark.parametrize("missing", XPK)
def test_what_xpk_needs_is_asked_for(world, missing):
  options = {key: value for key, value in XPK.items() if key != missing}
  done = world.start(LAUNCH / "xpk.sh", RUN, **options)
  assert (done.returncode, world.calls) == (2, [])
  assert done.stderr.startswith(f"error: {missing} is missing")


def test_a_node_of_skypilot_joins_the_others(tmp_path, monkeypatch):
  """The script of the YAML, with a stand-in for Python."""
  task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
  assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == CODES
  assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 0
  assert task["envs"] == {"FLAGS": None, "SETUP": None}
  # SkyPilot has volumes on Kubernetes and RunPod alone; any cloud can mount.
  assert "volumes" not in task
  assert 'eval "$SETUP"\n' in task["setup"]
  python = tmp_path / ".venv" / "bin" / "python"
  python.parent.mkdir(parents=True)
  python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
  python.chmod(0o755)
  arguments = [*RUN[:1], "--workdir=/a b/it's"]
  done = subprocess.run(
    ["bash", "-c", task["run"]],
    cwd=tmp_path,
    env={
      "PATH": "/usr/bin:/bin",
      "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
      "SKYPILOT_NUM_NODES": "2",
      "SKYPILOT_NODE_RANK": "1",
      "FLAGS": shlex.join(arguments),
    },
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  words = done.stdout.splitlines()
  assert words[:3] == ["-u", "-m", "loopjax.main"]
  assert words[-2:] == arguments
  told = {}
  monkeypatch.setattr(jax.distributed, "initialize", lambda **x: told.update(x))
  options = main_lib.parser().parse_config(words[3:-2])
  processes.start(
    options.distributed,
    options.coordinator_address,
    options.num_processes,
    options.process_id,
  )
  assert told["coordinator_address"] == "10.0.0.1:8476"
  assert (told["num_processes"], told["process_id"]) == (2, 1)


def test_the_scripts_of_the_task_are_bash():
  task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
  for script in (task["setup"], task["run"]):
    subprocess.run(["bash", "-n", "-c", script], check=True)
