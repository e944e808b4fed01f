"""Machines by name."""

import importlib.util

import jax
import pytest
from tests_support import refused

from loopjax.errors import UserError
from loopjax.fit import topology


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
