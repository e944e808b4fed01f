"""`gated_kv` for TPUs.

One kernel per update. For each tile of tokens, its steps iterate over tiles of
columns: first of W_z and U_z, which compute the latent in VMEM, then over the
heads of W_K and W_V, which read it there. Weights are streamed from HBM, each
tile during the product with the previous one, without a pause between the two
parts. Keys and values of all heads are collected in VMEM and copied to their
cache rows, in runs of the consecutive rows that an example has in a tile.

Two tiles of x, h and the latent, and of each matrix, are in VMEM at a time.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from loopjax.kernels.gated_kv import fused, reference
from loopjax.types import Array

_LANES, _SUBLANES = 128, 16
_MOST_TOKENS = 256  # Maximum tokens of a tile.
# Bytes of VMEM for tiles, of the 16 MiB that a kernel has.
_VMEM = 14 * 2**20


def gated_kv(inputs, latent, weights, tables, cache, start):
  """As in `api.gated_kv`."""
  kernels = fused.Kernels(_update, _pull_back)
  return fused.gated_kv(kernels, inputs, latent, weights, tables, cache, start)


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
  (num_tokens, width), each = x.shape, len(x) // len(start)
  num_heads, head_width = cache[0].shape[2:]
  num_columns, size = num_heads * head_width, x.dtype.itemsize
  unit = math.lcm(head_width, _LANES)
  tiles = _Tiles(
    per_token=2 * 3 * width * size
    + 2 * 2 * num_columns * cache[0].dtype.itemsize
    + 2 * 2 * head_width * 4,
    per_column=2 * 4 * width * size,
    unit=unit,
  )
  tile, run = tiles.tokens(num_tokens, each)
  columns = tiles.columns(tile, width, _LANES)
  heads = tiles.columns(tile, num_columns, unit) // head_width
  room = pl.cdiv(tile, _SUBLANES) * _SUBLANES
  num_gate_steps = 0 if h is None else width // columns
  num_steps = num_gate_steps + num_heads // heads

  def rows(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((tile, size), lambda i, j, start: (i, 0))

  def gate_tile(size: int) -> pl.BlockSpec:
    last = num_gate_steps - 1
    return pl.BlockSpec(
      (size, columns), lambda i, j, start: (0, jnp.minimum(j, last))
    )

  head_tile = pl.BlockSpec(
    (width, heads * head_width),
    lambda i, j, start: (0, jnp.maximum(j - num_gate_steps, 0)),
  )
  gate: tuple[Array, ...] = ()
  gate_specs: tuple[pl.BlockSpec, ...] = ()
  if h is not None:
    bias = weights.gate_bias[None].astype(jnp.float32)
    gate = h, weights.gate_input, weights.gate_latent, bias
    gate_specs = rows(width), *map(gate_tile, (width, width, 1))
  in_hbm = pl.BlockSpec(memory_space=pl.ANY)
  operands = (start, x, *gate, weights.key, weights.value, cos, sin, *cache)
  kernel = functools.partial(
    _update_kernel,
    num_gate_steps=num_gate_steps,
    num_tokens=num_tokens,
    each=each,
    run=run,
  )
  after, keys, values = pl.pallas_call(
    kernel,
    out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in (x, *cache)],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(pl.cdiv(num_tokens, tile), num_steps),
      in_specs=[
        rows(width),
        gate_specs,
        head_tile,
        head_tile,
        rows(head_width),
        rows(head_width),
        in_hbm,
        in_hbm,
      ],
      out_specs=[rows(width), in_hbm, in_hbm],
      scratch_shapes=[
        *(pltpu.VMEM((num_heads, room, head_width), y.dtype) for y in cache),
        *(pltpu.VMEM((room, num_heads, head_width), y.dtype) for y in cache),
        pltpu.SemaphoreType.DMA,
      ],
    ),
    input_output_aliases={len(operands) - 2: 1, len(operands) - 1: 2},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary")
    ),
    name="gated_kv",
  )(start, x, gate, weights.key, weights.value, cos, sin, *cache)
  return after, (keys, values)


def _update_kernel(
  start,
  x,
  gate,
  key_weights,
  value_weights,
  cos,
  sin,
  _keys_before,
  _values_before,
  latent,
  keys,
  values,
  key_heads,
  value_heads,
  key_rows,
  value_rows,
  semaphore,
  *,
  num_gate_steps: int,
  num_tokens: int,
  each: int,
  run: int,
):
  tile, (num_heads, _, head_width) = len(x), key_heads.shape
  index, step = pl.program_id(0), pl.program_id(1)

  if num_gate_steps:
    h, gate_input, gate_latent, bias = gate

    @pl.when(step < num_gate_steps)
    def blend():
      size = bias.shape[1]
      here = pl.ds(pl.multiple_of(step * size, size), size)
      activation = _dot(x[...], gate_input[...])
      activation += _dot(h[...], gate_latent[...]) + bias[...]
      keep = jax.nn.sigmoid(activation)
      own, old = (ref[:, here].astype(jnp.float32) for ref in (x, h))
      latent[:, here] = (own + keep * (old - own)).astype(latent.dtype)

  else:

    @pl.when(step == 0)
    def first_loop():
      latent[...] = x[...]

  @pl.when(step >= num_gate_steps)
  def project():
    key = _dot(latent[...], key_weights[...])
    value = _dot(latent[...], value_weights[...])
    heads = key.shape[1] // head_width
    for i in range(heads):
      head = (step - num_gate_steps) * heads + i
      part = slice(i * head_width, (i + 1) * head_width)
      swapped = pltpu.roll(key[:, part], head_width // 2, 1)
      rotated = key[:, part] * cos[...] + swapped * sin[...]
      key_heads[head, :tile] = rotated.astype(key_heads.dtype)
      value_heads[head, :tile] = value[:, part].astype(value_heads.dtype)

  @pl.when(step == pl.num_programs(1) - 1)
  def write():
    def transpose(i, _):
      # A few tokens at a time: the compiler unrolls what is inside.
      some = pl.ds(pl.multiple_of(i * _SUBLANES, _SUBLANES), _SUBLANES)
      for ref, by_head in ((key_rows, key_heads), (value_rows, value_heads)):
        for head in range(num_heads):
          ref[some, head] = by_head[head, some]

    jax.lax.fori_loop(0, len(key_rows) // _SUBLANES, transpose, None)
    first = index * tile
    num_runs = jax.lax.div(jnp.minimum(tile, num_tokens - first), run)

    def each_run(act):
      """act(copy) for every copy of a run of rows to the cache."""

      def body(i, _):
        token = first + i * run
        example = jax.lax.div(token, each)
        row = start[example]
        fits = (row >= 0) & (row + each <= keys.shape[1])

        @pl.when(fits)
        def act_on_keys_and_values():
          place = pl.ds(row + jax.lax.rem(token, each), run)
          for source, target in ((key_rows, keys), (value_rows, values)):
            act(
              pltpu.make_async_copy(
                source.at[pl.ds(i * run, run)],
                target.at[example, place],
                semaphore,
              )
            )

      jax.lax.fori_loop(0, num_runs, body, None)

    each_run(lambda copy: copy.start())
    each_run(lambda copy: copy.wait())


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
  num_columns = d_key.shape[1]
  size = x.dtype.itemsize
  tiles = _Tiles(
    per_token=2 * 2 * (width + num_columns) * size,
    per_column=2 * 2 * (width + num_columns) * size
    + 2 * _MOST_TOKENS * (3 * size + 2 * 4),
    unit=_LANES,
  )
  tile, _ = tiles.tokens(num_tokens, 1)
  columns = tiles.columns(tile, width, _LANES)
  whole = pl.BlockSpec((tile, width), lambda i, j: (i, 0))
  by_head = pl.BlockSpec((tile, num_columns), lambda i, j: (i, 0))
  part = pl.BlockSpec((tile, columns), lambda i, j: (i, j))
  square = pl.BlockSpec((width, columns), lambda i, j: (0, j))
  heads = pl.BlockSpec((columns, num_columns), lambda i, j: (j, 0))
  wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  narrow = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return pl.pallas_call(
    _pull_back_kernel,
    out_shape=[narrow, narrow, wide, wide],
    grid=(pl.cdiv(num_tokens, tile), width // columns),
    in_specs=[
      whole, whole, square, square,
      pl.BlockSpec((1, columns), lambda i, j: (0, j)),
      heads, heads, part, by_head, by_head,
    ],
    out_specs=[part] * 4,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "parallel")
    ),
    name="gated_kv_pull_back",
  )(
    x, h, weights.gate_input, weights.gate_latent,
    weights.gate_bias[None].astype(jnp.float32),
    weights.key, weights.value, d_after, d_key, d_value,
  )  # fmt: skip


def _pull_back_kernel(
  x,
  h,
  gate_input,
  gate_latent,
  bias,
  key_weights,
  value_weights,
  d_after,
  d_key,
  d_value,
  after,
  d_gate,
  d_inputs,
  d_latent,
):
  size = bias.shape[1]
  here = pl.ds(pl.multiple_of(pl.program_id(1) * size, size), size)
  activation = _dot(x[...], gate_input[...])
  activation += _dot(h[...], gate_latent[...]) + bias[...]
  keep = jax.nn.sigmoid(activation)
  own, old = (ref[:, here].astype(jnp.float32) for ref in (x, h))
  after[...] = (own + keep * (old - own)).astype(after.dtype)
  total = d_after[...].astype(jnp.float32)
  total += _dot(d_key[...], key_weights[...], transposed=True)
  total += _dot(d_value[...], value_weights[...], transposed=True)
  d_inputs[...], d_latent[...] = (1 - keep) * total, keep * total
  change = total * (old - own) * keep * (1 - keep)
  d_gate[...] = change.astype(d_gate.dtype)


def _dot(x: Array, matrix: Array, transposed: bool = False) -> Array:
  """x W, or x W^T, in float32."""
  precision: Any = None if x.dtype == jnp.bfloat16 else "highest"
  return jax.lax.dot_general(
    x,
    matrix,
    (((1,), (1 if transposed else 0,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


class _Tiles(NamedTuple):
  """Sizes of tiles that fit into VMEM.

  Attributes:
    per_token: bytes in VMEM of one more token in a tile.
    per_column: bytes in VMEM of one more column of each matrix.
    unit: columns of the narrowest tile.
  """

  per_token: int
  per_column: int
  unit: int

  def tokens(self, num_tokens: int, each: int) -> tuple[int, int]:
    """Tokens of a tile, and of a run of one example's tokens in it."""
    room = (_VMEM - self.unit * self.per_column) // self.per_token
    most = max(_SUBLANES, min(_MOST_TOKENS, room // _SUBLANES * _SUBLANES))
    if num_tokens <= most:
      return num_tokens, each
    sizes = range(_SUBLANES, most + 1, _SUBLANES)
    return max(
      ((size, math.gcd(size, each)) for size in sizes if 2 * size > most),
      key=lambda pair: pair[::-1],
    )

  def columns(self, num_tokens: int, num_columns: int, unit: int) -> int:
    """Columns of a tile: as many units as fit and divide all, or all."""
    most = (_VMEM - num_tokens * self.per_token) // self.per_column
    sizes = range(unit, max(most, unit) + 1, unit)
    return max((n for n in sizes if num_columns % n == 0), default=num_columns)
