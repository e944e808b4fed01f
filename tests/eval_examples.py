"""Tiny language models for tests of their evaluation."""

import functools
import gzip
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tests_support import untrained

from loopjax import config as config_lib
from loopjax.data.text import task as text_task
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.models import MODELS
from loopjax.saved.language_model import LanguageModel
from loopjax.types import Output, TaskSpec

LENGTH = 48
TINY = {"width": 16, "num_layers": 1, "num_heads": 2}
OF_FAMILY = {
  "sleep": {
    "num_memory_layers": 1,
    "num_memory_heads": 2,
    "key_width": 8,
    "value_width": 8,
    "num_loops": 2,
    "window": 16,
    "num_prelude": 0,
    "num_coda": 0,
  },
  "adaptive": {"num_local_slots": 4, "num_global_slots": 4, "num_loops": 2},
  "transformer": {"num_loops": 2},
}


@functools.cache
def drawn(family, length):
  """(graphdef, parameters) of a tiny model."""
  module = MODELS[family]
  config = module.Config(**TINY, **OF_FAMILY.get(family, {}))
  spec = text_task.spec(TextConfig(sequence_length=length))
  model = module.Model(config, spec, rngs=nnx.Rngs(params=0))
  graphdef, params = nnx.split(model)
  return graphdef, nnx.to_pure_dict(params)


def language_model_of(family="looped", length=LENGTH, scale=20.0, **call):
  """A model with random parameters and varied predictions."""
  graphdef, params = drawn(family, length)
  embedding = params["token_embedding"]["embedding"] * scale
  params = {**params, "token_embedding": {"embedding": embedding}}
  tokenizer = Tokenizer("bytes")
  return LanguageModel(
    tokenizer=tokenizer,
    stop_tokens=(tokenizer.end,),
    context_length=length,
    graphdef=graphdef,
    params=params,
    call={"num_loops": 2, "kind": "scan", **call},
    facts={"workdir": "runs/test"},
  )


@functools.cache
def logits_fn(graphdef, **call):
  """(params, inputs [B, T]) -> logits [B, T, V] of the whole model."""

  def logits(params, inputs):
    return nnx.merge(graphdef, params)(inputs, **call).logits

  return jax.jit(logits, compiler_options={"xla_backend_optimization_level": 0})


def ids(text):
  return np.frombuffer(text.encode(), np.uint8)


def begun(text):
  """A context: the previous document's end token, and a text."""
  return np.append(np.int64([256]), ids(text))


class Uniform(nnx.Module):
  """Uniform over bytes, zero for everything else."""

  class Config(NamedTuple):
    precision: str = "float32"

  def __init__(self):
    self.config = self.Config()
    # The end of a document and padding are masked.
    self.spec = TaskSpec(258, 64, ((0,),), num_padding_tokens=2)
    self.table = nnx.Param(jnp.zeros((258, 4)))

  def __call__(self, inputs):
    return Output(None, {}, {}, {}, {}, jnp.ones((*inputs.shape, 4)))

  def readout_table(self):
    return self.table[...]


def uniform_language_model():
  graphdef, params = nnx.split(Uniform())
  return LanguageModel(
    Tokenizer("bytes"),
    (256,),
    64,
    graphdef,
    params,
    {},
    {"workdir": "runs/uniform"},
  )


def make_run(workdir, family="looped", **overrides):
  """An untrained run on text that has saved its first state."""
  config = config_lib.make(family, "text")
  config_lib.override(
    config,
    {
      **{f"model.{name}": value for name, value in TINY.items()},
      "task.sequence_length": LENGTH,
      "model.init_std": 0.5,
      "run.num_steps": 2000,
      **{key.replace("__", "."): value for key, value in overrides.items()},
    },
  )
  return untrained(workdir, config)


def request(doc_id, idx, label, context, continuation, **doc):
  """A line of a request file."""
  return {
    "request_type": "loglikelihood", "doc": doc,
    "request": {"context": context, "continuation": continuation}, "idx": idx,
    "doc_id": doc_id, "label": label,
  }  # fmt: skip


def choices(num, first=0):
  """Lines of synthetic questions with three choices, and requests to skip."""
  lines = []
  for n in range(first, first + num):
    question = f"Question: what is {n} + {n * n}?\nAnswer:"
    for idx, answer in enumerate((n + n * n, n, f"{n} to the power {n}")):
      for offset, context in ((0, question), (1_000_000, "Answer:")):
        lines.append(
          request(
            offset + n,
            idx,
            n % 3,
            f"Question: 1?\nAnswer: 1\n\n{context}",
            f" {answer}",
            query=question,
          )
        )
  return lines


def texts(num):
  """Lines of synthetic questions with one answer each."""
  return [
    request(
      n,
      0,
      str(3 * n),
      f"Question: A box holds {n} pens. How many do 3 hold?\nAnswer:",
      f" {' '.join(['Three boxes'] * (1 + n % 4))} hold 3 x {n} = {3 * n}.",
      question=f"A box holds {n} pens. How many do 3 hold?",
    )
    for n in range(num)
  ]


def write(path, lines):
  """A request file."""
  content = "".join(json.dumps(line) + "\n" for line in lines).encode()
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(gzip.compress(content))
  return path
