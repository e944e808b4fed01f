"""Cost of windows and passes in a training step of a model that sleeps.

  python benchmarks/bench_sleep.py --figure=sleep.png
  python benchmarks/bench_sleep.py --tokens=12288 --precision=bfloat16

Figure 6 of "Language Models Need Sleep" (arXiv 2605.26099): tokens per second
by window length L with one pass, and by passes N with windows of one length.
Windows are processed one after another: short windows underuse a device. N
passes should cost N times as much, except for the parts that run once. A step
is loss and gradient on random tokens, all predicted. Forms alternate in one
process; only their ratios are meaningful. Windows are processed

  hard      one after another, each evicted as a whole
  sliding   one after another, keeping the last L - 1 tokens
  parallel  all at once: the same sliding-window hybrid, with the windows as a
            batch for attention; checked first to equal "sliding"

With L = T there is one window, the hybrid with full attention. Columns:

  ms       median of a step
  cpu      the same in CPU time of the process, for busy machines
  tokens   thousands per second
  ratio    tokens per second divided by the first row's
  temp     temporaries of the compiled program, in MiB
"""

import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.analysis.plots import draw
from loopjax.loop import windows
from loopjax.losses import tokens as token_losses
from loopjax.models import sleep
from loopjax.nn import block, hybrid, rope
from loopjax.nn.attention.cache import KeyValues
from loopjax.run import provenance
from loopjax.types import Array, LoopOptions, TaskSpec

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
_REMAT = flags.DEFINE_string(
  "remat", "full", "Of groups of layers, where N varies."
)
_JSON = flags.DEFINE_string("json", None, "File to write the rows to, as JSON.")
_FIGURE = flags.DEFINE_string("figure", None, "File to write the plot to.")
_VOCABULARY = 256
_READ = ("hard", "sliding", "parallel")


class Form(NamedTuple):
  """How a sequence is processed. remat: policy for a part processed at once."""

  window: int
  read: str = "hard"
  passes: int = 1
  remat: str = "none"


def main(argv):
  del argv
  _check_parallel(min(_WINDOWS.value))
  forms = {}
  for size in _WINDOWS.value:
    for read in _READ if size < _TOKENS.value else _READ[:1]:
      forms[f"L = {size} {read}"] = Form(size, read)
  by_window = _table("windows, one pass", forms)
  by_passes = _table(
    f"passes, L = {_PASS_WINDOW.value}",
    {
      f"N = {n}": Form(_PASS_WINDOW.value, "hard", n, _REMAT.value)
      for n in _PASSES.value
    },
  )
  if _JSON.value:
    report = {"rows": by_window + by_passes, **provenance.environment()}
    with open(_JSON.value, "w", encoding="utf-8") as file:
      json.dump(report, file, indent=2)
  if _FIGURE.value:
    _draw(by_window, by_passes)


def _table(title: str, forms: dict[str, Form]) -> list[dict]:
  """Times the forms alternately; prints and returns one row for each."""
  steps = {name: _compiled(form) for name, form in forms.items()}
  seconds: dict[str, list[np.ndarray]] = {name: [] for name in forms}
  for turn in range(_CALLS.value + 1):  # The first warms up.
    for name, (call, _) in steps.items():
      start = np.array([time.perf_counter(), time.process_time()])
      call()
      end = np.array([time.perf_counter(), time.process_time()])
      if turn:
        seconds[name].append(end - start)
  header = f"{'ms':>10}{'cpu':>10}{'tokens':>9}{'ratio':>8}{'temp':>9}"
  print(f"\n{title}\n{'':20}{header}")
  rows: list[dict] = []
  for name, (_, temporaries) in steps.items():
    median, cpu = np.median(seconds[name], axis=0).tolist()
    rate = _BATCH.value * _TOKENS.value / median
    row = {
      "title": title,
      "window": forms[name].window,
      "read": forms[name].read,
      "passes": forms[name].passes,
      "ms": 1e3 * median,
      "cpu_ms": 1e3 * cpu,
      "tokens_per_second": rate,
      "temp_bytes": temporaries,
    }
    rows.append(row)
    row["ratio"] = rate / rows[0]["tokens_per_second"]
    print(
      f"{name:20}{row['ms']:10.1f}{row['cpu_ms']:10.1f}{rate / 1e3:9.2f}"
      f"{row['ratio']:8.3f}{temporaries / 2**20:9.1f}"
    )
  return rows


def _compiled(form: Form):
  """(a step that waits for its results, bytes of temporaries)."""
  graphdef, params = _make(form)
  loss = _loss_of(form, graphdef)
  compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return lambda: jax.block_until_ready(compiled(params)), temporaries


