"""Traffic and time of one update of MELT's latents and cache rows.

  python benchmarks/bench_gated_kv.py --batch=8
  python benchmarks/bench_gated_kv.py --batch=4 --tokens=500

By default, a layer of the 1.4 B model of arXiv 2605.07721. "floor" counts each
operand and result once: weights, x, h, the latent, angles, and the tokens' rows
of the cache. "moved" is counted from the program: for the TPU kernel, the
blocks that its grid fetches and stores (a block that stays is not fetched
again) and the rows that it copies; for the reference, on an accelerator, XLA's
count of bytes accessed. The GPU kernels' copies are not counted. "ms" is the
median of --calls calls in sequence, each on the previous call's cache, for the
reference and this accelerator's kernel.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.extend import core

from loopjax.kernels.gated_kv import Weights, gated_kv
from loopjax.run import provenance

_BATCH = flags.DEFINE_integer("batch", 8, "B.")
_TOKENS = flags.DEFINE_integer("tokens", 1, "S, of each example.")
_WIDTH = flags.DEFINE_integer("width", 2048, "D.")
_HEADS = flags.DEFINE_integer("heads", 16, "G, of keys and values.")
_HEAD_WIDTH = flags.DEFINE_integer("head_width", 128, "d_h.")
_ROWS = flags.DEFINE_integer("rows", 4096, "L, rows of the cache.")
_CALLS = flags.DEFINE_integer("calls", 0, "Timed calls; 0 for none.")

_KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}


def main(argv):
  del argv
  shapes = operands_of(
    _BATCH.value,
    _TOKENS.value,
    _WIDTH.value,
    _HEADS.value,
    _HEAD_WIDTH.value,
    _ROWS.value,
  )
  floor = floor_bytes(shapes)
  own = _KERNELS.get(jax.default_backend())  # None on CPUs.
  rows = []
  for form in ("reference", "pallas_tpu", "pallas_gpu"):
    row = {"form": form, "moved_over_floor": None}
    if form == "pallas_tpu":
      row["moved_over_floor"] = tpu_bytes(shapes) / floor
    if own and form in ("reference", own):
      program = compiled(form, shapes)
      memory = program.memory_analysis()
      row["temporaries_mib"] = memory.temp_size_in_bytes / 2**20
      if form == "reference":
        moved = program.cost_analysis()["bytes accessed"]
        row["moved_over_floor"] = moved / floor
      if _CALLS.value:
        row["ms"] = 1e3 * timed(program, shapes)
        row["floor_gb_per_second"] = floor / row["ms"] / 1e6
    rows.append(row)
  sizes = ("batch", "tokens", "width", "heads", "head_width", "rows")
  options = {name: flags.FLAGS[name].value for name in sizes}
  report = {"floor_mib": floor / 2**20, "forms": rows, **options}
  print(json.dumps(report | provenance.environment(), indent=2))


def operands_of(batch, tokens, width, heads, head_width, rows):
  """Shapes of all operands of `gated_kv`, in bfloat16."""

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  square, columns = like(width, width), like(width, heads * head_width)
  weights = Weights(square, square, like(width), columns, columns)
  angles = like(batch, tokens, head_width // 2, dtype=jnp.float32)
  x = like(batch, tokens, width)
  cache = (like(batch, rows, heads, head_width),) * 2
  return x, x, weights, (angles, angles), cache, like(batch, dtype=jnp.int32)


def floor_bytes(shapes) -> int:
  """Bytes of every operand and result, and of the written rows of the cache."""
  x, *others, _, _ = shapes
  whole = sum(y.size * y.dtype.itemsize for y in jax.tree.leaves([x, others]))
  return whole + x.size * x.dtype.itemsize + _row_bytes(shapes)


def _row_bytes(shapes) -> int:
  """Bytes of the written cache rows."""
  keys, _ = shapes[4]
  num_tokens = shapes[0].shape[0] * shapes[0].shape[1]
  return 2 * num_tokens * keys.shape[2] * keys.shape[3] * keys.dtype.itemsize


def tpu_bytes(shapes) -> int:
  """Bytes between HBM and VMEM of the TPU kernel."""

  def run(*operands):
    return gated_kv(*operands, implementation="pallas_tpu")

  jaxpr = jax.make_jaxpr(run)(*shapes).jaxpr
  (call,) = _calls(jaxpr, "pallas_call")
  mapping = call.params["grid_mapping"]
  moved = _row_bytes(shapes)
  for block in mapping.block_mappings:
    if "any" in str(block.transformed_block_aval):
      continue  # Stays in HBM: the cache.
    shape = [getattr(size, "block_size", size) for size in block.block_shape]
    places = [_place(block, step) for step in np.ndindex(*mapping.grid)]
    fetches = sum(a != b for a, b in zip(places, [None, *places], strict=False))
    moved += fetches * int(np.prod(shape)) * block.array_aval.dtype.itemsize
  return moved


def _place(block, step):
  """Indices of a grid step's block."""
  index_map = block.index_map_jaxpr
  unused = [None] * (len(index_map.in_avals) - len(step))  # Prefetched scalars.
  indices = [np.int32(i) for i in step]
  return tuple(map(int, core.jaxpr_as_fun(index_map)(*indices, *unused)))


def _calls(jaxpr, name):
  """Equations of a primitive, including inner programs."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == name:
      yield equation
      continue
    for inner in core.jaxprs_in_params(equation.params):
      yield from _calls(inner, name)


def compiled(form, shapes):
  def run(x, h, weights, tables, cache, start):
    return gated_kv(x, h, weights, tables, cache, start, implementation=form)

  return jax.jit(run, donate_argnums=(4,)).lower(*shapes).compile()


def timed(program, shapes) -> float:
  """Median seconds of a call."""
  *operands, cache, start = jax.tree.map(
    lambda x: jnp.full(x.shape, 0.1, x.dtype), shapes
  )
  seconds = []
  for _ in range(_CALLS.value + 1):
    begin = time.perf_counter()
    _, cache = jax.block_until_ready(program(*operands, cache, start))
    seconds.append(time.perf_counter() - begin)
  return float(np.median(seconds[1:]))  # The first warms up.


if __name__ == "__main__":
  app.run(main)
