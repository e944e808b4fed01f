"""The subject of an evaluation: a trained language model and its call."""

import inspect
import pathlib
from typing import Any, NamedTuple

from flax import nnx

from loopjax import config as config_lib
from loopjax import trained
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError


class Subject(NamedTuple):
  """A model at a checkpoint, and the arguments of its call.

  Attributes:
    tokenizer: the task's tokenizer.
    context_length: maximum number of tokens it reads at once, as in training.
    graphdef: the model without its parameters.
    params: the parameters, averaged if the run averages.
    call: keyword arguments of the model's call.
    facts: metadata to store with every score, as JSON.
  """

  tokenizer: Tokenizer
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
) -> Subject:
  """Reads a run, which may be in progress, onto one device.

  Args:
    workdir: the run's work directory.
    num_loops: number of loops; None for that of the config's evaluation.
    exit_threshold: threshold of the exit gate; None for the model's own.
    checkpoint: step of the checkpoint; None for the newest intact one.

  Raises:
    UserError: there is no such run or checkpoint, the model is not a language
      model, or it has no such number of loops or exit threshold.
  """
  label = str(workdir)
  settings = config_lib.of_run(workdir, label)
  family = settings.plain["model"]["name"]
  _check(settings, label)
  loops = num_loops or settings.eval_loops
  try:
    settings.family.costs(settings.model, settings.spec, loops)
  except UserError as error:
    raise UserError(f"--num_loops={loops}: {error}") from error
  call = {"num_loops": loops, "kind": settings.eval.loop_kind}
  if exit_threshold is not None:
    signature = inspect.signature(settings.family.Model.__call__)
    if "exit_threshold" not in signature.parameters:
      raise UserError(f"--exit_threshold has no effect on {family}")
    call["exit_threshold"] = exit_threshold
  run = trained.read(workdir, checkpoint)
  assert isinstance(settings.task, TextConfig)  # `_check` ensures this.
  return Subject(
    tokenizer=Tokenizer(settings.task.tokenizer, settings.task.end_token),
    context_length=settings.spec.sequence_length,
    graphdef=run.graphdef,
    params=run.params,
    call=call,
    facts={
      "workdir": label,
      "model": family,
      "step": run.step,
      "num_loops": loops,
      "trained_num_loops": settings.model.num_loops,
      "exit": {"loop_kind": call["kind"], "threshold": exit_threshold},
      "tokenizer": settings.task.tokenizer,
      "context_length": settings.spec.sequence_length,
      "chat_template": None,
    },
  )


def _check(settings: config_lib.Settings, label: str) -> None:
  """Raises UserError unless the run is of a language model."""
  task, family = (settings.plain[part]["name"] for part in ("task", "model"))
  if task != "text":
    raise UserError(f"{label}: task.name={task!r} is not 'text'")
  if not hasattr(settings.family.Model, "readout_table"):
    raise UserError(f"{label}: model.name={family!r} predicts no next tokens")
