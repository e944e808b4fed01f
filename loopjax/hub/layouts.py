"""The tensor names and settings of published architectures: a table for each.

To add one, add a Layout to LAYOUTS: a row per tensor, the required values of
its config.json, and the equivalent settings of our family.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loopjax.errors import UserError
from loopjax.models import looped


class Row(NamedTuple):
  """A parameter of ours and the corresponding tensor.

  Attributes:
    ours: path of the parameter.
    theirs: name of the tensor; "{}" is the layer if ours are stacked.
    transposed: whether theirs is transposed, as PyTorch stores linear maps.
  """

  ours: str
  theirs: str
  transposed: bool = False


class Layout(NamedTuple):
  """An architecture.

  Attributes:
    architecture: the class that its config.json names.
    rows: rows of all tensors; rows of parameters that a model lacks are unused.
    ignored: suffixes of tensor names that hold no parameters.
    fixed: required values of config.json; a missing setting has this value.
    settings: from config.json to settings of `models.looped`.
    config: from settings of `models.looped` to the entries of config.json apart
      from sizes; raises UserError if the architecture cannot express the model.
  """

  architecture: str
  rows: tuple[Row, ...]
  ignored: tuple[str, ...]
  fixed: Mapping[str, Any]
  settings: Callable[[Mapping[str, Any]], dict[str, Any]]
  config: Callable[[looped.Config], dict[str, Any]]


_BLOCK = (
  Row("attention_norm/scale", "input_layernorm.weight"),
  Row("attention/query/kernel", "self_attn.q_proj.weight", True),
  Row("attention/key/kernel", "self_attn.k_proj.weight", True),
  Row("attention/value/kernel", "self_attn.v_proj.weight", True),
  Row("attention/output/kernel", "self_attn.o_proj.weight", True),
  # The norm before the MLP, here and in Ouro; Gemma 2 uses this name otherwise.
  Row("mlp_norm/scale", "post_attention_layernorm.weight"),
  Row("mlp/gate/kernel", "mlp.gate_proj.weight", True),
  Row("mlp/value/kernel", "mlp.up_proj.weight", True),
  Row("mlp/output/kernel", "mlp.down_proj.weight", True),
)
_SANDWICH = (
  Row("attention_post_norm/scale", "input_layernorm_2.weight"),
  Row("mlp_post_norm/scale", "post_attention_layernorm_2.weight"),
)
_HEAD_NORMS = (
  Row("attention/query_norm/scale", "self_attn.q_norm.weight"),
  Row("attention/key_norm/scale", "self_attn.k_norm.weight"),
)
_AROUND = (
  Row("token_embedding/embedding", "model.embed_tokens.weight"),
  Row("final_norm/scale", "model.norm.weight"),
  Row("head/kernel", "lm_head.weight", True),
)
_GATE = (
  Row("exit_gate/kernel", "model.early_exit_gate.weight", True),
  Row("exit_gate/bias", "model.early_exit_gate.bias"),
)
_FIXED = {
  "hidden_act": "silu",
  "rms_norm_eps": 1e-6,
  "attention_bias": False,
  "mlp_bias": False,
  "rope_scaling": None,
  "use_sliding_window": False,
}


def _stacked(*rows: Row) -> tuple[Row, ...]:
  return tuple(
    row._replace(
      ours=f"layers/{row.ours}", theirs=f"model.layers.{{}}.{row.theirs}"
    )
    for row in rows
  )


def _ouro(config: Mapping[str, Any]) -> dict[str, Any]:
  loops = need(config, "total_ut_steps", int)
  gate = "joint" if loops > 1 else "unused"
  return {"post_norm": True, "num_loops": loops, "exit_gate": gate}


def _as_ouro(config: looped.Config) -> dict[str, Any]:
  _require(config, post_norm=True, qk_norm=False, loop_norm="per_loop")
  if config.exit_gate == "none":
    raise UserError("model.exit_gate='none': Ouro has a gate")
  return {"total_ut_steps": config.num_loops}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
  del config  # It has no settings of its own.
  return {"qk_norm": True, "num_loops": 1}


def _as_qwen3(config: looped.Config) -> dict[str, Any]:
  _require(config, post_norm=False, qk_norm=True, num_loops=1, exit_gate="none")
  return {}


# Qwen 3 is here because MELT compares with it and the block can express it.
# GPT-2 has learned positions, which no causal family here has.
LAYOUTS: Mapping[str, Layout] = {
  "ouro": Layout(
    "OuroForCausalLM",
    (*_AROUND, *_GATE, *_stacked(*_BLOCK, *_SANDWICH)),
    ("rotary_emb.inv_freq",),
    _FIXED,
    _ouro,
    _as_ouro,
  ),
  "qwen3": Layout(
    "Qwen3ForCausalLM",
    (*_AROUND, *_stacked(*_BLOCK, *_HEAD_NORMS)),
    ("rotary_emb.inv_freq",),
    _FIXED,
    _qwen3,
    _as_qwen3,
  ),
}


def layout_of(config: Mapping[str, Any]) -> Layout:
  """The layout that config.json names; raises UserError if there is none."""
  kind = config.get("model_type")
  if not isinstance(kind, str) or kind not in LAYOUTS:
    raise UserError(f"model_type={kind!r} is not one of {', '.join(LAYOUTS)}")
  return LAYOUTS[kind]


def settings(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of `models.looped` from a config.json.

  Raises:
    UserError: a setting is missing, or no model here can express it.
  """
  for name, value in layout.fixed.items():
    if config.get(name, value) != value:
      raise UserError(f"{name}={config[name]!r} is not supported, {value!r} is")
  kinds = set(config.get("layer_types") or ["full_attention"])
  if kinds != {"full_attention"}:
    raise UserError(
      f"layer_types {sorted(kinds)}: only full_attention is known"
    )
  width, heads = (
    need(config, name, int) for name in ("hidden_size", "num_attention_heads")
  )
  features = need(config, "intermediate_size", int)
  rope = config.get("rope_parameters") or config  # Top level before 5.0.
  if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != (
    "default"
  ):
    raise UserError(f"rope_parameters={rope!r} are not supported")
  return {
    "width": width,
    "num_layers": need(config, "num_hidden_layers", int),
    "num_heads": heads,
    "num_key_value_heads": config.get("num_key_value_heads") or heads,
    "head_width": config.get("head_dim") or width // heads,
    "mlp": "swiglu",
    # Half a feature more, as the product might otherwise round down.
    "mlp_ratio": next(
      ratio
      for ratio in (features / width, (features + 0.5) / width)
      if int(width * ratio) == features
    ),
    "tied": need(config, "tie_word_embeddings", bool),
    "rope_base": float(need(rope, "rope_theta", (int, float))),
    **layout.settings(config),
  }


