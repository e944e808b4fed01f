"""Models to generate with: of a run, or of a downloaded folder."""

import pathlib
from typing import Any

from loopjax import program as program_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.generate.engine import Engine
from loopjax.hub import convert
from loopjax.models import CAUSAL
from loopjax.subject import Subject


def of_folder(
  folder: pathlib.Path, *, dtype: str, num_loops: int | None = None
) -> Subject:
  """The model of a folder in the layout of the Hugging Face Hub.

  Args:
    folder: see `convert.import_folder`.
    dtype: of the parameters, "float32" or "bfloat16".
    num_loops: the trained number if None.

  Raises:
    UserError: something is missing, damaged, or not supported.
  """
  _, settings, params = convert.read_folder(folder, dtype=dtype)
  graphdef, _ = program_lib.abstract_model(settings)
  task = settings.task
  assert isinstance(task, TextConfig)
  return Subject(
    tokenizer=Tokenizer(task.tokenizer, task.end_token),
    context_length=settings.spec.sequence_length,
    graphdef=graphdef,
    params=params,
    call={"num_loops": num_loops or settings.model.num_loops, "kind": "scan"},
    facts={"workdir": str(folder), "model": "looped"},
  )


def make_engine(subject: Subject, **options: Any) -> Engine:
  """An engine of a model; options as in `Engine`.

  Raises:
    UserError: see `Engine`.
  """
  return Engine(
    CAUSAL[subject.facts["model"]],
    subject.graphdef,
    subject.params,
    num_loops=subject.call["num_loops"],
    **options,
  )


def opened(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
  """Token ids of the beginning of a document, which the end of one precedes."""
  (ids,) = tokenizer.encode([text])
  return tokenizer.end, *ids.tolist()
