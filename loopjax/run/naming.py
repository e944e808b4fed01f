"""Names of directories; the same experiment always has the same name."""

import hashlib
import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from loopjax import sections
from loopjax.run import workdir as workdir_lib

_MAX = 120  # File systems allow 255 bytes; a log's name is longer by 4.


def settings(keys: Iterable[str], values: Mapping[str, Any]) -> str:
  """A file name that describes settings: `num_memory_tokens=8,seed=42`.

  Different settings have different names; the seed comes last.

  Args:
    keys: "section.key" of the settings to include.
    values: values of all settings, by "section.key".
  """
  names = [key.partition(".")[2] for key in values]
  parts = []
  for key in sorted(keys, key=lambda key: (key == "run.seed", key)):
    short = key.partition(".")[2]
    label = short if names.count(short) == 1 else key
    parts.append(f"{label}={_quoted(values[key])}")
  text = ",".join(parts)
  if len(text) <= _MAX:
    return text
  digest = hashlib.sha256(text.encode()).hexdigest()
  return f"{text[: _MAX - 16]}~{digest[:16]}"  # Longer than a short one.


def workdir(
  config_name: str, overrides: Iterable[str], config: Mapping[str, Any]
) -> pathlib.Path:
  """`runs/<config>[-<preset and overrides>]`, a run's default work directory.

  Settings that may change when a run is resumed are omitted, so that a command
  that changes only these resumes the run, or evaluates it.

  Args:
    config_name: --config, FILE[:argument].
    overrides: "section.key" of the flags --config.section.key.
    config: the resolved config, as plain data.
  """
  path, argument = sections.split_name(config_name)
  parts = sections.split(argument)
  words = [_quoted(part) for part in parts if "=" not in part]
  changed = {part.partition("=")[0] for part in parts if "=" in part}
  changed.update(overrides)
  if "import" in changed:
    changed.add("run.init_from")
  values = sections.flatten(config)
  binding = [
    key
    for key in values
    if (key in changed or key.partition(".")[0] in changed)
    and workdir_lib.binds(key, "train")
  ]
  if binding:
    words.append(settings(binding, values))
  name = pathlib.Path(path).stem
  if words:
    name += f"-{','.join(words)}"
  return pathlib.Path("runs") / name


def _quoted(value: Any) -> str:
  """A value as part of a file name; a tuple (1, 2) is 1+2."""
  parts = value if isinstance(value, list) else [value]
  return "+".join(urllib.parse.quote(str(part), safe="") for part in parts)
