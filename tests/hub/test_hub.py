"""Models of the Hub: what they compute, there and back, and broken folders."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
from unittest import mock

import hub_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eval_examples import make_run
from flax import nnx
from in_float64 import without_rounding
from safetensors.numpy import load_file
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import main, program, sharding, train
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.hub import __main__ as hub
from loopjax.hub import convert, files, tokenizer_files, weights
from loopjax.hub.retrofit import Retrofit, retrofit
from loopjax.models import MODELS, looped, plt, recurrent
from loopjax.optim import parameters
from loopjax.program import teacher
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import restore
from loopjax.run.checkpoints import tensors as tensors_lib
from loopjax.saved import language_model
from loopjax.train.score import score_model
from loopjax.types import PRECISIONS, TaskSpec

SPEC = TaskSpec(31, 9, tuple((i,) for i in range(9)))
NAMES = tuple(convert.LAYOUTS)
RECURRENT = ("huginn_raven",)
LOOPED = ("ouro", "nanbeige", "iquestloopcoder", "huginn_raven")


def config_of(name, **changes):
  stored = json.loads(str(examples.oracle(name)["config"]))
  layout = convert.LAYOUTS[name]
  settings = convert.settings_of(layout, stored)
  return MODELS[layout.family].Config(**{**settings, **changes})


def family_of(name):
  return MODELS[convert.LAYOUTS[name].family]


def abstract(config, mesh=None, min_split_size=1):
  """(graph, shapes with their places on a mesh of one device or more)."""
  families = (looped, plt, recurrent)
  family = next(x for x in families if isinstance(config, x.Config))
  mesh = mesh or sharding.make_mesh(sharding.Config(), jax.devices()[:1])
  graphdef, state = nnx.split(
    nnx.eval_shape(lambda: family.Model(config, SPEC, rngs=nnx.Rngs(params=0)))
  )
  shapes = nnx.to_pure_dict(state)
  places = sharding.parameter_shardings(
    mesh, shapes, parameters.splits(shapes), min_split_size
  )
  return graphdef, jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    shapes,
    places,
  )


def read(folder, name="ouro", **changes):
  config = config_of(name, **changes)
  graphdef, shapes = abstract(config)
  head_width = config.block_shape().head_width
  layout = convert.LAYOUTS[name]
  return graphdef, weights.read(folder, layout, shapes, head_width)


def test_logits_after_every_loop_are_those_of_transformers(tmp_path):
  """Gemma 2 arranged as Ouro, with its exit gate, in float32."""
  oracle = examples.oracle("ouro")
  graphdef, params = read(examples.make_folder(tmp_path / "hub"))

  def run(params):
    model = nnx.merge(graphdef, params)
    output = model(oracle["tokens"], trace=("hidden",))
    hidden = output.trace["hidden"]
    logits = jnp.einsum("kbtd,vd->kbtv", hidden, model.readout_table())
    return logits, model.exit_logits(hidden)

  logits, gates = without_rounding(run)(params)
  np.testing.assert_allclose(logits, oracle["logits"], atol=1e-5, rtol=0)
  np.testing.assert_allclose(gates, oracle["gates"], atol=1e-5, rtol=0)


def with_zeros(name):
  """Huginn begins with a random state, which implementations draw apart."""
  return {"state": "zero", "state_std": 0.632} if name in RECURRENT else {}


def assert_close(logits, name, loops):
  expected = examples.oracle(name)["logits"][loops - 1]
  np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "loops"), [
  *((name, 1) for name in NAMES),
  *((name, 3) for name in LOOPED),
  *((name, 8) for name in LOOPED if name != "ouro"),
])  # fmt: skip
def test_logits_are_those_of_the_published_architecture(name, loops, tmp_path):
  """In float32, with as many loops as were trained and with others."""
  folder = examples.make_folder(tmp_path / "hub", name)
  graphdef, params = read(folder, name, **with_zeros(name))
  tokens = jnp.asarray(examples.oracle(name)["tokens"])

  def run(params):
    return nnx.merge(graphdef, params)(tokens, num_loops=loops).logits

  assert_close(without_rounding(run)(params), name, loops)


@pytest.mark.parametrize("name", ["llama3", "smollm"])
def test_llamas_with_other_rotations_and_heads_are_read_and_exported(
  name, tmp_path
):
  """Llama 3.1's, of long, short and other wavelengths, and SmolLM's 9 heads."""
  oracle = examples.oracle(name)
  folder = examples.make_folder(tmp_path / "hub", name)
  _, settings, params = convert.read_folder(folder)
  graphdef, _ = program.abstract_model(settings)
  tokens = jnp.asarray(oracle["tokens"])
  model = nnx.merge(graphdef, params)
  reading = looped.FAMILY.reading
  cache = reading.empty_cache(model, 2, tokens.shape[1])
  output, cache = reading.read(model, tokens[:, :-1], cache)
  last, _ = reading.read(model, tokens[:, -1:], cache)
  logits = jnp.concatenate([output.logits, last.logits], axis=1)
  assert_close(logits, name, 1)
  assert_close(model(tokens).logits, name, 1)
  convert.import_folder(folder, tmp_path / "run")
  options = convert.Export("llama", dtype="float32")
  convert.export_run(tmp_path / "run", tmp_path / "out", options)
  again = convert.read_folder(tmp_path / "out")
  assert again.settings.model == settings.model
  exported = json.loads((tmp_path / "out" / "config.json").read_text())
  stored = json.loads(str(oracle["config"]))["rope_parameters"]
  assert exported["rope_theta"] == stored.pop("rope_theta")
  theirs = None if stored == {"rope_type": "default"} else stored
  assert exported["rope_scaling"] == theirs


def test_a_scaled_rotation_is_refused_where_there_is_none(tmp_path):
  folder = examples.make_folder(tmp_path / "hub", "llama3")
  with pytest.raises(UserError, match="rope_scaling: `recurrent` does not"):
    retrofit(folder, tmp_path / "run", Retrofit("0:1"))
  for wrong in ((1.0,), (8.0, 4.0, 1.0, 16.0), (8.0, 1.0, 4.0, 16.5)):
    with pytest.raises(UserError, match=r"model\.rope_scaling="):
      looped.Config(rope_scaling=wrong)


@pytest.mark.parametrize("name", ["qwen2", *LOOPED[1:]])
def test_a_prompt_and_a_token_with_a_cache_have_the_same_logits(name, tmp_path):
  folder = examples.make_folder(tmp_path / "hub", name)
  graphdef, params = read(folder, name, **with_zeros(name))
  tokens = jnp.asarray(examples.oracle(name)["tokens"])
  loops, family = 1 if name == "qwen2" else 3, family_of(name)

  def run(params):
    model = nnx.merge(graphdef, params)
    cache = family.reading.empty_cache(model, 2, 9, num_loops=loops)
    prompt, token = tokens[:, :8], tokens[:, 8:]
    first, cache = family.reading.read(model, prompt, cache, num_loops=loops)
    last, _ = family.reading.read(model, token, cache, num_loops=loops)
    return jnp.concatenate([first.logits, last.logits], axis=1)

  assert_close(without_rounding(run)(params), name, loops)


def test_huginn_is_the_preset_of_its_paper():
  """The settings of its config.json, apart from 0.632 for (2 / 5)^(1/2)."""
  theirs = json.loads(str(examples.oracle("huginn_raven")["config"]))
  depth, width = 2 + 32 * 4 + 2, 5280
  theirs |= {
    "n_embd": width, "n_heads": 55, "num_key_value_heads": 55, "head_dim": 96,
    "n_layers": 8, "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4,
    "effective_expected_depth": depth, "mean_recurrence": 32,
    "mean_backprop_depth": 8, "intermediate_size": 17_920,
    "init_values": {
      "embed_scale": 72.6636084983398, "embedding": 0.008703882797784892,
      "out_proj": 0.0005356869554443541, "std": 0.008703882797784892,
    },
  }  # fmt: skip
  layout = convert.LAYOUTS["huginn_raven"]
  settings = convert.settings_of(layout, theirs)
  preset = load_config("lm_recurrent", "paper").model.to_dict()
  for name, value in settings.items():
    if name not in ("mlp", "num_key_value_heads", "tied"):
      assert value == pytest.approx(preset[name], rel=1e-3), name
  model = recurrent.Config(**settings)
  written = convert.config_of(layout, model, 31)
  assert {name: written[name] for name in written if name in theirs} == {
    name: pytest.approx(value) if name == "init_values" else value
    for name, value in theirs.items()
    if name in written
  }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_absent_has_the_formats_default(name):
  """Grouped keys and the width of heads; all else may not change silently."""
  theirs = json.loads(str(examples.oracle(name)["config"]))
  layout = convert.LAYOUTS[name]
  whole = convert.settings_of(layout, theirs)
  heads, width = whole["num_heads"], whole["width"]
  defaults = {"num_key_value_heads": {"num_key_value_heads": heads}}
  if "head_width" in whole:
    defaults["head_dim"] = {"head_width": width // heads}
  for key in theirs:
    some = {x: value for x, value in theirs.items() if x != key}
    with contextlib.suppress(UserError):
      found = convert.settings_of(layout, some)
      assert found == whole | defaults.get(key, {}), key


def test_nanbeige_has_a_norm_after_every_loop_if_nothing_is_said():
  layout = convert.LAYOUTS["nanbeige"]
  theirs = json.loads(str(examples.oracle("nanbeige")["config"]))
  for said, norm in ((False, "per_loop"), (True, "final_only")):
    theirs["skip_loop_final_norm"] = said
    assert convert.settings_of(layout, theirs)["loop_norm"] == norm
  del theirs["skip_loop_final_norm"]
  assert convert.settings_of(layout, theirs)["loop_norm"] == "per_loop"


def test_nanbeige_has_one_norm_after_all_loops_if_it_says_so(tmp_path):
  oracle = examples.oracle("nanbeige")
  once = {"skip_loop_final_norm": True, "num_loops": 3}
  folder = examples.make_folder(tmp_path / "hub", "nanbeige", config=once)
  layout = convert.LAYOUTS["nanbeige"]
  theirs = json.loads((folder / "config.json").read_text())
  settings = convert.settings_of(layout, theirs)
  graphdef, params = read(folder, "nanbeige", **settings)

  def run(params):
    return nnx.merge(graphdef, params)(oracle["tokens"]).logits

  expected = oracle["once/logits"][2]
  np.testing.assert_allclose(jax.jit(run)(params), expected, atol=1e-5, rtol=0)
  written = convert.config_of(layout, looped.Config(**settings), 31)
  assert {name: written[name] for name in once} == once


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_bytes", [10**9, 3000])
def test_there_and_back_is_exact(name, max_bytes, tmp_path):
  """In one file and in several, whose index is read again."""
  tensors = examples.tensors_of(name)
  _, params = read(examples.make_folder(tmp_path / "hub", name, parts=3), name)
  layout, out = convert.LAYOUTS[name], tmp_path / "out"
  out.mkdir()
  model = config_of(name)
  constants = layout.constants(model, 64)
  head_width = model.block_shape().head_width
  made = weights.tensors(layout, params, head_width, "F32", constants)
  files.write(out, made, max_bytes)
  written = sorted(out.glob("*.safetensors"))
  assert (len(written) > 3) == (max_bytes == 3000)
  assert (out / files.INDEX).exists() == (max_bytes == 3000)
  found = {key: x for file in written for key, x in load_file(file).items()}
  assert found.keys() == tensors.keys()
  for key, value in tensors.items():
    assert found[key].dtype == value.dtype
    if key in constants:  # Computed again, with other roundings.
      np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=0)
    else:
      assert np.array_equal(found[key], value), key
  _, again = read(out, name)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, params, again))


def test_files_of_tensors_have_the_usual_permissions(tmp_path):
  made = files.Made((2,), np.dtype(np.float32), lambda: np.ones(2, np.float32))
  before = os.umask(0o027)
  try:
    files.write(tmp_path, {"x": made}, 100)
    tensors_lib.write(tmp_path / "run", {"x": jnp.ones(2)})
  finally:
    os.umask(before)
  modes = {
    path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()
  }
  assert modes == {files.SINGLE: 0o640, "run": 0o640}


@pytest.mark.parametrize("value", [7e4, np.nan])
def test_values_that_are_not_finite_are_named(value, tmp_path):
  """7e4 is infinite in float16, which a file would hold without a word."""
  tensors, name = examples.tensors_of("llama"), "model.embed_tokens.weight"
  folder = examples.make_folder(tmp_path / "hub", "llama", tensors)
  layout, (_, params) = convert.LAYOUTS["llama"], read(folder, "llama")
  params["token_embedding"]["embedding"] = (
    params["token_embedding"]["embedding"].at[3, 2].set(value)
  )
  made = weights.tensors(layout, params, 8, "F16")
  with pytest.raises(UserError, match=f"{name} has values .* in float16"):
    made[name].make()
  made["model.norm.weight"].make()
  tensors[name][3, 2] = np.inf
  folder = examples.make_folder(tmp_path / "inf", "llama", tensors)
  with pytest.raises(UserError, match=f"{name} has values .* in float32"):
    read(folder, "llama")


@pytest.mark.parametrize("shape", [(), (3, 5), (7, 64, 33)])
def test_what_was_read_becomes_an_array_of_jax_without_a_copy(shape):
  """The import of a large model fits into little more than its size."""
  values = weights._empty(shape, jnp.bfloat16)
  values[...] = 1.5
  array = jax.device_put(values)
  assert array.unsafe_buffer_pointer() == values.ctypes.data
  assert array.shape == shape and jnp.all(array == 1.5)


def test_bfloat16_is_kept_and_widened_exactly(tmp_path):
  narrow = {
    name: x.astype(jnp.bfloat16)
    for name, x in examples.tensors_of("ouro").items()
  }
  folder = examples.make_folder(tmp_path / "hub", tensors=narrow)
  _, wide = read(folder)
  _, kept = read(folder, precision="bfloat16_params")
  for one, other in zip(
    jax.tree.leaves(wide), jax.tree.leaves(kept), strict=True
  ):
    assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)
    assert jnp.array_equal(one, other.astype(jnp.float32))
  out = tmp_path / "out"
  out.mkdir()
  made = weights.tensors(convert.LAYOUTS["ouro"], wide, 4, "BF16")
  files.write(out, made, 10**9)
  for name, value in load_file(out / "model.safetensors").items():
    assert np.array_equal(value, narrow[name]), name


def test_each_device_reads_its_part(tmp_path):
  folder = examples.make_folder(tmp_path / "hub")
  mesh = sharding.make_mesh(
    sharding.Config(data=1, fsdp=2, tensor=2), jax.devices()[:4]
  )
  config = config_of("ouro")
  _, shapes = abstract(config, mesh, min_split_size=64)
  found = weights.read(folder, convert.LAYOUTS["ouro"], shapes, 4)
  _, whole = read(folder)
  kernel = found["layers"]["mlp"]["gate"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (2, 8, 22)
  assert jax.tree.all(
    jax.tree.map(lambda x, y: np.array_equal(x, y), found, whole)
  )


def broken(tensors, change):
  tensors = dict(tensors)
  change(tensors)
  return tensors


NORM = "model.norm.weight"


@pytest.mark.parametrize(("change", "message"), [
  (lambda x: x.pop(NORM), f"missing {NORM}"),
  (lambda x: x.update({"model.layers.2.mlp.up_proj.weight": x[NORM]}),
   "not in the model model.layers.2.mlp.up_proj.weight"),
  (lambda x: x.update({NORM: np.zeros(17, np.float32)}),
   r"other shape model.norm.weight \(\[17\] there, \[16\] here\)"),
  (lambda x: x.update({NORM: np.zeros(16, np.int8)}),
   r"of an unsupported dtype model.norm.weight \(I8\)"),
  (lambda x: x.update({"norm.weight": x.pop(NORM)}),
   "missing model.norm.weight; not in the model norm.weight"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
  tensors = broken(examples.tensors_of("ouro"), change)
  folder = examples.make_folder(tmp_path / "hub", tensors=tensors)
  with pytest.raises(UserError, match=message) as caught:
    read(folder)
  assert "\n" not in str(caught.value)


def test_no_more_than_some_rows_are_read_at_a_time(tmp_path, monkeypatch):
  folder, numbers = examples.make_folder(tmp_path / "hub"), []
  whole = convert.read_folder(folder).params

  def read(path, tensor, index):
    found = _read(path, tensor, index)
    numbers.append(len(found))
    return found

  _read = files._read
  monkeypatch.setattr(files, "_read", read)
  monkeypatch.setattr(weights, "_ROWS", 5)
  jax.tree.map(
    np.testing.assert_array_equal, convert.read_folder(folder).params, whole
  )
  assert max(numbers) == 5


def test_a_tied_table_may_be_there_twice(tmp_path, monkeypatch):
  """As some tied models are saved; one that differs is not left out."""
  monkeypatch.setattr(weights, "_ROWS", 16)  # The row is in the second part.
  reads = mock.Mock(side_effect=files._read)
  monkeypatch.setattr(files, "_read", reads)
  tensors = examples.tensors_of("qwen3")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  read(examples.make_folder(tmp_path / "hub", "qwen3", tensors), "qwen3")
  names = [call.args[1] for call in reads.call_args_list]
  assert names.count("lm_head.weight") == -(
    -len(tensors["lm_head.weight"]) // 16
  )
  tensors["lm_head.weight"][30, 15] += 1
  folder = examples.make_folder(tmp_path / "other", "qwen3", tensors)
  with pytest.raises(UserError, match="not in the model lm_head.weight"):
    read(folder, "qwen3")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_read_as_it_was_written(name):
  """With heads that are not width / heads wide, and turns of their own."""
  layout = convert.LAYOUTS[name]
  changes = [{"rope_base": 12_345.0}, {"norm_epsilon": 3e-6}]
  if name not in RECURRENT:
    changes.append({"head_width": 12})
  for change in changes:
    model = config_of(name, **change)
    written = convert.config_of(layout, model, 31)
    again = type(model)(**convert.settings_of(layout, written))
    assert {key: getattr(again, key) for key in change} == change
    shapes = [config.block_shape() for config in (again, model)]
    assert shapes[0].head_width == shapes[1].head_width


def test_either_file_names_the_ends_of_a_text(tmp_path):
  assert tokenizer_files.end_tokens(tmp_path) == ()
  for name, ids, known in (
    ("config.json", 7, (7,)),
    ("generation_config.json", [5, 7, 0], (7, 5, 0)),
  ):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    assert tokenizer_files.end_tokens(tmp_path) == known


def test_tensors_without_parameters_are_left_out(tmp_path):
  tensors = examples.tensors_of("ouro")
  _, plain = read(examples.make_folder(tmp_path / "plain", tensors=tensors))
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  tensors[name] = np.ones(2, np.float32)
  _, params = read(examples.make_folder(tmp_path / "hub", tensors=tensors))
  jax.tree.map(np.testing.assert_array_equal, params, plain)


def cut(folder):
  path = folder / "model-00002-of-00003.safetensors"
  path.write_bytes(path.read_bytes()[:-5])


def hostile(folder):
  path = folder / "model-00002-of-00003.safetensors"
  path.write_bytes(b"\xff" * 64)


def lost(folder):
  (folder / "model-00002-of-00003.safetensors").unlink()


def reindex(change):
  def apply(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))

  return apply


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (cut, "00002-of-00003.safetensors: cannot be read: .*not fully covered"),
    (hostile, "00002-of-00003.safetensors: cannot be read: .*too large"),
    (lost, "00002-of-00003.safetensors: cannot be read"),
    (reindex(lambda x: x.pop(NORM)), f"does not place {NORM} in model-"),
    (
      reindex(lambda x: x.update(more="model-00001-of-00003.safetensors")),
      "00001-of-00003.safetensors: more is missing",
    ),
    (
      reindex(lambda x: x.update({NORM: "../model.safetensors"})),
      "weight_map must map tensors to files of the folder",
    ),
    (
      lambda x: (x / "model.safetensors.index.json").write_text("{"),
      "index.json: cannot be read",
    ),
    (
      lambda x: (x / "model.safetensors.index.json").unlink(),
      "contains neither model.safetensors nor",
    ),
  ],
)
def test_broken_folders_are_one_line(damage, message, tmp_path, capsys):
  folder = examples.make_folder(tmp_path / "hub", parts=3)
  damage(folder)
  assert hub.main(["import", str(folder), str(tmp_path / "run")]) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ") and error.count("\n") == 1
  with pytest.raises(UserError, match=message):
    read(folder)
  assert not (tmp_path / "run").exists()


def test_an_adapter_is_not_a_model(tmp_path):
  (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
  assert convert.is_folder(tmp_path)
  with pytest.raises(UserError, match="is an adapter, not a model; merge it"):
    convert.read_folder(tmp_path)


@pytest.mark.parametrize(("config", "message"), [
  ({"model_type": "gemma2"}, "model_type='gemma2' is not one of ouro, nan"),
  ({"hidden_act": "gelu"}, "hidden_act='gelu' is unsupported"),
  ({"rms_norm_eps": None}, "rms_norm_eps=None is invalid"),
  ({"rms_norm_eps": -0.5}, "rms_norm_eps=-0.5 must be at least 0"),
  ({"rope_parameters": None, "rope_theta": 0.0}, "rope_theta=0.0 must be gre"),
  ({"hidden_size": "16"}, "hidden_size='16' is invalid"),
  ({"num_hidden_layers": True}, "num_hidden_layers=True is invalid"),
  ({"num_key_value_heads": "2"}, "num_key_value_heads='2' is invalid"),
  ({"rope_scaling": {"factor": 2}}, "rope_scaling=.* is not supported"),
  ({"rope_scaling": "dynamic"}, "rope_scaling='dynamic' is not supported"),
  ({"rope_parameters": [1]}, r"rope_parameters=\[1\] is not supported"),
  ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor': 0.5.* is not"),
  ({"rope_theta": "1e6"}, "rope_theta='1e6' is invalid"),
  ({"layer_types": ["sliding_attention"] * 2}, "only full_attention"),
  ({"layer_types": 5}, "layer_types=5: only full_attention"),
  ({"total_ut_steps": None}, "total_ut_steps=None is invalid"),
  ({"eos_token_id": 99}, r"eos_token_id=99 is not a token id of"),
  ({"eos_token_id": 2**70}, r"eos_token_id=1180591.* is not a token id of"),
  ({"eos_token_id": []}, r"eos_token_id=\[\] is not a token id of"),
  ({"eos_token_id": None}, r"eos_token_id=None is not a token id of"),
  ({"num_hidden_layers": 3}, "missing model.layers.2"),
  ({"vocab_size": 40}, "other shape"),
  ({"vocab_size": 30}, "vocab_size=30 is too small"),
])  # fmt: skip
def test_settings_that_are_not_ours_are_one_line(
  config, message, tmp_path, capsys
):
  folder = examples.make_folder(tmp_path / "hub", config=config)
  assert hub.main(["import", str(folder), str(tmp_path / "run")]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert not (tmp_path / "run").exists()
  with pytest.raises(UserError, match=message):
    convert.import_folder(folder, tmp_path / "run")


@pytest.mark.parametrize(("name", "config", "message"), [
  ("llama", {"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None},
   "rope_scaling=.*linear.* is not supported"),
  ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5}},
   "rope_parameters=.*yarn.* is not supported"),
  ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
   "factor=None is invalid"),
  ("huginn_raven", {"init_values": None}, "init_values=None is invalid"),
])  # fmt: skip
def test_variants_of_an_architecture_are_refused(name, config, message):
  layout = convert.LAYOUTS[name]
  theirs = json.loads(str(examples.oracle(name)["config"]))
  with pytest.raises(UserError, match=message):
    convert.settings_of(layout, {**theirs, **config})


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_of_the_folder_that_is_another_one_is_named(name, tmp_path):
  folder = examples.make_folder(tmp_path / "hub")
  (folder / name).write_text("<!DOCTYPE html><html>")
  with pytest.raises(UserError, match=f"{name}: is a web page"):
    convert.read_folder(folder)


@pytest.mark.parametrize(("content", "message"), [
  ('{"eos_token_id": [0, 99]}', "eos_token_id=99 is not a token id of"),
  ('{"eos_token_id": "<end>"}', "eos_token_id='<end>' is not an id"),
  ('{"eos_token_id": [0, true]}', r"eos_token_id=\[0, True\] is not an id"),
  ("{", "cannot be read: Expecting property name"),
])  # fmt: skip
def test_ends_of_generation_are_checked_when_imported(
  content, message, tmp_path
):
  folder = examples.make_folder(tmp_path / "hub")
  (folder / "generation_config.json").write_text(content)
  with pytest.raises(UserError, match=message):
    convert.import_folder(folder, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_window_that_config_json_leaves_out_is_refused():
  """Mistral's default is one of 4,096 tokens."""
  layout = convert.LAYOUTS["mistral"]
  theirs = json.loads(str(examples.oracle("mistral")["config"]))
  del theirs["sliding_window"]
  with pytest.raises(UserError, match="sliding_window=4096 is unsupported"):
    convert.settings_of(layout, convert.with_defaults(layout, theirs))


