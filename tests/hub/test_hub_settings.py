"""Settings of the Hub's models and of ours: each is converted or refused."""

import dataclasses
import json

import hub_examples as examples
import pytest

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.hub import convert, retrofit
from loopjax.loop import injection
from loopjax.models import MODELS, causal
from loopjax.models.recurrent import config as recurrent
from loopjax.nn import stack

NAMES = tuple(convert.LAYOUTS)
# Unknown everywhere: they change a model, or might.
NOWHERE = {
  "residual_multiplier": 0.22, "n_layers_in_recurrent_block_1": 4,
  "quantization_config": {"bits": 4}, "rope_interleaved": True, "new": False,
}  # fmt: skip
# Known everywhere: as `transformers`, its users and its forks write them.
HARMLESS = {
  "_name_or_path": "x", "architectures": ["X"], "attention_dropout": 0.1,
  "auto_map": {"AutoModel": "x.X"}, "bos_token_id": 3, "clip_qkv": None,
  "dtype": "float32", "loopjax_step": 7, "pruned_heads": {},
  "rope_interleaved": False, "temperature": 0.5, "use_mrope": False,
}  # fmt: skip
OF_ALL = {
  "hidden_act": "gelu",
  "attention_bias": True,
  "mlp_bias": True,
  "use_sliding_window": True,
  "layer_types": ["full_attention", "sliding_attention"],
  **NOWHERE,
}
# Unsupported features by layout: a setting with this value is refused.
REFUSED = {
  **dict.fromkeys(
    ("iquestloopcoder", "qwen3", "qwen2", "llama"), OF_ALL
  ),
  "ouro": {**OF_ALL, "early_exit_threshold": 0.5},
  "mistral": {**OF_ALL, "sliding_window": 4096},
  "nanbeige": {
    **OF_ALL, "loop_loss_weights": [1.0], "qk_layernorm": True,
    "emb_neighbor_num": 3, "insert_ngram_layer_idx": [1],
    "ngram_insert_all_layers": True, "enable_double_loop_split": True,
    "loop_share_kv": True, "enable_hyper_connection": True, "enable_mhc": True,
    "enable_depth_attention": True,
  },
  "huginn_raven": {
    "architecture_class_name": "GPT", "block_class_name": "PreNormBlock",
    "norm_class_name": "LayerNorm", "mlp_class_name": "GELU",
    "nonlin_name": "ReLU", "injection_type": "gate", "state_init": "zero",
    "sampling_scheme": "uniform", "bias": True, "test_time_noise": 0.1,
    "padded_vocab_size": 32, **NOWHERE,
  },
}  # fmt: skip
OF_BLOCKS = {
  "hidden_size": ("width", 32), "num_hidden_layers": ("num_layers", 3),
  "num_attention_heads": ("num_heads", 8),
  "num_key_value_heads": ("num_key_value_heads", 1),
  "head_dim": ("head_width", 6), "intermediate_size": ("mlp_width", 52),
  "tie_word_embeddings": ("tied", None), "rope_theta": ("rope_base", 123.0),
  "rms_norm_eps": ("norm_epsilon", 0.25),
}  # fmt: skip
# Settings that become ours: our name, and another value; None: negated.
READ = {
  **dict.fromkeys(("qwen3", "qwen2", "llama", "mistral"), OF_BLOCKS),
  "ouro": {**OF_BLOCKS, "total_ut_steps": ("num_loops", 7)},
  "nanbeige": {**OF_BLOCKS, "num_loops": ("num_loops", 7)},
  "iquestloopcoder": {
    **OF_BLOCKS, "loop_num": ("num_loops", 7),
    "loop_window_size": ("window", 5),
  },
  "huginn_raven": {
    "n_embd": ("width", 48), "n_heads": ("num_heads", 6),
    "num_key_value_heads": ("num_key_value_heads", 1),
    "n_layers_in_prelude": ("num_prelude", 4),
    "n_layers_in_recurrent_block": ("num_layers", 5),
    "n_layers_in_coda": ("num_coda", 6), "mean_recurrence": ("num_loops", 7),
    "mean_backprop_depth": ("num_with_gradient", 2),
    "intermediate_size": ("mlp_width", 52), "qk_bias": ("qk_bias", None),
    "rope_base": ("rope_base", 123.0), "norm_eps": ("norm_epsilon", 0.25),
    "tie_embeddings": ("tied", None),
  },
}  # fmt: skip
OPTIONAL = {"num_key_value_heads", "head_dim"}
# Settings of training, or implied by the weights.
NOT_EXPORTED = {
  "precision", "init_std", "dropout", "entropy_weight", "gate_bias", "depth",
  "calibrated", "max_loops", "depth_per", "growth_steps", "growth_loops",
}  # fmt: skip
WORDS = {
  "mlp": ("gelu", "swiglu"), "loop_norm": tuple({
    *causal.LOOP_NORMS, *recurrent.LOOP_NORMS
  }),
  "exit_gate": ("none", "joint", "alone", "unused"),
  "norm_order": stack.NORM_ORDERS, "injection": tuple(injection.INJECTIONS),
  "state": recurrent.STATES,
  "update": recurrent.UPDATES, "rope_scaling": ((8.0, 1.0, 4.0, 16.0),),
}  # fmt: skip


