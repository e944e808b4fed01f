"""Stand-ins for the tools that the launch scripts call."""

import pathlib
import shlex
import subprocess
import sys

from tests_support import ROOT

from loopjax.errors import RESUMABLE, ExitStatus

LAUNCH = ROOT / "launch"
TOOLS = [
  "gcloud", "git", "sbatch", "srun", "scontrol", "kubectl", "xpk", "python",
]  # fmt: skip
# Records its arguments as one line; answers with the next line of its file of
# answers, an exit status and output, of an error on standard error. Without a
# line: 0 and no output.
STAND_IN = """#!/bin/bash
me=$(basename "$0")
words="$*"
echo "$me ${words//$'\\n'/ }" >>"$STANDINS/calls"
case "$me $words" in
  *queued-resources\\ describe*) me=request ;;
  *tpu-vm\\ describe*) me=machine ;;
  *tpu_host.sh\\ run*) me=run ;;
  *tpu_host.sh\\ install*) me=install ;;
  *tpu_host.sh\\ status*) me=status ;;
  git\\ rev-parse*) echo abc1234 ;;
esac
answers=$STANDINS/answers/$me
[[ -s $answers ]] || exit 0
read -r status said <"$answers"
sed -i 1d "$answers"
((status == 0)) || exec >&2
[[ -z $said ]] || echo "$said"
exit "$status"
"""
RUN = ["--config=configs/sudoku_utm.py:smoke", "--workdir=/shared/run"]
SWEEP = [*RUN, "--sweep=depth"]
TPU = {"NAME": "t", "ZONE": "z", "PAUSE": "0"}
KUBERNETES = {"NAME": "run1", "IMAGE": "i", "CLAIM": "c"}
# Whether to restart a run with an exit status: the package's own, those for a
# program that cannot start, and two signals.
AGAIN = {status.value: int(status in RESUMABLE) for status in ExitStatus}
AGAIN |= {126: 0, 127: 0, 128: 0, 134: 1, 137: 1}
# Of those below 128, the ones after which a run is over, and the others.
FINAL = [status for status, again in AGAIN.items() if status and not again]
CODES = [status for status, again in AGAIN.items() if again and status < 128]


class World:
  """Stand-ins for the tools, and a record of their calls."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    (directory / "answers").mkdir(parents=True)
    for tool in TOOLS:
      (directory / tool).write_text(STAND_IN)
      (directory / tool).chmod(0o755)

  def answer(self, what, *lines):
    text = "".join(f"{line}\n" for line in lines)
    (self.directory / "answers" / what).write_text(text)

  def start(self, script, arguments, **environment):
    command = [str(script), *arguments]
    if str(script).endswith(".py"):
      command = [sys.executable, *command]
    return subprocess.run(
      command,
      cwd=ROOT,
      env={
        "PATH": f"{self.directory}:/usr/bin:/bin",
        "STANDINS": str(self.directory),
        "TMPDIR": str(self.directory),
        "HOME": str(self.directory),
        **environment,
      },
      capture_output=True,
      text=True,
      timeout=60,
    )

  @property
  def calls(self):
    path = self.directory / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith("git ")]

  def count(self, words):
    return sum(words in call for call in self.calls)


def dry(world, script, arguments, **environment):
  """The output of a dry run as lists of words; it calls nothing."""
  done = world.start(script, arguments, DRY_RUN="1", **environment)
  assert done.returncode == 0, done.stderr
  assert not [call for call in world.calls if not call.startswith("python ")]
  assert not list(world.directory.glob("*.tar.gz"))
  lines = done.stdout.replace("&&\n", "&& ").splitlines()
  return [shlex.split(line, comments=True) for line in lines]
