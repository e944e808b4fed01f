"""Architectures of Llama's kind, once or looped: Ouro, IQuest-Coder, Qwen, ...

Facts of Nanbeige 4.2: its published modeling_nanbeige.py applies all layers and
`model.norm` in every loop, or the norm after the last loop only, with
`skip_loop_final_norm`. Its other settings (n-gram embeddings, attention to
depth, hyper-connections) are off in the published models.

IQuest-Coder's models with loops (`iquestloopcoder`): its published
configuration_iquestloopcoder.py has the defaults; the tensors are Llama's and a
gate per layer, whose loops share the first one's keys and values.
"""

from collections.abc import Mapping
from typing import Any

from loopjax.errors import UserError
from loopjax.hub.layout import Layout, Row, mlp_ratio, need, require, stacked
from loopjax.models import looped, plt

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
_BIASES = (
  Row("attention/query/bias", "self_attn.q_proj.bias"),
  Row("attention/key/bias", "self_attn.k_proj.bias"),
  Row("attention/value/bias", "self_attn.v_proj.bias"),
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
_WINDOW_GATES = (
  Row("window_gates/weight", "model.gate_projections.{}.weight"),
  Row("window_gates/bias", "model.gate_projections.{}.bias"),
)
_FIXED = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
  "use_sliding_window": False,
}
# What `_settings` reads, and a window that `use_sliding_window` turns off.
_KNOWN = frozenset((
  "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
  "num_attention_heads", "num_key_value_heads", "head_dim",
  "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling",
  "rope_parameters", "partial_rotary_factor", "layer_types",
  "original_max_position_embeddings",
))  # fmt: skip
_WINDOW = _KNOWN | {"sliding_window", "max_window_layers"}
# The numbers of `rope.Scaling` by their names in config.json.
_LLAMA3 = (
  "factor", "low_freq_factor", "high_freq_factor",
  "original_max_position_embeddings",
)  # fmt: skip
# What `transformers` does not write into config.json: the defaults of its
# configs, by `model_type`.
_DEFAULTS: Mapping[str, Any] = {
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
}
_LLAMA = {
  **_DEFAULTS,
  "vocab_size": 32_000,
  "intermediate_size": 11_008,
  "max_position_embeddings": 2048,
}
_MISTRAL = {
  **_DEFAULTS,
  "vocab_size": 32_000,
  "intermediate_size": 14_336,
  "num_key_value_heads": 8,
  "max_position_embeddings": 131_072,
  "sliding_window": 4096,
}
_QWEN2 = {
  **_DEFAULTS,
  "vocab_size": 151_936,
  "intermediate_size": 22_016,
  "num_key_value_heads": 32,
  "max_position_embeddings": 32_768,
}
_QWEN3 = {**_QWEN2, "head_dim": 128}
_IQUEST = {
  "vocab_size": 76_800,
  "hidden_size": 5120,
  "intermediate_size": 27_648,
  "num_hidden_layers": 80,
  "num_attention_heads": 40,
  "num_key_value_heads": 8,
  "head_dim": 128,
  "max_position_embeddings": 8192,
  "rms_norm_eps": 1e-5,
  "rope_theta": 500_000.0,
  "tie_word_embeddings": False,
  "loop_num": 2,
  "loop_window_size": 64,
}
_NANBEIGE = {
  "loop_loss_weights": [],
  "qk_layernorm": False,
  "emb_neighbor_num": None,
  "insert_ngram_layer_idx": [],
  "ngram_insert_all_layers": False,
  "enable_double_loop_split": False,
  "loop_share_kv": False,
  "enable_hyper_connection": False,
  "enable_mhc": False,
  "enable_depth_attention": False,
}
# Settings of blocks without any additions, and of the family `looped`.
_BLOCKS = {
  "norm_order": "pre",
  "qk_norm": False,
  "qk_bias": False,
  "value_bias": False,
}
_PLAIN = {**_BLOCKS, "exit_gate": "none"}