# Those of the configuration classes of `transformers` 5.24, which differ in
# nothing else that is read: (layers, heads, key-value heads, width of a head,
# width of the MLP, longest text).
@pytest.mark.parametrize(("name", "sizes"), [
  ("llama", (32, 32, 32, 128, 11_008, 2048)),
  ("mistral", (32, 32, 8, 128, 14_336, 131_072)),
  ("qwen2", (32, 32, 32, 128, 22_016, 32_768)),
  ("qwen3", (32, 32, 32, 128, 22_016, 32_768)),
])  # fmt: skip
def test_what_a_config_json_leaves_out(name, sizes):
  layout = convert.LAYOUTS[name]
  theirs = convert.with_defaults(layout, {"sliding_window": None})
  ours = convert.settings_of(layout, theirs)
  layers, heads, groups, head_width, mlp_width, longest = sizes
  expected = {
    "width": 4096, "num_layers": layers, "num_heads": heads,
    "num_key_value_heads": groups, "head_width": head_width,
    "mlp_ratio": mlp_width / 4096, "tied": False, "rope_base": 10_000.0,
    "rope_scaling": (), "norm_epsilon": 1e-6,
  }  # fmt: skip
  assert ours == ours | expected
  vocabulary = 151_936 if name.startswith("qwen") else 32_000
  assert theirs["vocab_size"] == vocabulary
  assert theirs[layout.context] == longest


