"""How far a model writes what its teacher writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis import evaluated
from loopjax.generate.engine import Engine, GenerationRequest, Sampling
from loopjax.models import CAUSAL
from loopjax.types import Dataset

_NUM_PROMPTS, _MOST_WRITTEN = 64, 32


def measure(
  program: program_lib.Program, params: Any, frozen: Any, dataset: Dataset
) -> dict[str, float]:
  """Agreement of greedy continuations of texts with the teacher's.

  Both continue the first halves of some texts; of a row of several documents
  the first one's. All processes call it.

  Args:
    program: of the run.
    params: of its model.
    frozen: of its teacher; {} if it has none.
    dataset: the texts.

  Returns:
    "agreement", the mean share of a continuation that comes before the first
    token that differs, and its standard error over texts; {} without a teacher,
    or if one of the two does not predict next tokens.
  """
  settings, teacher = program.settings, program.teacher
  if teacher is None or not {settings.family, teacher.family} <= {
    *CAUSAL.values()
  }:
    return {}
  if jax.process_count() > 1:  # Each holds only part of the arrays.
    params, frozen = multihost_utils.process_allgather(
      (params, frozen), tiled=True
    )
  length = settings.spec.sequence_length
  num_written = min(_MOST_WRITTEN, length - length // 2)
  prompts = prompts_of(
    evaluated.sample(dataset, _NUM_PROMPTS),
    length // 2,
    settings.spec.vocab_size - settings.spec.num_padding_tokens,
  )
  ours, theirs = (
    _written(of, values, prompts, num_written)
    for of, values in ((settings, params), (teacher, frozen))
  )
  shares = [
    shared_length(*pair) / num_written
    for pair in zip(ours, theirs, strict=True)
  ]
  return {
    "agreement": float(np.mean(shares)),
    "agreement/standard_error": float(
      np.std(shares) / math.sqrt(max(len(shares), 1))
    ),
  }


def prompts_of(
  batch: Mapping[str, np.ndarray], most: int, num_tokens: int
) -> list[tuple[int, ...]]:
  """The first half of each row's text, and at most so many tokens of it.

  Args:
    batch: "inputs" [N, T] and, where rows have several, "documents".
    most: tokens of a prompt.
    num_tokens: that there are; larger ids are padding.
  """
  there = batch["inputs"] < num_tokens
  if "documents" in batch:
    there &= batch["documents"] == batch["documents"][:, :1]
  rows = (row[kept] for row, kept in zip(batch["inputs"], there, strict=True))
  return [
    tuple(row[: min(max(len(row) // 2, 1), most)].tolist())
    for row in rows
    if len(row)
  ]


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
  """Tokens before the first that differs."""
  pairs = enumerate(zip(first, second, strict=True))
  return next((i for i, (a, b) in pairs if a != b), len(first))


def _written(
  settings: config_lib.Settings,
  params: Any,
  prompts: Sequence[tuple[int, ...]],
  num_written: int,
) -> list[list[int]]:
  """The most likely tokens after each prompt, one after another."""
  graphdef, _ = program_lib.abstract_model(settings)
  device = jax.local_devices()[0]
  engine = Engine(
    CAUSAL[settings.plain["model"]["name"]],
    graphdef,
    jax.device_put(jax.device_get(params), device),
    num_slots=len(prompts),
    max_tokens=max(map(len, prompts)) + num_written,
  )
  greedy = Sampling(temperature=0.0)
  requests = [
    GenerationRequest(prompt, num_written, greedy) for prompt in prompts
  ]
  return [[x.token for x in text] for text in engine.generate(requests)]
