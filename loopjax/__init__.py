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
import os
import warnings
from importlib import metadata
from typing import Any

__version__ = "0.1.0"

# First tested and first untested version, as in setup.cfg.
_TESTED = {"jax": ("0.10.2", "0.13"), "flax": ("0.12.8", "0.13")}

# The interface for Python programs; see `loopjax.library`.
_LIBRARY = (
  "Model", "build", "check_family", "datasets", "dynamics", "load", "loss",
  "run_sweep", "save", "table",
)  # fmt: skip
# Config files and programs of users import these from here.
_ELSEWHERE = {
  "budget": "program.budget",
  "language_model": "saved.language_model",
  "presets": "config.presets",
  "trained": "saved.trained",
}


def __getattr__(name: str) -> Any:
  """What users import from the top of the package, which imports no JAX."""
  if name in _LIBRARY:
    return getattr(importlib.import_module(f"{__name__}.library"), name)
  if name in _ELSEWHERE:
    return importlib.import_module(f"{__name__}.{_ELSEWHERE[name]}")
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  """The names that `__getattr__` finds, and modules that are imported."""
  ours = [
    name
    for name, value in globals().items()
    if name.startswith("_")
    or getattr(value, "__name__", "").startswith(f"{__name__}.")
  ]
  return sorted({*ours, *_LIBRARY, *_ELSEWHERE})


def _numbers(version: str) -> tuple[int, ...]:
  """(0, 10, 2) of "0.10.2.dev1"."""
  parts = version.split(".")
  return tuple(int(x) for x in parts[:3] if x.isdigit())


def _check_platform(name: str) -> None:
  """Raises ImportError on Windows, rather than in the middle of a run."""
  if name == "nt":
    raise ImportError(
      "loopjax runs on Linux and macOS; on Windows, install it in WSL"
    )


def _warn_if_untested() -> None:
  for name, (first, end) in _TESTED.items():
    found = metadata.version(name)
    if not _numbers(first) <= _numbers(found) < _numbers(end):
      warnings.warn(
        f"loopjax {__version__} is tested with {name} >={first},<{end};"
        f" {found} is installed",
        stacklevel=3,
      )


_check_platform(os.name)
_warn_if_untested()