def test_what_a_config_json_of_iquest_leaves_out():
  """The defaults of its configuration class."""
  layout = convert.LAYOUTS["iquestloopcoder"]
  ours = convert.settings_of(layout, convert.with_defaults(layout, {}))
  expected = {
    "width": 5120, "num_layers": 80, "num_heads": 40, "num_key_value_heads": 8,
    "head_width": 128, "mlp_ratio": 5.4, "tied": False, "num_loops": 2,
    "window": 64, "rope_base": 500_000.0, "norm_epsilon": 1e-5,
  }  # fmt: skip
  assert ours == ours | expected


@pytest.mark.parametrize(("files", "end"), [
  ({"generation_config.json": {"eos_token_id": [3, 0]}}, "w2"),
  ({"tokenizer_config.json": {"eos_token": {"content": "<end>"}}}, "<end>"),
])  # fmt: skip
def test_the_end_of_a_text_may_be_named_by_another_file(files, end, tmp_path):
  folder = examples.make_folder(tmp_path / "hub", config={"eos_token_id": None})
  for name, content in files.items():
    (folder / name).write_text(json.dumps(content))
  assert convert.read_folder(folder).settings.task.end_token == end


def test_a_folder_is_imported_scored_and_exported(tmp_path, capsys):
  folder = examples.make_folder(tmp_path / "hub", parts=2)
  run, out = tmp_path / "run", tmp_path / "out"
  chat = {"eos_token_id": [5, 0], "temperature": 0.6}
  (folder / "generation_config.json").write_text(json.dumps(chat))
  arguments = ["import", str(folder), str(run), "--sequence_length=9"]
  assert hub.main(arguments) == 0
  assert hub.main(arguments) == 2  # There is a run now.
  assert "already contains a run" in capsys.readouterr().err
  shutil.rmtree(folder)  # Nothing of it is needed any more.
  found = language_model.load(run)
  assert found.facts["model"] == "looped" and found.facts["num_loops"] == 4
  assert found.tokenizer.end == found.tokenizer.padding == 0
  assert found.stop_tokens == (0, 5)
  oracle = examples.oracle("ouro")

  @functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
  )
  def run_model(params):
    return nnx.merge(found.graphdef, params)(oracle["tokens"]).logits

  logits = run_model(found.params)
  np.testing.assert_allclose(logits, oracle["logits"][-1], atol=1e-5, rtol=0)
  export = ["export", str(run), str(out), "--layout=ouro", "--dtype=float32"]
  assert hub.main(export) == 0
  assert hub.main(export) == 2  # The folder is there now.
  for name, value in load_file(out / "model.safetensors").items():
    assert np.array_equal(value, oracle[f"tensor/{name}"]), name
  theirs = json.loads(str(oracle["config"]))
  written = json.loads((out / "config.json").read_text())
  assert {name: written[name] for name in theirs} == theirs
  assert written["architectures"] == ["OuroForCausalLM"]
  assert (out / "tokenizer_config.json").read_text() == (
    '{"chat_template": "{{ x }}"}'
  )


