"""SLURM scripts: submissions and requeues."""

import os
import re
import signal
import subprocess
import sys

import pytest
from launch_support import AGAIN, LAUNCH, RUN, SWEEP, dry
from tests_support import ROOT


def test_a_dry_run_on_slurm(world):
  submit, _, step = dry(
    world, LAUNCH / "slurm.sh", RUN, NODES="4", GPUS="8", CPUS="6"
  )
  assert submit == [
    "sbatch", "--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=8",
    "--cpus-per-task=6", "launch/slurm.sh", *RUN,
  ]  # fmt: skip
  # JAX takes one GPU per task; hiding the others would mislead it.
  assert not [word for word in submit + step if "per-task=1" in word]
  assert step[0] == "srun"
  assert step[-7:-5] == ["launch/task.sh", "FOLDER"]
  assert step[-5:] == ["python", "-m", "loopjax.main", *RUN]


def test_a_dry_run_of_a_sweep_on_slurm(world):
  world.answer("python", "0 7")
  submit, _, step = dry(
    world, LAUNCH / "slurm_sweep.sh", SWEEP, PARALLEL="3", GPUS="2"
  )
  assert world.calls == [f"python -m loopjax.sweep {' '.join(SWEEP)} --count"]
  assert "--array=0-6%3" in submit
  assert "--gpus-per-node=2" in submit
  assert submit[-4:] == ["launch/slurm_sweep.sh", *SWEEP]
  assert step[-4:] == [*SWEEP, "--item=INDEX"]


def test_a_sweep_that_there_is_not_is_not_submitted(world):
  world.answer("python", "2")
  done = world.start(LAUNCH / "slurm_sweep.sh", SWEEP)
  assert done.returncode == 2
  assert world.count("sbatch") == 0


@pytest.mark.parametrize("name", ["slurm.sh", "slurm_sweep.sh"])
def test_jobs_are_told_before_the_end_and_may_be_queued_again(name):
  options = re.findall(
    r"^#SBATCH (\S+)", (LAUNCH / name).read_text(), re.MULTILINE
  )
  assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(
    options
  )


def test_what_is_submitted(world):
  assert world.start(LAUNCH / "slurm.sh", RUN).returncode == 0
  world.answer("python", "0 7")
  assert world.start(LAUNCH / "slurm_sweep.sh", SWEEP).returncode == 0
  assert world.count("sbatch") == 2
  assert world.count("srun") == 0


@pytest.mark.parametrize(("status", "again"), AGAIN.items())
def test_a_slurm_job_is_queued_again_only_if_that_helps(
  world, tmp_path, status, again
):
  # SLURM runs a copy.
  copy = tmp_path / "slurm_script"
  copy.write_text((LAUNCH / "slurm.sh").read_text())
  copy.chmod(0o755)
  world.answer("srun", status)
  done = world.start(copy, RUN, SLURM_JOB_ID="7")
  assert done.returncode == status
  assert world.count("scontrol requeue 7") == again
  assert world.count(f"python -m loopjax.main {' '.join(RUN)}") == 1
  world.answer("srun", status)
  limits = {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}
  world.start(copy, RUN, SLURM_JOB_ID="7", **limits)
  assert world.count("scontrol requeue 7") == again  # No further requeue.


# After a crash of one task the others end with 5, or JAX aborts them; and srun
# returns the highest status.
@pytest.mark.parametrize(
  ("ends", "status", "again"),
  [
    ([0, 0, 0], 0, 0),
    ([134, 1, 5], 1, 0),
    ([5, 2, 5], 2, 0),
    ([4, 4, 4], 4, 1),
    ([5, 137, 5], 5, 1),
  ],
)
def test_a_crash_of_one_task_does_not_queue_all_again(
  world, tmp_path, ends, status, again
):
  copy = tmp_path / "slurm_script"
  copy.write_text((LAUNCH / "slurm.sh").read_text())
  copy.chmod(0o755)
  (world.directory / "srun").write_text(f"""#!/bin/bash
highest=0 number=0
for status in {" ".join(map(str, ends))}; do
  SLURM_PROCID=$number END=$status "${{@:3}}" || true
  number=$((number + 1)) highest=$((status > highest ? status : highest))
done
exit $highest
""")
  (world.directory / "python").write_text("#!/bin/bash\nexit $END\n")
  done = world.start(copy, RUN, SLURM_JOB_ID="7")
  assert done.returncode == status, done.stderr
  assert world.count("scontrol requeue 7") == again
  assert not list(ROOT.glob("loopjax-7.*"))


def test_a_task_that_is_told_to_stop_says_how_its_command_ended(tmp_path):
  """SLURM signals the script as well as the command."""
  command = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(4));"
    "print(flush=True); signal.pause()"
  )
  with subprocess.Popen(
    [LAUNCH / "task.sh", tmp_path, sys.executable, "-c", command],
    env={"PATH": "/usr/bin:/bin", "SLURM_PROCID": "3"},
    stdout=subprocess.PIPE,
    start_new_session=True,
  ) as process:
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 4
  assert (tmp_path / "3").read_text() == "4\n"


@pytest.mark.parametrize(("status", "again"), AGAIN.items())
def test_an_item_is_queued_again_alone(world, status, again):
  world.answer("srun", status)
  job = {
    "SLURM_JOB_ID": "9",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "2",
  }
  done = world.start(LAUNCH / "slurm_sweep.sh", SWEEP, **job)
  assert done.returncode == status
  assert world.count("--item=2") == 1
  assert world.count("scontrol requeue 7_2") == again == world.count("scontrol")
