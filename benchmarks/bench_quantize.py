"""Weights in 8 and 4 bits compared with bfloat16 and float32.

  python benchmarks/bench_quantize.py --texts=DIRECTORY --rows=256

  quality  bits per byte of `zoo:novels` on rows of its test split, whose texts
           are in DIRECTORY, with all loops; "error" is the standard error over
           rows, also of the difference from float32
  speed    tokens per second of the engine, greedy: `zoo:novels`, and untrained
           weights of width 512, 8 layers, 4 loops; in turns in one process
  memory   bytes of the weights, and memory of the compiled decode program:
           arguments (weights and cache) and temporaries

The second part of a name is the precision of products.
"""

import dataclasses
import json
import os
import pathlib

import bench_generate  # In this folder.
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.analysis import evaluated
from loopjax.generate.engine import Engine, GenerationRequest
from loopjax.models import looped
from loopjax.run import provenance
from loopjax.run.checkpoints import quantized
from loopjax.saved import trained

_TEXTS = flags.DEFINE_string("texts", ".", "Where the novels are.")
_SIZES = flags.DEFINE_list("sizes", ["novels", "large"], "Of speed.")
_QUALITY = flags.DEFINE_bool("quality", True, "Whether to score as well.")
FORMS = {
  "float32": (None, "float32"),
  "bfloat16": (None, "bfloat16_params"),
  "int8, float32": ("int8", "float32"),
  "int8, bfloat16": ("int8", "bfloat16_params"),
  "int4, float32": ("int4", "float32"),
  "int4, bfloat16": ("int4", "bfloat16_params"),
}


def main(argv):
  del argv
  rows = quality() if _QUALITY.value else []
  for size in _SIZES.value:
    rows += speed(size)
  load = {"load_average": os.getloadavg(), "cpus": os.cpu_count()}
  print(
    json.dumps({"rows": rows, **load, **provenance.environment()}, indent=2)
  )


def forms(config, spec, params):
  """{name: (graphdef, parameters)}."""
  made = {}
  for name, (weights, precision) in FORMS.items():
    options = dataclasses.replace(config, precision=precision)
    shapes = jax.eval_shape(
      lambda options=options: looped.Model(
        options, spec, rngs=nnx.Rngs(params=0)
      )
    )
    graphdef, wanted = nnx.split(shapes)
    own = jax.tree.map(
      lambda x, like: x.astype(like.dtype), params, nnx.to_pure_dict(wanted)
    )
    made[name] = graphdef, quantized.quantized(own, weights) if weights else own
  return made


def novels():
  run = trained.read(pathlib.Path("zoo:novels"))
  return run, forms(run.settings.model, run.settings.spec, run.params)


def quality():
  """Bits per byte of every form, and the difference from float32."""
  os.chdir(_TEXTS.value)
  run, models = novels()
  size = bench_generate._ROWS.value
  dataset = run.settings.task_module.make_dataset(
    run.settings.task, "test", batch_size=size, seed=0
  )
  batch = evaluated.sample(dataset, size)
  bits = {}
  for name, (graphdef, params) in models.items():

    @jax.jit
    def score(params, inputs, targets, documents, graphdef=graphdef):
      logits = nnx.merge(graphdef, params)(inputs, documents=documents).logits
      chance = jax.nn.log_softmax(logits.astype(jnp.float32))
      at = jnp.take_along_axis(chance, targets[..., None], axis=2)
      return -at[..., 0] / np.log(2)

    parts = []
    for start in range(0, size, 32):
      part = [
        jnp.asarray(batch[x][start : start + 32])
        for x in ("inputs", "targets", "documents")
      ]
      parts.append(np.asarray(score(params, *part)))
    weights = batch["weights"]
    by_row = (np.concatenate(parts) * weights).sum(1) / weights.sum(1)
    bits[name] = by_row
  return [
    {
      "part": "quality",
      "form": name,
      "bits_per_byte": float(by_row.mean()),
      "more_than_float32": float((by_row - bits["float32"]).mean()),
      "error": float((by_row - bits["float32"]).std() / size**0.5),
      "of_bfloat16": float(by_row.mean() / bits["bfloat16"].mean()),
    }
    for name, by_row in bits.items()
  ]


def speed(size):
  """Tokens per second and memory of every form."""
  if size == "novels":
    _, models = novels()
  else:
    graphdef, params = bench_generate.make_model(bench_generate.LARGE, 128)
    model = nnx.merge(graphdef, params)
    models = forms(model.config, model.spec, params)
  rows, memory = [], {}
  for batch in map(int, bench_generate._BATCHES.value):
    given = bench_generate.prompts(batch, 64, 64)
    asked = [GenerationRequest(x, 64, bench_generate.GREEDY) for x in given]
    runs = {}
    for name, (graphdef, params) in models.items():
      engine = Engine(
        looped.FAMILY, graphdef, params, num_slots=batch, max_tokens=128,
        tokens_per_dispatch=16,
      )  # fmt: skip
      runs[name] = bench_generate.writer(engine, asked)
      memory[name] = of_program(engine, params)
    found = bench_generate.compare(
      f"{size}, batch {batch}", runs, 64 * batch, same=False
    )
    rows += [row | memory[row["form"]] for row in found]
  return rows


def of_program(engine, params):
  """Memory of decoding, in bytes."""
  program = engine._programs.decode.lower(
    engine._params, engine._state, np.ones(engine.num_slots, bool), num_top=0,
    span=128, with_exits=False,
  )  # fmt: skip
  stats = program.compile().memory_analysis()
  return {
    "weight_bytes": quantized.num_bytes(params),
    "argument_bytes": stats.argument_size_in_bytes,
    "temporary_bytes": stats.temp_size_in_bytes,
  }


if __name__ == "__main__":
  app.run(main)