@pytest.mark.parametrize("end_token", ["", "<end>"])
def test_a_model_trained_here_is_read_again(end_token, tmp_path):
  """With its end of documents, and the chat template of its tokenizer."""
  tokenizer, out = tmp_path / "there" / "tokenizer.json", tmp_path / "out"
  tokenizer.parent.mkdir()
  examples.write_tokenizer(tokenizer)
  (tokenizer.parent / "chat_template.jinja").write_text("{{ messages }}")
  sizes = {
    "mlp": "swiglu",
    "norm_order": "branch",
    "tied": False,
    "num_loops": 2,
  }
  sizes["exit_gate"] = "joint"
  run = make_run(
    tmp_path / "run", task__tokenizer=str(tokenizer), task__end_token=end_token,
    **{f"model__{name}": value for name, value in sizes.items()},
  )  # fmt: skip
  convert.export_run(run, out, convert.Export("ouro", "float32"))
  shutil.rmtree(tokenizer.parent)
  assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
  _, settings, params = convert.read_folder(out)
  task = settings.task
  found = Tokenizer(task.tokenizer, task.end_token)
  assert found.end == (0 if end_token else 31)
  assert found.decode([1, found.end]).startswith("w0 <")
  assert params["head"]["kernel"].shape[1] == found.num_real


