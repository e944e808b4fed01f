"""Model families by name."""

from collections.abc import Mapping

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
from loopjax.protocols import CausalFamily, Family

# Families that predict next tokens.
CAUSAL: Mapping[str, CausalFamily] = {
  "adaptive": adaptive,
  "disco": disco,
  "looped": looped,
  "melt": melt,
  "ponderlm": ponderlm,
  "recurrent": recurrent,
  "sleep": sleep,
  "transformer": transformer,
}
MODELS: Mapping[str, Family] = {
  **CAUSAL,
  "hrm": hrm,
  "trm": trm,
  "urm": urm,
  "utm": utm,
}
