"""Model families by name: each module has `Config`, `Model` and `loss`."""

from loopjax.models import utm

MODELS = {"utm": utm}