@pytest.mark.long
def test_huginn_comes_back_as_it_was(tmp_path):
  """With its constants, and the settings that are not ours."""
  more = {"bos_token_id": 1, "activation_checkpoint_impl": "per-iteration"}
  folder = examples.make_folder(tmp_path / "hub", "huginn_raven", config=more)
  run, out = tmp_path / "run", tmp_path / "out"
  summary = convert.import_folder(folder, run)
  tensors = examples.tensors_of("huginn_raven")
  turns = tensors["freqs_cis"]
  count = sum(x.size for x in tensors.values()) - turns.size
  assert summary["parameters"] == count
  convert.export_run(run, out, convert.Export("huginn_raven", "float32"))
  found = load_file(out / "model.safetensors")
  np.testing.assert_allclose(found.pop("freqs_cis"), turns, atol=1e-5)
  assert found.keys() == tensors.keys() - {"freqs_cis"}
  assert all(np.array_equal(x, tensors[name]) for name, x in found.items())
  theirs = json.loads((folder / "config.json").read_text())
  written = json.loads((out / "config.json").read_text())
  assert {name: written[name] for name in theirs} == theirs


@pytest.mark.long
def test_iquest_comes_back_as_it_was(tmp_path):
  """A run of `plt`, whose loops and window are the folder's."""
  name = "iquestloopcoder"
  folder = examples.make_folder(tmp_path / "hub", name)
  run, out = tmp_path / "run", tmp_path / "out"
  convert.import_folder(folder, run)
  settings = config_lib.of_run(run, "")
  assert settings.model_name == "plt"
  assert (settings.model.num_loops, settings.model.window) == (2, 4)
  convert.export_run(run, out, convert.Export(name, "float32"))
  tensors = examples.tensors_of(name)
  found = load_file(out / "model.safetensors")
  assert found.keys() == tensors.keys()
  assert all(np.array_equal(x, tensors[key]) for key, x in found.items())
  theirs = json.loads((folder / "config.json").read_text())
  written = json.loads((out / "config.json").read_text())
  assert {key: written[key] for key in theirs} == theirs
  with pytest.raises(
    UserError, match="of model.name='plt'; .* iquestloopcoder"
  ):
    convert.export_run(run, tmp_path / "other", convert.Export("llama"))


