"""MELT (arXiv 2605.07721): all loops share the keys and values of a token.

`algorithm.py` is the paper's, in training and in reading; `training.py` has the
two phases of training, `model.py` the rest of the family.
"""

from loopjax.models import exiting
from loopjax.models.melt.config import Config, check_schedule, costs, made_from
from loopjax.models.melt.model import (
  TRACES,
  Model,
  empty_cache,
  read,
)
from loopjax.models.melt.training import check_teacher, loss
from loopjax.protocols import Exits, Family, Reading

FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  check_schedule=check_schedule,
  check_teacher=check_teacher,
  made_from=made_from,
  untrained=exiting.untrained,
  reading=Reading(
    caches=("latent",),
    empty_cache=empty_cache,
    read=read,
    has_span=True,
    exits=Exits(rule=exiting.exit_rule, check=exiting.check_exits),
    chunk=Config.read_chunk,
  ),
)
