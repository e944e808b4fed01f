"""GGUF files: read, written, and refused; the package makes those to read."""

import json
import re
import sys

import hub_examples as examples
import jax
import numpy as np
import pytest
import texts_examples as texts
import tokenizers
from flax import nnx
from in_float64 import without_rounding
from tests_support import ROOT, command, long_case, refused

from loopjax import describe
from loopjax.data.text import chat
from loopjax.errors import UserError
from loopjax.hub import __main__ as hub
from loopjax.hub import (
  convert,
  gguf_tokenizer,
  imported,
  tokenizer_files,
  weights,
)
from loopjax.hub.retrofit import read_source
from loopjax.run import workdir as workdir_lib
from loopjax.saved import language_model

gguf = pytest.importorskip("gguf")
NAMES = {
  "model.embed_tokens": "token_embd", "model.norm": "output_norm",
  "lm_head": "output", "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
  "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
  "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
  "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # The package only reads.


def theirs_of(name):
  """config.json of a stored model, as old versions of transformers write it."""
  config = json.loads(str(examples.oracle(name)["config"]))
  return {**config, **(config.get("rope_parameters") or {})}


def as_gguf(name, config, tensors):
  """Names of tensors, and rows of queries and keys, as llama.cpp's script."""
  found = {}
  for key, value in tensors.items():
    stem, _, part = key.rpartition(".")
    short = stem.rpartition(".")[2]
    new = NAMES.get(stem) or NAMES[short]
    if stem.startswith("model.layers."):
      new = f"blk.{stem.split('.')[2]}.{new}"
    if short in ("q_proj", "k_proj") and config["model_type"] == "llama":
      heads = config["num_attention_heads"]
      if short == "k_proj":
        heads = config["num_key_value_heads"]
      split = value.reshape(heads, 2, -1, value.shape[-1])
      value = split.swapaxes(1, 2).reshape(value.shape)
    found[f"{new}.{part}"] = value
  return found


def metadata_of(config):
  kind = config["model_type"]
  head_width = config.get("head_dim")
  if head_width is None:
    head_width = config["hidden_size"] // config["num_attention_heads"]
  values = {
    "context_length": config["max_position_embeddings"],
    "embedding_length": config["hidden_size"],
    "block_count": config["num_hidden_layers"],
    "feed_forward_length": config["intermediate_size"],
    "attention.head_count": config["num_attention_heads"],
    "attention.head_count_kv": config["num_key_value_heads"],
    "attention.key_length": head_width,
    "rope.dimension_count": head_width,
    "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    "rope.freq_base": float(config["rope_theta"]),
  }
  return {
    **{f"{kind}.{key}": value for key, value in values.items()},
    "tokenizer.ggml.eos_token_id": 0,
  }


def write(path, kind, values, tensors, types=None):
  """A GGUF file; `types` are names by tensor, bytes are stored as they are."""
  writer = gguf.GGUFWriter(path, kind)
  add = {
    str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32,
    float: writer.add_float32, list: writer.add_array,
  }  # fmt: skip
  for key, value in values.items():
    if value is not None:
      add[type(value)](key, value)
  for name, value in tensors.items():
    type_ = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
    if value.dtype != np.uint8:
      value = gguf.quants.quantize(value, type_)
    writer.add_tensor(name, value, raw_dtype=type_)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def make(folder, name="llama", values=None, change=None, types=None):
  """A stored model as a GGUF file beside a tokenizer, with changes."""
  folder.mkdir(exist_ok=True)
  config = theirs_of(name)
  tensors = as_gguf(name, config, examples.tensors_of(name))
  if change:
    change(tensors)
  examples.write_tokenizer(folder / "tokenizer.json")
  given = {**metadata_of(config), **(values or {})}
  kind = given.pop("general.architecture", config["model_type"])
  return write(folder / "model.gguf", kind, given, tensors, types)


def params_of(run):
  return language_model.load(run).params


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
  "name", ["llama", long_case("smollm"), long_case("qwen2"), "qwen3"]
)
def test_a_model_is_the_one_of_its_folder(name, tmp_path):
  """Its parameters and settings, and the logits of transformers."""
  path = make(tmp_path / "gguf", name)
  folder = examples.make_folder(tmp_path / "hub", name)
  assert hub.main(["import", str(path), str(tmp_path / "run")]) == 0
  convert.import_folder(folder, tmp_path / "other")
  found = language_model.load(tmp_path / "run")
  assert_same(found.params, params_of(tmp_path / "other"))
  one, other = (
    workdir_lib.read_json(tmp_path / x / "config.json")
    for x in ("run", "other")
  )
  assert one["model"] == other["model"]
  oracle = examples.oracle(name)

  def run_model(params):
    return nnx.merge(found.graphdef, params)(oracle["tokens"]).logits

  logits = without_rounding(run_model)(found.params)
  np.testing.assert_allclose(logits, oracle["logits"][0], atol=1e-5, rtol=0)


