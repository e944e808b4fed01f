"""Sleep: offline passes that write context into fast weights before eviction.

Source: "Language Models Need Sleep" (arXiv 2605.26099).
"""

from loopjax.models.exiting import untrained
from loopjax.models.sleep.config import Config, costs
from loopjax.models.sleep.model import (
  HEADLINE,
  TRACES,
  Model,
  WindowState,
  loss,
)
from loopjax.models.sleep.reading import CACHES, empty_cache, read

__all__ = [
  "CACHES",
  "HEADLINE",
  "TRACES",
  "Config",
  "WindowState",
  "Model",
  "costs",
  "empty_cache",
  "loss",
  "read",
  "untrained",
]
