"""Adaptive loops and memory (arXiv 2603.08391).

`layer.py` and `model.py` contain the paper's algorithm, `config.py` the
settings.
"""

from loopjax.models import reading
from loopjax.models.adaptive.config import Config, costs
from loopjax.models.adaptive.model import HALTING_TRACE, TRACES, Model, loss
from loopjax.protocols import Family, Reading

FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  headline=("ponder_steps",),
  halting_trace=HALTING_TRACE,
  reading=Reading(
    caches=("per_loop",),  # A slot for every layer and iteration.
    empty_cache=reading.empty_cache,
    read=reading.read,
    has_span=True,
    has_places=True,
  ),
)
