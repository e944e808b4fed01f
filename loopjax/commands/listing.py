"""Lists configs and presets, with the time each takes on this machine."""

import pathlib
import re
import textwrap

from loopjax import config as config_lib
from loopjax.config import presets
from loopjax.run import machine

# "  tiny    description," and its continuation lines.
_DESCRIBED = re.compile(r"^  (\w+) +(\S.*(?:\n {8}.*)*)", re.MULTILINE)
_TOO_LONG = 10 * 365 * 86_400  # Seconds.
_USAGE = """\
python -m loopjax.main --config=FILE[:preset][,section.key=value...]

The default preset is :tiny. Times are rough: counted FLOPs divided by this
machine's current rate of matrix products."""


def listing() -> str:
  """The text on how to train, with a paragraph per config."""
  files = sorted(presets.folder().glob("*_*.py"))
  return "\n\n".join([_USAGE, *map(_config, files)])


def _config(path: pathlib.Path) -> str:
  """The description of a config, and a few lines on each of its presets."""
  names = presets.read(path)
  summary, _, rest = names["__doc__"].partition("\n")
  lines = [_wrapped("", f"configs/{path.name}: {summary}", 2)]
  for name, text in _DESCRIBED.findall(rest):
    if name in names["PRESETS"]:
      settings = config_lib.resolve(names["get_config"](name))
      seconds = machine.training_seconds(
        settings.training_flops, settings.model.width
      )
      long = seconds > _TOO_LONG
      time = "too long" if long else machine.duration(seconds)
      lines.append(_wrapped(f"  :{name}", f"{time} here. {text}", 12))
  return "\n".join(lines)


def _wrapped(label: str, text: str, indent: int) -> str:
  """Text after a label, wrapped at 80 columns with a hanging indent."""
  return textwrap.fill(
    " ".join(text.split()),
    width=80,
    initial_indent=f"{label} ".ljust(indent) if label else "",
    subsequent_indent=" " * indent,
    break_long_words=False,
    break_on_hyphens=False,
  )