def stored(name):
  return json.loads(str(examples.oracle(name)["config"]))


def read(name, theirs):
  """Our config of a config.json."""
  layout = convert.LAYOUTS[name]
  return MODELS[layout.family].Config(**convert.settings_of(layout, theirs))


def changed(theirs, key, value):
  """A config.json with another value, where it has this key."""
  rope = theirs.get("rope_parameters")
  if rope and key == "rope_theta":
    return {**theirs, "rope_parameters": {**rope, key: value}}
  return {**theirs, key: value}


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_no_model_here_has_are_refused(name):
  assert {*convert.LAYOUTS[name].fixed} <= {*REFUSED[name]}
  for key, value in REFUSED[name].items():
    with pytest.raises(UserError, match=key) as caught:
      read(name, {**stored(name), key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_other_purposes_change_nothing(name):
  assert read(name, stored(name) | HARMLESS) == read(name, stored(name))


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_read_change_the_model(name):
  """Each one its own; missing or unknown values are not guessed."""
  before = read(name, stored(name))
  for key, (ours, value) in READ[name].items():
    if value is None:
      value = not getattr(before, ours)
    after = read(name, changed(stored(name), key, value))
    at = after.block_shape() if ours == "mlp_width" else after
    assert getattr(at, ours) == value, key
    if key not in OPTIONAL:
      for wrong in (None, "many"):
        with pytest.raises(UserError, match=key):
          read(name, changed(stored(name), key, wrong))


def others(field, value):
  """Alternative values of our setting."""
  if field in WORDS:
    return WORDS[field]
  if isinstance(value, bool):
    return (not value,)
  return (
    (2 * value, value + 1, 0)
    if isinstance(value, int)
    else (value * 2 + 0.1, 0.0)
  )


def facts(config):
  """The parts of a model that a layout can express."""
  shape, own = config.block_shape(), dataclasses.asdict(config)
  for name in (*NOT_EXPORTED, "mlp_ratio"):
    own.pop(name, None)
  # An untrained gate is still a gate.
  own["exit_gate"] = own.get("exit_gate", "none") != "none"
  if own.get("num_with_gradient") == 0:  # All loops.
    own["num_with_gradient"] = own["num_loops"]
  if own["num_loops"] == 1:
    own.pop("loop_norm", None)  # It ends with the norm in both cases.
  same = ("num_key_value_heads", "head_width", "mlp_width")
  own |= {name: getattr(shape, name) for name in same}
  return {
    name: float(f"{value:.6g}") if isinstance(value, float) else value
    for name, value in own.items()
  }


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_ours_are_exported_or_refused(name):
  """With every other value of every field; each head has its own keys."""
  layout, before = convert.LAYOUTS[name], read(name, stored(name))
  before = dataclasses.replace(before, num_key_value_heads=0)
  kept, refused = set(), set()
  for field, old in dataclasses.asdict(before).items():
    for value in others(field, old) if field not in NOT_EXPORTED else ():
      try:
        model = dataclasses.replace(before, **{field: value})
      except UserError:
        continue  # No such model.
      if model == before:
        continue
      try:
        written = convert.config_of(layout, model, 31)
      except UserError as error:
        assert f"model.{field}=" in str(error)
        refused.add(field)
        continue
      again = facts(read(name, json.loads(json.dumps(written))))
      assert again == facts(model), field
      kept.add(field)
  assert {"width", "num_heads", "rope_base", "tied", "norm_epsilon"} <= kept
  assert "mlp" in refused


@pytest.mark.parametrize(("name", "value"), [
  ("num_loops", 2),
  ("injection", "add"),
  ("state", "zero"),
  ("prelude_norm", True),
  ("loop_norm", "plain"),
  ("update", "gate"),
  ("relaxed_rank", 4),
])  # fmt: skip
def test_no_loop_is_put_around_what_is_no_transformer(name, value):
  """Recurrent depth with one loop is one, unless it has any of these."""
  assert name in retrofit._TRANSFORMER and len(retrofit._TRANSFORMER) == 7
  config = config_lib.make("recurrent", "text").model
  config.update(retrofit._TRANSFORMER)
  assert retrofit._num_layers(config) == 8
  config[name] = value
  with pytest.raises(UserError, match=f"model.{name}={value!r}: expected"):
    retrofit._num_layers(config)
