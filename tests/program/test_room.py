"""Memory: residuals by policy, and the resolution of "auto"."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import program
from loopjax.nn import remat
from loopjax.program import room

GIB = 2**30


class Device:
  """The interface of an accelerator."""

  platform = "gpu"
  process_index = 0

  def __init__(self, limit=None):
    self.limit = limit

  def memory_stats(self):
    return {"bytes_limit": self.limit} if self.limit else None


class Remote(Device):
  """A device of another process, which JAX does not query."""

  process_index = 1

  def memory_stats(self):
    raise ValueError("MemoryStats is only supported for addressable devices")


class OneDevice:
  """A mesh of one device; others may precede it."""

  def __init__(self, device, *others):
    self.devices = np.array([[[*others, device]]], object)
    self.shape = {"data": 1, "fsdp": 1, "tensor": 1}


def settings(**overrides):
  config = load_config("lm_looped", "smoke")
  for key, value in overrides.items():
    config_lib.override(config, {key.replace("__", "."): value})
  return config_lib.resolve(config)


def kept(policy, num_examples=4, **overrides):
  made = settings(loop__remat=policy, **overrides)
  return room.residual_bytes(made, num_examples)


@pytest.mark.long
def test_what_is_kept_grows_with_examples_and_is_less_if_recomputed():
  assert kept("none", 8) > 1.5 * kept("none") > 3 * kept("full")


def test_memory_is_that_of_a_device_of_this_process():
  assert room._memory(OneDevice(Device(limit=7), Remote())) == 7
  assert room._memory(OneDevice(Remote())) is None


@pytest.mark.long
def test_policies_are_ordered_by_what_they_keep():
  sizes = [kept(policy) for policy in remat.ORDER]
  assert sizes == sorted(sizes, reverse=True)
  one, two, three = (kept("none", model__num_loops=n) for n in (2, 3, 4))
  assert 0 < two - one == three - two


@pytest.mark.long
def test_the_estimate_is_what_the_compiler_needs():
  """Forward and backward pass of a model that fills memory."""
  made = settings(loop__remat="none", run__batch_size=64, model__num_loops=12)
  step = program.make_program(made, jax.devices()[:1])
  batches = program.abstract_batches(made, step.mesh)
  compiled = step.train.lower(step.abstract_state, batches, {}).compile()
  needed = compiled.memory_analysis().temp_size_in_bytes
  assert 0.5 < room.residual_bytes(made, 64) / needed < 2


def policy_of(memory, device=None):
  mesh = OneDevice(device or Device())
  return room.with_remat(settings(), mesh, memory).loop.remat


@pytest.fixture
def sizes(monkeypatch):
  """Bytes per example by policy, without tracing a model."""
  found = dict(zip(remat.ORDER, (1600, 800, 400, 200, 100), strict=True))

  def instead(made, num_examples, teacher):
    return num_examples * found[made.loop.remat]

  monkeypatch.setattr(room, "residual_bytes", instead)
  return found


def test_auto_keeps_what_fits(sizes):
  # Keeping more than products is never the faster choice.
  assert policy_of(100 * GIB) == "dots"
  assert policy_of(1) == "full"
  state = room._state_bytes(settings(), OneDevice(Device()))
  run = settings().run
  number = run.batch_size // run.num_microbatches
  for policy in remat.ON_ACCELERATORS[:-1]:
    least = int(state + number * sizes[policy] / room.SHARE)
    assert policy_of(least + 2) == policy
    assert policy_of(least - 2) != policy


@pytest.mark.usefixtures("sizes")
def test_a_device_is_asked_and_may_not_know():
  assert policy_of(None, Device(limit=100 * GIB)) == "dots"
  assert policy_of(None, Device(limit=1)) == "full"
  assert policy_of(None, Device()) == "dots"


def test_cpus_and_what_is_set_stay():
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), list("abc"))
  assert room.with_remat(settings(), mesh, 1).loop.remat == remat.AUTO["cpu"]
  dots = settings(loop__remat="dots")
  assert room.with_remat(dots, OneDevice(Device()), 1) == dots


@pytest.mark.parametrize(
  ("memory", "gather"),
  [(None, "step"), (300_000, "step"), (100_000, "weights"), (50_000, "use")],
)
def test_parameters_are_gathered_where_they_fit(memory, gather):
  mesh = OneDevice(Device())
  mesh.shape = {"data": 1, "fsdp": 8, "tensor": 1}
  assert room.gathering(settings(), mesh, memory) == gather


def test_gathered_parameters_leave_less_room(sizes):
  """With two devices, each with half of the examples."""
  made, mesh = settings(), OneDevice(Device())
  mesh.shape = {"data": 1, "fsdp": 2, "tensor": 1}
  sizes["dots"] *= 10**7  # More than the parameters, which are gathered once.
  number = made.run.batch_size // made.run.num_microbatches // 2
  needed = number * sizes["dots"] + sum(room._gathered_bytes(made))
  least = int(room._state_bytes(made, mesh) + needed / room.SHARE)
  assert room.with_remat(made, mesh, least + 2).loop.remat == "dots"
  assert room.with_remat(made, mesh, least - 2).loop.remat != "dots"


def test_gradients_are_sums_over_loops_and_over_microbatches():
  """Each stored twice in float32, and once as they are computed."""
  weights, one = room._gathered_bytes(settings())
  _, several = room._gathered_bytes(settings(run__num_microbatches=2))
  leaves = jax.tree.leaves(program.abstract_model(settings())[1])
  sums = 2 * 4 * sum(x.size for x in leaves)
  assert (one, several) == (sums + weights, 2 * sums + weights)