@pytest.mark.parametrize(("present", "used"), [(1, 1), (3, 2), (7, 4), (8, 8)])
def test_parameters_are_split_over_devices_that_divide_them(
  present, used, monkeypatch
):
  """On three devices, a width that is a power of two is split over two."""
  devices = jax.devices()[:present]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  settings = config_lib.resolve(
    load_config("lm_looped", "smoke,model.width=32,mesh.min_split_size=64")
  )
  leaves = jax.tree.leaves(convert.abstract_params(settings))
  meshes = {leaf.sharding.mesh for leaf in leaves}
  assert [list(mesh.devices.flat) for mesh in meshes] == [devices[:used]]
  assert used == 1 or not all(x.sharding.is_fully_replicated for x in leaves)


def test_no_code_is_asked_for(tmp_path):
  config = {"auto_map": {"AutoModel": "modeling_ouro.OuroModel"}}
  folder = examples.make_folder(tmp_path / "hub", config=config)
  run, out = tmp_path / "run", tmp_path / "out"
  convert.import_folder(folder, run)
  convert.export_run(run, out, convert.Export("ouro"))
  assert "auto_map" not in json.loads((out / "config.json").read_text())


def test_what_is_exported_has_the_runs_dtype(tmp_path):
  """Nothing is rounded unless --dtype says so."""
  folder = examples.make_folder(tmp_path / "hub")
  for dtype in ("float32", "bfloat16"):
    run, out = tmp_path / dtype, tmp_path / f"{dtype}_out"
    convert.import_folder(folder, run, dtype=dtype)
    words = ["export", str(run), str(out), "--layout=ouro"]
    assert hub.main(words) == 0
    kinds = {one.dtype for one in files.tensors(out).values()}
    assert kinds == {{"float32": "F32", "bfloat16": "BF16"}[dtype]}
    assert workdir_lib.read_json(out / "config.json")["dtype"] == dtype


