"""The cost of DiscoLoop's second channel, chunked and plain.

  python benchmarks/bench_decode_embed.py --part=operator
  python benchmarks/bench_decode_embed.py --part=step
  python benchmarks/bench_decode_embed.py --part=paper

`operator` times value and gradient of `decode_embed` alone, chunked and
reference, for several vocabulary sizes. `step` times a training step (loss,
gradient, plain gradient descent) of DiscoLoop against the vanilla loop of equal
size, with the vocabularies of the two-hop task and of the language model (arXiv
2607.00341, section 5.1 and appendix B), but fewer tokens and a smaller model
than the latter's. `paper` compiles the language model's step in bfloat16 and
runs nothing. Forms alternate in one process under the same conditions; only
ratios within one run are meaningful. Columns:

  ms, time        median of a call, and its multiple of the first row's
  temp            temporaries of the compiled program, in MiB
  peak            arguments + outputs + temporaries, as a multiple
  flops           floating-point operations of the step, as a multiple, counted
                  from the matrix products
"""

import json
import pathlib
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.kernels.decode_embed import decode_embed
from loopjax.models import MODELS
from loopjax.run import provenance
from loopjax.types import LoopOptions, TaskSpec

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import vocabulary_examples

FORMS = {"reference": vocabulary_examples.decode_embed, "chunked": decode_embed}

_PART = flags.DEFINE_enum(
  "part", "step", ["operator", "step", "paper"], "What."
)
_CALLS = flags.DEFINE_integer("calls", 5, "Timed calls of every form.")
_JSON = flags.DEFINE_string("json", None, "File to write the rows to, as JSON.")

_LARGE_VOCABULARY = 129_280
# Tokens of a batch, sizes, and the forms of Phi by name: (top_k, form).
_STEPS = {
  "two-hop": {
    "vocab": 1_050,
    "batch": (500, 4),
    "sizes": {"width": 128, "num_layers": 2, "num_heads": 4, "num_loops": 2},
    "forms": {"disco": (0, "chunked"), "disco, reference": (0, "reference")},
  },
  "language model": {
    "vocab": _LARGE_VOCABULARY,
    "batch": (1, 64),
    "sizes": {
      "width": 512, "num_layers": 16, "num_heads": 8, "num_loops": 4,
      "mlp": "swiglu", "mlp_ratio": 2.75,
    },
    "forms": {
      "disco, top 128": (128, "chunked"),
      "disco": (0, "chunked"),
      "disco, reference": (0, "reference"),
    },
  },
}  # fmt: skip
_PAPER = {
  "vocab": _LARGE_VOCABULARY,
  "batch": (1, 8192),
  "sizes": {
    "width": 1024, "num_layers": 24, "num_heads": 16, "num_loops": 4,
    "mlp": "swiglu", "mlp_ratio": 2.75, "rope_base": 1e6,
    "precision": "bfloat16",
  },
  "forms": {"disco, top 128": (128, "chunked"), "disco": (0, "chunked")},
}  # fmt: skip


def main(argv):
  del argv
  parts = {"operator": operator_rows, "step": step_rows, "paper": paper_rows}
  rows = parts[_PART.value]()
  if _JSON.value:
    report = {"rows": rows, **provenance.environment()}
    with open(_JSON.value, "w", encoding="utf-8") as file:
      json.dump(report, file, indent=2)


def operator_rows() -> list[dict]:
  """The chunked form and the reference, by vocabulary size."""
  rows = []
  for vocab in (1_050, 2_048, 4_096, 8_192, 16_384, 32_768):
    for top_k in (0, 128):
      forms = {
        name: _operator(vocab, top_k, form) for name, form in FORMS.items()
      }
      title = f"V={vocab:,} top_k={top_k}, 1024 tokens of width 128"
      rows += _table(title, forms, flops={})
  return rows


def _operator(vocab: int, top_k: int, form):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden, cotangent = jax.random.normal(keys[0], (2, 8, 128, 128))
  table = 0.1 * jax.random.normal(keys[2], (vocab, 128))

  def projected(hidden, table):
    return jnp.vdot(cotangent, form(hidden, table, top_k=top_k))

  run = jax.jit(jax.value_and_grad(projected, (0, 1)))
  return run.lower(hidden, table).compile(), lambda: (hidden, table)


def step_rows() -> list[dict]:
  """Training steps of DiscoLoop and of the vanilla loop."""
  rows = []
  for name, setting in _STEPS.items():
    rows += _table(_title(name, setting), *_steps(setting, LoopOptions()))
  return rows


def paper_rows() -> list[dict]:
  """The same at the language model's size; only compiled."""
  forms, flops = _steps(_PAPER, LoopOptions(remat="full"), materialize=False)
  return _table(_title("paper", _PAPER), forms, flops)


def _title(name: str, setting: dict) -> str:
  return f"{name}: V={setting['vocab']:,}, batch {setting['batch']}"


