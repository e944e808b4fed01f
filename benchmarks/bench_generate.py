"""Generated tokens per second, each part against the form that it replaces.

  python benchmarks/bench_generate.py --parts=cache,slots,exits,torch

  cache   256 tokens of one text: the engine, and a full forward pass over the
          whole text for every token (both compiled; the same greedy tokens)
  slots   64 requests of mixed lengths: 32 slots, 8, and one at a time
  wide    the same with width 512 and 8 layers, 32 requests
  steps   CPU milliseconds of a step for each of --batches rows, in calls of
          eight, by span of attention, and by how loops are compiled
  exits   full depth, half by num_loops, and half by a gate that exits there,
          for one text and eight; with --workdir, a run's --exit_rule at each of
          --thresholds, with the loss on --rows rows of its test split decoded
          with the same exits
  prefix  time to the first token after a prompt of --prompt_length tokens: new,
          with a cached prefix of all but its last 16 tokens, and without prefix
          caching; every turn has a new prompt
  torch   width 512, 8 layers, 4 loops, texts of 64 + 64 tokens: the engine, and
          plain PyTorch with a cache as long as the text; batch 1 and 8, the
          same weights and greedy tokens

Forms take turns in one process after a turn that compiles; "seconds" lists all
turns, and rates use the median. "cpu_seconds" is the process's CPU time, for
busy machines.
"""

import functools
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
from loopjax.generate.engine import Engine, GenerationRequest
from loopjax.generate.programs import slots as slots_lib
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits as exits_lib
from loopjax.models import MODELS, looped
from loopjax.run import provenance
from loopjax.saved import language_model as language_model_lib
from loopjax.saved import trained
from loopjax.types import TaskSpec

_PARTS = flags.DEFINE_list("parts", ["cache", "slots", "exits"], "To run.")
_TURNS = flags.DEFINE_integer("turns", 3, "Timed turns.")
_BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Of exits and torch.")
_WORKDIR = flags.DEFINE_string("workdir", "", "A run whose exits to time.")
_EXIT_RULE = flags.DEFINE_string("exit_rule", "gate", "Of that run.")
_THRESHOLDS = flags.DEFINE_list("thresholds", ["0.5"], "Of that rule.")
_PROMPT_LENGTH = flags.DEFINE_integer("prompt_length", 1024, "Of prefix.")
_ROWS = flags.DEFINE_integer("rows", 128, "Of its test split.")
GREEDY = Sampling(temperature=0)
VOCABULARY = 258
TINY = {"width": 128, "num_layers": 2, "num_heads": 4, "num_loops": 4}
LARGE = {"width": 512, "num_layers": 8, "num_heads": 8, "num_loops": 4}


def main(argv):
  del argv
  rows = []
  for part in _PARTS.value:
    rows += {
      "cache": cache, "slots": slots, "wide": wide, "steps": steps,
      "exits": exits, "prefix": prefix, "torch": torch,
    }[part]()  # fmt: skip
  options = {"turns": _TURNS.value, "workdir": _WORKDIR.value}
  load = {"load_average": os.getloadavg(), "cpus": os.cpu_count()}
  report = {"rows": rows, **options, **load, **provenance.environment()}
  print(json.dumps(report, indent=2))


def compare(part, forms, num_tokens, *, same=True):
  """Times forms in turns; the texts of all must be `same`."""
  seconds, cpu_seconds, found = {}, {}, {}
  for turn in range(_TURNS.value + 1):
    for form, run in forms.items():
      start, cpu_start = time.perf_counter(), time.process_time()
      found[form] = run()
      if turn:
        seconds.setdefault(form, []).append(time.perf_counter() - start)
        used = time.process_time() - cpu_start
        cpu_seconds.setdefault(form, []).append(used)
  first = next(iter(found.values()))
  if same:
    assert all(texts == first for texts in found.values()), part
  return [
    {
      "part": part,
      "form": form,
      "tokens_per_second": num_tokens / float(np.median(seconds[form])),
      "of_the_last_form": float(
        np.median(seconds[list(forms)[-1]]) / np.median(seconds[form])
      ),
      "of_its_least_cpu": min(cpu_seconds[list(forms)[-1]])
      / min(cpu_seconds[form]),
      "seconds": seconds[form],
      "cpu_seconds": cpu_seconds[form],
    }
    for form in forms
  ]


def make_model(sizes, length, **changes):
  """(graphdef, parameters) with varied predictions."""
  config = looped.Config(
    **sizes, mlp="swiglu", mlp_ratio=2.75, init_std=0.05, **changes
  )
  spec = TaskSpec(VOCABULARY, length, tuple((i,) for i in range(length)))
  model = looped.Model(config, spec, rngs=nnx.Rngs(params=0))
  graphdef, params = nnx.split(model)
  return graphdef, jax.device_put(nnx.to_pure_dict(params))


def writer(engine, requests):
  """Ids of the texts of requests."""
  return lambda: [
    [token.token for token in text] for text in engine.generate(requests)
  ]