def _check_parallel(window: int) -> None:
  """Raises AssertionError unless the parallel form has the sequential loss."""
  losses = []
  for read in _READ[1:]:
    form = Form(window, read)
    graphdef, params = _make(form)
    losses.append(float(jax.jit(_loss_of(form, graphdef))(params)))
  np.testing.assert_allclose(*losses, rtol=1e-3)


def _make(form: Form) -> tuple[nnx.GraphDef, Any]:
  """The model and its parameters, which are the same for every form."""
  tokens, window = _TOKENS.value, form.window
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
    num_loops=form.passes,
    eviction="hard" if form.read == "hard" else "sliding",
    # Convolutions that restart in every window cannot run in parallel.
    carry_convolutions=form.read != "hard",
    precision=_PRECISION.value,
  )
  model = sleep.Model(
    config, spec, LoopOptions("scan", form.remat), rngs=nnx.Rngs(params=0)
  )
  return nnx.split(model)


def _loss_of(form: Form, graphdef: nnx.GraphDef) -> Any:
  """params -> mean cross-entropy."""
  tokens = _TOKENS.value
  inputs = jax.random.randint(
    jax.random.key(0), (_BATCH.value, tokens), 0, _VOCABULARY
  )
  batch = {
    "inputs": inputs,
    "targets": jnp.roll(inputs, -1, axis=1),
    "weights": jnp.ones(inputs.shape, jnp.float32),
  }

  def loss(params):
    model: Any = nnx.merge(graphdef, params)
    if form.read != "parallel":
      return sleep.loss(model, batch, jax.random.key(0), jnp.asarray(0), {})[0]
    return token_losses.next_token(model, _parallel(model, inputs), batch)

  return loss


def _parallel(model: sleep.Model, inputs: Array) -> Array:
  """Final hidden states of all tokens, [B, T, D], each attending to L tokens.

  Attention has all windows as a batch, each with its predecessor; fast-weight
  layers process all tokens at once.
  """
  config, length = model.config, model.config.window
  batch = len(inputs)
  of_windows = (batch * (inputs.shape[1] // length), length)
  first = jnp.arange(of_windows[0]) % (of_windows[0] // batch) == 0
  seen = jnp.broadcast_to(~first[:, None], (of_windows[0], length - 1))
  window = windows.make_window(seen, None, length)
  tables = rope.rope_tables(
    window.positions, config.block_shape().head_width, config.rope_base
  )

  def attend(x: Array, layer: block.Block) -> tuple[Array, None]:
    x = x.reshape(*of_windows, -1)
    own = layer.attention._keys(layer.attention_norm(x))
    past = KeyValues(*(jnp.roll(y, 1, axis=0)[:, 1:] for y in own))
    x, _ = layer.attend_with_past(x, past, tables, length, window.keys)
    return x.reshape(*inputs.shape, -1), None

  def remember(x: Array, layer: hybrid.MemoryBlock) -> tuple[Array, None]:
    state = layer.memory.initial_state(batch, carry_convolutions=True)
    return layer(x, state, None)[0], None

  def step(x: Array, group: hybrid.Groups) -> tuple[Array, None]:
    x, _ = jax.lax.scan(attend, x, group.attention)
    return jax.lax.scan(remember, x, group.memory)

  groups = hybrid.grouped(model.layers, model.memories)
  x, _ = jax.lax.scan(step, model.token_embedding(inputs), groups)
  return model.final_norm(x)


def _draw(by_window: list[dict], by_passes: list[dict]) -> None:
  """Curves by window, by passes, and 1 / N."""
  figure = draw.new(9.2, 3.4)
  left, right = figure.subplots(1, 2)
  labels = (
    "in turn, dropped whole",
    "in turn, sliding",
    "in parallel, sliding",
  )
  for read, label, color in zip(_READ, labels, draw.PALETTE, strict=False):
    rows = [row for row in by_window if row["read"] == read]
    _draw_rates(left, rows, "window", label, color)
  _draw_rates(right, by_passes, "passes", "measured", draw.BLUE)
  draw.tidy(left, "Training throughput", "L, tokens", "thousand tokens / s")
  draw.tidy(right, "Training throughput", "N, passes", "thousand tokens / s")
  left.set_xscale("log", base=2)
  left.legend(frameon=False, fontsize=9)
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


def _draw_rates(axes, rows, key: str, label: str, color) -> None:
  """Plots thousands of tokens per second over a setting."""
  rates = [row["tokens_per_second"] / 1e3 for row in rows]
  axes.plot([row[key] for row in rows], rates, "o-", color=color, label=label)
  axes.set_ylim(bottom=0)


if __name__ == "__main__":
  app.run(main)
