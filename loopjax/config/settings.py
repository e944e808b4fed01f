"""The checked, typed settings of a run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from loopjax import sharding
from loopjax.config import run_config
from loopjax.models import CAUSAL
from loopjax.optim import chain
from loopjax.protocols import (
  CausalFamily,
  Dataclass,
  Family,
  ModelConfig,
  Task,
)
from loopjax.run import profiling
from loopjax.types import LoopOptions, TaskSpec


class Settings(NamedTuple):
  """A checked config.

  Attributes:
    plain: the config as stored in config.json.
    family: the module of model.name.
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
  run: run_config.Run
  eval: run_config.Eval

  @property
  def model_name(self) -> str:
    return self.plain["model"]["name"]

  @property
  def causal(self) -> CausalFamily | None:
    """The family if it predicts next tokens."""
    return CAUSAL.get(self.model_name)

  @property
  def eval_loops(self) -> int:
    return self.eval.num_loops or self.model.num_loops

  @property
  def training_flops(self) -> float:
    """FLOPs of the whole run."""
    costs = self.family.costs(self.model, self.spec, self.model.num_loops)
    examples = self.run.num_steps * self.run.batch_size
    return examples * profiling.training_flops(costs)
