"""Cloud TPU scripts: dry runs, and runs with stand-ins."""

import shlex

import pytest
from launch_support import AGAIN, LAUNCH, RUN, TPU, dry

POD = {**TPU, "TYPE": "v5litepod-64"}
ABSENT = "1 ERROR: (gcloud.describe) NOT_FOUND: Resource 't' was not found"


def test_a_dry_run_on_a_tpu_vm(world):
  arguments = [*RUN[:1], "--workdir=/a b/it's"]
  archive, copy, install, run = dry(
    world, LAUNCH / "tpu_vm.sh", arguments, SETUP="mount /a", PROJECT="p", **TPU
  )
  assert archive[:2] == ["git", "archive"]
  assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
  for words in (copy, install, run):
    assert {"--worker=all", "--zone=z", "--project=p"} <= set(words)
  assert install[-1].startswith("--command={ mount /a; } && mkdir")
  assert install[-1].endswith("loopjax-abc1234/launch/tpu_host.sh install")
  remote = shlex.split(run[-1].removeprefix("--command="))
  assert remote[0] == "loopjax-abc1234/launch/tpu_host.sh"
  assert remote[1:] == ["run", "ATTEMPT", *arguments]


@pytest.mark.parametrize(
  ("kind", "runtime"),
  [
    ("v4-32", "tpu-ubuntu2204-base"),
    ("v5litepod-64", "v2-alpha-tpuv5-lite"),
    ("v5p-32", "v2-alpha-tpuv5"),
    ("v6e-64", "v2-alpha-tpuv6e"),
  ],
)
def test_a_dry_run_on_a_pod(world, kind, runtime):
  options = {**TPU, "TYPE": kind, "SPOT": "1", "DELETE": "1"}
  create, _, *work, delete = dry(world, LAUNCH / "tpu_pod.sh", RUN, **options)
  assert create[3:6] == ["queued-resources", "create", "t"]
  assert {
    "--node-id=t",
    f"--accelerator-type={kind}",
    f"--runtime-version={runtime}",
    "--spot",
  } <= set(create)
  assert len(work) == 4
  assert delete[3:6] == ["queued-resources", "delete", "t"]
  options |= {"SPOT": "0", "DELETE": "0", "RUNTIME": "mine"}
  create, *rest = dry(world, LAUNCH / "tpu_pod.sh", RUN, **options)
  assert "--spot" not in create
  assert "--runtime-version=mine" in create
  assert "delete" not in rest[-1]


@pytest.mark.parametrize(("status", "again"), [*AGAIN.items(), (255, 1)])
def test_a_tpu_vm_starts_again_only_if_that_helps(world, status, again):
  world.answer("machine", *["0 READY"] * 3)
  world.answer("run", status, "0")
  done = world.start(LAUNCH / "tpu_vm.sh", RUN, **TPU)
  assert done.returncode == (0 if again else status)
  assert world.count("tpu_host.sh run") == 1 + again
  assert world.count("--distributed") == 0  # The host's script adds it.


@pytest.mark.parametrize(
  ("ends", "status"), [("5 1 134", 1), ("5 2 5", 2), ("5 137 5", 0)]
)
def test_a_crash_of_one_host_does_not_start_all_again(world, ends, status):
  """gcloud returns the first host's status; here that it lost another."""
  world.answer("machine", *["0 READY"] * 3)
  world.answer("run", 5, 0)
  (world.directory / "answers" / "status").write_text(
    "0 Connecting to host 0\n"
  )
  text = (world.directory / "gcloud").read_text()
  hosts = "".join(f"echo {end}; " for end in ends.split())
  (world.directory / "gcloud").write_text(
    text.replace("me=status ;;", f"me=status; {hosts};;")
  )
  done = world.start(LAUNCH / "tpu_vm.sh", RUN, **TPU)
  assert done.returncode == status, done.stderr
  assert world.count("tpu_host.sh run") == (1 if status else 2)


