"""Prefill with fewer loops: cost in quality and savings in time.

python benchmarks/bench_prefill.py --texts=DIRECTORY --rows=256

quality  bits per byte of the second half of rows of the test split of
         `zoo:novels`, whose texts are in DIRECTORY. The first half is
         prefilled with each number of loops and each of `exits.KEPT` that
         fills the others; its last token and the second half use all loops.
         "shallow": both halves with fewer loops. "error" is the standard error
         over rows of the difference from all loops
first    seconds to the first token after a prompt of --prompt_length tokens;
         forms take turns in one process, after a turn that compiles
"""

import json
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.analysis import evaluated
from loopjax.generate import source
from loopjax.generate.engine import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits
from loopjax.models import looped
from loopjax.run import provenance
from loopjax.saved import language_model as language_model_lib
from loopjax.saved import trained

_TEXTS = flags.DEFINE_string("texts", ".", "Where the novels are.")
_PARTS = flags.DEFINE_list("parts", ["quality", "first"], "To run.")
_ROWS = flags.DEFINE_integer("rows", 256, "Rows of the test split.")
_TURNS = flags.DEFINE_integer("turns", 7, "Timed turns.")
_PROMPT_LENGTH = flags.DEFINE_integer("prompt_length", 1024, "Of first.")
WORKDIR = pathlib.Path("zoo:novels")


def main(argv):
  del argv
  rows = []
  for part in _PARTS.value:
    rows += {"quality": quality, "first": first}[part]()
  load = {"load_average": os.getloadavg(), "cpus": os.cpu_count()}
  print(
    json.dumps({"rows": rows, **load, **provenance.environment()}, indent=2)
  )


def quality():
  """Bits per byte after prefill with fewer loops."""
  os.chdir(_TEXTS.value)
  run = trained.read(WORKDIR)
  settings, model = run.settings, language_model_lib.load(WORKDIR)
  dataset = settings.task_module.make_dataset(
    settings.task, "test", batch_size=_ROWS.value, seed=0
  )
  batch = evaluated.sample(dataset, _ROWS.value)
  alike = np.all(batch["documents"] == batch["documents"][:, :1], axis=1)
  inputs, targets = (
    jnp.asarray(batch[name][alike]) for name in ("inputs", "targets")
  )
  size, length = inputs.shape
  most, held = model.call["num_loops"], length // 2 - 1

  def scorer(kept, whole):
    """Compiled function: loops of the prompt -> bits per byte of each row."""

    @jax.jit
    def score(params, fewer):
      net = nnx.merge(model.graphdef, params)
      cache = looped.FAMILY.reading.empty_cache(net, size, length)
      loops = jnp.full(size, fewer)

      def read(tokens, cache, loops, fills):
        policy = exits.ExitPolicy(jnp.ones(size), loops, "fixed", kept, fills)
        return looped.FAMILY.reading.read(
          net, tokens, cache, exit_policy=policy
        )

      _, cache = read(inputs[:, :held], cache, loops, True)
      rest = loops if whole else jnp.full(size, most)
      output, _ = read(inputs[:, held:], cache, rest, False)
      chance = jax.nn.log_softmax(output.logits.astype(jnp.float32))
      at = jnp.take_along_axis(chance, targets[:, held:, None], axis=2)
      return jnp.mean(-at[..., 0], axis=1) / np.log(2)

    return lambda fewer: np.asarray(score(model.params, fewer))

  forms = {
    "copy": scorer("copy", False),
    "state": scorer("state", False),
    "shallow": scorer("copy", True),
  }
  best = forms["copy"](most)
  return [
    {
      "part": "quality",
      "form": form,
      "prefill_loops": fewer,
      "rows": size,
      "scored": length - held,
      "bits_per_byte": float((found := score(fewer)).mean()),
      "more": float((found - best).mean()),
      "error": float((found - best).std() / size**0.5),
    }
    for form, score in forms.items()
    for fewer in range(1, most + 1)
  ]


def first():
  """Time to the first token."""
  model, length = language_model_lib.load(WORKDIR), _PROMPT_LENGTH.value
  most = model.call["num_loops"]
  engines = {
    kept: source.make_engine(
      model, num_slots=1, max_tokens=length + 64, exit_kept=kept
    )
    for kept in ("copy", "state")
  }
  forms = {("copy", most): []}
  forms |= {(kept, fewer): [] for kept in engines for fewer in range(1, most)}
  generator = np.random.default_rng(0)
  for turn in range(_TURNS.value + 1):
    prompt = tuple(generator.integers(0, 256, length).tolist())
    for (kept, fewer), seconds in forms.items():
      asked = GenerationRequest(
        prompt, 1, Sampling(temperature=0), prefill_loops=fewer
      )
      start = time.perf_counter()
      engines[kept].generate([asked])
      if turn:
        seconds.append(time.perf_counter() - start)
  whole = np.median(forms["copy", most])
  return [
    {
      "part": "first",
      "form": kept,
      "prefill_loops": fewer,
      "seconds": seconds,
      "median": float(np.median(seconds)),
      "of_all_loops": float(np.median(seconds) / whole),
    }
    for (kept, fewer), seconds in forms.items()
  ]


if __name__ == "__main__":
  app.run(main)
