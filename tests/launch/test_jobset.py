"""Kubernetes: the YAML, and that a run accepts it."""

import runpy

import jax
import pytest
import yaml
from launch_support import FINAL, KUBERNETES, LAUNCH, RUN, SWEEP
from tests_support import ROOT

from loopjax.run import processes


def job_set(**environment):
  environment = {**KUBERNETES, **environment}
  namespace = runpy.run_path(str(LAUNCH / "jobset.py"))
  return namespace["job_set"](RUN, environment)


def pods(job):
  (container,) = job["template"]["spec"]["containers"]
  return job["template"]["spec"], container


def test_a_job_set_of_gpu_hosts(world):
  done = world.start(
    LAUNCH / "jobset.py", RUN, DRY_RUN="1", HOSTS="4", GPUS="2", **KUBERNETES
  )
  manifest = yaml.safe_load(done.stdout)
  assert manifest == job_set(HOSTS="4", GPUS="2")
  assert world.calls == []
  assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
  assert manifest["kind"] == "JobSet"
  assert manifest["spec"]["network"]["enableDNSHostnames"]
  policy = manifest["spec"]["failurePolicy"]
  assert policy["maxRestarts"] == 100
  (rule,) = policy["rules"]
  assert rule["action"] == "FailJobSet"
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  (workers,) = manifest["spec"]["replicatedJobs"]
  job = workers["template"]["spec"]
  assert job["completionMode"] == "Indexed"
  assert job["completions"] == job["parallelism"] == 4
  assert job["backoffLimit"] == 0
  (rule,) = job["podFailurePolicy"]["rules"]
  spec, container = pods(job)
  assert rule["action"] == "FailJob"
  assert rule["onExitCodes"] == {
    "containerName": container["name"],
    "operator": "In",
    "values": FINAL,
  }
  assert spec["terminationGracePeriodSeconds"] == 120
  assert spec["restartPolicy"] == "Never"  # Required by podFailurePolicy.
  assert container["command"] == ["python", "-m", "loopjax.main"]
  assert container["args"] == RUN
  assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
  assert {v["name"] for v in spec["volumes"]} == {
    m["name"] for m in container["volumeMounts"]
  }
  mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
  assert mounts == {"shared": "/shared", "memory": "/dev/shm"}
  assert f"--workdir={mounts['shared']}/run" in container["args"]


def test_a_run_understands_what_the_job_set_says(monkeypatch):
  manifest = job_set(HOSTS="4")
  _, container = pods(manifest["spec"]["replicatedJobs"][0]["template"]["spec"])
  for variable in container["env"]:
    monkeypatch.setenv(variable["name"], variable["value"])
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
  told = {}
  monkeypatch.setattr(jax.distributed, "initialize", lambda **x: told.update(x))
  processes.start()
  # JobSet names pods JOBSET-REPLICATEDJOB-JOB-POD.JOBSET.
  assert told["coordinator_address"] == "run1-workers-0-0.run1:8476"
  assert (told["num_processes"], told["process_id"]) == (4, 2)


def test_an_item_of_a_sweep_runs_alone_whatever_its_index(monkeypatch):
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
  monkeypatch.setattr(jax.distributed, "initialize", pytest.fail)
  assert processes.start() is None


def test_a_job_set_of_a_tpu_slice():
  manifest = job_set(
    TPU="tpu-v5-lite-podslice", TOPOLOGY="4x8", NODES="a/b=c,d=e"
  )
  (annotation,) = manifest["metadata"]["annotations"].items()
  assert annotation[1] == "cloud.google.com/gke-nodepool"
  job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
  spec, container = pods(job)
  assert job["completions"] == job["parallelism"] == 4 * 8 // 4
  assert container["args"] == [*RUN, "--distributed"]
  assert container["env"] == []
  assert container["resources"]["limits"] == {"google.com/tpu": 4}
  assert container["securityContext"] == {"privileged": True}
  assert spec["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "4x8",
    "a/b": "c",
    "d": "e",
  }


def test_one_host_needs_no_others():
  for environment in ({}, {"TPU": "v", "TOPOLOGY": "2x2"}):
    manifest = job_set(**environment)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    _, container = pods(job)
    assert job["completions"] == 1
    assert (container["args"], container["env"]) == (RUN, [])


@pytest.mark.long
def test_a_sweep_is_an_indexed_job(world):
  done = world.start(
    LAUNCH / "jobset.py",
    SWEEP,
    DRY_RUN="1",
    GPUS="1",
    PARALLEL="2",
    PYTHONPATH=str(ROOT),
    **KUBERNETES,
  )
  assert done.returncode == 0, done.stderr
  manifest = yaml.safe_load(done.stdout)
  assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
  job = manifest["spec"]
  assert job["completionMode"] == "Indexed"
  assert (job["completions"], job["parallelism"]) == (3, 2)
  assert "backoffLimit" not in job
  ended, disrupted = job["podFailurePolicy"]["rules"]
  assert ended["action"] == "FailIndex"
  assert ended["onExitCodes"]["values"] == FINAL
  assert disrupted["action"] == "Ignore"
  spec, container = pods(job)
  assert container["command"] == ["python", "-m", "loopjax.sweep"]
  assert container["args"] == [*SWEEP, "--item=$(JOB_COMPLETION_INDEX)"]
  assert spec["terminationGracePeriodSeconds"] == 120


def test_what_is_given_to_kubectl(world):
  world.answer("kubectl", "3 refused")
  done = world.start(LAUNCH / "jobset.py", RUN, **KUBERNETES)
  assert world.calls == ["kubectl create -f -"]
  assert (done.returncode, done.stderr) == (3, "refused\n")
