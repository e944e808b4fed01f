"""Families and tasks by name."""

import importlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

from loopjax.errors import UserError

_Entry = TypeVar("_Entry")


class Registry(MutableMapping[str, _Entry], Generic[_Entry]):
  """Families or tasks by name; a module is imported when it is first read.

  A name that is not in the table is the import path of a module from outside
  the package. `registry[name] = entry` adds one for this process only.
  """

  def __init__(
    self,
    section: str,
    load: Callable[[types.ModuleType], _Entry],
    modules: Mapping[str, str],
  ):
    """Makes a registry.

    Args:
      section: the section of a config whose `name` is a name here.
      load: the entry of a module; raises UserError if it has none.
      modules: import paths of the modules in this package, by name.
    """
    self._section, self._load, self._modules = section, load, dict(modules)
    self._entries: dict[str, _Entry] = {}

  def __getitem__(self, name: str) -> _Entry:
    if name not in self:
      raise KeyError(name)
    if name not in self._entries:
      try:
        module = importlib.import_module(self._modules.get(name, name))
        self._entries[name] = self._load(module)
      except (ImportError, UserError) as error:
        raise UserError(f"{self._section}.name={name!r}: {error}") from error
    return self._entries[name]

  def __setitem__(self, name: str, entry: _Entry) -> None:
    self._entries[name] = entry

  def __delitem__(self, name: str) -> None:
    del self._entries[name]

  def __contains__(self, name: object) -> bool:
    if not isinstance(name, str):  # A user's mistake; may have no hash.
      return False
    return name in self._modules or name in self._entries or _is_module(name)

  def is_outside(self, name: str) -> bool:
    """Whether an entry is not of this package."""
    return name not in self._modules

  def __iter__(self) -> Iterator[str]:
    return iter({**self._modules, **self._entries})

  def __len__(self) -> int:
    return len({**self._modules, **self._entries})


def _is_module(name: str) -> bool:
  """Whether a module can be imported by this name."""
  try:
    return bool(importlib.util.find_spec(name))
  except (ImportError, ValueError):  # Its package is missing; or it is "".
    return False
