"""Named sweeps of a config: one run per item, restartable.

Called, this package is `loopjax.library.sweep`: a function of that name and the
module of the command `python -m loopjax.sweep` are one attribute of `loopjax`.
"""

import importlib
import sys
import types
from typing import Any


class _Callable(types.ModuleType):
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    library = importlib.import_module("loopjax.library")
    return library.sweep(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
