"""Adaptive loops and memory (arXiv 2603.08391).

`layer.py` and `model.py` contain the paper's algorithm, `config.py` the
settings.
"""

from loopjax.models.adaptive.config import Config, costs
from loopjax.models.adaptive.model import (
  HEADLINE,
  TRACES,
  Model,
  loss,
)
from loopjax.models.reading import empty_cache, read

CACHES = ("per_loop",)  # A slot for every layer and iteration.
__all__ = [
  "CACHES",
  "HEADLINE",
  "TRACES",
  "Config",
  "Model",
  "costs",
  "empty_cache",
  "loss",
  "read",
]
