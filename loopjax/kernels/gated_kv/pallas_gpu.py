"""`gated_kv` for Hopper GPUs, by Mosaic GPU, in bfloat16.

Blocks of a GPU cannot wait for each other. The update therefore takes two
kernels: one computes the latent, with one tile of columns per block, the other
projects it. A block of the second has `w` column pairs of one head, one column
from each half: the two features that RoPE rotates into each other are then at
the same position of two accumulators. Both kernels end with copies of whole
tiles. XLA writes the new rows to the cache: a tensor copy must start at a
multiple of 128 bytes of shared memory, and single rows do not.

A block has one warpgroup. Operands are prefetched into shared memory several
steps ahead. Matrix tiles are square, because both operands of a product must
have the same layout in shared memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loopjax.errors import UserError
from loopjax.kernels import hopper
from loopjax.kernels.gated_kv import fused, reference
from loopjax.types import Array

_UNIT = 64  # Widths must be multiples of this.
_MAX_STEPS = 8  # Maximum number of prefetched steps.
# Shared memory for these steps in bytes, of the 227 KiB of a block.
_STEP_BYTES = 160 * 2**10
_FEW = 64  # Up to this many tokens make one tile; also the smallest tile.
_ROWS = plgpu.Layout.WGMMA.reduce(0)  # Layout of vectors that all tokens share.


def gated_kv(inputs, latent, weights, tables, cache, start):
  """As in `api.gated_kv`; `_check` says which shapes are supported."""
  _check(inputs, cache)
  kernels = fused.Kernels(_update, _pull_back)
  return fused.gated_kv(kernels, inputs, latent, weights, tables, cache, start)


def _check(inputs: Array, cache: tuple[Array, Array]) -> None:
  width, head_width = inputs.shape[-1], cache[0].shape[-1]
  if {inputs.dtype, *(x.dtype for x in cache)} != {jnp.dtype(jnp.bfloat16)}:
    raise UserError("pallas_gpu takes bfloat16 inputs and cache")
  if width % _UNIT or head_width % _UNIT:
    raise UserError(
      f"pallas_gpu takes widths that are multiples of {_UNIT}, not D={width},"
      f" d_h={head_width}"
    )


def _update(
  x: Array,
  h: Array | None,
  weights: reference.Weights,
  cos: Array,
  sin: Array,
  cache: tuple[Array, Array],
  start: Array,
) -> tuple[Array, tuple[Array, Array]]:
  """As in `fused.Kernels`."""
  num_tokens = len(x)
  tile = _tile(num_tokens)
  x, cos, sin = (_padded(y, tile) for y in (x, cos, sin))
  latent = x if h is None else _blend(x, _padded(h, tile), weights, tile)
  *_, heads, head_width = cache[0].shape
  new = _project(latent, weights, cos, sin, head_width, tile)
  tokens = len(start), num_tokens // len(start), heads, head_width
  keys, values = (
    reference.write(old, rows[:num_tokens].reshape(tokens), start)
    for old, rows in zip(cache, new, strict=True)
  )
  return latent[:num_tokens], (keys, values)


def _tile(num_tokens: int) -> int:
  return _FEW if num_tokens <= _FEW else 2 * _FEW


def _columns(tile: int) -> int:
  """Columns of a tile of a square matrix; fewer if weights dominate traffic."""
  return 32 if tile == _FEW else 64


def _accumulate(totals, rows: list, matrices: list, places: tuple) -> None:
  """Adds [tile, D] times [D, columns] to the accumulator of each matrix.

  Args:
    totals: one accumulator [tile, columns] per matrix, or one for all.
    rows: arrays [M, D], one per matrix, or one for all.
    matrices: the matrices, [D, N].
    places: index of the tile of rows, and of each matrix's tile of columns.
  """
  (tile, columns), (i, *blocks) = totals[0].shape, places
  size = 2 * columns * (tile * len(rows) + columns * len(matrices))

  def step(_, *operands):
    left, right = operands[: len(rows)], operands[len(rows) :]
    for n, matrix in enumerate(right):
      plgpu.wgmma(totals[n % len(totals)], left[n % len(left)], matrix)
    plgpu.wgmma_wait(0)

  def square(block) -> plgpu.BlockSpec:
    return _spec((columns, columns), lambda k: (k, block))

  plgpu.emit_pipeline(
    step,
    grid=(rows[0].shape[1] // columns,),
    in_specs=[
      *(_spec((tile, columns), lambda k: (i, k)) for _ in rows),
      *map(square, blocks),
    ],
    max_concurrent_steps=min(_MAX_STEPS, _STEP_BYTES // size),
  )(*rows, *matrices)


def _padded(x: Array, tile: int) -> Array:
  return jnp.pad(x, ((0, -len(x) % tile), (0, 0)))


def _spec(shape: tuple[int, int], index_map) -> plgpu.BlockSpec:
  return plgpu.BlockSpec(
    shape, index_map, transforms=hopper.transforms(shape[1])
  )


def _blend(x: Array, h: Array, weights: reference.Weights, tile: int) -> Array:
  """z h + (1 - z) x [M, D], for M a multiple of the tile."""
  num_tokens, width = x.shape
  columns = _columns(tile)

  def body(
    x, h, gate_input, gate_latent, bias, after,
    own, old, bias_here, result, barrier,
  ):  # fmt: skip
    i, j = jax.lax.axis_index("tokens"), jax.lax.axis_index("columns")
    here = (pl.ds(i * tile, tile), pl.ds(j * columns, columns))
    plgpu.copy_gmem_to_smem(x.at[here], own, barrier)
    plgpu.copy_gmem_to_smem(h.at[here], old, barrier)
    plgpu.copy_gmem_to_smem(bias.at[here[1]], bias_here, barrier)

    def accumulate(total):
      _accumulate([total], [x, h], [gate_input, gate_latent], (i, j, j))
      return total[...]

    total = pl.run_scoped(accumulate, plgpu.ACC((tile, columns), jnp.float32))
    plgpu.barrier_wait(barrier)
    keep = _gate(total, bias_here)
    own, old = (_wide(ref) for ref in (own, old))
    result[...] = (own + keep * (old - own)).astype(result.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(result, after.at[here])
    plgpu.wait_smem_to_gmem(0)

  part = hopper.smem((tile, columns))
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(num_tokens // tile, width // columns),
    grid_names=("tokens", "columns"),
    scratch_types=[
      part,
      part,
      plgpu.SMEM((columns,), jnp.float32),
      part,
      plgpu.Barrier(num_arrivals=3),
    ],
    compiler_params=hopper.PARAMS,
    kernel_name="gated_kv_blend",
  )(
    x, h, weights.gate_input, weights.gate_latent,
    weights.gate_bias.astype(jnp.float32),
  )  # fmt: skip


def _gate(activation: Array, bias) -> Array:
  bias = plgpu.layout_cast(bias[...], _ROWS)
  bias = jax.lax.broadcast_in_dim(bias, activation.shape, (1,))
  return jax.nn.sigmoid(activation + bias)


def _wide(ref) -> Array:
  return plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA).astype(jnp.float32)


def _project(
  latent: Array,
  weights: reference.Weights,
  cos: Array,
  sin: Array,
  head_width: int,
  tile: int,
) -> tuple[Array, Array]:
  """Rotated keys, and values, [M, G d_h], for M a multiple of the tile."""
  num_tokens, width = len(latent), weights.key.shape[1]
  half, pairs = head_width // 2, 32  # 64 pairs would take 256 registers.

  def body(
    latent, key_weights, value_weights, cos, sin, keys, values,
    cos_here, sin_here, *rest,
  ):  # fmt: skip
    *parts, barrier = rest
    i, j = jax.lax.axis_index("tokens"), jax.lax.axis_index("pairs")
    head = jax.lax.div(j, half // pairs)
    first = jax.lax.rem(j, half // pairs) * pairs
    tokens = pl.ds(i * tile, tile)
    angles = pl.ds(first, pairs)
    plgpu.copy_gmem_to_smem(cos.at[tokens, angles], cos_here, barrier)
    plgpu.copy_gmem_to_smem(sin.at[tokens, angles], sin_here, barrier)

    near = jax.lax.div(head * head_width + first, pairs)
    far = near + half // pairs

    def accumulate(*totals):
      matrices = [key_weights] * 2 + [value_weights] * 2
      places = (i, near, far, near, far)
      _accumulate(totals, [latent], matrices, places)
      return [total[...] for total in totals]

    total = plgpu.ACC((tile, pairs), jnp.float32)
    low, high, *value = pl.run_scoped(accumulate, *[total] * 4)
    plgpu.barrier_wait(barrier)
    c, s = (
      plgpu.layout_cast(ref[...], plgpu.Layout.WGMMA)
      for ref in (cos_here, sin_here)
    )
    results = (low * c - high * s, high * c + low * s, *value)
    for part, result in zip(parts, results, strict=True):
      part[...] = result.astype(part.dtype)
    plgpu.commit_smem()
    for n, part in enumerate(parts):
      columns = pl.ds(head * head_width + first + n % 2 * half, pairs)
      target = keys if n < 2 else values
      plgpu.copy_smem_to_gmem(part, target.at[tokens, columns])
    plgpu.wait_smem_to_gmem(0)

  result = jax.ShapeDtypeStruct((num_tokens, width), latent.dtype)
  return plgpu.kernel(
    body,
    out_type=[result, result],
    grid=(num_tokens // tile, width // 2 // pairs),
    grid_names=("tokens", "pairs"),
    scratch_types=[
      *[plgpu.SMEM((tile, pairs), jnp.float32)] * 2,
      *[plgpu.SMEM((tile, pairs), latent.dtype)] * 4,
      plgpu.Barrier(num_arrivals=2),
    ],
    compiler_params=hopper.PARAMS,
    kernel_name="gated_kv_project",
  )(latent, weights.key, weights.value, cos[:, :half], sin[:, half:])


def _pull_back(
  x: Array,
  h: Array,
  weights: reference.Weights,
  d_after: Array,
  d_key: Array,
  d_value: Array,
) -> tuple[Array, Array, Array, Array]:
  """As in `fused.Kernels`."""
  num_tokens, width = x.shape
  tile = columns = _FEW
  operands = [_padded(y, tile) for y in (x, h, d_after, d_key, d_value)]

  def body(
    x, h, d_after, d_key, d_value,
    gate_input, gate_latent, bias, key_weights, value_weights,
    after, d_gate, d_inputs, d_latent,
    own, old, d_own, bias_here, d_inputs_here, d_latent_here, barrier,
  ):  # fmt: skip
    i, j = jax.lax.axis_index("tokens"), jax.lax.axis_index("columns")
    here = (pl.ds(i * tile, tile), pl.ds(j * columns, columns))
    for source, target in ((x, own), (h, old), (d_after, d_own)):
      plgpu.copy_gmem_to_smem(source.at[here], target, barrier)
    plgpu.copy_gmem_to_smem(bias.at[here[1]], bias_here, barrier)

    def accumulate(total, cotangent):
      _accumulate([total], [x, h], [gate_input, gate_latent], (i, j, j))
      matrices = [key_weights, value_weights]
      _accumulate([cotangent], [d_key, d_value], matrices, (i, j, j))
      return total[...], cotangent[...]

    total = plgpu.ACC((tile, columns), jnp.float32)
    total, cotangent = pl.run_scoped(accumulate, total, total)
    plgpu.barrier_wait(barrier)
    keep = _gate(total, bias_here)
    cotangent += _wide(d_own)
    difference = _wide(old) - _wide(own)
    results = (
      (own, _wide(own) + keep * difference),
      (old, cotangent * difference * keep * (1 - keep)),
      (d_inputs_here, (1 - keep) * cotangent),
      (d_latent_here, keep * cotangent),
    )
    for part, result in results:
      part[...] = result.astype(part.dtype)
    plgpu.commit_smem()
    whole = (after, d_gate, d_inputs, d_latent)
    for (part, _), target in zip(results, whole, strict=True):
      plgpu.copy_smem_to_gmem(part, target.at[here])
    plgpu.wait_smem_to_gmem(0)

  narrow, wide = (
    jax.ShapeDtypeStruct(operands[0].shape, dtype)
    for dtype in (x.dtype, jnp.float32)
  )
  results = plgpu.kernel(
    body,
    out_type=[narrow, narrow, wide, wide],
    grid=(len(operands[0]) // tile, width // columns),
    grid_names=("tokens", "columns"),
    scratch_types=[
      *[hopper.smem((tile, columns))] * 3,
      plgpu.SMEM((columns,), jnp.float32),
      *[plgpu.SMEM((tile, columns), jnp.float32)] * 2,
      plgpu.Barrier(num_arrivals=4),
    ],
    compiler_params=hopper.PARAMS,
    kernel_name="gated_kv_pull_back",
  )(
    *operands,
    weights.gate_input,
    weights.gate_latent,
    weights.gate_bias.astype(jnp.float32),
    weights.key.T,  # JAX 0.10's interpreter does not transpose operands.
    weights.value.T,
  )
  after, d_gate, d_inputs, d_latent = (y[:num_tokens] for y in results)
  return after, d_gate, d_inputs, d_latent
