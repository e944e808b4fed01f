"""Continuations scored per second: in batches by length, and one at a time.

  python benchmarks/bench_scorer.py --requests=FILE.jsonl.gz

A looped model with random parameters scores the continuations of a request file
of OLMES (`loopjax.eval.tasks`), or synthetic ones with the lengths of questions
with four choices. Forms take turns in one process, after a turn that compiles.

  batches      `loopjax.eval.scorer.Scorer`
  single       one at a time from the logits of all tokens, padded to the same
               lengths
  single_full  the same, padded to the context length: one program

"cpu_seconds" is the process's CPU time, for busy machines.
"""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from loopjax.data.text import task as text_task
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.eval import scorer as eval_scorer
from loopjax.eval import tasks
from loopjax.eval.scorer import Scorer, ScoringRequest
from loopjax.models import looped
from loopjax.run import provenance
from loopjax.saved.language_model import LanguageModel

_REQUESTS = flags.DEFINE_string("requests", "", "Request file; made up if ''.")
_ITEMS = flags.DEFINE_integer("items", 500, "Continuations.")
_WIDTH = flags.DEFINE_integer("width", 64, "D.")
_LAYERS = flags.DEFINE_integer("layers", 2, "L of the stack.")
_LOOPS = flags.DEFINE_integer("num_loops", 2, "K.")
_CONTEXT = flags.DEFINE_integer("context", 512, "Context length, in tokens.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bytes", "Or a tokenizer.json.")
_BATCH = flags.DEFINE_integer("batch_tokens", 8192, "Of a batch.")
_TURNS = flags.DEFINE_integer("turns", 3, "Timed turns.")


def main(argv):
  del argv
  language_model, asked = make_language_model(), make_requests()
  scorer = Scorer(language_model, _BATCH.value)
  length = _CONTEXT.value
  forms = {
    "batches": lambda: [one.log_likelihood for one in scorer(asked)],
    "single": single(language_model, asked, eval_scorer.rounded),
    "single_full": single(language_model, asked, lambda _: length),
  }
  seconds = {form: [] for form in forms}
  cpu_seconds = {form: [] for form in forms}
  found = {}
  for turn in range(_TURNS.value + 1):
    for form, run in forms.items():
      start, cpu_start = time.perf_counter(), time.process_time()
      found[form] = run()
      if turn:  # The first compiles.
        seconds[form].append(time.perf_counter() - start)
        cpu_seconds[form].append(time.process_time() - cpu_start)
  rows = [
    {
      "form": form,
      "items_per_second": len(asked) / float(np.median(seconds[form])),
      "seconds": seconds[form],
      "cpu_seconds": cpu_seconds[form],
      "largest_difference": float(
        np.max(np.abs(np.subtract(found[form], found["batches"])))
      ),
    }
    for form in forms
  ]
  computed = scorer.num_tokens + scorer.num_padding
  options = {
    name: flags.FLAGS[name].value
    for name in (
      *("requests", "items", "width", "layers", "num_loops", "context"),
      *("batch_tokens", "tokenizer"),
    )
  }
  lengths = [len(one.context) + len(one.continuation) for one in asked]
  options["padding_of_batches"] = scorer.num_padding / computed
  options["median_length"] = float(np.median(lengths))
  report = {"rows": rows, **options, **provenance.environment()}
  print(json.dumps(report, indent=2))


def single(
  language_model: LanguageModel, asked: list[ScoringRequest], row_length
):
  """Scores each request separately, in a row of `row_length(its length)`."""

  @jax.jit
  def score(params, inputs, targets):
    model = nnx.merge(language_model.graphdef, params)
    logits = model(inputs[None], **language_model.call).logits[0]
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]

  end, most = language_model.tokenizer.end, language_model.context_length
  windows = []
  for request in asked:
    opened = ScoringRequest(
      np.append(end, request.context), request.continuation
    )
    windows.append(eval_scorer.split_windows(opened, most)[0])

  def score_all() -> list[float]:
    likelihoods = []
    for tokens, num_scored in windows:
      num = len(tokens) - 1
      row = np.zeros(min(row_length(num), most) + 1, np.int32)
      row[: num + 1] = tokens
      log_probs = np.asarray(score(language_model.params, row[:-1], row[1:]))
      scored = log_probs[num - num_scored : num]
      likelihoods.append(float(np.sum(scored, dtype=np.float64)))
    return likelihoods

  return score_all


def make_language_model() -> LanguageModel:
  """A looped model."""
  config = looped.Config(
    width=_WIDTH.value,
    num_layers=_LAYERS.value,
    num_heads=4,
    num_loops=_LOOPS.value,
  )
  tokenizer = Tokenizer(_TOKENIZER.value)
  spec = text_task.spec(
    TextConfig(
      sequence_length=_CONTEXT.value,
      tokenizer=_TOKENIZER.value,
      vocab_size=-(-tokenizer.num_ids // 128) * 128,
    )
  )
  model = looped.Model(config, spec, rngs=nnx.Rngs(params=0))
  graphdef, params = nnx.split(model)
  return LanguageModel(
    tokenizer=tokenizer,
    context_length=_CONTEXT.value,
    graphdef=graphdef,
    params=jax.device_put(nnx.to_pure_dict(params)),
    call={"num_loops": _LOOPS.value, "kind": "scan"},
    facts={"workdir": "a random model"},
  )


def make_requests() -> list[ScoringRequest]:
  """Continuations to score, from a file or synthetic."""
  if _REQUESTS.value:
    pairs = [
      (question["context"], continuation)
      for question in tasks.questions(pathlib.Path(_REQUESTS.value))
      for continuation in question["continuations"]
    ]
    encode = Tokenizer(_TOKENIZER.value).encode
    return [
      ScoringRequest(*map(np.asarray, encode(pair)))
      for pair in pairs[: _ITEMS.value]
    ]
  generator = np.random.default_rng(0)
  found = []
  for _ in range(-(-_ITEMS.value // 4)):
    context = generator.integers(97, 123, generator.integers(40, 300))
    for _ in range(4):
      size = generator.integers(3, 60)
      found.append(ScoringRequest(context, generator.integers(97, 123, size)))
  return found[: _ITEMS.value]


if __name__ == "__main__":
  app.run(main)
