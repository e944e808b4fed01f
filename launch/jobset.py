#!/usr/bin/env python
# Not run on a cluster yet; its YAML has what the schema of JobSet 0.12 knows.
r"""Trains on Kubernetes: a run on several hosts, or a sweep.

  NAME=run1 IMAGE=example.com/loopjax CLAIM=shared HOSTS=4 GPUS=8 \
    launch/jobset.py --config=configs/sudoku_utm.py:paper --workdir=/shared/run1

A run becomes a JobSet (https://jobset.sigs.k8s.io, 0.6 or newer): when a host
is lost or preempted, all restart and resume. With --sweep=NAME it is an indexed
Job, one item per index (Kubernetes 1.31 or newer). Crashes, user errors and
diverged runs are not retried.

  NAME, IMAGE     of the run; of the image, see launch/Dockerfile
  CLAIM, MOUNT    claim of a shared volume, and its mount path (/shared);
                  --workdir must be in it
  HOSTS, GPUS     1; 8, per host
  TPU, TOPOLOGY   instead: accelerator and topology of a GKE slice, such as
                  tpu-v5-lite-podslice and 4x8
  CHIPS           4, per TPU host
  NODES           labels of the nodes, "key=value,key=value"
  PARALLEL        8, items of a sweep at the same time
  MAX_RESTARTS    100
  DRY_RUN=1       print the YAML, do nothing
"""

import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
PORT = 8476  # Process 0's, for the others.
GRACE_SECONDS = 120  # Time to save after SIGTERM.
# A crash, a mistake, a run that diverged; and a container that cannot start.
FINAL = (1, 2, 3, 126, 127, 128)

# A slice's node pool runs exactly the slice's pods.
PLACEMENT = "alpha.jobset.sigs.k8s.io/exclusive-topology"
POOL = "cloud.google.com/gke-nodepool"


class UserError(ValueError):
  """A mistake by the user: one line and exit status 2."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
  """Creates or prints the resources that arguments and environment describe."""
  sweep = any(argument.startswith("--sweep=") for argument in arguments)
  check(arguments, environment)
  if sweep:
    count = number_of_items(arguments)
    manifest = sweep_job(arguments, environment, count)
  else:
    manifest = job_set(arguments, environment)
  text = yaml.safe_dump(manifest, sort_keys=False)
  if environment.get("DRY_RUN") == "1":
    print(text, end="")
    return 0
  command = ["kubectl", "create", "-f", "-"]
  return subprocess.run(command, input=text, text=True, check=False).returncode


def check(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
  """Raises UserError for missing or contradictory settings."""
  for name in ("NAME", "IMAGE", "CLAIM"):
    if not environment.get(name):
      raise UserError(f"{name} is missing; launch/jobset.py says what it is")
  # Pod names add a suffix and are limited to 63 characters.
  if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", environment["NAME"]):
    name = environment["NAME"]
    message = "is not a lower-case name of 1 to 40 characters"
    raise UserError(f"NAME={name} {message}")
  values = {}
  for argument in arguments:
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--"):
      raise UserError(f"{argument} is not a flag; flags begin with --")
    values[flag] = value if equals else ""
  for flag in ("--config", "--workdir"):
    if not values.get(flag):
      raise UserError(f"{flag}=... is missing")
  mount = pathlib.PurePosixPath(environment.get("MOUNT", "/shared"))
  if not pathlib.PurePosixPath(values["--workdir"]).is_relative_to(mount):
    raise UserError(f"--workdir={values['--workdir']} is not in {mount}")
  if "TPU" in environment:
    for name in ("HOSTS", "GPUS"):
      if name in environment:
        raise UserError(f"{name} has no effect with TPU")
  if "--sweep" in values and hosts(environment) > 1:
    raise UserError("an item of a sweep runs on one host")


def hosts(environment: Mapping[str, str]) -> int:
  """Number of hosts of a run."""
  if "TPU" not in environment:
    return number(environment, "HOSTS", 1)
  topology = environment.get("TOPOLOGY", "")
  if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
    raise UserError(f"TOPOLOGY={topology} is none such as 4x8 or 2x2x4")
  chips = math.prod(int(size) for size in topology.split("x"))
  per_host = number(environment, "CHIPS", 4)
  if chips % per_host:
    raise UserError(f"CHIPS={per_host} does not divide {topology}={chips}")
  return chips // per_host


def number(environment: Mapping[str, str], name: str, default: int) -> int:
  """A variable's value, a whole number of at least 1."""
  text = environment.get(name, str(default))
  if not re.fullmatch(r"[1-9]\d*", text):
    raise UserError(f"{name}={text} is not a whole number of at least 1")
  return int(text)


