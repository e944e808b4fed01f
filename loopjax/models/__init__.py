"""Model families by name."""

from typing import TYPE_CHECKING

from loopjax.protocols import CausalFamily, Family, Registry

if TYPE_CHECKING:  # The type checker compares each family with its protocol.
  from loopjax.models import (
    adaptive,
    disco,
    hrm,
    looped,
    melt,
    ponderlm,
    recurrent,
    sleep,
    transformer,
    trm,
    urm,
    utm,
  )

  _COMPARED: tuple[Family, ...] = (hrm, trm, urm, utm)
  _COMPARED_CAUSAL: tuple[CausalFamily, ...] = (
    adaptive,
    disco,
    looped,
    melt,
    ponderlm,
    recurrent,
    sleep,
    transformer,
  )

_CAUSAL = {
  "adaptive": "loopjax.models.adaptive",
  "disco": "loopjax.models.disco",
  "looped": "loopjax.models.looped",
  "melt": "loopjax.models.melt",
  "ponderlm": "loopjax.models.ponderlm",
  "recurrent": "loopjax.models.recurrent",
  "sleep": "loopjax.models.sleep",
  "transformer": "loopjax.models.transformer",
}
# Families that predict next tokens.
CAUSAL = Registry[CausalFamily](_CAUSAL)
MODELS = Registry[Family](
  {
    **_CAUSAL,
    "hrm": "loopjax.models.hrm",
    "trm": "loopjax.models.trm",
    "urm": "loopjax.models.urm",
    "utm": "loopjax.models.utm",
  }
)
