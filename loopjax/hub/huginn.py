"""Huginn (arXiv 2502.05171): the tensors of tomg-group-umd/huginn-0125.

Facts of its published raven_modeling_minimal.py: `ln_f` is applied to the last
state before the coda and to the coda's output; the adapter reads [h; e]; the
first half of `fc` is the gate; heads are rotated in adjacent pairs.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.hub.layout import Layout, Row, mlp_ratio, need, require, stacked
from loopjax.models import recurrent
from loopjax.nn import rope

_FUSED = "attn.Wqkv.weight"
_BLOCK = (
  Row("attention_norm/scale", "norm_1.weight"),
  Row("attention/query/kernel", _FUSED, transposed=True, adjacent=True),
  Row("attention/key/kernel", _FUSED, transposed=True, adjacent=True),
  Row("attention/value/kernel", _FUSED, transposed=True),
  Row("attention/query/bias", "attn.qk_bias", adjacent=True, by_head=True),
  Row("attention/key/bias", "attn.qk_bias", adjacent=True, by_head=True),
  Row("attention/output/kernel", "attn.proj.weight", transposed=True),
  Row("attention_post_norm/scale", "norm_2.weight"),
  Row("mlp_norm/scale", "norm_3.weight"),
  Row("mlp/gate/kernel", "mlp.fc.weight", transposed=True),
  Row("mlp/value/kernel", "mlp.fc.weight", transposed=True),
  Row("mlp/output/kernel", "mlp.proj.weight", transposed=True),
  Row("mlp_post_norm/scale", "norm_4.weight"),
)
_ROWS = (
  Row("token_embedding/embedding", "transformer.wte.weight"),
  Row("head/kernel", "lm_head.weight", transposed=True),
  Row("injection/adapter/kernel", "transformer.adapter.weight", True),
  Row("final_norm/scale", "transformer.ln_f.weight"),
  *stacked("prelude", "transformer.prelude.{}", _BLOCK),
  *stacked("layers", "transformer.core_block.{}", _BLOCK),
  *stacked("coda", "transformer.coda.{}", _BLOCK),
)
_FIXED = {
  "architecture_class_name": "RecurrentGPT",
  "block_class_name": "SandwichBlock",
  "norm_class_name": "RMSNorm_llama",
  "mlp_class_name": "GatedMLP",
  "nonlin_name": "SiLU",
  "injection_type": "linear",
  "state_init": "like-init",
  "sampling_scheme": "poisson-lognormal-filling",
  "bias": False,
  "test_time_noise": 0,
}
# Read, implied by what is read, or of training; the published code also has
# the names of `transformers`.
_KNOWN = frozenset((
  "vocab_size", "padded_vocab_size", "n_embd", "n_heads",
  "num_key_value_heads", "head_dim", "n_layers", "n_layers_in_prelude",
  "n_layers_in_recurrent_block", "n_layers_in_coda",
  "effective_expected_depth", "mean_recurrence", "mean_backprop_depth",
  "intermediate_size", "qk_bias", "rope_base", "norm_eps", "tie_embeddings",
  "init_values", "init_strategy", "init_orthogonal", "padding_multiple",
  "test_time_noise_type", "attn_impl", "hidden_size", "num_attention_heads",
  "num_hidden_layers", "max_position_embeddings", "tie_word_embeddings",
))  # fmt: skip


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of `models.recurrent`."""
  width, heads = (need(config, name, int) for name in ("n_embd", "n_heads"))
  initial = need(config, "init_values", Mapping)
  scale = float(need(initial, "embed_scale", (int, float)))
  std = float(need(initial, "std", (int, float), may_be_0=True))
  vocabulary = need(config, "vocab_size", int)
  if config.get("padded_vocab_size", vocabulary) != vocabulary:
    raise UserError(
      f"padded_vocab_size={config['padded_vocab_size']!r} is not supported,"
      f" vocab_size={vocabulary} is"
    )
  return {
    "width": width,
    "num_heads": heads,
    "num_key_value_heads": config.get("num_key_value_heads") or heads,
    "num_prelude": need(config, "n_layers_in_prelude", int, may_be_0=True),
    "num_layers": need(config, "n_layers_in_recurrent_block", int),
    "num_coda": need(config, "n_layers_in_coda", int),
    "num_loops": need(config, "mean_recurrence", int),
    "num_with_gradient": need(config, "mean_backprop_depth", int),
    "mlp": "swiglu",
    "mlp_ratio": mlp_ratio(need(config, "intermediate_size", int), width),
    "qk_bias": need(config, "qk_bias", bool),
    "rope_base": float(need(config, "rope_base", (int, float))),
    "norm_epsilon": need(config, "norm_eps", float, may_be_0=True),
    "tied": need(config, "tie_embeddings", bool),
    "input_scale": scale,
    "init_std": std,
    # "like-init": an embedded token's, after the scale.
    "state_std": std * scale,
  }