@pytest.mark.manual
def test_training_starts_from_an_imported_run(tmp_path):
  """On text with the model's own tokenizer and end of documents."""
  folder = examples.make_folder(tmp_path / "hub")
  convert.import_folder(folder, tmp_path / "run", sequence_length=9)
  text = tmp_path / "text.jsonl"
  texts = [f"w{i % 30} w{i // 30} w3" for i in range(300)]
  text.write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
  there = json.loads((tmp_path / "run" / "config.json").read_text())
  config = config_lib.make("looped", "text")
  config_lib.override(
    config,
    {
      **{
        f"model.{name}": value
        for name, value in there["model"].items()
        if name != "name"
      },
      "task.train_files": str(text),
      "task.tokenizer": there["task"]["tokenizer"],
      "task.end_token": "<end>",
      "task.sequence_length": 9,
      "optim.learning_rate": 1e-20,
      "optim.final_learning_rate": 0.0,
      "optim.warmup_steps": 0,
      "optim.ema_decay": 0.0,
      "run.init_from": str(tmp_path / "run"),
      "run.num_steps": 1,
      "run.batch_size": 8,
      "run.steps_per_call": 1,
      "run.log_every": 1,
      "run.checkpoint_every": 1,
      "eval.depth_factor": 0,
    },
  )
  train.run(config, tmp_path / "tuned", "train")
  settings = config_lib.resolve(config)
  built = program.make_program(settings, jax.devices()[:1])
  shapes = built.abstract_state.params
  params = [
    restore.params(tmp_path / name, step, shapes)
    for name, step in (("run", 0), ("tuned", 1))
  ]
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), *params
  )


def test_an_imported_run_may_be_moved(tmp_path):
  """Also where another model is imported to its old place."""
  before, now = tmp_path / "run", tmp_path / "other place"
  convert.import_folder(examples.make_folder(tmp_path / "hub"), before)
  recorded = language_model.load(before)
  before.rename(now)
  for _ in range(2):
    found = language_model.load(now)
    assert found.tokenizer.key == recorded.tokenizer.key
    assert found.facts["tokenizer"] == str(now / "hub" / "tokenizer.json")
    (before / "hub").mkdir(parents=True, exist_ok=True)
    text = (now / "hub/tokenizer.json").read_text().replace('"w29"', '"x"')
    (before / "hub/tokenizer.json").write_text(text)


def test_two_exports_do_not_share_a_folder(tmp_path):
  """The second removed the files of the first, and mixed them with its own."""
  run, out, partial = (tmp_path / x for x in ("run", "out", ".out.partial"))
  convert.import_folder(examples.make_folder(tmp_path / "hub"), run)
  partial.mkdir()
  (partial / "config.json").write_text("of another export")
  with pytest.raises(UserError, match="out.partial: another export is writing"):
    convert.export_run(run, out, convert.Export("ouro"))
  assert (partial / "config.json").read_text() == "of another export"
  assert not out.exists()


def settings_of_words(folder):
  """Settings of a run on a text of words, whose tokenizer is a file."""
  words, text = folder / "words.json", folder / "text.txt"
  examples.write_tokenizer(words)
  text.write_text("w1 w2 w3\n\n" * 3000)
  return {
    "model.width": 16, "model.num_heads": 2, "model.num_layers": 1,
    "model.num_loops": 2, "task.train_files": str(text),
    "task.tokenizer": str(words), "task.sequence_length": 8,
    "optim.warmup_steps": 0, "run.num_steps": 1, "run.batch_size": 8,
    "run.steps_per_call": 1, "run.log_every": 1, "run.checkpoint_every": 1,
    "eval.depth_factor": 0,
  }  # fmt: skip


def test_a_run_is_read_without_the_file_of_its_tokenizer(tmp_path):
  settings = settings_of_words(tmp_path)
  words = tmp_path / "words.json"
  config = config_lib.make("looped", "text")
  config_lib.override(config, settings)
  train.run(config, tmp_path / "run", "train")
  there = language_model.load(tmp_path / "run")
  assert there.facts["tokenizer"] == str(words)
  (tmp_path / "run").rename(tmp_path / "moved")
  for content in (None, "{}"):  # It is gone, and another file.
    words.unlink() if content is None else words.write_text(content)
    found = language_model.load(tmp_path / "moved")
    assert found.tokenizer.key == there.tokenizer.key
    config = config_lib.config_of_run(tmp_path / "moved", "")
    assert score_model(config, tmp_path / "moved", limit=1)["metrics"]