def wide(kind):
  """A Llama whose rows are blocks of 256, and the types of its matrices."""
  config = {
    **theirs_of("llama"), "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2,
  }  # fmt: skip
  sizes = {"attn_k": 128, "attn_v": 128, "token_embd": 31, "output": 31}
  random, tensors, types = np.random.default_rng(0), {}, {}
  for name in NAMES.values():
    is_layer = name not in ("token_embd", "output_norm", "output")
    full = f"{'blk.0.' * is_layer}{name}.weight"
    if name in ("attn_q_norm", "attn_k_norm"):
      continue
    if "norm" in name:
      tensors[full] = random.normal(size=256).astype(np.float32)
      continue
    shape, type_ = (sizes.get(name, 256), 256), gguf.GGMLQuantizationType[kind]
    types[full] = kind
    tensors[full] = random.normal(size=shape).astype(np.float32)
    if kind in BLOCKS:  # Any bytes are numbers, with scales below 2.
      size = gguf.quant_shape_to_byte_shape(shape, type_)
      tensors[full] = random.integers(0, 60, size, dtype=np.uint8)
    else:
      tensors[full] = gguf.quants.quantize(tensors[full], type_)
  return config, tensors, types


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTIZED, *BLOCKS])
def test_a_type_is_what_the_package_makes_of_it(kind, tmp_path):
  """Queries and keys are turned after it, not before."""
  config, tensors, types = wide(kind)
  examples.write_tokenizer(tmp_path / "tokenizer.json")
  path = write(
    tmp_path / "x.gguf", "llama", metadata_of(config), tensors, types
  )
  convert.import_folder(path, tmp_path / "run")
  params = params_of(tmp_path / "run")

  def plain(name):
    type_ = gguf.GGMLQuantizationType[kind]
    return gguf.quants.dequantize(tensors[name], type_)

  layer = {
    x: np.asarray(y["kernel"][0])
    for x, y in params["layers"]["attention"].items()
  }
  value = plain("blk.0.attn_v.weight")
  assert len(np.unique(value)) > 50 and np.isfinite(value).all()
  np.testing.assert_array_equal(layer["value"], value.T)
  heads = plain("blk.0.attn_k.weight").reshape(2, 32, 2, 256)
  turned = heads.swapaxes(1, 2).reshape(128, 256)
  np.testing.assert_array_equal(layer["key"], turned.T)
  table = params["token_embedding"]["embedding"]
  np.testing.assert_array_equal(table, plain("token_embd.weight"))


def drop(name):
  return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(("values", "message"), [
  ({"general.architecture": "gemma"}, "general.architecture='gemma' is not"),
  ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
  ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn'"),
  ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor=4.0 is"),
  ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear=2.0 is not"),
  ({"llama.rope.dimension_count": 2}, "llama.rope.dimension_count=2 is not"),
  ({"llama.attention.value_length": 8}, "attention.value_length=8 is not"),
  ({"llama.attention.causal": False}, "llama.attention.causal=False is not"),
  ({"llama.attention.sliding_window": 9}, "attention.sliding_window=9 is"),
  ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon=None is not"),
  ({"llama.attention.layer_norm_rms_epsilon": float("nan")},
   "epsilon=nan is not"),
  ({"split.count": "x"}, "its metadata is malformed: '>' not supported"),
  ({"llama.context_length": None}, "llama.context_length=None is not"),
  ({"llama.feed_forward_length": [40, 44]}, r"length=\[40, 44\] is not sup"),
  ({"llama.block_count": 3}, "missing blk.2.attn"),
  ({"split.count": 2}, "is one of several parts"),
  ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id=99 is not a token id"),
  ({"tokenizer.ggml.eos_token_id": None}, "eos_token_id=None is not a token"),
])  # fmt: skip
def test_metadata_of_other_models_is_one_line(
  values, message, tmp_path, capsys
):
  path = make(tmp_path / "gguf", values=values)
  assert_refused(path, message, tmp_path, capsys)


