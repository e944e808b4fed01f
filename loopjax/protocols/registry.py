"""Families and tasks by name."""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

_Module = TypeVar("_Module")


class Registry(MutableMapping[str, _Module], Generic[_Module]):
  """Modules by name; each is imported when it is first read.

  A run needs one family and one task; to import all takes longer than to read
  a model. `registry[name] = module` adds one from outside the package.
  """

  def __init__(self, places: Mapping[str, str]):
    """Makes a registry.

    Args:
      places: the modules' names in `import`, by their names here.
    """
    self._places: dict[str, str | None] = dict(places)
    self._modules: dict[str, Any] = {}

  def __getitem__(self, name: str) -> _Module:
    place = self._places[name]
    if name not in self._modules and place:
      self._modules[name] = importlib.import_module(place)
    return self._modules[name]

  def __setitem__(self, name: str, module: _Module) -> None:
    self._places[name] = None
    self._modules[name] = module

  def __delitem__(self, name: str) -> None:
    del self._places[name]
    self._modules.pop(name, None)

  def __contains__(self, name: object) -> bool:
    return name in self._places  # Without importing it.

  def __iter__(self) -> Iterator[str]:
    return iter(self._places)

  def __len__(self) -> int:
    return len(self._places)