def _steps(setting: dict, options: LoopOptions, materialize: bool = True):
  """Forms by name, and their FLOPs as multiples of the vanilla loop's."""
  sizes, vocab, length = (
    setting["sizes"], setting["vocab"], setting["batch"][1]
  )  # fmt: skip
  forms = {
    "vanilla": _step("looped", setting, options, 0, "chunked", materialize)
  }
  flops = {"vanilla": 1.0}
  for name, (top_k, form) in setting["forms"].items():
    forms[name] = _step("disco", setting, options, top_k, form, materialize)
    whole = form == "reference"
    flops[name] = _flops_ratio(sizes, vocab, length, top_k, whole)
  return forms, flops


def _step(family_name, setting, options, top_k, form, materialize):
  """(compiled step, its arguments or None)."""
  family = MODELS[family_name]
  changes = {"top_k": top_k} if top_k else {}
  config = family.Config(**setting["sizes"], **changes)
  length = setting["batch"][1]
  spec = TaskSpec(setting["vocab"], length, tuple((i,) for i in range(length)))

  def build():
    return family.Model(config, spec, options, rngs=nnx.Rngs(params=0))

  graphdef, _ = nnx.split(nnx.eval_shape(build))

  def make_arguments():
    params = nnx.to_pure_dict(nnx.state(build()))
    keys = jax.random.split(jax.random.key(0), 2)
    inputs, targets = (
      jax.random.randint(key, setting["batch"], 0, setting["vocab"])
      for key in keys
    )
    weights = jnp.ones(setting["batch"], jnp.float32)
    return params, {"inputs": inputs, "targets": targets, "weights": weights}

  def loss(params, batch):
    key, step = jax.random.key(0), jnp.zeros((), jnp.int32)
    return family.loss(nnx.merge(graphdef, params), batch, key, step, {})[0]

  def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

  with mock.patch("loopjax.loop.channel.decode_embed", FORMS[form]):
    abstract = jax.eval_shape(make_arguments)
    compiled = jax.jit(step, donate_argnums=0).lower(*abstract).compile()
  return compiled, jax.jit(make_arguments) if materialize else None


def _flops_ratio(sizes, vocab, length, top_k, kept) -> float:
  """Ratio of a training step's products with Phi to those without.

  A backward pass has two products for each product of the forward pass. Phi
  over V tokens has 2 products with the table in the forward and 4 in the
  backward pass, plus one if it recomputes the logits; over k tokens, only the
  forward pass's logits use the whole table.
  """
  spec = TaskSpec(vocab, length, tuple((0,) for _ in range(length)))
  config = MODELS["looped"].Config(**sizes)
  loops = config.num_loops
  costs = MODELS["looped"].costs(config, spec, loops)
  vanilla = 3 * costs["flops_per_example"][-1]
  table = 2 * length * vocab * config.width
  few = 2 * length * top_k * config.width
  phi = table + 4 * few if top_k else (6 if kept else 7) * table
  return (vanilla + (loops - 1) * phi) / vanilla


def _table(title: str, forms: dict, flops: dict) -> list[dict]:
  """Times the forms alternately; prints and returns one row for each.

  Args:
    title: title of the table.
    forms: by name, (compiled program, function that makes its arguments or None
      not to run it).
    flops: multiple of the first form's, by name; may be empty.
  """
  seconds = {name: [] for name in forms}
  for turn in range(_CALLS.value + 1):  # The first warms up.
    for name, (compiled, make_arguments) in forms.items():
      if make_arguments is None:
        seconds[name] = [np.nan]
        continue
      arguments = jax.block_until_ready(make_arguments())
      start = time.perf_counter()
      jax.block_until_ready(compiled(*arguments))
      if turn:
        seconds[name].append(time.perf_counter() - start)
  print(f"\n{title}\n{'':18}{'ms':>9}{'time':>8}{'temp':>9}{'peak':>8}", end="")
  print(f"{'flops':>8}" if flops else "")
  rows = []
  for name, (compiled, _) in forms.items():
    memory = compiled.memory_analysis()
    row = {
      "title": title,
      "form": name,
      "ms": 1e3 * float(np.median(seconds[name])),
      "temp_bytes": memory.temp_size_in_bytes,
      "peak_bytes": memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
      - memory.alias_size_in_bytes,
    }
    rows.append(row)
    row["time"] = row["ms"] / rows[0]["ms"]
    row["peak"] = row["peak_bytes"] / rows[0]["peak_bytes"]
    print(
      f"{name:18}{row['ms']:9.1f}{row['time']:8.2f}"
      f"{row['temp_bytes'] / 2**20:9.1f}{row['peak']:8.2f}",
      end="",
    )
    if flops:
      row["flops"] = flops[name]
    print(f"{flops[name]:8.3f}" if flops else "")
  return rows


if __name__ == "__main__":
  app.run(main)