def assert_refused(path, message, tmp_path, capsys):
  assert hub.main(["import", str(path), str(tmp_path / "run")]) == 2
  error = capsys.readouterr().err
  assert error.startswith(f"error: {path}") and error.count("\n") == 1
  assert not (tmp_path / "run").exists()
  with pytest.raises(UserError, match=message):
    convert.import_folder(path, tmp_path / "run")


def with_bytes(tensors):
  tensors["output.weight"] = np.zeros((31, 16), np.uint8)


@pytest.mark.parametrize(("change", "message"), [
  (lambda x: x.pop("output_norm.weight"), "missing output_norm.weight"),
  (lambda x: x.pop("token_embd.weight"), "vocab_size=None is invalid"),
  (lambda x: x.update({"rope_freqs.weight": np.ones(2, np.float32)}),
   "rope_freqs.weight: scaled rotations are not supported"),
  (lambda x: x.update({"blk.0.attn_q.bias": np.ones(16, np.float32)}),
   "not in the model blk.0.attn_q.bias"),
  (with_bytes, r"of an unsupported dtype output.weight \(I8\)"),
])  # fmt: skip
def test_tensors_of_other_models_are_one_line(
  change, message, tmp_path, capsys
):
  types = {"output.weight": "I8"} if change is with_bytes else None
  path = make(tmp_path / "gguf", change=change, types=types)
  assert_refused(path, message, tmp_path, capsys)


@pytest.mark.parametrize(("damage", "message"), [
  (lambda x: x[:-1], "cannot be read, or is incomplete"),
  (lambda x: x[:600], "cannot be read, or is incomplete"),
  (lambda x: x[:6], "cannot be read, or is incomplete"),
  (lambda x: b"", "is not a GGUF file"),
  (lambda x: b"<!DOCTYPE html><html>", "is a web page"),
  (lambda x: b"PK" + x, "is not a GGUF file"),
  (lambda x: x[:4] + b"\x09" + x[5:], "appears to be version 9"),
])  # fmt: skip
def test_a_damaged_file_is_one_line(damage, message, tmp_path, capsys):
  path = make(tmp_path / "gguf")
  path.write_bytes(damage(path.read_bytes()))
  assert_refused(path, message, tmp_path, capsys)


def test_a_config_imports_a_file(tmp_path):
  file = make(tmp_path / "models")
  config = f"--config={ROOT / 'configs/lm_tune.py'}:smoke,import={file}"
  assert command(describe.main, config, directory=tmp_path) == 0
  found = workdir_lib.read_config(tmp_path / "runs" / file.stem)
  assert found["model"]["name"] == "looped"
  table = file.with_suffix(".csv")
  table.write_text("question,answer\n")
  with refused("models/.*.csv: is not a model; .* --config.task.test_csv="):
    imported.run_of(str(table))


def test_rows_are_read_in_parts(tmp_path, monkeypatch):
  """Also of matrices whose rows have another order in the file."""
  path = make(tmp_path / "gguf")
  whole = convert.import_folder(path, tmp_path / "whole")
  monkeypatch.setattr(weights, "_ROWS", 5)
  parts = convert.import_folder(path, tmp_path / "parts")
  assert parts["digest"] == whole["digest"]


def test_a_folder_is_needed_elsewhere(tmp_path):
  path = make(tmp_path / "gguf")
  for read in (convert.read_folder, lambda x: read_source(x, None)):
    with pytest.raises(UserError, match="is a file; `loopjax hub import`"):
      read(path)


def test_without_the_package_it_is_named(tmp_path, monkeypatch, capsys):
  path = make(tmp_path / "gguf")
  monkeypatch.setitem(sys.modules, "gguf", None)
  assert hub.main(["import", str(path), str(tmp_path / "run")]) == 2
  assert "pip install 'loopjax[gguf]'" in capsys.readouterr().err


def make_run(folder, kind="byte_level", **changes):
  """An imported run with a tokenizer of texts.json, and its files."""
  files = texts.stored()["kinds"][kind]
  texts.make_model(folder / "hub", files, changes)
  convert.import_folder(folder / "hub", folder / "run")
  return folder / "run", files


CHAT = "{{ bos_token }}{{ messages[0].content }}"