def test_a_run_is_resumed_without_the_file_of_its_tokenizer(tmp_path):
  settings, file = settings_of_words(tmp_path), tmp_path / "words.py"
  file.write_text(
    "from loopjax import config\n"
    "def get_config():\n"
    "  result = config.make('looped', 'text')\n"
    f"  config.override(result, {settings!r})\n"
    "  return result\n"
  )
  command = [f"--config={file}", "--mode=train"]
  assert main.main([*command, f"--workdir={tmp_path / 'run'}"]) == 0
  (tmp_path / "words.json").unlink()
  moved = (tmp_path / "run").rename(tmp_path / "moved")
  command += [f"--workdir={moved}", "--extend", "--config.run.num_steps=2"]
  assert main.main(command) == 0
  assert workdir_lib.read_summary(moved)["steps"] == 2
  # So that the same command resumes it again, here or there.
  recorded = workdir_lib.read_config(moved)["task"]["tokenizer"]
  assert recorded == settings["task.tokenizer"]


def test_a_teacher_is_an_imported_run_and_no_folder(tmp_path):
  folder = examples.make_folder(tmp_path / "hub")
  convert.import_folder(folder, tmp_path / "run", sequence_length=9)
  label = "run.teacher=x"
  there = config_lib.of_run(tmp_path / "run", label)
  built = program.make_program(there, jax.devices()[:1])
  named = there._replace(run=there.run.__class__(teacher=str(tmp_path / "run")))
  step, params = teacher.load(named, built.abstract_state.params, None)
  assert step == 0
  table = examples.tensors_of("ouro")["model.embed_tokens.weight"]
  assert np.array_equal(params["token_embedding"]["embedding"], table)
  with pytest.raises(UserError, match="loopjax.hub import"):
    config_lib.of_run(folder, label)


PLAIN = {"mlp": "swiglu", "exit_gate": "none", "loop_norm": "final_only"}


@pytest.mark.parametrize(("model", "arguments", "message"), [
  (
    {"name": "disco"}, ["--layout=ouro"],
    "no layout fits model.name='disco'; there are some for looped, plt, recur",
  ),
  (
    {"name": "recurrent"}, ["--gguf"],
    "no layout of a GGUF file fits model.name='recurrent'; there are some for"
    " looped$",
  ),
  (
    {**PLAIN, "num_loops": 1, "mlp": "gelu"}, [],
    "no layout fits its model; ouro: .*; nanbeige, llama, mistral: model.mlp=",
  ),
  (
    {**PLAIN, "num_loops": 1, "mlp": "gelu"}, ["--layout=llama"],
    "--layout=llama: model.mlp='gelu': .*; no layout fits its model$",
  ),
  (
    {**PLAIN, "num_loops": 1}, [],
    "--layout=NAME: is missing; its model fits nanbeige, llama, mistral$",
  ),
  (
    {**PLAIN, "num_loops": 1}, ["--gguf"],
    "--layout=NAME: is missing; its model fits llama$",
  ),
  (
    {**PLAIN, "num_loops": 3}, ["--layout=llama"],
    "--layout=llama: model.num_loops=3: the layout requires 1; its model fits"
    " nanbeige$",
  ),
  (
    {**PLAIN, "num_loops": 3}, ["--layout=huginn_raven"],
    "--layout=huginn_raven: is not a layout of model.name='looped'; its model"
    " fits nanbeige$",
  ),
])  # fmt: skip
def test_an_export_names_the_layouts_that_fit(
  model, arguments, message, tmp_path, capsys
):
  config = config_lib.make(model.get("name", "looped"), "text")
  config_lib.override(config, {f"model.{k}": v for k, v in model.items()})
  (tmp_path / "run").mkdir()
  plain = json.dumps(config_lib.to_dict(config))
  (tmp_path / "run" / "config.json").write_text(plain)
  run, out = str(tmp_path / "run"), tmp_path / "out"
  assert hub.main(["export", run, str(out), *arguments]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and re.search(message, error.strip())
  assert not out.exists()


def test_a_run_of_another_task_is_not_exported(tmp_path):
  config = load_config("multihop_disco", "smoke,model.name=looped")
  plain = json.dumps(config_lib.to_dict(config))
  (tmp_path / "config.json").write_text(plain)
  with pytest.raises(UserError, match="its task is not 'text'"):
    convert.export_run(tmp_path, tmp_path / "out", convert.Export("ouro"))


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_parameter(name):
  _, shapes = abstract(config_of(name, tied=False))
  rows = {row.ours for row in convert.LAYOUTS[name].rows}
  assert rows == {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
  }


@pytest.mark.parametrize(("layers", "count"), [(24, 269), (48, 533)])
def test_tensors_of_the_published_models(layers, count):
  config = config_of("ouro", num_layers=layers)
  _, shapes = abstract(config)
  parts = weights._parts(convert.LAYOUTS["ouro"], shapes, 4)
  names = [name for part in parts for name in part.names()]
  assert len(set(names)) == len(names) == count == 11 * layers + 5
  assert PRECISIONS["bfloat16_params"].params == jnp.bfloat16


def test_huginns_random_state_comes_along():
  """Its code draws it with `std` times the scale of embeddings."""
  layout = convert.LAYOUTS["huginn_raven"]
  theirs = json.loads(json.dumps(convert.config_of(
    layout, config_of("huginn_raven", state_std=0.3, input_scale=4.0), 128
  )))  # fmt: skip
  assert theirs["init_values"]["std"] == pytest.approx(0.3 / 4.0)
  got = convert.settings_of(layout, theirs)
  assert got["state_std"] == pytest.approx(0.3)


def test_huginns_biases_need_as_many_keys_as_queries():
  """They are one tensor; without them, heads may share keys."""
  layout = convert.LAYOUTS["huginn_raven"]
  grouped = config_of("huginn_raven", num_key_value_heads=1)
  with pytest.raises(UserError, match="num_key_value_heads=1: with model.qk_b"):
    convert.config_of(layout, grouped, 128)
  plain = dataclasses.replace(grouped, qk_bias=False)
  assert convert.config_of(layout, plain, 128)["num_key_value_heads"] == 1
