"""Model families by name."""

import types

from loopjax.errors import UserError
from loopjax.protocols import Family, Registry


def _family(module: types.ModuleType) -> Family:
  family = getattr(module, "FAMILY", None)
  if not isinstance(family, Family):
    raise UserError(
      f"{module.__name__} has no FAMILY; it must end with"
      " FAMILY = loopjax.protocols.Family(...)"
    )
  return family


MODELS = Registry(
  "model",
  _family,
  {
    "adaptive": "loopjax.models.adaptive",
    "disco": "loopjax.models.disco",
    "hrm": "loopjax.models.hrm",
    "loopformer": "loopjax.models.loopformer",
    "looped": "loopjax.models.looped",
    "melt": "loopjax.models.melt",
    "plt": "loopjax.models.plt",
    "ponderlm": "loopjax.models.ponderlm",
    "recurrent": "loopjax.models.recurrent",
    "sleep": "loopjax.models.sleep",
    "transformer": "loopjax.models.transformer",
    "trm": "loopjax.models.trm",
    "urm": "loopjax.models.urm",
    "utm": "loopjax.models.utm",
  },
)