def test_there_and_back_is_exact(tmp_path):
  """Parameters, settings, the tokenizer, its template and what ends a text."""
  given = {"chat_template": CHAT}
  ends = {"eos_token_id": [2, 0]}
  run, files = make_run(
    tmp_path, **{"tokenizer_config.json": given, "generation_config.json": ends}
  )
  path = tmp_path / "model.gguf"
  export = ["export", str(run), str(path), "--layout=llama", "--gguf"]
  assert hub.main([*export, "--dtype=float32"]) == 0
  assert [x.name for x in tmp_path.iterdir() if "partial" in x.name] == []
  again = tmp_path / "again"
  convert.import_folder(path, again)
  assert_same(params_of(run), params_of(again))
  one, other = (workdir_lib.read_json(x / "config.json") for x in (run, again))
  assert one["model"] == other["model"]
  for name in ("end_token", "begin_token", "add_begin_token", "vocab_size"):
    assert one["task"][name] == other["task"][name], name
  kept = workdir_lib.read_json(again / "hub" / "tokenizer.json")
  assert kept == files["tokenizer.json"]
  assert tokenizer_files.end_tokens(again / "hub") == (2, 0)
  messages = [{"role": "user", "content": "x"}]
  assert chat.template(again / "hub")(messages) == "<|im_start|>x"


def without_json(path):
  """The metadata of a file, without the whole tokenizer.json."""
  fields = gguf.GGUFReader(path).fields.values()
  found = {field.name: field.contents() for field in fields}
  assert found.pop("tokenizer.huggingface.json")
  return found


def ids_of(made, tmp_path):
  path = tmp_path / "made.json"
  path.write_text(json.dumps(made), encoding="utf-8")
  return tokenizers.Tokenizer.from_file(str(path))


def test_the_metadata_of_a_tokenizer_gives_the_same_tokens(tmp_path):
  """With a begin token, which texts.json has for the other kinds."""
  run, files = make_run(
    tmp_path, **{"tokenizer.json": {"post_processor": texts.ADDS}}
  )
  path = tmp_path / "model.gguf"
  convert.export_run(run, path, convert.Export("llama", gguf=True))
  found = without_json(path)
  assert found["tokenizer.ggml.pre"] == "gpt-2"
  assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
  assert found["tokenizer.ggml.add_bos_token"]
  made = ids_of(gguf_tokenizer.tokenizer(found), tmp_path)
  stored = {**files["tokenizer.json"], "post_processor": texts.ADDS}
  expected = tokenizers.Tokenizer.from_str(json.dumps(stored))
  for text in (*texts.PROMPTS, texts.LONG, "<|im_start|>x<|im_end|>"):
    assert made.encode(text).ids == expected.encode(text).ids
    assert made.encode(text).ids[0] == 0


def sentencepiece(**changes):
  """The metadata of the tokenizer of Llama's kind in texts.json."""
  stored = texts.stored()["kinds"]["dummy_prefix"]["tokenizer.json"]
  words = stored["model"]["vocab"]
  ranks = {"".join(x): i for i, x in enumerate(stored["model"]["merges"])}
  given = {
    "model": "llama",
    "tokens": list(words),
    "scores": [-float(ranks.get(word, 1000)) for word in words],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(words) - 259)],
    "unknown_token_id": 0,
    "bos_token_id": 1,
    **changes,
  }
  return {f"tokenizer.ggml.{key}": value for key, value in given.items()}


def test_sentencepiece_is_made_from_scores(tmp_path):
  """A begin token is the default, as is the space before a text."""
  expected = texts.stored()["expected"]["dummy_prefix"]["prompts"]
  made = ids_of(gguf_tokenizer.tokenizer(sentencepiece()), tmp_path)
  for text, ids in zip(texts.PROMPTS, expected, strict=True):
    assert made.encode(text).ids == ids
    assert made.decode(ids) == text
  bare = sentencepiece(add_space_prefix=False, add_bos_token=False)
  made = ids_of(gguf_tokenizer.tokenizer(bare), tmp_path)
  assert made.encode("e \N{ROCKET}").tokens == [
    "e", "\u2581", "<0xF0>", "<0x9F>", "<0x9A>", "<0x80>"
  ]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [
  ({"model": "t5"}, "model='t5' with .*put its tokenizer.json beside"),
  ({"model": "gpt2", "pre": "x"}, "pre='x' is not supported; put its"),
  ({"scores": [1.0]}, "scores is incomplete"),
  ({"scores": [-1000.0] * 420}, "scores are not distinct"),
  ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not"),
  ({"precompiled_charsmap": [1]}, "precompiled_charsmap is not supported"),
  ({"add_eos_token": True}, "add_eos_token is not supported"),
  ({"bos_token_id": None}, "bos_token_id is missing"),
  ({"bos_token_id": 420}, "bos_token_id=420 is not the id of a token"),
])  # fmt: skip
def test_a_tokenizer_that_cannot_be_made_is_refused(changes, message):
  with pytest.raises(UserError, match=message):
    gguf_tokenizer.tokenizer(sentencepiece(**changes))


