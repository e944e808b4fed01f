"""Cost of windows and passes in a training step of a model that sleeps.

  python benchmarks/bench_sleep.py --figure=sleep.png
  python benchmarks/bench_sleep.py --tokens=12288 --precision=bfloat16

Figure 6 of "Language Models Need Sleep" (arXiv 2605.26099): tokens per second
by window length L with one pass, and by passes N with windows of one length.
Windows are read one after another, so short ones leave a device idle; N passes
should cost N times as much except for what is read once. A step is loss and
gradient on random tokens, all predicted. Forms alternate in one process; their
ratios are what counts. With L = T there is one window: the plain hybrid in
parallel, whose attention also has the most to compute. Columns:

  ms       median of a step
  tokens   thousands per second
  ratio    of tokens per second to the first row's
  temp     temporaries of the compiled program, in MiB
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.analysis import draw
from loopjax.models import sleep
from loopjax.run import provenance
from loopjax.types import LoopOptions, TaskSpec

_CALLS = flags.DEFINE_integer("calls", 5, "Timed steps of every form.")
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "T, tokens of a sequence.")
_WINDOWS = flags.DEFINE_multi_integer(
  "window", [2048, 1024, 512, 256, 128, 64, 32], "L; they divide T."
)
_PASSES = flags.DEFINE_multi_integer("passes", [1, 2, 3, 4], "N.")
_PASS_WINDOW = flags.DEFINE_integer("pass_window", 256, "L where N varies.")
_WIDTH = flags.DEFINE_integer("width", 128, "D; heads are of 64.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Of attention, and of memory.")
_MEMORY = flags.DEFINE_string("memory", "gated_delta", "Or jet.")
_PRECISION = flags.DEFINE_string("precision", "float32", "Or bfloat16.")
_REMAT = flags.DEFINE_string("remat", "full", "Of windows, where N varies.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to, as JSON.")
_FIGURE = flags.DEFINE_string("figure", None, "File to write the plot to.")
_VOCABULARY = 256


def main(argv):
  del argv
  by_window = _table(
    "windows, one pass",
    {f"L = {size}": (size, 1, "none") for size in _WINDOWS.value},
  )
  by_passes = _table(
    f"passes, L = {_PASS_WINDOW.value}",
    {f"N = {n}": (_PASS_WINDOW.value, n, _REMAT.value) for n in _PASSES.value},
  )
  if _JSON.value:
    report = {"rows": by_window + by_passes, **provenance.environment()}
    with open(_JSON.value, "w") as file:
      json.dump(report, file, indent=2)
  if _FIGURE.value:
    _draw(by_window, by_passes)


def _table(title: str, forms: dict[str, tuple[int, int, str]]) -> list[dict]:
  """Times the forms alternately; prints and returns one row for each."""
  steps = {name: _compiled(*form) for name, form in forms.items()}
  seconds: dict[str, list[float]] = {name: [] for name in forms}
  for turn in range(_CALLS.value + 1):  # The first one warms up.
    for name, (call, _) in steps.items():
      start = time.perf_counter()
      call()
      if turn:
        seconds[name].append(time.perf_counter() - start)
  print(f"\n{title}\n{'':12}{'ms':>10}{'tokens':>9}{'ratio':>8}{'temp':>9}")
  rows: list[dict] = []
  for name, (_, temporaries) in steps.items():
    median = float(np.median(seconds[name]))
    rate = _BATCH.value * _TOKENS.value / median
    row = {
      "title": title,
      "window": forms[name][0],
      "passes": forms[name][1],
      "ms": 1e3 * median,
      "tokens_per_second": rate,
      "temp_bytes": temporaries,
    }
    rows.append(row)
    row["ratio"] = rate / rows[0]["tokens_per_second"]
    print(
      f"{name:12}{row['ms']:10.1f}{rate / 1e3:9.2f}{row['ratio']:8.3f}"
      f"{temporaries / 2**20:9.1f}"
    )
  return rows


def _compiled(window: int, num_passes: int, remat: str):
  """(a step that waits for its results, bytes of temporaries)."""
  tokens = _TOKENS.value
  assert tokens % window == 0, f"--window={window} does not divide {tokens}"
  spec = TaskSpec(_VOCABULARY, tokens, tuple((i,) for i in range(tokens)))
  heads = _WIDTH.value // 64
  config = sleep.Config(
    width=_WIDTH.value,
    num_layers=_LAYERS.value,
    num_heads=heads,
    num_memory_layers=_LAYERS.value,
    memory=_MEMORY.value,
    num_memory_heads=heads,
    key_width=48,
    value_width=128,
    window=window,
    num_passes=num_passes,
    precision=_PRECISION.value,
  )
  model = sleep.Model(
    config, spec, LoopOptions("scan", remat), rngs=nnx.Rngs(params=0)
  )
  graphdef, params = nnx.split(model)
  inputs = jax.random.randint(
    jax.random.key(0), (_BATCH.value, tokens), 0, _VOCABULARY
  )
  batch = {
    "inputs": inputs,
    "targets": jnp.roll(inputs, -1, axis=1),
    "weights": jnp.ones(inputs.shape, jnp.float32),
  }

  def loss(params):
    model = nnx.merge(graphdef, params)
    return sleep.loss(model, batch, jax.random.key(0), jnp.asarray(0), {})[0]

  compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return lambda: jax.block_until_ready(compiled(params)), temporaries


def _draw(by_window: list[dict], by_passes: list[dict]) -> None:
  """Both curves, and 1 / N."""
  figure = draw.new(9.2, 3.4)
  left, right = figure.subplots(1, 2)
  for axes, rows, key, label in (
    (left, by_window, "window", "L, tokens"),
    (right, by_passes, "passes", "N, passes"),
  ):
    places = [row[key] for row in rows]
    rates = [row["tokens_per_second"] / 1e3 for row in rows]
    axes.plot(places, rates, "o-", color=draw.BLUE, label="measured")
    axes.set_ylim(bottom=0)
    draw.tidy(axes, "Training throughput", label, "thousand tokens / s")
  left.set_xscale("log", base=2)
  first = by_passes[0]["tokens_per_second"] / 1e3
  counts = [row["passes"] for row in by_passes]
  right.plot(
    counts,
    [first * counts[0] / n for n in counts],
    ":",
    color=draw.GREY,
    label="1 / N",
  )
  right.legend(frameon=False, fontsize=9)
  figure.savefig(_FIGURE.value, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
  app.run(main)
