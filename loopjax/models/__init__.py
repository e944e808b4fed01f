"""Model families by name: each module has `Config`, `Model` and `loss`."""

from loopjax.models import disco, looped, ponderlm, sleep, transformer, utm

MODELS = {
  "disco": disco,
  "looped": looped,
  "ponderlm": ponderlm,
  "sleep": sleep,
  "transformer": transformer,
  "utm": utm,
}
