"""How far a model's continuations agree with its teacher's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.run import statistics
from loopjax.run import workdir as workdir_lib
from loopjax.types import Dataset

_NUM_PROMPTS, _MOST_WRITTEN = 64, 32


def agreement(
  program: program_lib.Program,
  params: Any,
  teacher_params: Any,
  dataset: Dataset,
) -> dict[str, float]:
  """Agreement of greedy continuations of texts with the teacher's.

  Both continue the first half of each text; in rows of several documents, of
  the first document. The model runs as many loops as in evaluation, its teacher
  the trained number.

  Args:
    params: its model's parameters, of which this process holds all.
    teacher_params: its teacher's parameters; {} if it has none.

  Returns:
    "agreement", the mean fraction of a continuation before the first differing
    token, and its standard error over texts; {} without a teacher, or if either
    model does not predict next tokens.
  """
  settings, teacher = program.settings, program.teacher
  if teacher is None or not (
    settings.family.reading and teacher.family.reading
  ):
    return {}
  length = settings.spec.sequence_length
  num_written = min(_MOST_WRITTEN, length - length // 2)
  texts = evaluated_lib.halves(
    evaluated_lib.sample(dataset, _NUM_PROMPTS),
    length // 2,
    settings.spec.num_tokens,
  )
  prompts = [text.prompt for text in texts]
  own, other = (
    _written(of, values, prompts, num_written, num_loops)
    for of, values, num_loops in (
      (settings, params, settings.eval_loops),
      (teacher, teacher_params, teacher.model.num_loops),
    )
  )
  pairs = zip(own, other, strict=True)
  shares = np.array([shared_length(*pair) / num_written for pair in pairs])
  mean, error = statistics.mean(shares, np.ones(len(shares)))
  return workdir_lib.finite(
    {"agreement": float(mean), "agreement/standard_error": float(error)}
  )


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
  """Number of tokens before the first difference."""
  pairs = enumerate(zip(first, second, strict=True))
  return next((i for i, (a, b) in pairs if a != b), len(first))


def _written(
  settings: config_lib.Settings,
  params: Any,
  prompts: Sequence[tuple[int, ...]],
  num_written: int,
  num_loops: int,
) -> list[list[int]]:
  """Greedy continuations of the prompts."""
  # Training imports no engine: only a model with a teacher needs it.
  from loopjax.generate import engine as engine_lib

  graphdef, _ = program_lib.abstract_model(settings)
  engine = engine_lib.Engine(
    settings.family,
    graphdef,
    evaluated_lib.on_one_device(params),
    num_slots=len(prompts),
    max_tokens=max(map(len, prompts)) + num_written,
    num_loops=num_loops,
  )
  greedy = engine_lib.Sampling(temperature=0.0)
  requests = [
    engine_lib.GenerationRequest(prompt, num_written, greedy)
    for prompt in prompts
  ]
  return [[x.token for x in text] for text in engine.generate(requests)]
