"""Sleep: offline passes that turn evicted context into fast weights.

Source: "Language Models Need Sleep" (arXiv 2605.26099).
"""

from loopjax.models.sleep.config import Config, costs
from loopjax.models.sleep.model import HEADLINE, TRACES, Model, loss
from loopjax.models.sleep.reading import CACHES, empty_cache, read
from loopjax.models.sleep.state import Kept

__all__ = [
  "CACHES",
  "HEADLINE",
  "TRACES",
  "Config",
  "Kept",
  "Model",
  "costs",
  "empty_cache",
  "loss",
  "read",
]