def prompts(num, least, most):
  generator = np.random.default_rng(0)
  sizes = generator.integers(least, most + 1, num)
  return [tuple(generator.integers(0, 256, n).tolist()) for n in sizes]


def cache():
  """One text with the engine, and by full forward passes."""
  num, length = 256, 320
  graphdef, params = make_model(TINY, length)
  (prompt,) = prompts(1, 64, 64)

  @jax.jit
  def next_token(params, tokens, size):
    model = nnx.merge(graphdef, params)
    hidden = model(tokens[None]).hidden[0, size - 1]
    return jnp.argmax(model.readout_table() @ hidden)

  def recomputed():
    tokens = np.zeros(length, np.int32)
    tokens[: len(prompt)] = prompt
    for size in range(len(prompt), len(prompt) + num):
      new = int(next_token(params, tokens, size))
      if size < length:
        tokens[size] = new
    return [tokens[len(prompt) :].tolist()]

  engine = Engine(
    looped.FAMILY, graphdef, params, num_slots=1, max_tokens=length,
    tokens_per_dispatch=32,
  )  # fmt: skip
  forms = {
    "engine": writer(engine, [GenerationRequest(prompt, num, GREEDY)]),
    "full forward": recomputed,
  }
  return compare("cache", forms, num)


def slots():
  """Mixed requests together, and one at a time."""
  return together("slots", TINY, 64, 128, 256)


def wide():
  """As `slots`, with a model whose weights do not fit in processor caches."""
  return together("wide", LARGE, 32, 48, 128)


def together(part, model, num, most, max_tokens):
  """Rates for `num` requests of up to `most` tokens, by number of slots."""
  graphdef, params = make_model(model, max_tokens)
  sizes = np.random.default_rng(1).integers(16, most + 1, num).tolist()
  asked = [
    GenerationRequest(prompt, size, GREEDY)
    for prompt, size in zip(prompts(num, 8, 64), sizes, strict=True)
  ]
  forms = {
    f"{slots} slots": writer(
      Engine(
        looped.FAMILY, graphdef, params, num_slots=slots, max_tokens=max_tokens
      ),
      asked,
    )
    for slots in (32, 8, 1)
  }
  return compare(part, forms, sum(sizes))


def steps():
  """The minimum CPU time of a step with full slots."""
  graphdef, params = make_model(TINY, 256)
  rows = []
  for size in map(int, _BATCHES.value):
    engine = Engine(
      looped.FAMILY, graphdef, params, num_slots=size, max_tokens=256
    )
    everyone = np.arange(size, dtype=np.int32)
    for span in (64, 128):
      for depth in (slots_lib.LOOPS, slots_lib.UNROLLED):
        found, state = [], engine._state
        for _ in range(60):
          cut = state.cache.cut(jnp.full(size, 23), jnp.ones(size, bool))
          left = state.slots._replace(
            num_left=jnp.full(size, 100),
            position=jnp.full(size, 24),
            num_loops=jnp.full(size, TINY["num_loops"]),
          )
          state = jax.block_until_ready(slots_lib.State(cut, left))
          start = time.process_time()
          state, _ = jax.block_until_ready(
            engine._programs.decode(
              params, state, everyone, np.bool_(False), span=span, depth=depth
            )
          )
          found.append(time.process_time() - start)
        engine._state, each = state, 1e3 / engine.tokens_per_dispatch
        rows.append(
          {
            "part": f"steps, {size} rows, {span} places",
            "form": depth,
            "cpu_milliseconds": min(found) * each,
          }
        )
  return rows


def exits():
  """Full depth against less."""
  num, rows, losses = 128, [], {}
  full = {"full": {}}
  if _WORKDIR.value:
    language_model = language_model_lib.load(pathlib.Path(_WORKDIR.value))
    loops = language_model.call["num_loops"]
    forms = {
      f"num_loops {n}": {"num_loops": n} for n in range(1, loops)
    } | {
      f"{_EXIT_RULE.value} at {x}": {"exit_threshold": float(x)}
      for x in _THRESHOLDS.value
    }  # fmt: skip
    losses = {
      form: read_out(language_model, **options)
      for form, options in (forms | full).items()
    }
    make = lambda size: source.make_engine(  # noqa: E731
      language_model,
      num_slots=size,
      max_tokens=256,
      exit_rule=_EXIT_RULE.value,
    )
  else:
    graphdef, params = make_model(TINY, 256, exit_gate="joint")
    # The exit probability after two loops is 0.75.
    params["exit_gate"] = jax.tree.map(jnp.zeros_like, params["exit_gate"])
    forms = {
      "half, by num_loops": {"num_loops": 2},
      "gate at 0.7": {"exit_threshold": 0.7},
    }
    make = lambda size: Engine(  # noqa: E731
      looped.FAMILY, graphdef, params, num_slots=size, max_tokens=256
    )
  for size in map(int, _BATCHES.value):
    engine = make(size)
    given = prompts(size, 32, 32)
    asked = {
      form: [GenerationRequest(one, num, GREEDY, **options) for one in given]
      for form, options in (forms | full).items()
    }
    found = compare(
      f"exits, batch {size}",
      {form: writer(engine, of) for form, of in asked.items()},
      num * size,
      same=False,
    )
    for row in found:
      texts = engine.generate(asked[row["form"]])
      row["loops_per_token"] = float(
        np.mean([token.loops for text in texts for token in text])
      )
      row |= losses.get(row["form"], {})
    rows += found
  return rows


