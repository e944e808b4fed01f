"""`loopjax fit`: machines by name, measurements, and the command."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest
from tests_support import ROOT, refused, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.errors import UserError
from loopjax.fit import measure, topology

SMALL = {"model__norm": "rmsnorm", "model__halting": "fixed"}


@pytest.mark.parametrize(
  ("name", "kind", "sizes"),
  [
    ("v5e:16x16", "v5e", (16, 16)),
    ("v4:2x2x4", "v4", (2, 2, 4)),
    ("h200:8", "h200", (1, 8)),
    ("a100-40:2x8", "a100-40", (2, 8)),
    ("cpu:12", "cpu", (12,)),
  ],
)
def test_names(name, kind, sizes):
  assert topology.parse(name) == (name, kind, sizes)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("", "is not one of v4:AxBxC, v5e:AxB"),
    ("v9:2x2", "is not one of"),
    ("h200", "is not one of"),
    ("h200:0", "is not one of"),
    ("cpu:8x", "is not one of"),
    ("v5e:2x2x2", r"v5e takes 2 size\(s\)$"),
    ("v4:2x2", r"v4 takes 3 size\(s\)$"),
    ("cpu:2x4", r"cpu takes 1 size\(s\)$"),
    ("h200:1x2x3", r"h200 takes 1 size\(s\), or 2 for nodes x GPUs"),
  ],
)
def test_unknown_machines_are_one_line(name, message):
  with refused(message):
    topology.parse(name)


def test_processors_of_this_process():
  machine = topology.machine(topology.parse("cpu:4"), 0.5)
  assert list(machine.devices) == jax.devices("cpu")[:4]
  assert machine.memory == 2**29
  with pytest.raises(UserError, match="cpu:4 needs --memory_gib"):
    topology.machine(topology.parse("cpu:4"))
  with pytest.raises(UserError, match="cpu:9: this process has 8 device"):
    topology.machine(topology.parse("cpu:9"), 1.0)
  for amount in (float("nan"), float("inf"), -1.0, 1e-300, 1e300):
    with pytest.raises(UserError, match=r"--memory_gib=.* is not 0 or in"):
      topology.machine(topology.parse("cpu:4"), amount)


@pytest.mark.parametrize(
  ("name", "package"), [("v5e:2x2", "libtpu"), ("h100:8", "jax-cuda13-plugin")]
)
def test_a_missing_package_says_what_to_install(monkeypatch, name, package):
  monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
  with pytest.raises(UserError, match=package) as error:
    topology.machine(topology.parse(name))
  assert "pip install 'loopjax[fit]'" in str(error.value)


def test_what_xla_is_told_of_a_gpu():
  text = topology._target_config("h100", topology.GPUS["h100"])
  fields = dict(
    line.split(": ", 1) for line in text.split("\n") if ": " in line
  )
  fields = {key.strip(): value for key, value in fields.items()}
  assert fields["core_count"] == "132"
  assert fields["device_memory_size"] == "80000000000"
  assert fields["shared_memory_per_block_optin"] == str(227 * 1024)
  assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in text
  assert "feature_extension" not in topology._target_config(
    "a100", topology.GPUS["a100"]
  )


@pytest.mark.long
def test_sizes_of_the_arguments_on_a_chip():
  machine = topology.machine(topology.parse("cpu:8"), 1.0)
  config = smoke(
    mesh__fsdp=2, mesh__tensor=2, mesh__min_split_size=200, **SMALL
  )
  settings = config_lib.resolve(config)
  measured = measure.measure(settings, machine)
  program = program_lib.make_program(settings, jax.devices())
  state = program.init(jax.random.key(0))

  def on_first(tree):
    parts = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(tree)]
    return sum(part.nbytes for part in parts)

  assert measured.fits and not measured.refusal
  assert measured.mesh == {"data": 2, "fsdp": 2, "tensor": 2}
  assert measured.arguments == {
    "parameters": on_first(state.params),
    "EMA": on_first(state.ema),
    "optimizer": on_first(state.opt_state),
    # 5 steps of 4 boards of 16 cells, three arrays.
    "batch": 5 * 4 * 3 * 16 * 4,
  }
  whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
  assert measured.arguments["parameters"] < whole
  assert measured.needed == sum(measured.memory.values())
  used = sum(measured.arguments.values())
  assert used <= measured.memory["arguments"] < used + 200
  # Three forward passes of a quarter of the batch's 16 boards, as `costs` says.
  assert measured.flops == 16 / 8 * 3 * program.costs["flops_per_example"][-1]


def test_what_cannot_be_is_the_users_mistake():
  machine = topology.machine(topology.parse("cpu:3"), 1.0)
  with pytest.raises(UserError, match="run.batch_size=16"):
    measure.measure(config_lib.resolve(smoke()), machine)


@pytest.mark.parametrize(
  ("message", "needed"),
  [
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required"
      " for HLO temporaries (23.06G) exceeds available HBM (15.75G).",
      int(23.06 * 2**30) + 7,
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.5M"
      " of 15.75G hbm. Exceeded hbm capacity by 4.4G.",
      int(512.5 * 2**20),
    ),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", None),
    ("INTERNAL: (23.06G) HBM", None),
  ],
)
def test_what_a_tpus_compiler_says_it_needs(message, needed):
  assert measure.needed_bytes(message, 7) == needed


def test_messages_of_compilers_show_only_with_a_failure(capfd):
  with topology.quiet_stderr():
    os.write(2, b"noise")
  assert capfd.readouterr().err == ""
  with pytest.raises(UserError), topology.quiet_stderr():
    os.write(2, b"noise")
    raise UserError("a mistake")
  assert capfd.readouterr().err == ""
  with pytest.raises(RuntimeError), topology.quiet_stderr():
    os.write(2, b"a hint")
    raise RuntimeError("failed")
  assert capfd.readouterr().err == "a hint"
  os.write(2, b"afterwards")
  assert capfd.readouterr().err == "afterwards"


@pytest.mark.parametrize(
  ("package", "name", "kind"),
  [
    ("libtpu", "v5e:2x2", "4 x TPU v5 lite"),
    ("jax_cuda13_plugin", "h200:1x4", "4 x NVIDIA H200"),
  ],
)
def test_machines_that_are_not_here(package, name, kind):
  pytest.importorskip(package)
  done = subprocess.run(
    [
      *(sys.executable, "-m", "loopjax.fit"),
      "--config=configs/sudoku_utm.py:smoke",
      *("--config.model.norm=rmsnorm", "--config.model.halting=fixed"),
      f"--topology={name}",
    ],
    cwd=ROOT,
    env=dict(os.environ),
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert kind in done.stdout
  assert " TFLOP, " in done.stdout and " s at its peak" in done.stdout
  assert done.stdout.splitlines()[-1].startswith("fits: ")


SMOKE = "--config=configs/sudoku_utm.py:smoke"
# Small, quick to compile, and only microbatches save memory.
STEP = (
  SMOKE,
  "--config.model.norm=rmsnorm",
  "--config.model.halting=fixed",
  "--config.task.box_cols=3",
  "--config.loop.remat=full",
  "--config.mesh.fsdp=2",
  "--config.run.batch_size=4",
  "--topology=cpu:2",
  "--memory_gib=0.00026",  # 272 KiB; whole batches need 334, halves 219.
)


def run(*arguments):
  """In a separate process, which must not search for accelerators."""
  environment = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cuda"}
  return subprocess.run(
    [sys.executable, "-m", "loopjax", "fit", *arguments],
    cwd=ROOT,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


@pytest.mark.long
def test_the_page():
  done = run(*STEP)
  assert done.returncode == 1, done.stderr
  assert done.stderr == ""
  first, mesh, _, title, *rows, _, flops, _, verdict = done.stdout.splitlines()
  assert first == (
    "cpu:2: 2 x cpu; 4 examples per step in 1 part(s), 5 step(s) per call"
  )
  assert mesh.startswith(
    "mesh: data 1, fsdp 2, tensor 1; loop.remat=full; compiled in "
  )
  assert title == "memory per chip"
  arguments, temporaries, outputs, program, peak, available = rows
  # Float32; the optimizer has two moments. Steps of 2 boards of 36 cells in
  # three arrays.
  assert "parameters 13.53 KiB, EMA 13.53 KiB, optimizer 27.07" in arguments
  assert f"batch {5 * 2 * 3 * 36 * 4 / 1024:.2f} KiB" in arguments
  parts = [arguments, temporaries, outputs, program]
  sizes = [line.split()[1:3] for line in parts]
  kib = sum(float(x) / (1024 if unit == "B" else 1) for x, unit in sizes)
  assert peak.split()[0] == "peak" and peak.split()[2] == "KiB"
  assert abs(float(peak.split()[1]) - kib) < 0.05
  assert available.split() == ["available", "272.63", "KiB", "--memory_gib"]
  assert flops.startswith("model FLOPs per optimizer step and chip: ")
  assert flops.endswith(" TFLOP")
  assert verdict.startswith("does not fit: ")
  assert verdict.endswith("%)") and " of 272.63 KiB per chip (" in verdict
  halves = run(*STEP, "--config.run.num_microbatches=2")
  assert halves.returncode == 0, halves.stderr
  assert halves.stdout.splitlines()[-1].startswith("fits: ")


def test_parameters_that_are_only_read_have_no_train_step():
  done = run(SMOKE, "--config.model.precision=bfloat16_params", *STEP[-2:])
  assert done.returncode == 2
  assert "'bfloat16_params' is for inference only" in done.stderr
