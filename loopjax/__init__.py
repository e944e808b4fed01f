"""loopjax: looped transformers with memory, in JAX and Flax.

Shapes in the docstrings of models and layers use these letters; in
`models/utm/` the names of arrays end in them (`g_BxSxD`):

  B batch            T tokens            S tokens attended to
  D model width      F MLP width         V vocabulary
  H query heads      G key-value heads   d_h, d_k, d_v widths of one head
  K loops            M memory tokens     C chunk

Any other letter, and any letter in tasks and analyses, is defined where it is
used.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

# Config files and programs of users import these from here.
_ELSEWHERE = {
  "budget": "program.budget",
  "language_model": "saved.language_model",
  "presets": "config.presets",
  "trained": "saved.trained",
}


def __getattr__(name: str) -> ModuleType:
  """A module that users import from the top of the package."""
  if name in _ELSEWHERE:
    return importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
