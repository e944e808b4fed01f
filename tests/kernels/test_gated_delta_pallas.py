"""The kernels of gated_delta: interpreted, lowered, and compiled ahead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_examples import (
  FAST,
  arrays,
  assert_close,
  assert_rounded,
  recurrence,
)
from jax.sharding import SingleDeviceSharding
from pallas_examples import (
  MACHINES,
  calls_for_tpu,
  compiler,
  num_kernels_for_hopper,
  on_gpu,
  on_tpu,
)

from loopjax.kernels.gated_delta import gated_delta, pallas_gpu
from loopjax.kernels.gated_delta import recurrence as recurrence_lib

# Roundings of a chunk in bfloat16: of both operands of the products within it,
# with the state, and of the state's update. In hard examples, each chunk's
# errors persist.
ROUNDINGS = 6


def differentiated(form, operands):
  """Results, and gradients for all inputs."""

  def value(*operands):
    results = form(*operands)
    total = 0.0
    for i, x in enumerate(results):
      factor = np.random.default_rng(i).normal(size=x.shape)
      total += jnp.sum(np.float32(factor) * x)
    return total, results

  run = jax.grad(value, tuple(range(6)), has_aux=True)
  grads, results = jax.jit(run, compiler_options=FAST)(*operands)
  return results, grads


def examples(number, num_tokens, dtype=jnp.float32):
  """Some of EXAMPLES; the state in float32."""
  *inputs, state = (x[:number] for x in arrays(num_tokens, np.float32))
  return [*(jnp.asarray(x, dtype) for x in inputs), jnp.asarray(state)]


def interpreted(operands, **options):
  kernel = functools.partial(
    gated_delta, implementation="pallas_tpu", **options
  )
  with on_tpu():
    return differentiated(kernel, operands)


def test_kernels_are_the_chunks():
  """Results and all gradients; three chunks, the last one partial."""
  operands = examples(1, 40)
  actual = interpreted(operands, chunk_size=16)
  form = functools.partial(gated_delta, implementation="chunked", chunk_size=16)
  assert_close(actual, differentiated(form, operands), 1e-5)


@pytest.mark.long
def test_float32_is_exact_and_bfloat16_is_rounded():
  """Against float64 of the same inputs, by example of EXAMPLES."""
  run = functools.partial(
    gated_delta, implementation="pallas_tpu", chunk_size=16
  )
  for dtype in (jnp.float32, jnp.bfloat16):
    operands = examples(5, 40, dtype)
    with on_tpu():
      actual = jax.jit(run, compiler_options=FAST)(*operands)
    wide = [np.asarray(x, np.float64) for x in operands]
    if dtype == jnp.float32:
      assert_close(actual, recurrence(*wide), 1e-5)
    else:
      assert_rounded(actual, recurrence(*wide), 3 * ROUNDINGS)


@pytest.fixture
def gpu(monkeypatch):
  """Results and gradients of the GPU kernels, interpreted."""
  monkeypatch.setattr(pallas_gpu, "_ONE_CHUNK", 0)

  def run(operands):
    kernel = functools.partial(gated_delta, implementation="pallas_gpu")
    with on_gpu(monkeypatch):
      return differentiated(kernel, operands)

  return run


def large(*, batch=1, tokens=100, heads=1, key_width=64, value_width=128):
  """Inputs of sizes that the GPU kernels support."""
  random = np.random.default_rng(0)
  lead = (batch, tokens, heads)
  query, key, value = (
    random.normal(size=(*lead, width))
    for width in (key_width, key_width, value_width)
  )
  gates = -0.1 * random.uniform(size=lead), random.uniform(size=lead)
  state = random.normal(size=(batch, heads, key_width, value_width))
  inputs = (query, key, value, *gates)
  return [*(jnp.asarray(x, jnp.bfloat16) for x in inputs), jnp.float32(state)]


@pytest.mark.parametrize("adjoint", [False, True])
def test_widths_are_filled_up_to_whole_tiles(monkeypatch, adjoint):
  """Exactly: the plain recurrence replaces the kernel of whole tiles."""
  random = np.random.default_rng(0)

  def some(*shape):
    return random.normal(size=shape)

  n, b, h, c, keys, values = 2, 1, 2, 4, 96, 72
  steps = recurrence_lib.Steps(
    base=some(n, b, h, c, values),
    left=some(n, b, h, c, keys),
    right=some(n, b, h, c, keys),
    matrix=some(n, b, h, c, c),
    through=some(n, b, h, 1, 1),
    extra=some(n, b, h, keys, values) if adjoint else None,
  )
  state = some(b, h, keys, values)
  widths = []

  def kernel(steps, state, *, adjoint):
    widths.append((steps.left.shape[-1], steps.base.shape[-1], state.shape[2:]))
    return recurrence_lib.scan(steps, state, adjoint=adjoint)

  monkeypatch.setattr(pallas_gpu, "_kernel", kernel)
  with jax.enable_x64(True):
    steps, state = jax.tree.map(jnp.asarray, (steps, state))
    actual = pallas_gpu._recur(steps, state, adjoint=adjoint)
    expected = recurrence_lib.scan(steps, state, adjoint=adjoint)
  assert widths == [(128, 128, (128, 128))]
  for one, other in zip(actual, expected, strict=True):
    assert one.dtype == jnp.float64
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("widths", [(64, 128), (96, 96)])
def test_gpu_kernels_are_the_chunks(gpu, widths):
  """Two chunks, the last one partial, and two tiles of columns."""
  operands = large(key_width=widths[0], value_width=widths[1])
  results, grads = gpu(operands)
  form = functools.partial(gated_delta, implementation="chunked")
  assert_rounded(grads, differentiated(form, operands)[1], 2 * ROUNDINGS)
  wide = [np.asarray(x, np.float64) for x in operands]
  assert_rounded(results, recurrence(*wide), ROUNDINGS)


def test_short_rows_are_one_chunk_without_a_kernel():
  """With the kernels' rounding, against the recurrence in float64."""
  operands = large(tokens=75, key_width=96)
  run = functools.partial(gated_delta, implementation="pallas_gpu")
  results, grads = differentiated(run, operands)
  wide = [np.asarray(x, np.float64) for x in operands]
  assert_rounded(results, recurrence(*wide), ROUNDINGS)
  form = functools.partial(gated_delta, implementation="chunked")
  assert_rounded(grads, differentiated(form, operands)[1], 2 * ROUNDINGS)
  text = jax.jit(gradients("pallas_gpu")).lower(*operands).as_text()
  products = [x for x in text.split("\n") if "dot_general" in x]
  operands, results = zip(*(x.split(") -> ") for x in products), strict=True)
  # Products of the forward and of the backward pass. The others are running
  # sums and the inverse of a chunk's matrix.
  assert sum(x.count("bf16>") == 2 for x in operands) == 6 + 16
  # The tokens' writes are rounded once, and sums of products are one product.
  assert sum("bf16>" in x for x in results) == 2


