"""Recurrent depth: prelude, core and coda (arXiv 2502.05171 and others)."""

from loopjax.models.reading import unstacked
from loopjax.models.recurrent.config import Config, costs
from loopjax.models.recurrent.model import HEADLINE, TRACES, Model
from loopjax.models.recurrent.reading import (
  CACHES,
  check_exits,
  check_resumes,
  empty_cache,
  exit_rule,
  read,
  reads_out_every_loop,
)
from loopjax.models.recurrent.training import check_schedule, loss

__all__ = [
  "CACHES",
  "HEADLINE",
  "TRACES",
  "Config",
  "Model",
  "check_exits",
  "check_resumes",
  "check_schedule",
  "costs",
  "empty_cache",
  "exit_rule",
  "loss",
  "read",
  "reads_out_every_loop",
  "unstacked",
]
