"""Measurements, and absent machines."""

import math
import os
import subprocess
import sys

import jax
import pytest
from tests_support import ROOT, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.errors import UserError
from loopjax.fit import measure, topology

SMALL = {"model__norm": "rmsnorm", "model__halting": "fixed"}


@pytest.mark.long
def test_sizes_of_the_arguments_on_a_chip():
  machine = topology.machine(topology.parse("cpu:8"), 1.0)
  config = smoke(
    mesh__fsdp=2, mesh__tensor=2, mesh__min_split_size=200, **SMALL
  )
  measured = measure.measure(config, machine)
  program = program_lib.make_program(config_lib.resolve(config), jax.devices())
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
  kinds = measured.traffic.executions
  assert kinds["all-gather"] and kinds["all-reduce"]
  assert all(count % 5 == 0 for count in kinds.values())


def test_what_cannot_be_is_the_users_mistake():
  machine = topology.machine(topology.parse("cpu:3"), 1.0)
  with pytest.raises(UserError, match="run.batch_size=16"):
    measure.measure(smoke(), machine)


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
  with measure.quiet_stderr():
    os.write(2, b"noise")
  assert capfd.readouterr().err == ""
  with pytest.raises(UserError), measure.quiet_stderr():
    os.write(2, b"noise")
    raise UserError("a mistake")
  assert capfd.readouterr().err == ""
  with pytest.raises(RuntimeError), measure.quiet_stderr():
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
  # The gradients are summed over the chips once per step.
  (reduced,) = (x for x in done.stdout.splitlines() if "all-reduce" in x)
  size = float(reduced.split(" x ")[1].split()[0])
  assert "KiB" in reduced and math.isclose(size, 13.27, abs_tol=0.1)
