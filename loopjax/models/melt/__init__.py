"""MELT (arXiv 2605.07721): all loops share the keys and values of a token.

`algorithm.py` is the paper's, in training and in reading; `training.py` has the
two phases of training, `model.py` the rest of the family.
"""

from loopjax.models.exiting import check_exits, exit_rule, untrained
from loopjax.models.melt.config import (
  Config,
  check_schedule,
  costs,
  has_gate_rate,
)
from loopjax.models.melt.model import (
  CACHES,
  HEADLINE,
  TRACES,
  Model,
  advance,
  between_tokens,
  empty_cache,
  read,
)
from loopjax.models.melt.training import check_teacher, loss

__all__ = [
  "CACHES",
  "HEADLINE",
  "TRACES",
  "Config",
  "Model",
  "advance",
  "between_tokens",
  "check_exits",
  "check_schedule",
  "check_teacher",
  "costs",
  "empty_cache",
  "exit_rule",
  "has_gate_rate",
  "loss",
  "read",
  "untrained",
]
