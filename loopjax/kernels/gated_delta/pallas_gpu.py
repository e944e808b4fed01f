"""`gated_delta` for Hopper GPUs, by Mosaic GPU, in bfloat16.

XLA computes everything that does not depend on other chunks, for many chunks at
once, as in `chunked`. One kernel iterates over the chunks. A block has one
warpgroup and some columns of a head's state, which are independent of the
others. It keeps them in shared memory, in float32 and rounded for the tensor
cores, and prefetches the next chunk's operands. With d_k = 128 a block uses 192
KiB, and 168 KiB in the backward pass, which does not prefetch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loopjax.errors import UserError
from loopjax.kernels import hopper
from loopjax.kernels.gated_delta import chunked
from loopjax.kernels.gated_delta.recurrence import Steps
from loopjax.types import Array

_SIZE = 64  # Tokens of a chunk, and columns of a block.
_MAX_KEYS = 128  # Largest d_k whose state fits in shared memory.
# Up to this many tokens are one chunk, computed without a kernel: there is no
# recurrence, and XLA needs no padding. From the roofline, not measured.
_ONE_CHUNK = 128


def gated_delta(
  query, key, value, log_decay, write, state
) -> tuple[Array, Array]:
  """As in `api.gated_delta`; `_check` lists the supported shapes."""
  inputs = (query, key, value, log_decay, write)
  _check(query, value)
  if query.shape[1] <= _ONE_CHUNK:
    return chunked.gated_delta(
      *inputs, state, chunk_size=_ONE_CHUNK, rounded=True
    )
  return chunked.gated_delta(
    *inputs,
    state,
    chunk_size=_SIZE,
    recur=_recur,
    whole_chunks=True,
    rounded=True,
  )


def _check(query: Array, value: Array) -> None:
  if value.dtype != jnp.bfloat16:
    raise UserError(f"pallas_gpu takes bfloat16 inputs, not {value.dtype}")
  if query.shape[-1] > _MAX_KEYS:
    raise UserError(
      f"pallas_gpu takes d_k of at most {_MAX_KEYS}, not {query.shape[-1]}"
    )


def _recur(
  steps: Steps, state: Array, *, adjoint: bool
) -> tuple[Array, Array, Array]:
  """As `recurrence.scan`.

  Widths are zero-padded to whole tiles, results cropped.
  """
  key_width, value_width = state.shape[-2:]

  def filled(x: Array, *axes: int) -> Array:
    added = [(0, 0)] * x.ndim
    for axis in axes:
      added[axis] = 0, -x.shape[axis] % _SIZE
    return jnp.pad(x, added)

  steps = steps._replace(
    base=filled(steps.base, -1),
    left=filled(steps.left, -1),
    right=filled(steps.right, -1),
    extra=None if steps.extra is None else filled(steps.extra, -2, -1),
  )
  before, results, after = _kernel(
    steps, filled(state, -2, -1), adjoint=adjoint
  )
  return (
    before[..., :key_width, :value_width],
    results[..., :value_width],
    after[..., :key_width, :value_width],
  )


def _kernel(
  steps: Steps, state: Array, *, adjoint: bool
) -> tuple[Array, Array, Array]:
  """As `recurrence.scan`, for widths that are whole tiles."""
  num_chunks, batch, heads, size, value_width = steps.base.shape
  key_width, num_rows = steps.left.shape[-1], batch * heads
  has_extra = steps.extra is not None
  # JAX 0.10's interpreter does not transpose operands.
  right, matrix = steps.right.mT, steps.matrix.mT if adjoint else steps.matrix
  operands = [steps.left, right, matrix, steps.base]
  operands += [steps.extra] if has_extra else []

  def flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])

  def body(start, through, *refs):
    operands, rest = refs[: 4 + has_extra], refs[4 + has_extra :]
    before, results, after, now, rounded, inner, result, copy = rest
    r, j = jax.lax.axis_index("heads"), jax.lax.axis_index("columns")
    columns = pl.ds(j * size, size)

    def rows(chunk, number):
      return pl.ds((chunk * num_rows + r) * number, number)

    def chunk_of(i):
      return num_chunks - 1 - i if adjoint else i

    of_head = pl.ds(r * key_width, key_width), columns
    load = functools.partial(_loaded, start.at[of_head], now)
    rounded[...] = pl.run_scoped(load, plgpu.Barrier()).astype(rounded.dtype)
    plgpu.commit_smem()

    def step(index, left, right, matrix, base, *extra):
      chunk = chunk_of(index[0])
      plgpu.copy_smem_to_gmem(now, before.at[rows(chunk, key_width), columns])
      inner[...] = (_product(left, rounded) + _wide(base)).astype(inner.dtype)
      plgpu.commit_smem()
      written = _product(matrix, inner)
      result[...] = written
      copy[...] = written.astype(copy.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(result, results.at[rows(chunk, size), columns])
      new = _product(right, copy) + through[chunk * num_rows + r] * _wide(now)
      for one in extra:
        new += _wide(one)
      plgpu.wait_smem_to_gmem(0)  # The source changes next.
      now[...] = new
      rounded[...] = new.astype(rounded.dtype)
      plgpu.commit_smem()

    def spec(shape, is_column, transforms):
      def place(i):
        return chunk_of(i) * num_rows + r, j if is_column else 0

      return plgpu.BlockSpec(shape, place, transforms=transforms)

    square = (key_width, size)
    specs = [
      spec((size, key_width), False, hopper.transforms(key_width)),
      spec(square, False, hopper.transforms(size)),
      spec((size, size), False, hopper.transforms(size)),
      spec((size, size), True, ()),
      *[spec(square, True, ())] * has_extra,
    ]
    plgpu.emit_pipeline(
      step,
      grid=(num_chunks,),
      in_specs=specs,
      max_concurrent_steps=1 if has_extra else 2,
    )(*operands)
    plgpu.copy_smem_to_gmem(now, after.at[of_head])
    plgpu.wait_smem_to_gmem(0)

  wide = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
  of_state = (key_width, size)
  before, results, after = plgpu.kernel(
    body,
    out_type=[
      wide((num_chunks * num_rows * key_width, value_width)),
      wide((num_chunks * num_rows * size, value_width)),
      wide((num_rows * key_width, value_width)),
    ],
    grid=(num_rows, value_width // size),
    grid_names=("heads", "columns"),
    scratch_types=[
      plgpu.SMEM(of_state, jnp.float32),
      hopper.smem(of_state),
      hopper.smem((size, size)),
      plgpu.SMEM((size, size), jnp.float32),
      hopper.smem((size, size)),
    ],
    compiler_params=hopper.PARAMS,
    kernel_name="gated_delta_adjoint" if adjoint else "gated_delta",
  )(flat(state), steps.through.reshape(-1), *map(flat, operands))
  every = num_chunks, batch, heads
  return (
    before.reshape(*every, key_width, value_width),
    results.reshape(*every, size, value_width),
    after.reshape(state.shape),
  )


def _loaded(source, target, barrier) -> Array:
  plgpu.copy_gmem_to_smem(source, target, barrier)
  plgpu.barrier_wait(barrier)
  return _wide(target)


def _product(left, right) -> Array:
  """left right, of two arrays in shared memory, in float32."""

  def multiply(total):
    plgpu.wgmma(total, left, right)
    plgpu.wgmma_wait(0)
    return total[...]

  shape = (left.shape[0], right.shape[1])
  return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _wide(ref) -> Array:
  return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
