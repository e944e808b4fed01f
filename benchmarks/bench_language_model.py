"""Training tokens per second against GPT-2 of `transformers` in PyTorch.

  pip install torch transformers
  python benchmarks/bench_language_model.py --vocab=50257

Both sides take optimizer steps on the same random tokens, in float32 and on the
CPU: forward, backward and AdamW, without dropout and clipping. Ours is the
family `transformer` with one copy of its stack, with the train step of real
runs, which also computes gradient norms and skips bad steps. GPT-2 has learned
positions, layer norms and biases; ours has rotary positions, RMS norms and no
biases; attention is PyTorch's fused kernel, and so is AdamW. Steps take turns
in one process under the same conditions; only ratios within one run are
meaningful. On a busy machine, run it on one core (`taskset -c 0`) and compare
CPU time.
"""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.run import provenance
from loopjax.types import TaskSpec

_VOCAB = flags.DEFINE_integer("vocab", 50_257, "V.")
_LAYERS = flags.DEFINE_integer("layers", 6, "L.")
_WIDTH = flags.DEFINE_integer("width", 384, "D.")
_HEADS = flags.DEFINE_integer("heads", 6, "H.")
_LENGTH = flags.DEFINE_integer("length", 512, "T.")
_BATCH = flags.DEFINE_integer("batch", 4, "Sequences of a step.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps of each side.")
_SIDES = flags.DEFINE_list("sides", ["loopjax", "transformers"], "Which.")


def main(argv):
  del argv
  shape = (_BATCH.value, _LENGTH.value + 1)
  tokens = np.random.default_rng(0).integers(0, _VOCAB.value, shape, np.int32)
  makers = {"loopjax": ours, "transformers": theirs}
  sides = {name: makers[name](tokens) for name in _SIDES.value}
  seconds = {name: [] for name in sides}
  busy = {name: [] for name in sides}
  losses = {name: [] for name in sides}
  for turn in range(_STEPS.value + 2):
    for name, (step, _) in sides.items():
      start = time.perf_counter(), time.process_time()
      losses[name].append(step())
      if turn >= 2:  # The first two warm up.
        seconds[name].append(time.perf_counter() - start[0])
        busy[name].append(time.process_time() - start[1])
  rows = {
    name: {
      "tokens_per_second": tokens[:, 1:].size / float(np.median(taken)),
      "step_ms": quantiles(taken),
      "cpu_ms": quantiles(busy[name]),
      "parameters": sides[name][1],
      "losses": [losses[name][0], losses[name][-1]],
    }
    for name, taken in seconds.items()
  }
  report: dict = {"rows": rows}
  if len(rows) == 2:
    rates = [row["tokens_per_second"] for row in rows.values()]
    report["ratio"] = rates[0] / rates[1]
    first, second = (float(np.median(x)) for x in busy.values())
    report["cpu_ratio"] = second / first
  names = ("vocab", "layers", "width", "heads", "length", "batch", "steps")
  report |= {name: flags.FLAGS[name].value for name in names}
  print(json.dumps(report | provenance.environment(), indent=2))


def quantiles(seconds):
  """Minimum, median and maximum, in ms."""
  return [round(1e3 * x, 1) for x in np.quantile(seconds, (0, 0.5, 1))]


def ours(tokens):
  """(a step that returns its loss, the number of parameters)."""
  config = config_lib.make("transformer", "text")
  config_lib.override(
    config,
    {
      "model.width": _WIDTH.value,
      "model.num_layers": _LAYERS.value,
      "model.num_heads": _HEADS.value,
      "model.num_loops": 1,
      "task.sequence_length": _LENGTH.value,
      "optim.schedule": "constant",
      "optim.warmup_steps": 0,
      "optim.clip_norm": 0.0,
      "optim.ema_decay": 0.0,
      "run.batch_size": _BATCH.value,
      "run.steps_per_call": 1,
      "eval.batch_size": _BATCH.value,
      "eval.depth_factor": 0,
    },
  )
  places = tuple((i,) for i in range(_LENGTH.value))
  spec = TaskSpec(_VOCAB.value, _LENGTH.value, places)
  settings = config_lib.resolve(config)._replace(spec=spec)
  program = program_lib.make_program(settings, jax.devices()[:1])
  state = program.init(jax.random.key(0))
  one = settings.task_module.abstract_batch(settings.task, _BATCH.value)
  batch = {name: jnp.ones((1, *x.shape), x.dtype) for name, x in one.items()}
  batch["inputs"] = jnp.asarray(tokens[None, :, :-1])
  batch["targets"] = jnp.asarray(tokens[None, :, 1:])
  compiled = program.train.lower(state, batch, {}).compile()

  def step() -> float:
    nonlocal state
    state, metrics = compiled(state, batch, {})
    return float(jax.block_until_ready((state, metrics))[1]["loss"][0])

  return step, sum(leaf.size for leaf in jax.tree.leaves(state.params))


def theirs(tokens):
  """The same in PyTorch."""
  import torch
  import transformers

  torch.manual_seed(0)
  model = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(
      vocab_size=_VOCAB.value,
      n_positions=_LENGTH.value,
      n_embd=_WIDTH.value,
      n_layer=_LAYERS.value,
      n_head=_HEADS.value,
      resid_pdrop=0.0,
      embd_pdrop=0.0,
      attn_pdrop=0.0,
      attn_implementation="sdpa",
      use_cache=False,
      bos_token_id=0,
      eos_token_id=0,
    )
  ).train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=3e-4, weight_decay=0.01, fused=True
  )
  inputs = torch.from_numpy(tokens[:, :-1].astype(np.int64))
  targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))

  def step() -> float:
    optimizer.zero_grad()
    logits = model(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(
      logits.flatten(0, 1), targets.flatten()
    )
    loss.backward()
    optimizer.step()
    return float(loss.detach())

  return step, sum(x.numel() for x in model.parameters())


if __name__ == "__main__":
  app.run(main)
