"""Families and tasks by name."""

import importlib
import importlib.metadata
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from loopjax.errors import UserError

_Entry = TypeVar("_Entry")


class Registry(MutableMapping[str, _Entry], Generic[_Entry]):
  """Families or tasks by name; a module is imported when it is first read.

  A run needs one family and one task; to import all takes longer than to read
  a model. Those from outside the package are added by `register`, or by an
  entry point of an installed package; entry points are read when a name is not
  known. `registry[name] = entry` adds one for this process only.
  """

  def __init__(
    self,
    section: str,
    group: str,
    load: Callable[[types.ModuleType], _Entry],
    modules: Mapping[str, str],
  ):
    """Makes a registry.

    Args:
      section: the section of a config whose `name` is a name here.
      group: the group of entry points.
      load: the entry of a module; raises UserError if it has none.
      modules: import paths of the modules in this package, by name.
    """
    self._section, self._group, self._load = section, group, load
    self._built_in = frozenset(modules)
    self._modules: dict[str, str | None] = dict(modules)
    self._entries: dict[str, _Entry] = {}
    self._has_installed = False

  def register(self, name: str, module: str) -> None:
    """Adds an entry whose module is not in this package; imports nothing.

    A config with this name contains the import path, and with it a run's
    config.json: every command that reads the run then imports the module.

    Args:
      name: the name in configs.
      module: the import path.

    Raises:
      UserError: the name is taken.
    """
    if self._modules.setdefault(name, module) != module:
      there = self._modules[name] or "defined in this process"
      raise UserError(
        f"{self._section}.name={name!r} is {module} here, but the name is taken"
        f" ({there})"
      )

  def register_recorded(self, section: Mapping[str, Any]) -> None:
    """Registers what a section of a run's config.json names, if from outside.

    Raises:
      UserError: see `register`.
    """
    if module := section.get("module"):
      self.register(section["name"], module)

  def named(self, name: str) -> dict[str, str]:
    """What a config says of an entry: its name and, if from outside, module."""
    module = None if name in self._built_in else self._modules[name]
    return {"name": name, **({"module": module} if module else {})}

  def __getitem__(self, name: str) -> _Entry:
    if name not in self:
      raise KeyError(name)
    if name not in self._entries:
      self._entries[name] = self._read(name, self._modules[name] or "")
    return self._entries[name]

  def _read(self, name: str, module: str) -> _Entry:
    """The entry of a module, which is imported."""
    if name in self._built_in:
      return self._load(importlib.import_module(module))
    label = f"{self._section}.name={name!r}"
    try:
      found = importlib.import_module(module)
    except ImportError as error:
      raise UserError(
        f"{label}: its module {module} cannot be imported ({error}); install"
        " the package that has it, or add its folder to PYTHONPATH"
      ) from error
    try:
      return self._load(found)
    except UserError as error:
      raise UserError(f"{label}: {error}") from error

  def __setitem__(self, name: str, entry: _Entry) -> None:
    self._modules[name] = None
    self._entries[name] = entry

  def __delitem__(self, name: str) -> None:
    del self._modules[name]
    self._entries.pop(name, None)

  def __contains__(self, name: object) -> bool:
    if not isinstance(name, str):
      return False
    if name not in self._modules and not self._has_installed:
      self._has_installed = True
      for entry in importlib.metadata.entry_points(group=self._group):
        self._modules.setdefault(entry.name, entry.value)
    return name in self._modules  # Without importing it.

  def __iter__(self) -> Iterator[str]:
    return iter(self._modules)

  def __len__(self) -> int:
    return len(self._modules)
