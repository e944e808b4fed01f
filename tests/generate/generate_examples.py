"""Tiny models, and their expected texts from full forward passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.generate import sampling
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.models import MODELS
from loopjax.types import TaskSpec

LENGTH, NUM_TOKENS = 24, 21
SPEC = TaskSpec(23, LENGTH, tuple((i,) for i in range(LENGTH)), 2)
STACK = {"width": 16, "num_heads": 2, "num_layers": 2}
SMALL = {
  "adaptive": {
    **STACK, "num_loops": 2, "num_local_slots": 6, "num_global_slots": 4,
    "tied": True, "init_std": 0.3,
  },
  "looped": {**STACK, "num_loops": 3, "exit_gate": "joint", "init_std": 0.3},
  "disco": {**STACK, "num_loops": 2, "init_std": 0.3},
  "loopformer": {**STACK, "num_loops": 2, "init_std": 0.3},
  "melt": {
    **STACK, "num_loops": 2, "chunk_size": 1, "distill": "none",
    "rope_base": 1e4, "init_std": 0.3, "precision": "float32",
  },
  "plt": {**STACK, "num_loops": 3, "window": 4, "init_std": 0.3},
  "ponderlm": {**STACK, "num_loops": 2, "tied": False, "init_std": 0.3},
  "recurrent": {
    **STACK, "num_layers": 1, "num_prelude": 1, "num_coda": 1, "num_loops": 3,
    "init_std": 0.3,
  },
  "sleep": {
    "width": 16, "num_heads": 2, "num_loops": 2, "window": 4,
    "num_memory_heads": 2, "key_width": 8, "value_width": 8,
  },
  "transformer": {**STACK, "num_loops": 2, "init_std": 0.3},
}  # fmt: skip
# Tiny programs take longer to compile than to run.
FAST = {"xla_backend_optimization_level": 0}
# Prompts of several lengths: in one chunk, in two, and of one token.
PROMPTS = ((3, 1, 4, 1, 5), (9,), tuple(range(20)), (2, 7, 1, 8, 2, 8, 1))


@functools.cache
def model_of(name, **changes):
  """(family, graphdef, parameters) with varied predictions."""
  family = MODELS[name]
  config = family.Config(**{**SMALL[name], **changes})

  def make():
    return nnx.split(family.Model(config, SPEC, rngs=nnx.Rngs(params=0)))

  graphdef = jax.tree.map(lambda x: x, nnx.eval_shape(make)[0])
  params = jax.jit(lambda: nnx.to_pure_dict(make()[1]))()
  return family, graphdef, params


def engine_of(name, *, changes=None, **options):
  """An engine of a tiny model."""
  family, graphdef, params = model_of(name, **(changes or {}))
  options = {
    "num_slots": 3, "max_tokens": LENGTH, "tokens_per_dispatch": 4,
    "prompt_chunk": 16, **options,
  }  # fmt: skip
  return Engine(family, graphdef, params, **options)


@functools.cache
def _shared(name, changes, options):
  return engine_of(name, changes=dict(changes), **dict(options))


def shared(name, *, changes=None, **options):
  """An idle engine shared by tests, whose programs are compiled once.

  Earlier texts must have no effect; tests of that create their own engines.
  """
  key = name, tuple((changes or {}).items()), tuple(options.items())
  if not _shared(*key).idle:  # A test has failed.
    _shared.cache_clear()
  return _shared(*key)


@functools.cache
def _whole(name, changes, num_loops):
  _, graphdef, params = model_of(name, **dict(changes))

  def run(inputs):
    model = nnx.merge(graphdef, params)
    return model(inputs, num_loops=num_loops).logits

  return jax.jit(run, compiler_options=FAST)


def logits_after(name, text, changes=None, num_loops=None):
  """The full forward pass's logits of the next token, f32 [V]."""
  inputs = np.full((1, LENGTH), NUM_TOKENS)
  inputs[0, : len(text)] = text
  whole = _whole(name, tuple((changes or {}).items()), num_loops)
  return np.asarray(whole(jnp.asarray(inputs))[0, len(text) - 1])


@jax.jit
def _draw(*arguments):
  return sampling.draw(*arguments)[0]


def written_out(name, request, **options):
  """Tokens with their log-probabilities, one full forward a token."""
  text, found = list(request.prompt), []
  room = min(request.max_new_tokens, LENGTH - len(text) + 1)
  settings = sampling.to_arrays([request.sampling])
  while len(found) < room:
    logits = logits_after(name, text, **options)
    seen = np.isin(np.arange(len(logits)), text)
    token = int(
      _draw(logits[None], seen[None], settings, np.array([len(text)]))
    )
    found.append((token, float(jax.nn.log_softmax(logits)[token])))
    text.append(token)
    if token in request.stop_tokens:
      break
  return found


def requests(num, **options):
  """One for each prompt."""
  return [GenerationRequest(prompt, num, **options) for prompt in PROMPTS]


def ids(tokens):
  return [token.token for token in tokens]
