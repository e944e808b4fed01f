"""UTM: one universal-transformer block with memory tokens and ACT.

Source: G. Sapunov, arXiv 2604.21999.
"""

from loopjax.models.utm.config import Config, check_schedule, costs
from loopjax.models.utm.model import TRACES, Model, loss
from loopjax.protocols import Family

FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  check_schedule=check_schedule,
  traces=TRACES,
  headline=("ponder_steps",),
  halting_rule=lambda config: config.halting,
  num_memory_tokens=lambda config: config.num_memory_tokens,
)