@pytest.mark.parametrize(("pre", "pieces"), [
  ("gpt-2", "We|'|RE|\u010a|h|'s|\u01201234|x"),
  ("smollm", "We|'|RE|\u010a|h|'s|\u0120|1|2|3|4|x"),
  ("llama-bpe", "We|'RE|\u010a|h|'s|\u0120|123|4|x"),
  ("qwen2", "We|'RE|\u010a|h|'s|\u0120|1|2|3|4|x"),
])  # fmt: skip
def test_texts_are_split_as_the_metadata_says(pre, pieces, tmp_path):
  """By llama.cpp's expressions of that name, in the letters for bytes."""
  found = {"model": "gpt2", "pre": pre, "tokens": ["a"], "bos_token_id": 0}
  named = {f"tokenizer.ggml.{key}": x for key, x in found.items()}
  made = ids_of(gguf_tokenizer.tokenizer(named), tmp_path)
  split = made.pre_tokenizer.pre_tokenize_str("We'RE\nh's 1234x")
  assert "|".join(piece for piece, _ in split) == pieces
  assert (made.encode("a").ids == [0, 0]) == (pre == "llama-bpe")


@pytest.mark.parametrize(
  ("dtype", "kind"),
  [("float16", "F16"), ("bfloat16", "BF16"), ("q8_0", "Q8_0")],
)
def test_matrices_are_exported_in_other_types(dtype, kind, tmp_path):
  config, tensors, _ = wide("F32")
  tensors["token_embd.weight"] = np.resize(
    tensors["token_embd.weight"], (380, 256)
  )
  tensors["output.weight"] = tensors["token_embd.weight"] + 1
  files = texts.stored()["kinds"]["byte_level"]
  texts.write_folder(tmp_path, files)
  path = write(tmp_path / "x.gguf", "llama", metadata_of(config), tensors)
  convert.import_folder(path, tmp_path / "run")
  out = tmp_path / "out.gguf"
  options = convert.Export("llama", dtype, gguf=True)
  convert.export_run(tmp_path / "run", out, options)
  reader = gguf.GGUFReader(out)
  assert {x.name for x in reader.tensors} == tensors.keys()
  type_ = gguf.GGMLQuantizationType[kind]
  for tensor in reader.tensors:
    value, is_norm = tensors[tensor.name], tensor.name.endswith("norm.weight")
    stored = type_ if not is_norm else gguf.GGMLQuantizationType.F32
    assert tensor.tensor_type == stored
    expected = gguf.quants.quantize(value, stored)
    np.testing.assert_array_equal(tensor.data, expected, tensor.name)


@pytest.mark.parametrize(("options", "kind", "message"), [
  (["--gguf"], "dummy_prefix", "cannot be expressed in a GGUF file exactly"),
  (["--gguf"], "unigram", "cannot be expressed in a GGUF file exactly"),
  (["--gguf", "--dtype=q8_0"], "byte_level", "rows of .* have 16 numbers"),
  (["--gguf", "--max_bytes=9"], "byte_level", "--max_bytes=9 has no effect"),
  (["--gguf", "--layout=mistral"], "byte_level", "--layout=mistral: a GGUF"),
  (["--dtype=q8_0"], "byte_level", "--dtype=q8_0 needs --gguf"),
])  # fmt: skip
def test_what_a_file_cannot_hold_is_one_line(
  options, kind, message, tmp_path, capsys
):
  run, _ = make_run(tmp_path, kind)
  out = tmp_path / "out.gguf"
  arguments = ["export", str(run), str(out), "--layout=llama", *options]
  assert hub.main(arguments) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and re.search(message, error)
  assert {x.name for x in tmp_path.iterdir()} == {"hub", "run"}