def number_of_items(arguments: Sequence[str]) -> int:
  """Number of items of a sweep; its messages go to stderr."""
  command = [sys.executable, "-m", "loopjax.sweep", *arguments, "--count"]
  done = subprocess.run(
    command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
  )
  if done.returncode:
    sys.exit(done.returncode)
  return int(done.stdout)


def job_set(
  arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
  """A run as a JobSet of one Job, with one pod per host."""
  name, count = environment["NAME"], hosts(environment)
  flags, variables = list(arguments), {}
  if count > 1 and "TPU" in environment:
    flags.append("--distributed")  # GKE tells JAX about the slice.
  elif count > 1:
    variables = {
      "JAX_COORDINATOR_ADDRESS": f"{name}-workers-0-0.{name}:{PORT}",
      "JAX_NUM_PROCESSES": str(count),  # JOB_COMPLETION_INDEX is its id.
    }
  job = {
    "completionMode": "Indexed",
    "completions": count,
    "parallelism": count,
    "backoffLimit": 0,  # One lost pod ends the Job; the JobSet starts it again.
    "podFailurePolicy": {"rules": [on_exit("FailJob", *FINAL)]},
    "template": pod("loopjax.main", flags, variables, environment),
  }
  return {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {
      "name": name,
      **({"annotations": {PLACEMENT: POOL}} if "TPU" in environment else {}),
    },
    "spec": {
      "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
      "failurePolicy": {
        "maxRestarts": number(environment, "MAX_RESTARTS", 100),
        "rules": [
          {
            "name": "final",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
          }
        ],
      },
      "replicatedJobs": [
        {"name": "workers", "replicas": 1, "template": {"spec": job}}
      ],
    },
  }


def sweep_job(
  arguments: Sequence[str], environment: Mapping[str, str], count: int
) -> dict[str, Any]:
  """A sweep as an indexed Job, with one pod per item."""
  flags = [*arguments, "--item=$(JOB_COMPLETION_INDEX)"]
  ended = on_exit("FailIndex", *FINAL)
  disruption = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
  }
  return {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": environment["NAME"]},
    "spec": {
      "completionMode": "Indexed",
      "completions": count,
      "parallelism": min(count, number(environment, "PARALLEL", 8)),
      "backoffLimitPerIndex": number(environment, "MAX_RESTARTS", 100),
      "podFailurePolicy": {"rules": [ended, disruption]},
      "template": pod("loopjax.sweep", flags, {}, environment),
    },
  }


def on_exit(action: str, *statuses: int) -> dict[str, Any]:
  """A rule of podFailurePolicy for these exit statuses."""
  return {
    "action": action,
    "onExitCodes": {
      "containerName": "loopjax",
      "operator": "In",
      "values": list(statuses),
    },
  }


def pod(
  module: str,
  flags: Sequence[str],
  variables: Mapping[str, str],
  environment: Mapping[str, str],
) -> dict[str, Any]:
  """The template of the pods of a Job."""
  selector = dict(
    label.split("=", 1)
    for label in environment.get("NODES", "").split(",")
    if "=" in label
  )
  if "TPU" in environment:
    selector["cloud.google.com/gke-tpu-accelerator"] = environment["TPU"]
    selector["cloud.google.com/gke-tpu-topology"] = environment["TOPOLOGY"]
    devices = {"google.com/tpu": number(environment, "CHIPS", 4)}
    # The driver locks memory. The chips belong to root, the image's user.
    security = {"privileged": True}
  else:
    devices = {"nvidia.com/gpu": number(environment, "GPUS", 8)}
    security = {"allowPrivilegeEscalation": False}
  container = {
    "name": "loopjax",
    "image": environment["IMAGE"],
    "command": ["python", "-m", module],
    "args": list(flags),
    "env": [{"name": k, "value": v} for k, v in variables.items()],
    "ports": [{"containerPort": PORT}],
    "resources": {"limits": devices},
    "securityContext": security,
    "volumeMounts": [
      {"name": "shared", "mountPath": environment.get("MOUNT", "/shared")},
      {"name": "memory", "mountPath": "/dev/shm"},
    ],
  }
  return {
    "spec": {
      "restartPolicy": "Never",  # The Job restarts, not the pod.
      "terminationGracePeriodSeconds": GRACE_SECONDS,
      "securityContext": {"fsGroup": 1000},  # The image's user may write.
      **({"nodeSelector": selector} if selector else {}),
      "containers": [container],
      "volumes": [
        {
          "name": "shared",
          "persistentVolumeClaim": {"claimName": environment["CLAIM"]},
        },
        # NCCL needs more than the default 64 MiB.
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
      ],
    },
  }


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:], os.environ))
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