def test_a_tpu_run_is_not_started_for_ever(world):
  world.answer("machine", *["0 READY"] * 9)
  world.answer("run", *[4] * 9)
  done = world.start(LAUNCH / "tpu_vm.sh", RUN, MAX_RESTARTS="2", **TPU)
  assert done.returncode == 4
  assert world.count("tpu_host.sh run") == 3


def test_gcloud_that_fails_is_not_the_run_that_fails(world):
  # The machine disappears while gcloud polls, and returns.
  world.answer("machine", "0 READY", "1", "0 REPAIRING", "0 READY")
  world.answer("install", "1", "0")
  done = world.start(LAUNCH / "tpu_vm.sh", RUN, **TPU)
  assert done.returncode == 0, done.stderr
  assert world.count("tpu_host.sh run") == 1


@pytest.mark.parametrize("state", ["1", "0 PREEMPTED"])
def test_a_tpu_vm_that_is_not_there(world, state):
  world.answer("machine", state)
  done = world.start(LAUNCH / "tpu_vm.sh", RUN, **TPU)
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1
  assert world.count("ssh") == 0


def test_a_pod_is_asked_for_and_waited_for(world):
  waiting = ["0 WAITING_FOR_RESOURCES", "0 PROVISIONING", "0 ACTIVE"]
  world.answer("request", ABSENT, *waiting)
  world.answer("machine", "0 READY")
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, DELETE="1", **POD)
  assert done.returncode == 0, done.stderr
  order = ["create", "describe", "scp", "install", "tpu_host.sh run", "delete"]
  places = [
    next(i for i, call in enumerate(world.calls) if words in call)
    for words in order
    if words != "describe"
  ]
  assert places == sorted(places)
  assert world.count("queued-resources create") == 1
  assert world.count("queued-resources describe") == 4


def test_a_pod_that_was_preempted_is_asked_for_again(world):
  # Ready; then its machine is lost, and the request is deleted and recreated.
  world.answer("request", *["0 ACTIVE"] * 2, "0 DELETING", ABSENT, "0 ACTIVE")
  world.answer("machine", "0 READY", "0 PREEMPTED", "0 READY")
  world.answer("run", "255", "0")
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, **POD)
  assert done.returncode == 0, done.stderr
  assert world.count("queued-resources delete") == 1
  assert world.count("queued-resources create") == 1
  assert world.count("tpu_host.sh install") == 2
  assert world.count("tpu_host.sh run") == 2


def test_a_pod_that_cannot_be_made_stops_the_script(world):
  world.answer("request", ABSENT)
  world.answer("gcloud", "1 no quota")
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, **POD)
  assert done.returncode == 1
  assert "no quota" in done.stderr
  assert len(world.calls) == 2


def test_gcloud_that_cannot_be_asked_is_no_pod_that_is_absent(world):
  denied = "(gcloud.describe) PERMISSION_DENIED: for t"
  world.answer("request", f"1 ERROR: {denied}")
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, **POD)
  assert done.returncode == 2
  assert done.stderr == f"error: gcloud cannot describe t: {denied}\n"
  assert len(world.calls) == 1


def test_a_pod_is_waited_for_while_gcloud_cannot_be_asked(world):
  # The connection is lost during the run, and returns.
  world.answer("request", "0 ACTIVE", "1 ERROR: no network", "0 ACTIVE")
  world.answer("machine", *["0 READY"] * 2)
  world.answer("run", "255", "0")
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, **POD)
  assert done.returncode == 0, done.stderr
  assert world.count("queued-resources create") == 0
  assert world.count("tpu_host.sh run") == 2


@pytest.mark.parametrize("status", [2, 3])
def test_a_pod_is_deleted_however_the_run_ended(world, status):
  world.answer("request", "0 ACTIVE")
  world.answer("machine", "0 READY")
  world.answer("run", status)
  done = world.start(LAUNCH / "tpu_pod.sh", RUN, DELETE="1", **POD)
  assert done.returncode == status
  assert world.count("queued-resources delete t --zone=z --force --quiet") == 1