def _config(model: recurrent.Config, vocab_size: int) -> dict[str, Any]:
  """Entries of config.json."""
  require(
    model, mlp="swiglu", norm_order="sum", injection="linear", qk_norm=False,
    value_bias=False, prelude_norm=False, loop_norm="coda", state="normal",
    update="replace", relaxed_rank=0,
  )  # fmt: skip
  shape, width = model.block_shape(), model.width
  if shape.head_width * shape.num_heads != width:
    raise UserError(
      f"model.head_width={model.head_width}: the layout requires width /"
      " num_heads"
    )
  if model.qk_bias and shape.num_key_value_heads != shape.num_heads:
    raise UserError(
      f"model.num_key_value_heads={model.num_key_value_heads}: with"
      " model.qk_bias=True, the layout requires as many as"
      f" model.num_heads={shape.num_heads}"
    )
  parts = model.num_prelude, model.num_layers, model.num_coda
  depth = model.num_prelude + model.num_loops * model.num_layers
  depth += model.num_coda
  return {
    "vocab_size": vocab_size,
    "padded_vocab_size": vocab_size,
    "n_embd": width,
    "n_heads": shape.num_heads,
    "num_key_value_heads": shape.num_key_value_heads,
    "head_dim": shape.head_width,
    "n_layers": sum(parts),
    "n_layers_in_prelude": parts[0],
    "n_layers_in_recurrent_block": parts[1],
    "n_layers_in_coda": parts[2],
    "effective_expected_depth": depth,
    "mean_recurrence": model.num_loops,
    "mean_backprop_depth": model.num_with_gradient or model.num_loops,
    "intermediate_size": shape.mlp_width,
    "qk_bias": model.qk_bias,
    "rope_base": model.rope_base,
    "norm_eps": model.norm_epsilon,
    "tie_embeddings": model.tied,
    # The published code reads the first two, the second for the random state;
    # all four are in its config.json.
    "init_values": {
      "embed_scale": model.input_scale,
      "std": model.state_std / model.input_scale,
      "embedding": model.init_std,
      "out_proj": model.init_std / (2 * depth) ** 0.5,
    },
  }


def _constants(
  model: recurrent.Config, num_tokens: int
) -> dict[str, np.ndarray]:
  """Cosines and sines of every position, f32 [1, T, 1, d_h / 2, 2]."""
  places = jnp.arange(num_tokens)[:, None]
  tables = rope.rope_tables(
    places, model.block_shape().head_width, model.rope_base
  )
  turns = np.stack([np.asarray(x) for x in tables], axis=-1)
  return {"freqs_cis": turns[None, :, None]}


LAYOUT = Layout(
  "RavenForCausalLM",
  "recurrent",
  _ROWS,
  ("freqs_cis",),
  _FIXED,
  "block_size",
  _settings,
  _config,
  _constants,
  known=_KNOWN,
)
