"""`gated_delta` for TPUs: by chunks, with the state in VMEM.

XLA computes everything that does not depend on other chunks, for many chunks at
once, as in `chunked`. One kernel iterates over the chunks of one head of one
example at a time, with the state in VMEM, and prefetches the next chunk's
operands from HBM. With d_k = 128, d_v = 256 and chunks of 64 this uses 1.5 MiB
of VMEM.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from loopjax.kernels.gated_delta import chunked
from loopjax.kernels.gated_delta.recurrence import Steps
from loopjax.types import Array


def gated_delta(
  query, key, value, log_decay, write, state, *, chunk_size
) -> tuple[Array, Array]:
  """As in `api.gated_delta`."""
  inputs = (query, key, value, log_decay, write)
  return chunked.gated_delta(
    *inputs, state, chunk_size=chunk_size, recur=_recur, rounded=True
  )


def _recur(
  steps: Steps, state: Array, *, adjoint: bool
) -> tuple[Array, Array, Array]:
  """As `recurrence.scan`."""
  num_chunks, batch, heads, size, value_width = steps.base.shape
  key_width = steps.left.shape[-1]

  def of_chunk(rows: int, columns: int) -> pl.BlockSpec:
    def place(head, i):
      chunk = num_chunks - 1 - i if adjoint else i
      return chunk, head, 0, 0

    return pl.BlockSpec((None, None, rows, columns), place)

  square = (key_width, value_width)
  of_head = pl.BlockSpec((None, *square), lambda head, i: (head, 0, 0))
  extra_specs, extra = [], []
  if steps.extra is not None:
    extra_specs, extra = [of_chunk(*square)], [_by_head(steps.extra)]
  every = num_chunks, batch * heads
  before, results, after = pl.pallas_call(
    functools.partial(_kernel, adjoint=adjoint),
    out_shape=[
      jax.ShapeDtypeStruct((*every, *square), jnp.float32),
      jax.ShapeDtypeStruct((*every, size, value_width), jnp.float32),
      jax.ShapeDtypeStruct((every[1], *square), jnp.float32),
    ],
    grid=(every[1], num_chunks),
    in_specs=[
      of_head,
      of_chunk(size, value_width),
      of_chunk(size, key_width),
      of_chunk(size, key_width),
      of_chunk(size, size),
      of_chunk(1, 1),
      *extra_specs,
    ],
    out_specs=[of_chunk(*square), of_chunk(size, value_width), of_head],
    scratch_shapes=[pltpu.VMEM(square, jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    name="gated_delta_adjoint" if adjoint else "gated_delta",
  )(state.reshape(-1, *square), *map(_by_head, steps[:5]), *extra)
  return (
    before.reshape(num_chunks, batch, heads, *square),
    results.reshape(steps.base.shape),
    after.reshape(state.shape),
  )


def _by_head(x: Array) -> Array:
  """[n, B, H, ...] -> [n, B H, ...]."""
  return x.reshape(len(x), -1, *x.shape[3:])


def _kernel(start, base, left, right, matrix, through, *others, adjoint: bool):
  *extra, before, results, after, state = others
  step = pl.program_id(1)

  @pl.when(step == 0)
  def begin():
    state[...] = start[...]

  now = state[...]
  before[...] = now
  inner = base[...] + _dot(left[...], now)
  result = _dot(matrix[...], inner, transposed=adjoint)
  results[...] = result
  new = through[...] * now + _dot(right[...], result, transposed=True)
  for one in extra:
    new += one[...]
  state[...] = new

  @pl.when(step == pl.num_programs(1) - 1)
  def end():
    after[...] = new


def _dot(x: Array, y: Array, transposed: bool = False) -> Array:
  """x y, or x^T y, in float32; y is rounded as x is."""
  precision: Any = None if x.dtype == jnp.bfloat16 else "highest"
  return jax.lax.dot_general(
    x,
    y.astype(x.dtype),
    (((0 if transposed else 1,), (0,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )
