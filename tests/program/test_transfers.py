"""Steps transfer nothing implicitly between host and devices.

Uploads are refused on every platform. A CPU's arrays are on the host, and JAX
does not refuse to read them; here every read by JAX is detected.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import smoke

from loopjax import sharding, train
from loopjax.run import metrics

REFUSED = "Disallowed"


@pytest.fixture
def reads_are_refused(monkeypatch):
  """A read other than `jax.device_get` fails as on an accelerator."""
  explicit = []
  kind, device_get = type(jnp.zeros(())), jax.device_get
  value = kind._value

  def read(array):
    guard = jax.config.jax_transfer_guard_device_to_host
    if guard == "disallow" and not explicit:
      raise RuntimeError(f"{REFUSED} device-to-host transfer")
    return value.fget(array)

  def get(tree):
    explicit.append(True)
    try:
      return device_get(tree)
    finally:
      explicit.pop()

  monkeypatch.setattr(kind, "_value", property(read))
  monkeypatch.setattr(jax, "device_get", get)


def at_every_step(monkeypatch, function):
  """The training loop also calls this."""
  count = metrics.Clock.count

  def changed(self, steps):
    function()
    count(self, steps)

  monkeypatch.setattr(metrics.Clock, "count", changed)


def run(workdir, **overrides):
  """Steps, logs, evaluations and checkpoints, with the smoke config's data."""
  config = smoke(run__num_steps=10, run__steps_per_call=1, **overrides)
  return train.run(config, workdir, "train_and_eval")


@pytest.mark.usefixtures("reads_are_refused")
def test_a_run_makes_none(tmp_path):
  evaluated = {"eval__every": 5, "run__checkpoint_every": 5}
  profiled = {"run__profile_steps": "1:2", "run__debug_nans": True}
  assert run(tmp_path, **evaluated, **profiled)["status"] == "completed"


@pytest.mark.usefixtures("reads_are_refused")
def test_one_at_a_step_is_an_error(monkeypatch, tmp_path):
  """Each kind of transfer, at a step of one run."""
  # On all devices: NumPy reads arrays on one CPU without JAX.
  mesh = sharding.make_mesh(sharding.Config(), jax.devices())
  x = jax.device_put(np.float32(1), sharding.replicated(mesh))
  transfers = {
    "float": float,
    "item": lambda x: x.item(),
    "bool": bool,
    "asarray": np.asarray,
    "upload": lambda _: jnp.asarray(np.ones(3)),
    "scalar": lambda x: x + 1,
  }
  allowed = []

  def try_all():
    for name, transfer in transfers.items():
      try:
        transfer(x)
      except RuntimeError as error:
        assert REFUSED in str(error), name
      else:
        allowed.append(name)
    allowed.append("a step")

  at_every_step(monkeypatch, try_all)
  assert run(tmp_path)["status"] == "completed"
  assert allowed == ["a step"] * 10
