"""Models to generate with: of a run, or of a downloaded folder."""

import argparse
import pathlib
from typing import Any, NamedTuple

from loopjax import language_model as language_model_lib
from loopjax import program as program_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate.engine import Engine
from loopjax.hub import convert
from loopjax.language_model import LanguageModel
from loopjax.loop import exits
from loopjax.models import CAUSAL


class Flags(NamedTuple):
  """A model, and how an engine reads it: the flags of `add_flags`."""

  workdir: pathlib.Path | None
  hub: pathlib.Path | None
  dtype: str | None
  checkpoint: int | None
  num_loops: int | None
  exit_rule: str | None
  exit_kept: str
  cache_kind: str | None
  max_tokens: int | None

  @property
  def folder(self) -> pathlib.Path:
    """Where the model is."""
    folder = self.hub or self.workdir
    assert folder is not None  # `check` has seen to that.
    return folder


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds those that every command that generates has."""
  parser.add_argument("--workdir", type=pathlib.Path, help="of a run")
  parser.add_argument(
    "--hub", type=pathlib.Path, help="a downloaded folder instead of a run"
  )
  parser.add_argument(
    "--dtype", choices=("float32", "bfloat16"), help="with --hub [bfloat16]"
  )
  parser.add_argument("--checkpoint", type=int, help="step [the newest]")
  parser.add_argument("--num_loops", type=int, help="[as the run is evaluated]")
  parser.add_argument(
    "--exit_rule", choices=exits.RULES, help="[the gate, where there is one]"
  )
  parser.add_argument(
    "--exit_kept",
    choices=exits.KEPT,
    default="copy",
    help="what a skipped loop leaves in the cache [copy]",
  )
  parser.add_argument("--cache_kind", help="[the family's own]")
  parser.add_argument(
    "--max_tokens", type=int, help="of prompt and text [as in training]"
  )


def flags_of(options: dict[str, Any]) -> Flags:
  """Takes them out of a parser's options."""
  return Flags(**{name: options.pop(name) for name in Flags._fields})


def check(flags: Flags) -> None:
  """Raises UserError for flags that contradict each other."""
  if (flags.workdir is None) == (flags.hub is None):
    raise UserError("give --workdir=DIR of a run, or --hub=DIR, a folder")
  if flags.workdir and flags.dtype:
    raise UserError("--dtype has no effect on the model of a run")
  if flags.hub and flags.checkpoint is not None:
    raise UserError("--checkpoint has no effect on a folder")
  for name, value, least in (
    ("num_loops", flags.num_loops, 1),
    ("max_tokens", flags.max_tokens, 2),
  ):
    if value is not None and value < least:
      raise UserError(f"--{name}={value} must be at least {least}")


def load(flags: Flags) -> LanguageModel:
  """The model that flags name.

  Raises:
    UserError: it cannot be read.
  """
  if flags.hub:
    return of_folder(
      flags.hub,
      dtype=flags.dtype or "bfloat16",
      num_loops=flags.num_loops,
    )
  return language_model_lib.load(
    flags.folder, num_loops=flags.num_loops, checkpoint=flags.checkpoint
  )


def of_folder(
  folder: pathlib.Path, *, dtype: str, num_loops: int | None = None
) -> LanguageModel:
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
  return LanguageModel(
    tokenizer=Tokenizer(task.tokenizer, task.end_token),
    context_length=settings.spec.sequence_length,
    graphdef=graphdef,
    params=params,
    call={"num_loops": num_loops or settings.model.num_loops, "kind": "scan"},
    facts={"workdir": str(folder), "model": "looped"},
  )


def make_engine(language_model: LanguageModel, **options: Any) -> Engine:
  """An engine of a model; options as in `Engine`.

  Raises:
    UserError: see `Engine`.
  """
  return Engine(
    CAUSAL[language_model.facts["model"]],
    language_model.graphdef,
    language_model.params,
    num_loops=language_model.call["num_loops"],
    **options,
  )


def engine_of(
  language_model: LanguageModel, flags: Flags, **options: Any
) -> Engine:
  """An engine as flags say; other options as in `Engine`.

  Raises:
    UserError: see `Engine`.
  """
  return make_engine(
    language_model,
    max_tokens=flags.max_tokens or language_model.context_length,
    cache_kind=flags.cache_kind,
    exit_rule=flags.exit_rule,
    exit_kept=flags.exit_kept,
    **options,
  )


def opened(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
  """Token ids of the beginning of a document, which the end of one precedes."""
  (ids,) = tokenizer.encode([text])
  return tokenizer.end, *ids.tolist()
