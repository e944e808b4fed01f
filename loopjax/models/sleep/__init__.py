"""Sleep: offline passes that write context into fast weights before eviction.

Source: "Language Models Need Sleep" (arXiv 2605.26099).
"""

from loopjax.models import exiting
from loopjax.models.sleep.config import GROUPS, Config, costs, made_from
from loopjax.models.sleep.model import TRACES, Model, WindowState, loss
from loopjax.models.sleep.reading import empty_cache, read
from loopjax.protocols import Family, Reading

FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  groups=GROUPS,
  made_from=made_from,
  untrained=exiting.untrained,
  reading=Reading(caches=("fast_weights",), empty_cache=empty_cache, read=read),
)
__all__ = ["FAMILY", "TRACES", "Config", "Model", "WindowState"]
