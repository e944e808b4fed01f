"""Properties of all launch scripts."""

import os
import re
import subprocess

import pytest
from launch_support import KUBERNETES, LAUNCH, RUN, SWEEP, TPU, dry
from tests_support import ROOT

from loopjax import main, sweep
from loopjax.errors import RESUMABLE, ExitStatus
from loopjax.sweep import __main__ as sweep_main

SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
SOURCED = ["common.sh", "tpu.sh"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_that_stops_at_mistakes(name):
  done = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True)
  assert done.returncode == 0, done.stderr
  text = (LAUNCH / name).read_text()
  assert bool(re.search("set -e?uo pipefail", text)) == (name not in SOURCED)
  assert os.access(LAUNCH / name, os.X_OK) == (name not in SOURCED)
  # Each parameter of an entry point is in its header, or in the header of the
  # script that it names.
  header = "".join(re.findall(r"^#.*\n", text, re.MULTILINE))
  if name not in (*SOURCED, "tpu_host.sh", "task.sh"):
    for variable in re.findall(r"\b([A-Z]+)=\$\{\1:-", text):
      assert variable in header


@pytest.mark.parametrize("path", sorted(LAUNCH.iterdir()), ids=lambda p: p.name)
def test_the_first_line_says_what_has_not_been_run(path):
  if path.name in (*SOURCED, "task.sh"):
    return
  first, *more = path.read_text().splitlines()
  if first.startswith("#!"):
    first = more[0]
  assert re.match("# Not (run on|built)", first), first


def test_the_page_has_every_exit_status():
  """The scripts' rules are compared with the statuses one by one elsewhere."""
  text = (ROOT / "docs" / "launching.md").read_text()
  stop, again = re.findall(r"^\| (0.*|4.*) \| (?:stop|restart)", text, re.M)
  for status in ExitStatus:
    line = again if status in RESUMABLE else stop
    assert re.search(rf"(?:^|, |; ){status.value} ", line), status


def test_the_image_for_tpus_runs_as_root():
  """xpk runs it as its own user, and the chips belong to root."""
  users, bases, stage = {}, {}, ""
  for line in (LAUNCH / "Dockerfile").read_text().splitlines():
    if match := re.match(r"FROM (\S+)(?: AS (\w+))?", line):
      base, stage = match.groups()
      users[stage], bases[stage] = users.get(base, "root"), base
    elif line.startswith("USER "):
      users[stage] = line.removeprefix("USER ")
  assert bases[None] == "$EXTRA"  # The last stage is the image.
  assert (users["tpu"], users["cuda"]) == ("root", "loopjax")
  assert users["cuda12"] == "loopjax"


MISTAKES = [
  ("tpu_vm.sh", {"ZONE": "z"}, RUN, "NAME is missing"),
  ("tpu_vm.sh", {"NAME": "t"}, RUN, "ZONE is missing"),
  ("tpu_vm.sh", TPU, RUN[:1], "--workdir=... is missing"),
  ("tpu_vm.sh", {**TPU, "MAX_RESTARTS": "x"}, RUN, "MAX_RESTARTS=x"),
  ("tpu_pod.sh", TPU, RUN, "TYPE is missing"),
  ("tpu_pod.sh", {**TPU, "TYPE": "v9-8"}, RUN, "RUNTIME is missing"),
  ("tpu_host.sh", {}, [], "install, run or status"),
  ("slurm.sh", {"NODES": "0"}, RUN, "NODES=0 is not a whole"),
  ("slurm.sh", {"GPUS": "two"}, RUN, "GPUS=two is not a whole"),
  ("slurm.sh", {}, [*RUN, "more"], "more is not a flag"),
  ("slurm.sh", {}, RUN[1:], "--config=... is missing"),
  ("slurm.sh", {}, [RUN[0], "--workdir=runs/x"], "not an absolute path"),
  ("slurm_sweep.sh", {}, RUN, "--sweep=... is missing"),
  ("slurm_sweep.sh", {"PARALLEL": "-1"}, SWEEP, "PARALLEL=-1"),
  ("jobset.py", {"NAME": "a", "IMAGE": "i"}, RUN, "CLAIM is missing"),
  ("jobset.py", {**KUBERNETES, "NAME": "A_b"}, RUN, "NAME=A_b"),
  ("jobset.py", KUBERNETES, [RUN[0], "--workdir=/tmp/x"], "not in /shared"),
  ("jobset.py", KUBERNETES, [RUN[0], "x"], "x is not a flag"),
  ("jobset.py", {**KUBERNETES, "HOSTS": "0"}, RUN, "HOSTS=0 is not a whole"),
  ("jobset.py", {**KUBERNETES, "HOSTS": "2"}, SWEEP, "on one host"),
  ("jobset.py", {**KUBERNETES, "TPU": "v5"}, RUN, "TOPOLOGY= is none"),
  (
    "jobset.py",
    {**KUBERNETES, "TPU": "v5", "TOPOLOGY": "3x3"},
    RUN,
    "CHIPS=4 does not divide 3x3=9",
  ),
  ("jobset.py", {**KUBERNETES, "TPU": "v5", "GPUS": "8"}, RUN, "no effect"),
]


@pytest.mark.parametrize(
  ("script", "environment", "arguments", "says"), MISTAKES
)
def test_mistakes_are_one_line(world, script, environment, arguments, says):
  done = world.start(LAUNCH / script, arguments, **environment)
  assert done.returncode == 2
  assert done.stderr.startswith("error: ")
  assert done.stderr.count("\n") == 1
  assert says in done.stderr
  assert world.calls == []


def given(text, module):
  """Flags of a module in a command line."""
  words = text.rpartition(f"-m {module.__name__} ")[2].split()
  return {word[2:].split("=")[0] for word in words if word.startswith("--")}


def there_are(module):
  known = module.parser()._option_string_actions
  return {flag.removeprefix("--") for flag in known}


def test_every_flag_that_a_script_gives_exists(world):
  host = re.findall(r".*-m loopjax.*", (LAUNCH / "tpu_host.sh").read_text())
  world.answer("python", "0 7")
  step = dry(world, LAUNCH / "slurm_sweep.sh", SWEEP)[-1]
  assert given(host[0], main) == {"distributed"} <= there_are(main)
  assert given(" ".join(RUN), main) == {"config", "workdir"} <= there_are(main)
  wanted = given(world.calls[0], sweep) | given(" ".join(step), sweep)
  assert wanted == {"config", "workdir", "sweep", "count", "item"}
  assert wanted <= there_are(sweep_main)


def test_a_cdpath_leads_no_script_elsewhere(world):
  (world.directory / "launch").mkdir()
  submit, *_ = dry(world, "launch/slurm.sh", RUN, CDPATH=str(world.directory))
  assert submit[-3:] == ["launch/slurm.sh", *RUN]
  for path in LAUNCH.glob("*.sh"):
    moves = re.findall(r".*\bcd \"\$\(dirname.*", path.read_text())
    assert all("CDPATH='' cd" in line for line in moves)
