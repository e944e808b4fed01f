"""Traces, memory and utilisation."""

import jax
import jax.numpy as jnp
import pytest
from tests_support import smoke

from loopjax import train
from loopjax.run import profiling
from loopjax.run import workdir as workdir_lib


@pytest.mark.manual
def test_a_trace_of_some_steps(tmp_path):
  """Whole calls are traced; the run itself is not changed."""
  traced, plain = tmp_path / "traced", tmp_path / "plain"
  options = {"eval__depth_factor": 0}
  done = train.run(smoke(run__profile_steps="7:12", **options), traced, "train")
  other = train.run(smoke(**options), plain, "train")
  (trace,) = (traced / "profile").rglob("*.xplane.pb")
  data = jax.profiler.ProfileData.from_file(str(trace))
  steps = {
    value
    for plane in data.planes
    for line in plane.lines
    for event in line.events
    for name, value in event.stats
    if name == "step_num" and event.name == "train"
  }
  assert steps == {5, 10}
  assert done["digest"] == other["digest"]
  assert not (plain / "profile").exists()


@pytest.mark.long
def test_a_summary_says_what_the_step_costs(tmp_path):
  done = train.run(smoke(), tmp_path, "train")
  assert done["compile_seconds"] > 0
  memory = done["memory_bytes"]
  state = 4 * 3 * done["parameters"]  # Parameters, two moments; and the EMA.
  assert state < memory["arguments"] < 2 * state
  assert memory["temporaries"] > 0
  row = workdir_lib.read_metrics(tmp_path)[-1]
  assert row["model_flops_per_second"] > 0
  assert "model_flops_utilization" not in row  # A CPU's peak is unknown.


def test_memory_of_a_program_known_by_hand():
  compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile()
  memory = profiling.memory(compiled)
  assert memory["arguments"] == memory["outputs"] == 4 * 64 * 64


@pytest.mark.parametrize(
  ("kind", "flops"),
  [
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA GB200", 2500e12),
    ("cpu", None),
  ],
)
def test_peaks(kind, flops):
  assert profiling.peak_flops(kind) == flops


def test_utilisation_is_three_forward_passes_over_the_peak(monkeypatch):
  monkeypatch.setattr(profiling, "peak_flops", lambda kind: 100.0)
  monkeypatch.setattr(jax, "device_count", lambda: 2)
  flops = profiling.training_flops({"flops_per_example": [3.0, 5.0]})
  rates = profiling.rates(flops, examples_per_second=4.0)
  assert rates["model_flops_per_second"] == 60.0
  assert rates["model_flops_utilization"] == pytest.approx(0.3)
