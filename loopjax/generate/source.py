"""The model to generate with, from a run or from a downloaded folder."""

import argparse
import pathlib
from typing import Any, NamedTuple

import jax

from loopjax import checks
from loopjax import program as program_lib
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.errors import UserError
from loopjax.generate.engine import Engine
from loopjax.hub import convert
from loopjax.loop import exits
from loopjax.models import MODELS
from loopjax.saved import language_model as language_model_lib
from loopjax.saved import trained
from loopjax.saved.language_model import LanguageModel

PREFIX_MIB = 64


class ModelFlags(NamedTuple):
  """The flags of `add_flags`: the model, and how the engine runs it."""

  folder: pathlib.Path
  dtype: str | None = None
  checkpoint: int | None = None
  num_loops: int | None = None
  exit_rule: str | None = None
  exit_kept: str | None = None
  cache_kind: str | None = None
  max_tokens: int | None = None
  prefix_mib: int | None = None
  bos: str | None = None

  @property
  def is_hub(self) -> bool:
    """Whether it is a model of the Hub, not a run."""
    return self.folder.is_file() or convert.is_folder(self.folder)


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds RUN, and the flags that commands that generate text share."""
  parser.add_argument(
    "folder",
    type=pathlib.Path,
    metavar="RUN",
    help="a run, or a downloaded folder of the Hub",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16"),
    help="dtype of the parameters of a Hub folder [float32 on CPUs, which"
    " multiply in float32; else bfloat16]",
  )
  add_model_flags(parser)
  parser.add_argument(
    "--exit_rule",
    choices=exits.RULES,
    help="when tokens exit [gate if the model has one, otherwise fixed]",
  )
  parser.add_argument(
    "--exit_kept",
    choices=exits.KEPT,
    help="what the cache stores for skipped loops [copy]",
  )
  parser.add_argument("--cache_kind", help="kind of cache [the family's own]")
  parser.add_argument(
    "--max_tokens",
    type=int,
    help="maximum length, including the prompt [as in training; of a model of"
    f" the Hub its own, at most {convert.MAX_TOKENS}]",
  )
  parser.add_argument(
    "--prefix_mib",
    type=int,
    help=f"MiB for cached prompt prefixes [{PREFIX_MIB} where prompts may"
    " share a prefix]",
  )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags for a checkpoint, its loops and first token."""
  parser.add_argument("--checkpoint", type=int, help="checkpoint step [newest]")
  parser.add_argument(
    "--num_loops", type=int, help="number of loops [as in evaluation]"
  )
  parser.add_argument(
    "--bos",
    metavar="TOKEN",
    help="token at the beginning of texts, or none [the model's]",
  )


def template_folder(flags: ModelFlags) -> pathlib.Path:
  """The folder of the model's chat template, if it has one."""
  exported = flags.folder / convert.DIRECTORY
  return exported if exported.is_dir() else flags.folder


def pop_flags(options: dict[str, Any]) -> ModelFlags:
  """Removes the flags of `add_flags` from parsed options, and returns them."""
  return ModelFlags(**{name: options.pop(name) for name in ModelFlags._fields})


def check(flags: ModelFlags, *, chat: bool = False) -> None:
  """Raises UserError for flags that contradict each other or a chat."""
  is_hub = flags.is_hub
  if flags.dtype and not is_hub:
    raise UserError(f"--dtype={flags.dtype} has no effect on a run")
  if chat and flags.bos is not None:
    raise UserError(
      "--bos has no effect with --chat: the chat template writes all tokens"
    )
  if flags.checkpoint is not None and is_hub:
    raise UserError(
      f"--checkpoint={flags.checkpoint}: {flags.folder} is not a run"
    )
  checks.flags_at_least(flags, num_loops=1, max_tokens=2, prefix_mib=0)


def load(flags: ModelFlags) -> LanguageModel:
  """The model that the flags name.

  Raises:
    UserError: it cannot be read.
  """
  if flags.is_hub:
    return load_folder(
      flags.folder,
      dtype=flags.dtype or default_dtype(),
      num_loops=flags.num_loops,
      bos=flags.bos,
    )
  return language_model_lib.load(
    flags.folder,
    num_loops=flags.num_loops,
    checkpoint=flags.checkpoint,
    kernels=True,
    bos=flags.bos,
  )


def default_dtype() -> str:
  """float32 on CPUs, where products are in float32; else bfloat16."""
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def load_folder(
  folder: pathlib.Path,
  *,
  dtype: str,
  num_loops: int | None = None,
  bos: str | None = None,
) -> LanguageModel:
  """The model in a folder with the layout of the Hugging Face Hub.

  Args:
    folder: see `convert.import_folder`.
    dtype: dtype of the parameters, "float32" or "bfloat16".
    num_loops: number of loops to run; the trained number if None.
    bos: see `Tokenizer.beginning_with`.

  Raises:
    UserError: a file is missing or damaged, or the model is not supported.
  """
  _, settings, params = convert.read_folder(folder, dtype=dtype)
  graphdef, _ = program_lib.abstract_model(settings)
  graphdef, params = trained.for_generation(
    settings, graphdef, params, jax.default_backend()
  )
  assert isinstance(settings.task, TextConfig)
  tokenizer = tokenizer_lib.of(settings.task).beginning_with(bos)
  return LanguageModel(
    tokenizer=tokenizer,
    stop_tokens=language_model_lib.stop_tokens(tokenizer, folder),
    context_length=settings.spec.sequence_length,
    graphdef=graphdef,
    params=params,
    call={"num_loops": num_loops or settings.model.num_loops, "kind": "scan"},
    facts={
      "workdir": str(folder),
      "model": settings.model_name,
      "texts_begin_with": tokenizer.beginning,
    },
  )


def make_engine(language_model: LanguageModel, **options: Any) -> Engine:
  """An engine for a model; the options are arguments of `Engine`.

  Raises:
    UserError: see `Engine`.
  """
  return Engine(
    MODELS[language_model.facts["model"]],
    language_model.graphdef,
    language_model.params,
    num_loops=language_model.call["num_loops"],
    **options,
  )


def engine_from_flags(
  language_model: LanguageModel,
  flags: ModelFlags,
  *,
  prefix_mib: int = PREFIX_MIB,
  **options: Any,
) -> Engine:
  """An engine for a model; other options are arguments of `Engine`.

  `prefix_mib` is used without the flag if the cache and its size permit it.

  Raises:
    UserError: see `Engine`; or a flag has no effect on this model.
  """
  mebibytes = flags.prefix_mib
  if mebibytes is None:
    reading = MODELS[language_model.facts["model"]].reading
    assert reading is not None  # `language_model.load` ensures this.
    kind = flags.cache_kind or reading.caches[0]
    mebibytes = prefix_mib if kind == "per_loop" else 0
  engine = make_engine(
    language_model,
    max_tokens=flags.max_tokens or language_model.context_length,
    cache_kind=flags.cache_kind,
    exit_rule=flags.exit_rule,
    exit_kept=flags.exit_kept or exits.KEPT[0],
    prefix_mib=mebibytes,
    **options,
  )
  if flags.exit_kept and engine.limits.min_loops == engine.limits.num_loops:
    raise UserError(
      f"--exit_kept={flags.exit_kept} has no effect with a fixed number of"
      " loops"
    )
  return engine
