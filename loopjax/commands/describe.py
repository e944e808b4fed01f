"""Describes the model and costs of a config, and lists configs and presets.

Nothing is built: costs are counted.
"""

import ast
import functools
import pathlib
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.config import presets
from loopjax.models import MODELS
from loopjax.optim import chain
from loopjax.program import state as state_lib
from loopjax.program import step
from loopjax.program import teacher as teacher_lib


def describe(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Resolved config, parameters and costs, as JSON-ready data.

  Returns:
    "config"; "parameters" and "parameters_by_module"; "state_bytes", of the
    parameters, their average, the optimizer state and the family's carried
    state; "flops_per_example" and "flops_per_token", forward floating-point
    operations (a multiply-add counts as two) up to and including each loop;
    for generation, "cache_bytes_per_token" and "cache_bytes_per_row", the
    latter independent of the number of tokens. With a teacher, "teacher": its
    "parameters" and "flops_per_example".
  """
  settings = config_lib.resolve(config)
  settings.check_schedule()
  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  state = jax.eval_shape(
    functools.partial(program_lib.initial_state, settings, tx),
    jax.random.key(0),
  )
  _, params = program_lib.abstract_model(settings)
  costs = settings.family.costs(
    settings.model, settings.spec, settings.eval_loops
  )
  by_token, by_row = program_lib.cache_bytes(settings)
  return {
    "config": settings.plain,
    "parameters": state_lib.num_elements(params),
    "parameters_by_module": {
      k: state_lib.num_elements(v) for k, v in sorted(params.items())
    },
    **(
      {"parameters_trained": state_lib.num_elements(state.params)}
      if state.base
      else {}
    ),
    "state_bytes": state_lib.num_bytes(step.learned(state)),
    **costs,
    "flops_per_token": [
      flops / settings.spec.sequence_length
      for flops in costs["flops_per_example"]
    ],
    "cache_bytes_per_token": by_token,
    "cache_bytes_per_row": by_row,
    **_teacher(settings),
  }


def page(described: Mapping[str, Any]) -> str:
  """What `describe` returns, as a page of 80 columns.

  FLOPs are of the first loop, of the trained number and of all that evaluation
  runs. Settings of a family that has groups are shown by mechanism.
  """
  config = described["config"]
  flops = described["flops_per_example"]
  trained = config["model"].get("num_loops", len(flops))
  loops = sorted({1, min(trained, len(flops)), len(flops)})
  after = [f"{_short(flops[k - 1])} after {_loops(k)}" for k in loops]
  modules = [
    f"{name} {size:,}"
    for name, size in described["parameters_by_module"].items()
  ]
  cache = [
    f"{_short(described[f'cache_bytes_per_{of}'])}B per {of}"
    for of in ("token", "row")
    if described[f"cache_bytes_per_{of}"]
  ]
  lines = {
    "model": f"{config['model']['name']} on {config['task']['name']}",
    "parameters": f"{described['parameters']:,}: {', '.join(modules)}",
    "state": f"{_short(described['state_bytes'])}B: parameters, their"
    " average and optimizer state",
    "forward": f"FLOPs per example: {', '.join(after)}",
    "cache": ", ".join(cache),
    "teacher": "",
  }
  if trained := described.get("parameters_trained"):
    lines["parameters"] += f"; {trained:,} of pairs and others are trained"
  if teacher := described.get("teacher"):
    lines["teacher"] = f"{teacher['parameters']:,} parameters"
  settings: dict[str, str] = {}
  for section, values in config.items():
    groups = MODELS[values["name"]].groups if section == "model" else {}
    grouped = {key for group in groups.values() for key in group}
    first = [key for key in values if key not in grouped]
    indented = {f"  {name}": keys for name, keys in groups.items()}
    for name, keys in {section: first, **indented}.items():
      settings[name] = ", ".join(f"{key}={values[key]}" for key in keys)
  return "\n".join(
    [
      *(_wrapped(name, text, 12) for name, text in lines.items() if text),
      "",
      "settings (change one with --config.SECTION.KEY=VALUE):",
      *(_wrapped(name, text, 12) for name, text in settings.items() if text),
    ]
  )


def _loops(count: int) -> str:
  return "1 loop" if count == 1 else f"{count} loops"


def _short(number: float) -> str:
  """1,234,567 as "1.23 M"."""
  number = float(f"{number:.3g}")  # 999,999 is 1 M.
  for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
    if number >= 10**power:
      return f"{number / 10**power:.3g} {letter}"
  return f"{number:.3g} "


def _teacher(settings: config_lib.Settings) -> dict[str, Any]:
  """The entry "teacher"; empty without a teacher."""
  teacher = teacher_lib.read(settings)
  if teacher is None:
    return {}
  _, params = program_lib.abstract_model(teacher)
  costs = teacher.family.costs(
    teacher.model, teacher.spec, teacher.model.num_loops
  )
  facts = {
    "parameters": state_lib.num_elements(params),
    "flops_per_example": costs["flops_per_example"],
  }
  return {"teacher": facts}


# "  tiny    description," and its continuation lines.
_DESCRIBED = re.compile(r"^  (\w+) +(\S.*(?:\n {8}.*)*)", re.MULTILINE)
_USAGE = """\
loopjax train --config=FILE[:preset][,section.key=value...]

The default preset is :tiny."""


def listing() -> str:
  """The text on how to train, with a paragraph per config."""
  files = sorted(presets.folder().glob("*_*.py"))
  return "\n\n".join([_USAGE, *map(_config, files)])


def _config(path: pathlib.Path) -> str:
  """The description of a config, and a few lines on each of its presets."""
  with presets.running(path):
    # From its text: with -OO, Python drops docstrings.
    parsed = ast.parse(path.read_text(encoding="utf-8"), str(path))
    said = ast.get_docstring(parsed) or ""
    names = presets.read(path)
  summary, _, rest = said.partition("\n")
  lines = [_wrapped("", f"configs/{path.name}: {summary}", 2)]
  for name, text in _DESCRIBED.findall(rest):
    if name in names.get("PRESETS", ()):
      lines.append(_wrapped(f"  :{name}", text, 12))
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
