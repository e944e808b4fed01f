"""`gated_kv` for TPUs.

One kernel per update. For each tile of tokens, its steps iterate over tiles of
columns: first of W_z and U_z, which compute the latent in VMEM, then over the
heads of W_K and W_V, which are multiplied with it. Weights are streamed from
HBM, each tile during the product with the previous one, without a bubble
between the two phases. Keys and values of all heads are collected in VMEM and
copied to their cache rows, one copy per run of consecutive rows of an example
in a tile.

VMEM holds two tiles each of x, h, the latent and every matrix. With 128 MiB
(v5e, v6e), a tile has up to 2,048 tokens of width 2,048, and weights are
streamed once; with 64 MiB (v5p), half as many tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from loopjax.kernels.gated_kv import fused, reference
from loopjax.types import Array

_LANES, _SUBLANES = 128, 16
# Maximum tokens per tile; every tile streams all weights.
_MAX_TOKENS = 2048
_MAX_COLUMNS = 256  # Per matrix tile; the next tile is prefetched.
_MAX_ROWS = 512  # Tokens of a tile computed at a time.
_MIN_VMEM = 16 * 2**20  # Bytes; assumed for unknown chips.


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
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=_vmem(),
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
    @_by_rows(tile)
    def blend(rows):
      size = bias.shape[1]
      here = pl.ds(pl.multiple_of(step * size, size), size)
      activation = _dot(x[rows], gate_input[...])
      activation += _dot(h[rows], gate_latent[...]) + bias[...]
      keep = jax.nn.sigmoid(activation)
      own, old = (ref[rows, here].astype(jnp.float32) for ref in (x, h))
      latent[rows, here] = (own + keep * (old - own)).astype(latent.dtype)

  else:

    @pl.when(step == 0)
    @_by_rows(tile)
    def first_loop(rows):
      latent[rows] = x[rows]

  @pl.when(step >= num_gate_steps)
  @_by_rows(tile)
  def project(rows):
    key = _dot(latent[rows], key_weights[...])
    value = _dot(latent[rows], value_weights[...])
    heads = key.shape[1] // head_width
    for i in range(heads):
      head = (step - num_gate_steps) * heads + i
      part = slice(i * head_width, (i + 1) * head_width)
      swapped = pltpu.roll(key[:, part], head_width // 2, 1)
      rotated = key[:, part] * cos[rows] + swapped * sin[rows]
      key_heads[head, rows] = rotated.astype(key_heads.dtype)
      value_heads[head, rows] = value[:, part].astype(value_heads.dtype)

  @pl.when(step == pl.num_programs(1) - 1)
  def write():
    def transpose(i, _):
      # A few tokens at a time: the compiler unrolls the body.
      some = pl.ds(pl.multiple_of(i * _SUBLANES, _SUBLANES), _SUBLANES)
      for ref, by_head in ((key_rows, key_heads), (value_rows, value_heads)):
        for head in range(num_heads):
          ref[some, head] = by_head[head, some]

    jax.lax.fori_loop(0, len(key_rows) // _SUBLANES, transpose, None)
    first = index * tile
    num_runs = jax.lax.div(jnp.minimum(tile, num_tokens - first), run)

    def each_run(act):
      """Calls act(copy) for every copy of a run of rows to the cache."""

      def body(i, _):
        token = first + i * run
        example = jax.lax.div(token, each)
        row = start[example]
        fits = (row >= 0) & (row <= keys.shape[1] - each)

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
    + 2 * min(_MAX_TOKENS, num_tokens) * (3 * size + 2 * 4),
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
      dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_vmem()
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

  @_by_rows(len(x))
  def pull_back(rows):
    activation = _dot(x[rows], gate_input[...])
    activation += _dot(h[rows], gate_latent[...]) + bias[...]
    keep = jax.nn.sigmoid(activation)
    own, old = (ref[rows, here].astype(jnp.float32) for ref in (x, h))
    after[rows] = (own + keep * (old - own)).astype(after.dtype)
    total = d_after[rows].astype(jnp.float32)
    total += _dot(d_key[rows], key_weights[...], transposed=True)
    total += _dot(d_value[rows], value_weights[...], transposed=True)
    d_inputs[rows], d_latent[rows] = (1 - keep) * total, keep * total
    change = total * (old - own) * keep * (1 - keep)
    d_gate[rows] = change.astype(d_gate.dtype)

  pull_back()


def _by_rows(tile: int) -> Callable[[Any], Any]:
  """Calls a function for some rows of a tile at a time.

  The compiler unrolls the function.
  """
  size = _rows(tile)

  def decorated(act: Any) -> Any:
    def body(i: Any, _: None) -> None:
      act(pl.ds(pl.multiple_of(i * size, _SUBLANES), size))

    def run() -> None:
      if size == tile:
        act(pl.ds(0, tile))
      else:
        jax.lax.fori_loop(0, tile // size, body, None)

    return run

  return decorated


def _rows(tile: int) -> int:
  """Rows per step: all of the tile's, or a divisor of them."""
  if tile <= _MAX_ROWS:
    return tile
  sizes = range(_SUBLANES, _MAX_ROWS + 1, _SUBLANES)
  return max((n for n in sizes if tile % n == 0), default=tile)


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
    per_token: bytes of VMEM per token of a tile.
    per_column: bytes of VMEM per column of each matrix.
    unit: columns of the narrowest tile.
  """

  per_token: int
  per_column: int
  unit: int

  def tokens(self, num_tokens: int, each: int) -> tuple[int, int]:
    """Tokens per tile, and per run of one example's tokens in it."""
    room = (_for_tiles() - self.unit * self.per_column) // self.per_token
    most = max(_SUBLANES, min(_MAX_TOKENS, room // _SUBLANES * _SUBLANES))
    if num_tokens <= most and _rows(num_tokens) <= _MAX_ROWS:
      return num_tokens, each
    sizes = range(_SUBLANES, most + 1, _SUBLANES)
    return max(
      ((size, math.gcd(size, each)) for size in sizes if 2 * size > most),
      key=lambda pair: pair[::-1],
    )

  def columns(self, num_tokens: int, num_columns: int, unit: int) -> int:
    """Columns per tile: all, or the most units that fit and divide them."""
    room = (_for_tiles() - num_tokens * self.per_token) // self.per_column
    most = min(room, _MAX_COLUMNS)
    sizes = range(unit, max(most, unit) + 1, unit)
    return max((n for n in sizes if num_columns % n == 0), default=num_columns)


def _vmem() -> int:
  """Bytes of VMEM of the target chip."""
  try:
    return pltpu.get_tpu_info().vmem_capacity_bytes
  except ValueError:  # No TPU: interpreted, or lowered for another machine.
    return _MIN_VMEM


def _for_tiles() -> int:
  """Bytes of VMEM for tiles; the compiler needs the rest."""
  return _vmem() * 7 // 8
