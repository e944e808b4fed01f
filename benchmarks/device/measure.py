"""Checks and timings on a GPU that are not training: part of PLAN.md.

  python benchmarks/device/measure.py checks --rows=rows.jsonl
  python benchmarks/device/measure.py steps --rows=rows.jsonl --traces=traces
  python benchmarks/device/measure.py decode --rows=rows.jsonl

"checks" compares kernels and families in bfloat16 with float64, and times
kernels; "steps" times train steps, "decode" decoding. Every row is written as
soon as it is complete, and repeating a command adds the missing ones. --only:
rows whose name matches a regular expression, so that several processes can
share a device. --toy: sizes for a CPU, where plain JAX replaces kernels.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import re
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / x) for x in (".", "kernels"))]

# Steps to time by name, with settings that fit one GPU.
_ONE = "run.batch_size={0},run.num_microbatches={0},eval.batch_size={0}"
_SLEEP = "gpu,model.precision=bfloat16"
STEPS = {
  "sudoku_utm": ("sudoku_utm", "gpu"),
  "sudoku_utm_scan": ("sudoku_utm", "gpu,loop.execution=scan"),
  "sudoku_utm_512": ("sudoku_utm", "gpu,run.batch_size=512"),
  "lm_melt": ("lm_melt", "gpu,run.batch_size=16"),
  "multihop_disco": ("multihop_disco", "gpu"),
  "depo_sleep": ("depo_sleep", _SLEEP),
  "automaton_sleep": ("automaton_sleep", _SLEEP),
  "lm_looped": ("lm_looped", "paper," + _ONE.format(8)),
  "lm_disco": ("lm_disco", "paper," + _ONE.format(4)),
  "lm_adaptive": ("lm_adaptive", "paper"),
  "depo_sleep_scan": ("depo_sleep", f"{_SLEEP},loop.execution=scan"),
}
# Models to decode with, and texts at a time.
_BYTES = ",task.train_files=made:arithmetic"
DECODED = {"lm_looped": "paper" + _BYTES, "lm_melt": "paper" + _BYTES}
BATCHES = (1, 8, 64)


class Rows:
  """A file of rows by name; existing rows are not recomputed."""

  def __init__(self, path, only=""):
    self.only, self.path = re.compile(only), pathlib.Path(path)
    self.path.parent.mkdir(parents=True, exist_ok=True)
    text = self.path.read_text("utf-8") if self.path.exists() else ""
    # A killed run's last line may be incomplete.
    whole = [line for line in text.splitlines(True) if line.endswith("\n")]
    self.done = {json.loads(line)["name"] for line in whole}
    self.path.write_text("".join(whole), "utf-8")

  def add(self, name, compute):
    """Computes and writes a row, unless it exists."""
    if name in self.done or not self.only.match(name):
      return
    started = time.monotonic()
    try:
      row = compute()
    except Exception as error:  # The next rows may still work.
      traceback.print_exc()
      row = {"error": f"{type(error).__name__}: {error}"[:2000]}
    seconds = round(time.monotonic() - started, 1)
    row = {"name": name, **row, "seconds": seconds}
    with self.path.open("a", encoding="utf-8") as file:
      file.write(json.dumps(row) + "\n")
      file.flush()
      os.fsync(file.fileno())
    self.done.add(name)
    print(json.dumps(row), flush=True)


def apart(got, expected):
  """Distance of pytrees, relative to the norm of the second."""
  import jax
  import numpy as np

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
  wide = [[np.asarray(x, np.float64) for x in pair] for pair in pairs]
  far = sum(np.sum((x - y) ** 2) for x, y in wide)
  return float(np.sqrt(far / sum(np.sum(y**2) for _, y in wide)))


def poison(toy):
  """Fills free memory with NaN, to expose kernels that read it."""
  import jax
  import jax.numpy as jnp

  stats = jax.local_devices()[0].memory_stats() or {}
  free = stats.get("bytes_limit", 2**20) - stats.get("bytes_in_use", 0)
  size = 2**20 if toy else int(0.8 * free)
  jax.block_until_ready(jnp.full(size // 4, jnp.nan, jnp.float32)).delete()


def operands(kind, seed, toy, large=False):
  """Inputs of a kernel in bfloat16, of a random shape, or of a model's."""
  import jax.numpy as jnp
  import numpy as np

  random = np.random.default_rng(seed)
  batch, tokens = int(random.integers(1, 4)), int(random.integers(1, 513))
  tokens = 3 if seed == 0 else tokens  # Fewer than any tile, and odd.
  tokens = min(tokens, 16) if toy else tokens
  if large:
    batch, tokens = 8, 2048
  if kind == "gated_kv":
    from gated_kv_examples import arrays

    heads = 2 if toy else 16 if large else int(random.integers(1, 17))
    width = 64 * heads
    return arrays(
      jnp.bfloat16, batch=batch, tokens=tokens, width=width, heads=heads,
      head_width=64, rows=tokens + 8, start=[8] * batch,
    )  # fmt: skip
  heads, width = (1, 64) if toy else (int(random.integers(1, 9)), 128)
  heads = 8 if large else heads

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

  query, key, value = (normal(batch, tokens, heads, width) for _ in range(3))
  if kind == "attention":
    return query, key, value
  decay = -jnp.abs(normal(batch, tokens, heads)) / 8
  write = jnp.abs(normal(batch, tokens, heads)) / 2
  state = jnp.zeros((batch, heads, width, width), jnp.float32)
  return query, key, value, decay, write, state