def read_out(language_model, num_loops=None, exit_threshold=1.0):
  """Loss and loops of test rows, decoded token by token with exits.

  Uses the first document of each row, because a cache row holds one. "error" is
  the standard error of the loss over rows.
  """
  settings = trained.read(pathlib.Path(_WORKDIR.value)).settings
  dataset = settings.task_module.make_dataset(
    settings.task, "test", batch_size=_ROWS.value, seed=0
  )
  batch = evaluated.sample(dataset, _ROWS.value)
  inputs, targets = (jnp.asarray(batch[x]) for x in ("inputs", "targets"))
  first = batch["documents"] == batch["documents"][:, :1]
  weights = jnp.asarray(batch["weights"] * first)
  size, length = inputs.shape
  most = language_model.call["num_loops"]
  policy = exits_lib.ExitPolicy(
    jnp.full(size, exit_threshold),
    jnp.full(size, num_loops or most),
    _EXIT_RULE.value,
  )
  reading = MODELS[language_model.facts["model"]].reading

  @jax.jit
  def score(params, inputs, targets):
    model = nnx.merge(language_model.graphdef, params)
    cache = reading.empty_cache(model, size, length)

    def step(cache, pair):
      token, target = pair
      output, cache = reading.read(
        model, token[:, None], cache, exit_policy=policy
      )
      chance = jax.nn.log_softmax(output.logits[:, 0])
      loss = -jnp.take_along_axis(chance, target[:, None], axis=1)[:, 0]
      return cache, (loss, output.stats["loops_run"])

    return jax.lax.scan(step, cache, (inputs.T, targets.T))[1]

  loss, loops = score(language_model.params, inputs, targets)
  by_row = jnp.sum(loss.T * weights, axis=1) / jnp.sum(weights, axis=1)
  share = weights.T / jnp.sum(weights)
  return {
    "loss": float(jnp.sum(loss * share)),
    "error": float(jnp.std(by_row) / size**0.5),
    "loops_when_read": float(jnp.sum(loops * share)),
  }


def trained_model():
  return language_model_lib.load(pathlib.Path(_WORKDIR.value or "zoo:novels"))


def prefix():
  """Time to the first token with and without a cached prefix."""
  language_model, length = trained_model(), _PROMPT_LENGTH.value
  engines = [
    source.make_engine(
      language_model, num_slots=1, max_tokens=length + 128, prefix_mib=mib
    )
    for mib in (source.PREFIX_MIB, 0)
  ]
  generator = np.random.default_rng(0)
  seconds = {"read": [], "shared": [], "without prefixes": []}
  for _ in range(_TURNS.value + 2):  # The first turns compile.
    text = generator.integers(0, 256, length + 16).tolist()
    one, other = text[:length], text[: length - 16] + text[length:]
    found = []
    for form, engine, prompt in (
      ("read", engines[0], one),
      ("shared", engines[0], other),
      ("without prefixes", engines[1], other),
    ):
      start = time.perf_counter()
      ((token,),) = engine.generate(
        [GenerationRequest(tuple(prompt), 1, GREEDY)]
      )
      seconds[form].append(time.perf_counter() - start)
      found.append(token)
    assert found[1].copied >= length - 32 and not found[0].copied
    assert found[1].token == found[2].token
  return [
    {
      "part": "prefix",
      "form": form,
      "seconds": (timed := each[2:]),
      "of_read": float(np.median(timed) / np.median(seconds["read"][2:])),
    }
    for form, each in seconds.items()
  ]


def torch():
  """The engine, and plain PyTorch."""
  import torch_looped  # In this folder.

  num, rows = 64, []
  graphdef, params = make_model(LARGE, 128)
  for size in map(int, _BATCHES.value):
    given = prompts(size, 64, 64)
    engine = Engine(
      looped.FAMILY, graphdef, params, num_slots=size, max_tokens=128,
      tokens_per_dispatch=16,
    )  # fmt: skip
    oracle = torch_looped.Model(LARGE, params)
    forms = {
      "engine": writer(
        engine, [GenerationRequest(x, num, GREEDY) for x in given]
      ),
      "torch": functools.partial(oracle.generate, given, num),
    }
    rows += compare(f"torch, batch {size}", forms, num * size)
  return rows


if __name__ == "__main__":
  app.run(main)
