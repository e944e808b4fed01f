"""The checked, typed settings of a run, and its sections run and eval."""

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from loopjax import checks, sharding
from loopjax.errors import UserError
from loopjax.loop import starts
from loopjax.optim import chain
from loopjax.protocols import (
  Dataclass,
  Family,
  ModelConfig,
  Task,
)
from loopjax.run import profiling
from loopjax.types import LoopOptions, TaskSpec


@dataclasses.dataclass(frozen=True)
class Run:
  """Length of the run, checkpoints, starting point and monitoring.

  Attributes:
    seed: seed of the parameters, the data order and every other random number.
    num_steps: optimizer steps.
    batch_size: examples per step over all devices.
    num_microbatches: parts of a batch that are computed one after another to
      save memory; the gradient is the whole batch's.
    steps_per_call: optimizer steps per dispatch to the device.
    log_every, checkpoint_every: steps, multiples of steps_per_call.
    keep_checkpoints: number of newest checkpoints to keep.
    keep_best: number of checkpoints with the best scores to keep in addition.
    best_metric: the score of keep_best, stop_after and eval.checkpoint=best, a
      metric of the evaluations during training; a leading minus means that
      lower is better.
    stop_after: the run ends after this many evaluations during training without
      a better best_metric than before; 0 to take all steps. The learning rate
      keeps to the schedule of num_steps.
    init_from: a work directory whose newest parameters (averaged, if it
      averages) the run starts from; "" to initialise all parameters.
    init_fresh: regular expression of parameters that may be missing there and
      are then initialised.
    teacher: a work directory whose newest parameters (averaged, if it averages)
      serve as the teacher, in families that have one; "" for none.
    max_bad_steps: the run stops after this many consecutive steps with a
      non-finite loss or gradient; such steps do not change the parameters.
    debug_nans: find the operation that produces the first non-finite number, at
      the cost of synchronising after every call.
    profile_steps: "FIRST:END", the steps to trace; "" for none.
    wandb_project: Weights & Biases project to log the run to; "" for none.
  """

  seed: int = checks.setting(0, least=0)
  num_steps: int = checks.setting(10_000, least=1)
  batch_size: int = checks.setting(256, least=1)
  num_microbatches: int = checks.setting(1, least=1)
  steps_per_call: int = checks.setting(10, least=1)
  log_every: int = checks.setting(100, least=1)
  checkpoint_every: int = checks.setting(1000, least=1)
  keep_checkpoints: int = checks.setting(2, least=1)
  keep_best: int = checks.setting(0, least=0)
  best_metric: str = "-validation/loss"
  stop_after: int = checks.setting(0, least=0)
  init_from: str = ""
  init_fresh: str = ""
  teacher: str = ""
  max_bad_steps: int = checks.setting(10, least=1)
  debug_nans: bool = False
  profile_steps: str = ""
  wandb_project: str = ""

  def __post_init__(self) -> None:
    checks.plain_values("run", self)
    for name in ("num_steps", "log_every", "checkpoint_every"):
      if getattr(self, name) % self.steps_per_call:
        raise UserError(
          f"run.{name}={getattr(self, name)} must be a multiple of"
          f" run.steps_per_call={self.steps_per_call}"
        )
    if not self.init_from:
      checks.without_effect("run", self, "init_from", "init_fresh")
    try:
      re.compile(self.init_fresh)
    except re.error as error:
      raise UserError(f"run.init_fresh={self.init_fresh!r}: {error}") from error
    profiling.step_range(self.profile_steps, self.num_steps)  # Checks it.