def function(kind, kernel):
  """The operator with kernels, or in plain JAX."""
  import jax

  from loopjax.kernels.gated_delta import gated_delta
  from loopjax.kernels.gated_kv import gated_kv

  if kind == "attention":
    attend = jax.nn.dot_product_attention
    backend = "cudnn" if kernel else "xla"
    return functools.partial(attend, is_causal=True, implementation=backend)
  if kind == "gated_kv":
    backend = "pallas_gpu" if kernel else "reference"
    return functools.partial(gated_kv, implementation=backend)
  backend = "pallas_gpu" if kernel else "chunked"
  return functools.partial(gated_delta, implementation=backend)


def with_gradients(run):
  """Results and gradients of the floating-point arguments."""
  import jax
  import jax.numpy as jnp

  def value(floats, others):
    merged = iter(others)
    args = [next(merged) if x is None else x for x in floats]
    results = run(*args)
    sums = (
      jnp.sum(jnp.square(x.astype(jnp.float32)))
      for x in jax.tree.leaves(results)
    )
    return sum(sums), results

  def both(*args):
    is_int = [getattr(x, "dtype", None) == jnp.int32 for x in args]
    floats = [None if i else x for x, i in zip(args, is_int, strict=True)]
    others = [x for x, i in zip(args, is_int, strict=True) if i]
    return jax.grad(value, has_aux=True)(floats, others)

  return both


def kernel_check(kind, seed, toy):
  """A kernel and plain JAX against plain JAX in float64."""
  import jax
  from in_float64 import in_float64

  args = operands(kind, seed, toy)
  plain = with_gradients(function(kind, kernel=False))
  found = {"shapes": [list(x.shape) for x in jax.tree.leaves(args)[:3]]}
  with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
    exact = jax.device_get(in_float64(plain)(*jax.device_get(args)))
  for name in ("plain",) if toy else ("plain", "kernel"):
    poison(toy)
    run = jax.jit(with_gradients(function(kind, kernel=name == "kernel")))
    found[name] = apart(jax.device_get(run(*args)), exact)
  found["ok"] = all(found[x] < 0.02 for x in ("plain", "kernel") if x in found)
  return found


