"""The tensor names and settings of published architectures: a table for each.

To add one, add a Layout to LAYOUTS: a row per tensor, the required values of
its config.json, and the equivalent settings of our family.
"""

from collections.abc import Mapping
from typing import Any

from loopjax.errors import UserError
from loopjax.hub import huginn, llama
from loopjax.hub.layout import Layout

# Those without loops are here as starting points (`hub.retrofit`), and because
# MELT compares with Qwen 3. GPT-2 has learned positions, which no causal family
# here has.
LAYOUTS: Mapping[str, Layout] = {
  **llama.LAYOUTS,
  "huginn_raven": huginn.LAYOUT,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
  """The layout of a config.json; raises UserError if there is none."""
  kind = config.get("model_type")
  if not isinstance(kind, str) or kind not in LAYOUTS:
    raise UserError(f"model_type={kind!r} is not one of {', '.join(LAYOUTS)}")
  return LAYOUTS[kind]


def with_defaults(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json with its missing settings filled in."""
  return {**layout.defaults, **config}


def settings(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of the layout's family from a config.json.

  Raises:
    UserError: a setting is missing, or no model here can express it.
  """
  for name, value in layout.fixed.items():
    if config.get(name, value) != value:
      raise UserError(
        f"{name}={config[name]!r} is unsupported: expected {value!r}"
      )
  return layout.settings(config)


def config(layout: Layout, model: Any, vocab_size: int) -> dict[str, Any]:
  """The config.json of a model; UserError if the layout cannot express it.

  Args:
    layout: the layout.
    model: config of the layout's family.
    vocab_size: number of token ids.
  """
  names = {of.architecture: name for name, of in LAYOUTS.items()}
  return {
    "architectures": [layout.architecture],
    "model_type": names[layout.architecture],
    **layout.fixed,
    **layout.config(model, vocab_size),
  }
