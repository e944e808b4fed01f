"""What to run when a GPU is available: three calls of ten minutes.

  python benchmarks/device/hour.py checks --out=rows.jsonl
  python benchmarks/device/hour.py steps --out=rows.jsonl --traces=traces
  python benchmarks/device/hour.py presets --out=rows.jsonl --runs=runs

"checks" compares kernels and families in bfloat16 with float64, and times
kernels; "steps" times train steps; "presets" trains presets, the longest first.
Every row is written as soon as it is complete. Repeating a command adds the
missing rows; it ends within --minutes. --only: rows whose name matches a
regular expression, so that several processes can share a device. --toy: sizes
for a CPU, where plain JAX replaces kernels. No network is needed.
"""

import argparse
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / x) for x in (".", "kernels"))]

# ":gpu" presets, the longest first.
PRESETS = (
  "depo_sleep", "gsm_sleep", "automaton_sleep", "maze_trm", "sudoku_utm",
  "sudoku_trm", "sudoku_hrm", "sudoku_urm",
)  # fmt: skip
# Steps to time, with settings that fit one GPU.
STEPS = {
  "lm_looped": "paper,run.batch_size=8,run.num_microbatches=8,"
  "eval.batch_size=8",
  "lm_disco": "paper,run.batch_size=4,run.num_microbatches=4,eval.batch_size=4",
  "lm_adaptive": "paper",
  "lm_melt": "gpu,run.batch_size=16",
  "sudoku_utm": "gpu,model.precision=bfloat16",
  "depo_sleep": "gpu,model.precision=bfloat16",
}


class Rows:
  """A file of rows by name; existing rows are not recomputed."""

  def __init__(self, path, minutes, only=""):
    self.only = re.compile(only)
    self.path, self.end = pathlib.Path(path), time.monotonic() + 60 * minutes
    text = self.path.read_text("utf-8") if self.path.exists() else ""
    # A killed run's last line may be incomplete.
    whole = [line for line in text.splitlines(True) if line.endswith("\n")]
    self.done = {json.loads(line)["name"] for line in whole}
    self.path.write_text("".join(whole), "utf-8")

  def add(self, name, compute):
    """Computes and writes a row, unless it exists or time is up."""
    if name in self.done or not self.only.match(name):
      return
    if time.monotonic() > self.end:
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

  cases = {"sudoku_utm": "smoke"} if options.toy else STEPS
  for kernels in ("xla",) if options.toy else ("gpu", "xla"):
    for name, arg in cases.items():
      run = functools.partial(steps.timed, name, arg, kernels, options.traces)
      rows.add(f"step/{kernels}/{name}", run)


def presets(rows, options):
  for name in ("sudoku_utm",) if options.toy else PRESETS:
    file = f"{name}.py:{'smoke' if options.toy else 'gpu'}"
    workdir = pathlib.Path(options.runs).absolute() / name
    run = functools.partial(trained, file, workdir, rows.end - 20)
    rows.add(f"preset/{name}", run)


def trained(file, workdir, end):
  """The result of a preset's run, interrupted at a given time."""
  command = [sys.executable, "-m", "loopjax.main", f"--workdir={workdir}"]
  command += [f"--config={ROOT}/configs/{file}"]
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  child = subprocess.Popen(command, cwd=ROOT, env=environment)
  try:
    status = child.wait(max(1, end - time.monotonic()))
  except subprocess.TimeoutExpired:
    child.terminate()  # It saves; the next call resumes.
    child.wait(60)
    raise SystemExit(f"{file} goes on with the same command") from None
  summary = json.loads((workdir / "summary.json").read_text("utf-8"))
  kept = ("status", "metrics", "wall_seconds", "steps")
  return {"exit": status} | {key: summary[key] for key in kept}


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parts = {"checks": checks, "steps": train_steps, "presets": presets}
  parser.add_argument("part", choices=parts)
  parser.add_argument("--out", required=True)
  parser.add_argument("--minutes", type=float, default=9.0)
  parser.add_argument("--only", default="")
  parser.add_argument("--runs", default="runs/device")
  parser.add_argument("--traces", default="")
  parser.add_argument("--toy", action="store_true")
  options = parser.parse_args()
  if options.toy:
    os.environ["JAX_PLATFORMS"] = "cpu"
  rows = Rows(options.out, options.minutes, options.only)
  parts[options.part](rows, options)


if __name__ == "__main__":
  main()
