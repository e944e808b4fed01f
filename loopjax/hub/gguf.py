"""GGUF files, the format of llama.cpp, to files of a Hub folder and back.

The package `gguf`, by llama.cpp's authors, reads, writes, dequantises and
quantises. Names of metadata are from its `constants.py`; the meaning of a
tokenizer's metadata is from llama.cpp's `src/llama-vocab.cpp`.
"""

import contextlib
import functools
import json
import math
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loopjax import checks
from loopjax.data.text import chat
from loopjax.errors import UserError, needing, one_line
from loopjax.hub import files, gguf_tokenizer, tokenizer_files
from loopjax.hub.files import Made, Tensor
from loopjax.hub.layout import Layout
from loopjax.run import workdir as workdir_lib

MAGIC = b"GGUF"  # What a file begins with.
PACKED = "model.gguf"  # What `pack` writes into a folder.
QUANTIZED = "q8_0"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Types of tensors by the names of dtypes here, with `general.file_type`.
_STORED = {
  "float32": ("F32", "ALL_F32"),
  "float16": ("F16", "MOSTLY_F16"),
  "bfloat16": ("BF16", "MOSTLY_BF16"),
  QUANTIZED: ("Q8_0", "MOSTLY_Q8_0"),
}
_READ = (
  "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K",
  "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
# From names of tensors in safetensors, without ".weight" or ".bias".
_LAYER = "model.layers.{}"
_NAMES = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
  f"{_LAYER}.input_layernorm": "blk.{}.attn_norm",
  f"{_LAYER}.self_attn.q_proj": "blk.{}.attn_q",
  f"{_LAYER}.self_attn.k_proj": "blk.{}.attn_k",
  f"{_LAYER}.self_attn.v_proj": "blk.{}.attn_v",
  f"{_LAYER}.self_attn.o_proj": "blk.{}.attn_output",
  f"{_LAYER}.self_attn.q_norm": "blk.{}.attn_q_norm",
  f"{_LAYER}.self_attn.k_norm": "blk.{}.attn_k_norm",
  f"{_LAYER}.post_attention_layernorm": "blk.{}.ffn_norm",
  f"{_LAYER}.mlp.gate_proj": "blk.{}.ffn_gate",
  f"{_LAYER}.mlp.up_proj": "blk.{}.ffn_up",
  f"{_LAYER}.mlp.down_proj": "blk.{}.ffn_down",
}
_SETTINGS = {
  "max_position_embeddings": "context_length",
  "hidden_size": "embedding_length",
  "num_hidden_layers": "block_count",
  "intermediate_size": "feed_forward_length",
  "num_attention_heads": "attention.head_count",
  "num_key_value_heads": "attention.head_count_kv",
  "head_dim": "attention.key_length",
  "rms_norm_eps": "attention.layer_norm_rms_epsilon",
  "rope_theta": "rope.freq_base",
}
_HEAD_WIDTHS = ("attention.value_length", "rope.dimension_count")
# Metadata of an architecture that changes nothing, with any value or with some.
_UNUSED = (*_SETTINGS.values(), "vocab_size", "tensor_data_layout")
_OFF = (0, "none")
_NEUTRAL = {
  "attention.causal": (True,),
  "rope.scale_linear": (0, 1),
  "rope.scaling.factor": (0, 1),
  "rope.scaling.attn_factor": (0, 1),
}
_SCALED = "rope_freqs.weight"


def layout_of(layout: Layout, kind: str) -> Layout:
  """An architecture's layout with the names and rotations of GGUF."""

  def name(theirs: str) -> str:
    stem, _, part = theirs.rpartition(".")
    return f"{_NAMES[stem]}.{part}"

  turned = ("attention/query/kernel", "attention/key/kernel")
  return layout._replace(
    rows=tuple(
      row._replace(
        theirs=name(row.theirs),
        adjacent=kind == "llama" and row.ours.endswith(turned),
      )
      for row in layout.rows
    )
  )