@dataclasses.dataclass(frozen=True)
class Eval:
  """Splits, checkpoints and numbers of loops of evaluations.

  Attributes:
    every: steps between evaluations of the validation split during training; 0
      for none. The end of training evaluates the whole validation and test
      splits.
    batch_size: examples per device call over all devices.
    num_examples: number of examples of an evaluation during training, rounded
      up to whole batches; 0 for all.
    num_loops: number of loops; 0 for the trained number.
    num_starts: starts of each example, of which one answers, see
      docs/evaluation.md.
    start_noise: noise of a start: standard deviation of what is added to the
      embedded tokens before the first loop, in units of their RMS.
    answer: the start that answers: the one with the largest "confidence", the
      summed log-probability of its answer, or the smallest "residual", the
      change of the state in the last three loops; the "majority"'s; the one
      whose "halting" head is the surest; or one that passes the task's "check".
    certain: probability of an answer after which an example gets no further
      start; 0 for all starts.
    execution: how the loop is executed: "scan", or "while", which stops when
      every token has halted, in models that halt.
    split: the split that `loopjax score` scores: "test", or "validation" for
      model selection.
    checkpoint: the checkpoint that `loopjax score` reads: "newest", "best" by
      run.best_metric, or its step.
    depth_factor: scores by depth, and their figure, extend to this multiple of
      the trained number of loops; 0 for none.
    depth_examples: number of examples for these scores; 0 for all.
  """

  every: int = checks.setting(0, least=0)
  batch_size: int = checks.setting(256, least=1)
  num_examples: int = checks.setting(0, least=0)
  num_loops: int = checks.setting(0, least=0)
  num_starts: int = checks.setting(1, least=1)
  start_noise: float = checks.setting(0.0, least=0)
  answer: str = "confidence"
  certain: float = checks.setting(0.0, within="[0, 1]")
  execution: str = "scan"
  split: str = "test"
  checkpoint: str = "newest"
  depth_factor: int = checks.setting(4, least=0)
  depth_examples: int = checks.setting(2048, least=0)

  def __post_init__(self) -> None:
    checks.plain_values("eval", self)
    checks.one_of(
      "eval",
      self,
      answer=starts.RULES,
      execution=("scan", "while"),
      split=("validation", "test"),
    )
    if self.num_starts == 1:
      checks.without_effect(
        "eval", self, "num_starts", "start_noise", "answer", "certain"
      )
    if not self.every:
      checks.without_effect("eval", self, "every", "num_examples")
    if not self.depth_factor:
      checks.without_effect("eval", self, "depth_factor", "depth_examples")
    if self.checkpoint not in ("newest", "best") and (
      not self.checkpoint.isdecimal()
    ):
      raise UserError(
        f"eval.checkpoint={self.checkpoint!r} must be 'newest', 'best' or a"
        " step"
      )


class Settings(NamedTuple):
  """A checked config.

  Attributes:
    plain: the config as stored in config.json.
    family: the family of model.name.
    task_module: the module of task.name.
    spec: the properties of the task that a model depends on.
    model, task, optim, loop, mesh, run, eval: the sections' records.
  """

  plain: Mapping[str, Any]
  family: Family
  task_module: Task
  spec: TaskSpec
  model: ModelConfig
  task: Dataclass
  optim: chain.Config
  loop: LoopOptions
  mesh: sharding.Config
  run: Run
  eval: Eval

  def __reduce__(self) -> tuple[Any, ...]:
    """How `pickle` and `copy.deepcopy` make it again: a module by its name."""
    module: Any = self.task_module
    return _with_module, tuple(self._replace(task_module=module.__name__))

  @property
  def model_name(self) -> str:
    return self.plain["model"]["name"]

  @property
  def eval_loops(self) -> int:
    return self.eval.num_loops or self.model.num_loops

  @property
  def reads_whole_rows(self) -> bool:
    """Whether the model reads rows of one length only."""
    return self.family.reading is None or self.spec.num_answer_tokens > 0

  def check_trains(self) -> None:
    """Raises UserError if the parameters can only be read, not trained."""
    if self.plain["model"].get("precision") == "bfloat16_params":
      raise UserError(
        "model.precision='bfloat16_params' is for inference only: rounding"
        " would lose updates of bfloat16 parameters"
      )

  def check_run(self, mode: str) -> None:
    """Raises UserError for settings that a training run cannot have.

    Not part of `resolve`: scoring and Python programs can have them.

    Args:
      mode: "train" or "train_and_eval".
    """
    for name in ("checkpoint", "split"):
      if getattr(self.eval, name) != getattr(Eval(), name):
        raise UserError(
          f"eval.{name} has no effect in training; loopjax score reads it"
        )
    self.check_trains()
    if self.run.batch_size % self.run.num_microbatches:
      raise UserError(
        f"run.batch_size={self.run.batch_size} must be a multiple of"
        f" run.num_microbatches={self.run.num_microbatches}"
      )
    if self.optim.lora_rank and not self.run.init_from:
      raise UserError(
        f"optim.lora_rank={self.optim.lora_rank} needs run.init_from, the"
        " trained model that the pairs adapt"
      )
    by_score = ("keep_best", "stop_after")
    used = [name for name in by_score if getattr(self.run, name)]
    if used and mode == "train":
      raise UserError(f"run.{used[0]} has no effect with --mode=train")
    if not used:
      checks.without_effect("run", self.run, by_score, "best_metric")

  def check_schedule(self, num_steps: int = 0) -> None:
    """Raises UserError if the loss changes for longer than the run trains.

    Not part of `resolve`, which also reads runs that are trained already.

    Args:
      num_steps: the steps of training; 0 for those of the run.
    """
    if self.family.check_schedule:
      self.family.check_schedule(self.model, num_steps or self.run.num_steps)


def _with_module(*fields: Any) -> Settings:
  """Settings from their fields, with the name of the task's module."""
  settings = Settings(*fields)
  name: Any = settings.task_module
  module: Any = importlib.import_module(name)
  return settings._replace(task_module=module)