def median_seconds(run, *args, calls=10):
  """Times of calls, each of which waits for the device."""
  import jax

  jax.block_until_ready(run(*args))
  times = []
  for _ in range(calls):
    started = time.perf_counter()
    jax.block_until_ready(run(*args))
    times.append(time.perf_counter() - started)
  return sorted(times)[calls // 2]


def kernel_time(kind, toy):
  """A kernel against XLA, forward and with gradients, and against PyTorch."""
  import jax

  args = operands(kind, 0, toy, large=not toy)
  found = {"shapes": [list(x.shape) for x in jax.tree.leaves(args)[:3]]}
  for name in ("plain",) if toy else ("plain", "kernel"):
    run = function(kind, kernel=name == "kernel")
    found[f"{name}_ms"] = 1e3 * median_seconds(jax.jit(run), *args)
    both = jax.jit(with_gradients(run))
    found[f"{name}_gradients_ms"] = 1e3 * median_seconds(both, *args)
  if kind == "attention" and not toy:
    found |= other_libraries(args)
  return found


def other_libraries(args):
  """The time of attention in PyTorch and tokamax, if installed."""
  import jax
  import numpy as np

  found = {}
  try:
    import torch

    q, k, v = (
      torch.tensor(np.asarray(x, np.float32)).to("cuda", torch.bfloat16)
      for x in (x.swapaxes(1, 2) for x in args)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    times = []
    for _ in range(11):
      events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
      events[0].record()
      attend(q, k, v, is_causal=True)
      events[1].record()
      torch.cuda.synchronize()
      times.append(events[0].elapsed_time(events[1]))
    found["torch_ms"] = sorted(times)[5]
  except ImportError:
    pass
  try:
    import tokamax

    run = functools.partial(tokamax.dot_product_attention, is_causal=True)
    found["tokamax_ms"] = 1e3 * median_seconds(jax.jit(run), *args)
  except ImportError:
    pass
  return found


def family_check(name, toy):
  """A family's loss and gradients in bfloat16 on the device and in float64."""
  import steps

  return steps.family(name, "xla" if toy else "gpu", apart)


def checks(rows, options):
  kinds = ("attention", "gated_kv", "gated_delta")
  seeds = range(1 if options.toy else 5)
  for seed, kind in itertools.product(seeds, kinds):
    check = functools.partial(kernel_check, kind, seed, options.toy)
    rows.add(f"check/{kind}/{seed}", check)
  from tests_support import SIZES

  for name in SIZES[:1] if options.toy else SIZES:
    rows.add(
      f"family/{name}", functools.partial(family_check, name, options.toy)
    )
  for kind in kinds:
    rows.add(f"time/{kind}", functools.partial(kernel_time, kind, options.toy))


def train_steps(rows, options):
  import steps

  cases = {"sudoku_utm": ("sudoku_utm", "smoke")} if options.toy else STEPS
  for label, (name, arg) in cases.items():
    for kernels in ("xla",) if options.toy else ("gpu", "xla"):
      run = functools.partial(
        steps.timed, name, arg, kernels, options.traces and label
        and f"{options.traces}/{label}-{kernels}",
      )  # fmt: skip
      rows.add(f"step/{kernels}/{label}", run)


def decoding(rows, options):
  import steps

  cases = {"lm_looped": "smoke"} if options.toy else DECODED
  for (name, arg), batch in itertools.product(cases.items(), BATCHES):
    if not options.toy or batch == BATCHES[0]:
      run = functools.partial(steps.decoded, name, arg, batch, options.toy)
      rows.add(f"decode/{name}/{batch}", run)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parts = {"checks": checks, "steps": train_steps, "decode": decoding}
  parser.add_argument("part", choices=parts)
  parser.add_argument("--rows", required=True)
  parser.add_argument("--only", default="")
  parser.add_argument("--traces", default="")
  parser.add_argument("--toy", action="store_true")
  options = parser.parse_args()
  if options.toy:
    os.environ["JAX_PLATFORMS"] = "cpu"
  rows = Rows(options.rows, options.only)
  parts[options.part](rows, options)


if __name__ == "__main__":
  main()