def config(
  layout: Layout, model: looped.Config, vocab_size: int
) -> dict[str, Any]:
  """The config.json of a model; UserError if the layout cannot express it."""
  _require(model, mlp="swiglu")
  shape = model.block_shape()
  names = {of.architecture: name for name, of in LAYOUTS.items()}
  return {
    "architectures": [layout.architecture],
    "model_type": names[layout.architecture],
    "vocab_size": vocab_size,
    "hidden_size": model.width,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": shape.num_heads,
    "num_key_value_heads": shape.num_key_value_heads,
    "head_dim": shape.head_width,
    "intermediate_size": shape.mlp_width,
    "tie_word_embeddings": model.tied,
    "rope_theta": model.rope_base,
    **layout.fixed,
    **layout.config(model),
  }


def need(config: Mapping[str, Any], name: str, kind: Any) -> Any:
  """A setting of config.json; UserError if it is missing or of another type."""
  value = config.get(name)
  if not isinstance(value, kind) or (kind is int and value < 1):
    raise UserError(f"{name}={value!r} is not what {name} can be")
  return value


def _require(config: looped.Config, **values: Any) -> None:
  for name, value in values.items():
    if getattr(config, name) != value:
      raise UserError(
        f"model.{name}={getattr(config, name)!r}: the layout has {value!r}"
      )