def _settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
  """Settings of the family: those of all layouts, and a layout's own."""
  kinds = config.get("layer_types")
  if kinds is not None and (
    not isinstance(kinds, list) or any(x != "full_attention" for x in kinds)
  ):
    raise UserError(f"layer_types={kinds!r}: only full_attention is supported")
  width, heads = (
    need(config, name, int) for name in ("hidden_size", "num_attention_heads")
  )
  name, rope = _rotation(config)
  scaling = _scaling(name, rope)

  def or_else(key: str, value: int) -> int:
    return value if config.get(key) is None else need(config, key, int)

  return {
    "width": width,
    "num_layers": need(config, "num_hidden_layers", int),
    "num_heads": heads,
    "num_key_value_heads": or_else("num_key_value_heads", heads),
    "head_width": or_else("head_dim", width // heads),
    "mlp": "swiglu",
    "mlp_ratio": mlp_ratio(need(config, "intermediate_size", int), width),
    "tied": need(config, "tie_word_embeddings", bool),
    "rope_base": float(need(rope, "rope_theta", (int, float))),
    "rope_scaling": scaling,
    "norm_epsilon": float(
      need(config, "rms_norm_eps", (int, float), may_be_0=True)
    ),
    **own,
  }


def _rotation(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
  """The settings of a config.json's rotations, and what it calls them.

  As in `transformers` 5, `rope_scaling`, its name before 5.0, goes before
  `rope_parameters`, and what neither has is read from the top level.
  """
  is_old = bool(config.get("rope_scaling"))
  name = "rope_scaling" if is_old else "rope_parameters"
  given = config.get(name) or {}
  if isinstance(given, Mapping) and config.get("layer_types"):
    given = given.get("full_attention", given)  # Written by kind of layer.
  if not isinstance(given, Mapping):
    raise UserError(f"{name}={given!r} is not supported")
  above = {
    key: config[key]
    for key in ("rope_theta", "partial_rotary_factor")
    if key in config
  }
  longest = {_LLAMA3[-1]: config.get("max_position_embeddings")}
  return name, {**longest, **above, **given}


def _scaling(name: str, rope: Mapping[str, Any]) -> tuple[float, ...]:
  """`rope.Scaling` of the settings of `_rotation`."""
  kind = rope.get("rope_type", rope.get("type", "default"))
  shown = f"{name}={dict(rope)!r} is not supported"
  if rope.get("partial_rotary_factor") not in (None, 1):
    raise UserError(shown)
  if kind == "default" and "factor" not in rope:
    return ()
  if kind != "llama3":
    raise UserError(shown)
  return tuple(float(need(rope, x, (int, float))) for x in _LLAMA3)


def _config(
  model: looped.Config | plt.Config, vocab_size: int, own: Mapping[str, Any]
) -> dict[str, Any]:
  """Entries of config.json: those of all layouts, and a layout's own."""
  require(model, mlp="swiglu")
  shape = model.block_shape()
  scaling: Any = None
  if model.rope_scaling:
    numbers: Any = dict(zip(_LLAMA3, model.rope_scaling, strict=True))
    numbers[_LLAMA3[-1]] = int(numbers[_LLAMA3[-1]])  # Tokens.
    scaling = {"rope_type": "llama3", **numbers}
  return {
    "vocab_size": vocab_size,
    "hidden_size": model.width,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": shape.num_heads,
    "num_key_value_heads": shape.num_key_value_heads,
    "head_dim": shape.head_width,
    "intermediate_size": shape.mlp_width,
    "tie_word_embeddings": model.tied,
    "rope_theta": model.rope_base,
    "rope_scaling": scaling,
    "rms_norm_eps": model.norm_epsilon,
    **own,
  }


def _once(
  architecture: str,
  rows: tuple[Row, ...] = (),
  fixed: Mapping[str, Any] | None = None,
  *,
  defaults: Mapping[str, Any],
  **own: Any,
) -> Layout:
  """The layout of a transformer without loops.

  Args:
    architecture: see `Layout`.
    rows: of a layer, beside those of all layouts.
    fixed: see `Layout`, beside those of all layouts.
    defaults: see `Layout`.
    **own: settings of `models.looped` that differ from `_PLAIN`.
  """
  own = {**_PLAIN, **own, "num_loops": 1}

  def config(model: looped.Config, vocab_size: int) -> dict[str, Any]:
    require(model, **own)
    return _config(model, vocab_size, {})

  return _layout(
    architecture,
    rows,
    {**_FIXED, **(fixed or {})},
    lambda theirs: _settings(theirs, own),
    config,
  )._replace(defaults=defaults)


def _layout(
  architecture: str, rows: tuple[Row, ...], *others: Any, around: Any = _AROUND
) -> Layout:
  layers = stacked("layers", "model.layers.{}", (*_BLOCK, *rows))
  fixed, *functions = others
  return Layout(
    architecture,
    "looped",
    (*around, *layers),
    ("rotary_emb.inv_freq",),
    fixed,
    "max_position_embeddings",
    *functions,
  )._replace(known=_KNOWN)


def _ouro(config: Mapping[str, Any]) -> dict[str, Any]:
  loops = need(config, "total_ut_steps", int)
  gate = "joint" if loops > 1 else "unused"
  own = {"norm_order": "branch", "num_loops": loops, "exit_gate": gate}
  return _settings(config, own)


def _as_ouro(config: looped.Config, vocab_size: int) -> dict[str, Any]:
  require(
    config, norm_order="branch", qk_norm=False, qk_bias=False, value_bias=False,
    loop_norm="per_loop",
  )  # fmt: skip
  if config.exit_gate == "none":
    raise UserError("model.exit_gate='none': Ouro requires a gate")
  return _config(config, vocab_size, {"total_ut_steps": config.num_loops})


def _nanbeige(config: Mapping[str, Any]) -> dict[str, Any]:
  once = config.get("skip_loop_final_norm", False)
  own = {
    **_PLAIN,
    "num_loops": need(config, "num_loops", int),
    "loop_norm": "final_only" if once else "per_loop",
  }
  return _settings(config, own)


def _as_nanbeige(config: looped.Config, vocab_size: int) -> dict[str, Any]:
  require(config, **_PLAIN)
  own = {
    "num_loops": config.num_loops,
    "skip_loop_final_norm": config.loop_norm == "final_only",
  }
  return _config(config, vocab_size, own)


def _iquest(config: Mapping[str, Any]) -> dict[str, Any]:
  own = {
    **_BLOCKS,
    "loop_norm": "final_only",
    "num_loops": need(config, "loop_num", int),
    "window": need(config, "loop_window_size", int),
  }
  return _settings(config, own)


def _as_iquest(config: plt.Config, vocab_size: int) -> dict[str, Any]:
  require(config, **_BLOCKS, loop_norm="final_only")
  own = {"loop_num": config.num_loops, "loop_window_size": config.window}
  return _config(config, vocab_size, own)


LAYOUTS: Mapping[str, Layout] = {
  "ouro": _layout(
    "OuroForCausalLM",
    _SANDWICH,
    {**_FIXED, "early_exit_threshold": 1.0},
    _ouro,
    _as_ouro,
    around=(*_AROUND, *_GATE),
  )._replace(known=_WINDOW | {"total_ut_steps"}),
  "nanbeige": _layout(
    "NanbeigeForCausalLM", (), {**_FIXED, **_NANBEIGE}, _nanbeige, _as_nanbeige
  )._replace(
    # Heads of `kv_channels` features: what `head_dim` says, too.
    known=_KNOWN | {"num_loops", "skip_loop_final_norm", "kv_channels"}
  ),
  "iquestloopcoder": _layout(
    "IQuestLoopCoderForCausalLM",
    (),
    _FIXED,
    _iquest,
    _as_iquest,
    around=(*_AROUND, *_WINDOW_GATES),
  )._replace(family="plt", defaults=_IQUEST),
  "qwen3": _once(
    "Qwen3ForCausalLM", _HEAD_NORMS, qk_norm=True, defaults=_QWEN3
  )._replace(known=_WINDOW),
  "qwen2": _once(
    "Qwen2ForCausalLM", _BIASES, qk_bias=True, value_bias=True, defaults=_QWEN2
  )._replace(known=_WINDOW),
  "llama": _once("LlamaForCausalLM", defaults=_LLAMA),
  "mistral": _once(
    "MistralForCausalLM", fixed={"sliding_window": None}, defaults=_MISTRAL
  ),
}
