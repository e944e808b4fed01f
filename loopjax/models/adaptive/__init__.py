"""Adaptive loops and memory (arXiv 2603.08391): config and model.

`layer.py` and `model.py` are the paper's algorithm, `config.py` its sizes and
switches.
"""

from loopjax.models.adaptive.config import Config, costs
from loopjax.models.adaptive.model import (
  HEADLINE,
  TRACES,
  Model,
  loss,
)
from loopjax.models.reading import empty_cache, read

CACHES = ("per_loop",)  # Of each layer, which loops by itself.
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
