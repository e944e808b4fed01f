"""The records of an architecture's table, see `convert.LAYOUTS`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from loopjax.errors import UserError

# Keys of any config.json that change nothing that is computed here: origin,
# training, storage, and generation, which the command decides.
_UNUSED = frozenset((
  "architectures", "auto_map", "dtype", "model_type", "name_or_path",
  "tokenizer_class", "torch_dtype", "transformers_version",
  "transformers.js_config", "unsloth_fixed", "unsloth_version",
  "activation_checkpoint_impl", "attention_dropout", "finetuning_task",
  "gradient_checkpointing", "hidden_dropout", "initializer_range",
  "label2id", "id2label", "num_labels", "problem_type", "resid_pdrop",
  "embd_pdrop", "router_aux_loss_coef", "task_specific_params",
  "tf_legacy_loss", "attn_implementation", "chunk_size_feed_forward",
  "keys_to_ignore_at_inference", "is_decoder", "is_llama_config",
  "output_attentions", "output_hidden_states", "output_scores",
  "pretraining_tp", "return_dict", "return_dict_in_generate", "torchscript",
  "use_bfloat16", "use_cache", "use_flash_attn", "use_return_dict",
  "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
  "unk_token_id", "decoder_start_token_id", "forced_bos_token_id",
  "forced_eos_token_id", "bad_words_ids", "begin_suppress_tokens",
  "suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
  "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
  "length_penalty", "max_length", "max_new_tokens", "min_length",
  "no_repeat_ngram_size", "num_beam_groups", "num_beams",
  "num_return_sequences", "prefix", "remove_invalid_values",
  "repetition_penalty", "temperature", "top_k", "top_p", "typical_p",
))  # fmt: skip
# Keys that change nothing while they are off: false, 0 or empty.
_OFF = frozenset((
  "add_cross_attention", "is_encoder_decoder", "pruned_heads",
  "rope_interleaved", "tie_encoder_decoder", "use_mrope",
))  # fmt: skip
# Beginnings of keys that are private to `transformers`, or written here.
_PRIVATE = ("_", "loopjax_")


class Row(NamedTuple):
  """One of our parameters and the corresponding tensor.

  Rows with the same tensor are its parts, one after another along its first
  axis.

  Attributes:
    ours: path of the parameter.
    theirs: name of the tensor; "{}" is the layer if ours are stacked.
    transposed: whether theirs is transposed, as PyTorch stores linear maps.
    adjacent: whether features 2i and 2i + 1 of their heads are rotated
      together; in ours, i and i + d_h / 2 are.
    by_head: whether theirs has a dimension for each of parts, 1, heads and
      features of a head.
  """

  ours: str
  theirs: str
  transposed: bool = False
  adjacent: bool = False
  by_head: bool = False


class Layout(NamedTuple):
  """An architecture.

  Attributes:
    architecture: the class in its config.json.
    family: the model family that it becomes.
    rows: rows of all tensors; rows of parameters that a model lacks are unused.
    ignored: suffixes of tensor names that hold no parameters.
    fixed: required values of config.json; a missing setting has this value.
    context: the setting of config.json for the maximum length, in tokens.
    settings: from config.json to settings of the family; raises UserError if
      the family cannot express the model.
    config: from settings of the family and the number of token ids to the
      entries of config.json; raises UserError if the architecture cannot
      express the model.
    constants: from settings of the family and the longest row to tensors that
      follow from them, which only the published code reads.
    defaults: settings that config.json may lack: `transformers` only writes
      those that differ from the default.
    known: other keys that `settings` reads, or that repeat one of those, or
      that change nothing in this architecture.
  """

  architecture: str
  family: str
  rows: tuple[Row, ...]
  ignored: tuple[str, ...]
  fixed: Mapping[str, Any]
  context: str
  settings: Callable[[Mapping[str, Any]], dict[str, Any]]
  config: Callable[[Any, int], dict[str, Any]]
  constants: Callable[[Any, int], dict[str, np.ndarray]] = lambda *_: {}
  defaults: Mapping[str, Any] = MappingProxyType({})
  known: frozenset[str] = frozenset()


def unknown(layout: Layout, config: Mapping[str, Any]) -> list[str]:
  """Keys of a config.json that might change the model, in a way unknown here.

  An absent value (null) changes nothing.
  """
  known = {*layout.known, *layout.fixed, *layout.defaults, layout.context}
  return [
    key
    for key, value in config.items()
    if value is not None
    and not (key in known or key in _UNUSED or (key in _OFF and not value))
    and not key.startswith(_PRIVATE)
  ]


def stacked(ours: str, theirs: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
  """Rows of all layers of a stack, from the rows of one layer.

  Args:
    ours: path of the stack.
    theirs: prefix of the tensors' names, with "{}" for the layer.
    rows: of one layer.
  """
  return tuple(
    row._replace(ours=f"{ours}/{row.ours}", theirs=f"{theirs}.{row.theirs}")
    for row in rows
  )


def need(
  config: Mapping[str, Any], name: str, kind: Any, *, may_be_0: bool = False
) -> Any:
  """A setting of config.json; UserError if it is missing or of another type.

  A number must be positive, unless it may be 0.
  """
  value = config.get(name)
  is_flag = isinstance(value, bool)
  if not isinstance(value, kind) or (is_flag and kind is not bool):
    raise UserError(f"{name}={value!r} is invalid")
  is_number = isinstance(value, int | float) and not is_flag
  if is_number and not (value > 0 or (may_be_0 and value == 0)):
    least = "at least" if may_be_0 else "greater than"
    raise UserError(f"{name}={value!r} must be {least} 0")
  return value


def require(config: Any, **values: Any) -> None:
  """Raises UserError unless a model has the settings of a layout."""
  for name, value in values.items():
    if getattr(config, name) != value:
      raise UserError(
        f"model.{name}={getattr(config, name)!r}: the layout requires {value!r}"
      )


def mlp_ratio(features: int, width: int) -> float:
  """The ratio that gives an MLP this number of features."""
  # Half a feature more, as the product might otherwise round down.
  return next(
    ratio
    for ratio in (features / width, (features + 0.5) / width)
    if int(width * ratio) == features
  )
