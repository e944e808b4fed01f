"""What the kernels over a vocabulary have in common: how they are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests_support import array_sizes

from loopjax import program, sharding

FAST = {"xla_backend_optimization_level": 0}
# Splits of hidden states and of a table over 2 x 2 devices each.
HIDDEN, ROWS = P(("data", "fsdp")), P(("tensor", "fsdp"))


def assert_close(actual, expected, tolerance, least=1e-3):
  """Every array within tolerance times its largest element, or `least`."""
  for got, want in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert got.dtype == want.dtype
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    np.testing.assert_allclose(
      got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), least)
    )


def on_a_mesh(loss, operands, splits, tolerance=1e-12):
  """Text of the program on 2 x 2 x 2 devices, which changes nothing.

  The gradients are of the first two operands, and split as these are. The
  tolerance is for operands in float64.
  """
  config = sharding.Config(data=2, fsdp=2, tensor=2)
  mesh = sharding.make_mesh(config, jax.devices())
  run = jax.value_and_grad(loss, (0, 1))
  expected = jax.jit(run, compiler_options=FAST)(*operands)
  splits = tuple(NamedSharding(mesh, split) for split in splits)
  compiled = jax.jit(
    program.on_mesh(mesh, run),
    in_shardings=splits,
    out_shardings=(None, splits[:2]),
  )
  compiled = compiled.lower(*operands).compile(FAST)
  actual = compiled(*jax.device_put(operands, splits))
  assert_close(actual, expected, tolerance)
  return compiled.as_text()


def assert_no_array_of_the_vocabulary(form, operands, backward, chunk, share):
  """Of 512 tokens by 16,384 rows: every array is of a chunk, or of the table.

  `form` computes a loss with an implementation; temporaries of the chunked one
  take less than `share` of those of the reference.
  """
  whole, parts = (
    compiled(functools.partial(form, implementation), operands, backward)
    for implementation in ("reference", "chunked")
  )
  assert max(array_sizes(whole.as_text())) == 512 * 16_384
  assert max(array_sizes(parts.as_text())) == 512 * chunk
  before, after = (
    program.memory_analysis().temp_size_in_bytes for program in (whole, parts)
  )
  assert after < share * before


def compiled(loss, operands, backward):
  """A program for float32 operands of these shapes, int32 for one dimension."""
  run = jax.grad(loss, (0, 1)) if backward else loss
  return jax.jit(run).lower(*operands).compile(FAST)


def assert_lowers(loss, operands, platform):
  """Also its gradients, without an array [..., V]."""
  table = "x".join(map(str, operands[1].shape))
  vocab = operands[1].shape[0]
  lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*operands)
  text = lowered.lower(lowering_platforms=(platform,)).as_text()
  assert f"{table}xbf16" in text
  assert f"x{vocab}x" not in text
  assert f"x{vocab}xf32" not in text


def assert_chunks_are_the_default(form, *operands):
  def is_chunked(**options):
    traced = jax.make_jaxpr(functools.partial(form, **options))(*operands)
    return "custom_vjp_call" in str(traced)

  assert is_chunked() and is_chunked(implementation="chunked")
  assert not is_chunked(implementation="reference")
  with pytest.raises(ValueError, match="'fast' is not one of"):
    is_chunked(implementation="fast")


def like(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)