@contextlib.contextmanager
def unpacked(
  path: pathlib.Path,
) -> Iterator[tuple[pathlib.Path, dict[str, Tensor]]]:
  """A temporary Hub folder of a GGUF file, and the file's tensors by name.

  The folder has no tensors. Tokenizer files beside the GGUF file replace those
  of its metadata.

  Raises:
    UserError: the file is damaged or not supported.
  """
  found, tensors = _opened(path)
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place).resolve()
    try:
      _write_folder(folder, path.parent, found, tensors)
    except UserError as error:
      raise UserError(f"{path}: {error}") from error
    # Metadata can be of any type, and of any length.
    except (TypeError, ValueError, LookupError, AttributeError) as error:
      raise UserError(
        f"{path}: its metadata is malformed: {one_line(error)}"
      ) from error
    try:
      yield folder, tensors
    except UserError as error:
      raise UserError(str(error).replace(str(folder), str(path))) from error


def _package() -> Any:
  with needing("gguf", "gguf", "GGUF files need"):
    import gguf
  return gguf


def _opened(
  path: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """The metadata and tensors of a complete file."""
  package = _package()
  try:
    with path.open("rb") as file:
      head = file.read(64)
    if head.startswith(MAGIC):
      reader = package.GGUFReader(path)
      if reader.endianess != package.GGUFEndian.LITTLE:
        raise ValueError("its numbers are big-endian")
      fields = reader.fields.values()
      return (
        {field.name: field.contents() for field in fields},
        {tensor.name: _tensor(path, tensor) for tensor in reader.tensors},
      )
    wrong = checks.wrong_file(head) or "is not a GGUF file"
  # The library checks nothing: what is missing is out of some array's range.
  except (OSError, ValueError, LookupError, OverflowError) as error:
    wrong = f"cannot be read, or is incomplete: {one_line(error)}"
  raise UserError(f"{path}: {wrong}")


def _tensor(path: pathlib.Path, tensor: Any) -> Tensor:
  name, data = tensor.tensor_type.name, tensor.data
  mapped = functools.partial(
    np.memmap, path, data.dtype, "r", int(tensor.data_offset), data.shape
  )
  return Tensor(
    tuple(tensor.shape.tolist()[::-1]),
    "F32" if name in _READ else name,
    functools.partial(_dequantized, mapped, tensor.tensor_type),
  )


def _dequantized(
  mapped: Callable[[], np.ndarray], kind: Any, index: tuple[slice, ...]
) -> np.ndarray:
  """A part of a tensor in float32; only its rows are dequantised.

  Args:
    mapped: maps the tensor's bytes, which take memory until the call ends.
    kind: their type.
    index: a slice of each axis.
  """
  dequantize, (rows, *rest) = _package().quants.dequantize, index
  if not rest:
    return dequantize(mapped(), kind)[rows]
  return dequantize(mapped()[rows], kind)[:, *rest]


def _write_folder(
  folder: pathlib.Path,
  beside: pathlib.Path,
  found: Mapping[str, Any],
  tensors: Mapping[str, Tensor],
) -> None:
  """Writes config.json and a tokenizer's files, from metadata or beside it."""
  config = _config(found, tensors)
  special = {
    f"{name}_token": gguf_tokenizer.token_of(found, key)
    for name, key in (
      ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")
    )
  }  # fmt: skip
  keys = map(gguf_tokenizer.id_key, ("eos", "eot", "eom"))
  ends = [found[key] for key in keys if key in found]
  template = found.get("tokenizer.chat_template")
  written = {
    "config.json": config,
    chat.CONFIG: {**special, "chat_template": template},
  }
  if ends:
    written["generation_config.json"] = {"eos_token_id": ends}
  for name, content in written.items():
    workdir_lib.write_json(folder / name, content)
  if (beside / tokenizer_files.TOKENIZER).is_file():
    for name in tokenizer_files.FILES:
      if (beside / name).is_file():
        shutil.copyfile(beside / name, folder / name)
    return
  whole = found.get("tokenizer.huggingface.json")
  if whole is None:
    whole = json.dumps(gguf_tokenizer.tokenizer(found), ensure_ascii=False)
  (folder / tokenizer_files.TOKENIZER).write_text(whole, encoding="utf-8")


def _config(
  found: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
  """The config.json of metadata."""
  kind = found.get("general.architecture")
  if kind not in ARCHITECTURES:
    raise UserError(
      f"general.architecture={kind!r} is not one of {', '.join(ARCHITECTURES)}"
    )
  if found.get("split.count", 1) > 1:
    raise UserError("is one of several parts; merge them first")
  if _SCALED in tensors:
    raise UserError(
      f"{_SCALED}: scaled rotations are not supported in a GGUF file; import"
      " the original folder"
    )
  given = {
    key.removeprefix(f"{kind}."): value
    for key, value in found.items()
    if key.startswith(f"{kind}.")
  }
  config: dict[str, Any] = {
    name: given.get(key) for name, key in _SETTINGS.items()
  }
  for name, value in config.items():
    if isinstance(value, float):  # 1e-5 is 9.99999974e-06 in float32.
      config[name] = float(str(np.float32(value)))
  if config["num_key_value_heads"] is None:
    config["num_key_value_heads"] = config["num_attention_heads"]
  if config["rope_theta"] is None:
    config["rope_theta"] = 10_000.0  # llama.cpp's default.
  width, heads = config["hidden_size"], config["num_attention_heads"]
  if config["head_dim"] is None and isinstance(width, int) and heads:
    config["head_dim"] = width // heads
  for name, value in config.items():
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
      raise UserError(f"{kind}.{_SETTINGS[name]}={value!r} is not supported")
  neutral = {**_NEUTRAL, **dict.fromkeys(_HEAD_WIDTHS, (config["head_dim"],))}
  for key, value in given.items():
    if key not in _UNUSED and value not in neutral.get(key, _OFF):
      raise UserError(f"{kind}.{key}={value!r} is not supported")
  table = tensors.get("token_embd.weight")
  return {
    "model_type": kind,
    **config,
    "vocab_size": table.shape[0] if table else None,
    "tie_word_embeddings": "output.weight" not in tensors,
    "eos_token_id": found.get(gguf_tokenizer.id_key("eos")),
    "bos_token_id": found.get(gguf_tokenizer.id_key("bos")),
  }


def pack(
  folder: pathlib.Path,
  made: Mapping[str, Made],
  dtype: str,
  ends: Sequence[int],
) -> None:
  """Writes a folder's model to `PACKED` in it, one tensor after another.

  Args:
    folder: has config.json and the files of a tokenizer.
    made: the tensors in float32, by names of `layout_of`.
    dtype: of matrices: a key of `_STORED`. Vectors stay in float32.
    ends: ids of the tokens that end a text.

  Raises:
    UserError: a GGUF file cannot express the model.
  """
  package = _package()
  config = workdir_lib.read_json(folder / "config.json")
  kind, (matrix, file_type) = config["model_type"], _STORED[dtype]
  if config.get("rope_scaling"):
    raise UserError("model.rope_scaling: a GGUF file does not store all of it")
  types = {
    name: package.GGMLQuantizationType[matrix if len(x.shape) > 1 else "F32"]
    for name, x in made.items()
  }
  values = {f"{kind}.{key}": config[name] for name, key in _SETTINGS.items()}
  values |= {f"{kind}.{key}": config["head_dim"] for key in _HEAD_WIDTHS}
  values |= {
    f"{kind}.vocab_size": config["vocab_size"],
    "general.file_type": int(package.LlamaFileType[file_type]),
    **gguf_tokenizer.metadata(folder, config["vocab_size"], ends),
  }
  writer = package.GGUFWriter(folder / PACKED, kind)
  if dtype == QUANTIZED:
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
  add = {
    str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
    float: writer.add_float32, list: writer.add_array,
  }  # fmt: skip
  for key, value in values.items():
    add[type(value)](key, value)
  for name, tensor in made.items():
    try:
      shape = package.quant_shape_to_byte_shape(tensor.shape, types[name])
    except ValueError:
      raise UserError(
        f"--dtype={dtype}: rows of {name} have {tensor.shape[-1]} numbers, not"
        " a multiple of 32"
      ) from None
    writer.add_tensor_info(
      name, shape, np.dtype(np.uint8), math.prod(shape), types[name]
    )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for name, tensor in made.items():
    with np.errstate(over="ignore"):  # Checked next.
      stored = package.quants.quantize(tensor.make(), types[name])
    files.check_finite(name, stored)
    writer.write_tensor_data(stored.view(np.uint8))
  writer.close()
