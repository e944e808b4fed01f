"""A trained language model: tokenizer, parameters and arguments of its call."""

import pathlib
import shlex
from typing import Any, NamedTuple

from flax import nnx

from loopjax import config as config_lib
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.hub import convert, tokenizer_files
from loopjax.run import zoo
from loopjax.saved import trained


class LanguageModel(NamedTuple):
  """A language model at a checkpoint.

  Attributes:
    tokenizer: the task's tokenizer.
    stop_tokens: ids that end a text, from the tokenizer and the files of an
      imported model.
    context_length: tokens of a text that the model reads, see
      `context_length`.
    graphdef: the model without its parameters.
    params: the parameters; their moving average if the run keeps one.
    call: keyword arguments of `Model.__call__`, such as `num_loops`.
    facts: metadata to store with every score; can be written as JSON.
  """

  tokenizer: Tokenizer
  stop_tokens: tuple[int, ...]
  context_length: int
  graphdef: nnx.GraphDef
  params: Any
  call: dict[str, Any]
  facts: dict[str, Any]


def load(
  workdir: pathlib.Path,
  *,
  num_loops: int | None = None,
  exit_threshold: float | None = None,
  checkpoint: int | None = None,
  kernels: bool = False,
  bos: str | None = None,
) -> LanguageModel:
  """Loads the model of a run, finished or in progress, onto one device.

  Args:
    workdir: the run's work directory.
    num_loops: number of loops; None for the run's number in evaluation.
    exit_threshold: the model's `exit_threshold` argument; None for its default.
    checkpoint: step of the checkpoint; None for the newest intact one.
    kernels: as in `trained.read`; only for models that run with a cache.
    bos: see `Tokenizer.beginning_with`.

  Raises:
    UserError: the run or checkpoint does not exist, the model is not a language
      model, it cannot run this number of loops, or it takes no exit threshold.
  """
  label = str(workdir)
  settings = config_lib.of_run(workdir, label)
  name, family = settings.model_name, settings.family
  _check(settings, label)
  convert.check_beginning(zoo.located(workdir))
  loops = num_loops or settings.eval_loops
  config_lib.check_loops(settings, loops, f"--num_loops={loops}")
  call = {"num_loops": loops, "kind": settings.eval.execution}
  if exit_threshold is not None:
    if family.reading and family.reading.exits:
      raise UserError(
        f"--exit_threshold: {name} exits early only in generation; scores use"
        " --num_loops loops"
      )
    if not family.halting_trace:
      raise UserError(f"--exit_threshold has no effect on {name}")
    call["exit_threshold"] = exit_threshold
  run = trained.read(workdir, checkpoint, kernels=kernels)
  assert isinstance(settings.task, TextConfig)  # `_check` ensures this.
  tokenizer = tokenizer_lib.of(settings.task).beginning_with(bos)
  files = workdir / convert.DIRECTORY
  length = context_length(settings.spec.sequence_length, files)
  return LanguageModel(
    tokenizer=tokenizer,
    stop_tokens=stop_tokens(tokenizer, files),
    context_length=length,
    graphdef=run.graphdef,
    params=run.params,
    call=call,
    facts={
      "workdir": label,
      "model": name,
      "step": run.step,
      "num_loops": loops,
      "trained_num_loops": settings.model.num_loops,
      "exit": {"execution": call["kind"], "threshold": exit_threshold},
      "tokenizer": settings.task.tokenizer,
      "texts_begin_with": tokenizer.beginning,
      "context_length": length,
      "chat_template": None,
    },
  )


def context_length(row: int, folder: pathlib.Path) -> int:
  """`LanguageModel.context_length` of a model with files in a folder, if any.

  A model that comes from the Hub reads as much as it did there, at most
  `convert.MAX_TOKENS`, also after training on shorter rows.

  Args:
    row: tokens of a row in training.
    folder: may have the Hub's config.json.
  """
  return max(row, min(convert.context_length(folder) or 0, convert.MAX_TOKENS))


def stop_tokens(tokenizer: Tokenizer, folder: pathlib.Path) -> tuple[int, ...]:
  """`LanguageModel.stop_tokens` of a model with files in a folder, if any."""
  ids = (tokenizer.end, *tokenizer_files.end_tokens(folder))
  for one in ids:
    if not 0 <= one < tokenizer.num_ids:
      raise UserError(
        f"{folder}: eos_token_id={one} is not a token id of {tokenizer.name}"
      )
  return tuple(dict.fromkeys(ids))


def _check(settings: config_lib.Settings, label: str) -> None:
  """Raises UserError unless the run trained a language model."""
  task = settings.plain["task"]["name"]
  if task != "text":
    raise UserError(
      f"{label}: task.name={task!r} is not 'text';"
      f" `loopjax report {shlex.quote(label)}` has its scores and figures"
    )
  if settings.family.reading is None:
    raise UserError(
      f"{label}: model.name={settings.model_name!r} does not predict next"
      " tokens"
    )
