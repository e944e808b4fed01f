"""Recurrent depth: prelude, core and coda (arXiv 2502.05171 and others)."""

from loopjax.models.recurrent.config import GROUPS, Config, costs
from loopjax.models.recurrent.model import TRACES, Model
from loopjax.models.recurrent.reading import (
  check_exits,
  empty_cache,
  read,
  reads_out_every_loop,
  unstacked,
)
from loopjax.models.recurrent.training import check_schedule, loss
from loopjax.nn.attention import parts
from loopjax.protocols import Exits, Family, Reading

FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=loss,
  costs=costs,
  traces=TRACES,
  groups=GROUPS,
  check_schedule=check_schedule,
  draws_state=lambda config: config.state == "normal" and not config.dropout,
  reads_out_every_loop=reads_out_every_loop,
  measures=Model.measures,
  reading=Reading(
    caches=parts.KINDS,
    empty_cache=empty_cache,
    read=read,
    has_span=True,
    has_places=True,
    exits=Exits(check=check_exits),
    unstacked=unstacked,
  ),
)