def test_what_gpu_kernels_do_not_take():
  run = functools.partial(gated_delta, implementation="pallas_gpu")
  with pytest.raises(ValueError, match="takes bfloat16 inputs, not float32"):
    run(*examples(1, 20))
  with pytest.raises(ValueError, match="d_k of at most 128, not 136"):
    run(*large(tokens=16, key_width=136))


# Jet's heads at the width of the 1.4 B model, rounded up to what Hopper takes.
SIZES = {"batch": 4, "tokens": 512, "heads": 6, "key_width": 128,
         "value_width": 256}  # fmt: skip


def gradients(implementation):
  def total(*operands):
    results = gated_delta(*operands, implementation=implementation)
    return sum(jnp.sum(x**2) for x in results)

  return jax.grad(total, tuple(range(6)))


def shapes(**changes):
  return jax.eval_shape(functools.partial(large, **{**SIZES, **changes}))


def test_lowers_for_tpu():
  _, names = calls_for_tpu(gradients("pallas_tpu"), shapes())
  # The backward pass computes the states again.
  assert sorted(names) == ["gated_delta"] * 2 + ["gated_delta_adjoint"]


@pytest.mark.long
def test_lowers_for_hopper():
  assert num_kernels_for_hopper(gradients("pallas_gpu"), shapes()) == 3


@pytest.mark.manual
@pytest.mark.parametrize("name", MACHINES)
def test_compiles_ahead_of_time(name, monkeypatch):
  """With the state in VMEM or shared memory."""
  machine, implementation = compiler(name, monkeypatch)
  device = SingleDeviceSharding(machine.devices[0])
  placed = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes()
  )
  run = gradients(implementation)
  jax.jit(run).lower(*placed).compile(machine.compiler_options)
