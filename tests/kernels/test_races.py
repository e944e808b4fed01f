"""The TPU kernels, interpreted with race detection."""

import functools

import gated_delta_examples
import gated_kv_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from loopjax.kernels.gated_delta import gated_delta
from loopjax.kernels.gated_kv import gated_kv, pallas_tpu

# Two cores share the parallel dimensions of a grid.
DETECT = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
FOUND = "RACE DETECTED"


def has_races(capfd, call, *args):
  """Whether JAX's interpreter reports a race; it only prints up to JAX 0.11."""
  try:
    jax.block_until_ready(call(*args))
  except jax.errors.JaxRuntimeError as error:
    pltpu.reset_tpu_interpret_mode_state()  # Clears interrupted state.
    if FOUND not in str(error):
      raise
    return True
  return FOUND in capfd.readouterr().out


def copied(x, wait_first):
  """A copy of x through memory that an asynchronous copy fills."""

  def kernel(x_ref, out_ref, buffer, semaphore):
    copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
    copy.start()
    if wait_first:
      copy.wait()
    out_ref[...] = buffer[...]
    if not wait_first:
      copy.wait()

  return pl.pallas_call(
    kernel,
    out_shape=x,
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
    interpret=DETECT,
  )(x)


@pytest.mark.parametrize("wait_first", [True, False])
def test_a_planted_race_is_found(wait_first, capfd):
  assert has_races(capfd, copied, jnp.ones((8, 128)), wait_first) != wait_first


def run_gated_kv(monkeypatch):
  monkeypatch.setattr(pallas_tpu, "_MAX_TOKENS", 16)
  monkeypatch.setattr(pallas_tpu, "_for_tiles", lambda: 0)
  operands = gated_kv_examples.arrays(
    jnp.float32, batch=2, tokens=20, width=256, heads=4, head_width=64,
    rows=32, start=(12, 3),
  )  # fmt: skip
  kernel = functools.partial(gated_kv, implementation="pallas_tpu")
  return gated_kv_examples.differentiated(kernel, operands)


def run_gated_delta(monkeypatch):
  del monkeypatch
  operands = gated_delta_examples.arrays(40, np.float32)
  operands = [jnp.asarray(x[:2]) for x in operands]
  kernel = functools.partial(
    gated_delta, implementation="pallas_tpu", chunk_size=16
  )

  def value(*operands):
    return sum(jnp.sum(x * x) for x in kernel(*operands))

  return jax.jit(jax.grad(value, tuple(range(6))))(*operands)


@pytest.mark.long
@pytest.mark.parametrize("run", [run_gated_kv, run_gated_delta])
def test_kernels_and_their_gradients_have_no_races(run, monkeypatch, capfd):
  with pltpu.force_tpu_interpret_mode(DETECT):
    assert not has_races(capfd, run, monkeypatch)
