"""From an imported model to a trained one by one command: import=."""

import contextlib
import hashlib
import os
import pathlib
import re
import shutil

import hub_examples as examples
import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from tests_support import ROOT, command, load_config, refused, summary_of

import loopjax
from loopjax import config as config_lib
from loopjax import main, score, sections
from loopjax.generate import __main__ as generate
from loopjax.hub import convert, imported
from loopjax.hub.retrofit import Retrofit, retrofit
from loopjax.run import naming
from loopjax.saved import language_model, trained
from loopjax.sweep import items as items_lib

CONFIG = f"--config={ROOT / 'configs' / 'lm_tune.py'}:smoke"
VOCABULARY = (
  "tokenizer", "end_token", "begin_token", "add_begin_token", "vocab_size",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("sketches", "user_cache")


@pytest.fixture
def folder(tmp_path):
  return examples.make_folder(tmp_path / "models" / "small", "llama")


def config_of(run, *arguments):
  return load_config(
    "lm_tune", ",".join(["smoke", f"import={run}", *arguments])
  )


def flat(config):
  return sections.flatten(config_lib.to_dict(config))


def test_a_config_takes_model_and_vocabulary_from_a_run(folder, tmp_path):
  run = tmp_path / "run"
  convert.import_folder(folder, run)
  there = flat(config_lib.config_of_run(run, "run"))
  found = flat(config_of(run))
  of_model = {key for key in there if key.startswith("model.")}
  assert of_model == {key for key in found if key.startswith("model.")}
  for key in (*of_model, *(f"task.{name}" for name in VOCABULARY)):
    assert found[key] == there[key], key
  assert found["run.init_from"] == str(run)
  # All else is the preset's, and what follows the import is the user's.
  plain = flat(load_config("lm_tune", "smoke"))
  of_run = (*of_model, *(f"task.{name}" for name in VOCABULARY))
  rest = plain.keys() - {key for key in plain if key.startswith("model.")}
  for key in rest - {*of_run, "run.init_from"}:
    assert found[key] == plain[key], key
  for arguments in (
    ("smoke", f"import={run}", "model.dropout=0.1"),
    ("model.dropout=0.1", f"import={run}", "smoke"),
  ):
    changed = load_config("lm_tune", ",".join(arguments))
    assert changed.model.dropout == 0.1
    assert changed.model.width == there["model.width"]


def test_without_an_import_the_model_is_one_that_the_package_has():
  config = load_config("lm_tune", "smoke")
  there = flat(config_lib.config_of_run(pathlib.Path("zoo:novels"), "zoo"))
  for key, value in flat(config).items():
    if key.startswith("model."):
      assert value == there[key]
  assert config.run.init_from == "zoo:novels"


def test_any_config_of_text_can_import(tmp_path):
  """What a preset has for its own family gives way, and a line says it."""
  config = load_config("lm_recurrent", "tiny,import=zoo:novels,run.seed=9")
  assert config.model.name == "looped"
  assert config_lib.resolve(config).run.init_from == "zoo:novels"


def test_the_name_of_a_work_directory_says_what_was_imported():
  config = config_lib.to_dict(load_config("lm_tune", "smoke"))
  names = {
    naming.workdir(f"c.py:{argument}", (), config).name
    for argument in ("smoke", "smoke,import=zoo:novels")
  }
  assert names == {"c-smoke", "c-smoke,init_from=zoo%3Anovels"}


@pytest.mark.parametrize(
  ("name", "argument", "message"),
  [
    ("lm_tune", "import=nowhere", "import=nowhere contains no run: no such"),
    ("lm_tune", "import=zoo:novel", "did you mean 'novels'"),
    ("lm_tune", "import=zoo:depo", "both tasks must be 'text'.* 'depo'"),
    ("lm_looped", "smoke,import=zoo:novels", "must be 'text'.*'arithmetic'"),
    ("lm_tune", "import=zoo:novels,import=zoo:novels_adaptive", "choose one"),
  ],
)
def test_what_cannot_be_imported_is_named(name, argument, message):
  with refused(message):
    load_config(name, argument)


def test_other_commands_name_the_way_for_a_folder(folder):
  with refused("is a Hugging Face Hub folder; import it with loopjax hub"):
    config_of(folder)


def test_one_command_trains_a_folder_of_the_hub_on_one_text(
  folder, text, tmp_path, capsys
):
  """It imports once; the run has the folder's template and end tokens."""
  argument = f"{CONFIG},lora,import={folder},task.train_files={text}"
  argument += ",optim.lora_rank=2,task.sequence_length=16"
  assert command(main.main, argument, directory=tmp_path) == 0
  assert f"imported {folder} to runs/small" in capsys.readouterr().out
  (run,) = (tmp_path / "runs").glob("lm_tune-smoke,lora,*lora_rank=2,*")
  metrics = summary_of(run)["metrics"]
  for split in ("validation", "test"):
    assert metrics[f"{split}/count"] > 0
    assert np.isfinite(metrics[f"{split}/bits_per_byte"])
  source = tmp_path / "runs" / "small"
  kept = sorted(path.name for path in (source / "hub").iterdir())
  assert "tokenizer_config.json" in kept
  assert sorted(path.name for path in (run / "hub").iterdir()) == kept
  model = language_model.load(run)
  assert model.stop_tokens == language_model.load(source).stop_tokens
  # What the folder's model reads, not a row of the training.
  assert model.context_length == 64
  words = ["--prompt", "w1 " * 65, "--max_new_tokens=1"]
  assert generate.main([str(run), *words]) == 2
  assert "65 tokens; the cache has room for 64: see --max_tokens" in (
    capsys.readouterr().err
  )
  before, after = trained.read(source).params, trained.read(run).params
  table = ("token_embedding", "embedding")
  layer = ("layers", "mlp", "value", "kernel")
  for path, same in ((table, True), (layer, False)):
    one, other = before, after
    for key in path:
      one, other = one[key], other[key]
    assert np.array_equal(one, other) == same
  # The same model as a folder again, with the pairs in its matrices.
  convert.export_run(run, tmp_path / "out", convert.Export("llama", "float32"))
  again = convert.read_folder(tmp_path / "out").params
  jax.tree.map(np.testing.assert_array_equal, again, after)
  # Imported before: the same run is the source.
  assert command(main.main, argument, directory=tmp_path) == 0
  assert "imported" not in capsys.readouterr().out
  other = tmp_path / "elsewhere" / "small"
  shutil.copytree(folder, other)  # The same model.
  argument = argument.replace(str(folder), str(other))
  assert command(main.main, argument, directory=tmp_path) == 0
  assert "imported" not in capsys.readouterr().out


def test_new_weights_in_the_same_folder_are_another_model(
  folder, text, tmp_path, capsys
):
  """What a command names is what the folder contains now."""
  words = [f"--config.task.test_files={text}", "--limit=4"]

  def scored(path):
    assert command(score.main, str(path), *words, directory=tmp_path) == 0
    out = capsys.readouterr().out
    return out, re.search(r"bits_per_byte[ =:]+([\d.]+)", out)[1]

  before = scored(folder)[1]
  files = [folder / "model.safetensors"]
  weights = load_file(files[0])
  first = min(weights, key=lambda name: "embed_tokens" not in name)
  weights[first] = weights[first][::-1].copy()
  save_file(weights, files[0], {"format": "pt"})
  out, after = scored(folder)
  assert "imported" in out and after != before
  out, again = scored(folder)
  assert "imported" not in out and again == after
  assert len([*(tmp_path / "runs").glob("small*")]) == 2


def test_files_that_have_not_changed_are_read_once(
  folder, tmp_path, monkeypatch
):
  """And again if only their content has changed, not their size or time."""
  monkeypatch.chdir(tmp_path)
  place = imported.run_of(str(folder))
  read = []
  digest = hashlib.file_digest

  def counted(file, name):
    read.append(file.name)
    return digest(file, name)

  monkeypatch.setattr(hashlib, "file_digest", counted)
  assert imported.run_of(str(folder)) == place and not read
  weights = folder / "model.safetensors"
  before = weights.stat()
  content = bytearray(weights.read_bytes())
  content[-2] ^= 1
  weights.write_bytes(content)
  os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
  assert imported.run_of(str(folder)) != place and read


def test_a_run_that_has_not_ended_is_another_model(folder, tmp_path):
  """A training with the folder's name, of which there is no summary yet."""
  with contextlib.chdir(tmp_path):
    run = tmp_path / "runs" / folder.name
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    place = imported.run_of(str(folder))
  assert re.fullmatch(rf"runs/{folder.name}-[0-9a-f]{{8}}", place)


def test_processes_import_nothing(folder, tmp_path, capsys):
  argument = f"{CONFIG},import={folder}"
  assert command(main.main, argument, "--distributed", directory=tmp_path) == 2
  assert "import it before processes start" in capsys.readouterr().err
  assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_loop_around_layers_trains_on_a_table_of_prompts(folder, tmp_path):
  """With its new gate beside the pairs; the loss is the answers'."""
  loops = tmp_path / "loops"
  retrofit(folder, loops, Retrofit("0:1", num_loops=2))
  table = tmp_path / "mine.csv"
  rows = [f"w{i % 7} w{i % 5},w{i % 11} w3" for i in range(300)]
  table.write_text("\n".join(["question,answer", *rows]) + "\n")
  arguments = [
    f"{CONFIG},lora,import={loops},task.train_files={table}",
    "--config.task.prompt_field=question",
    "--config.task.text_field=answer",
    "--config.task.separator= ",
    "--config.optim.lora_rank=2",
    "--config.optim.lora_whole=update_share",
    "--config.optim.rates=('update_share=10',)",
    f"--workdir={tmp_path / 'run'}",
  ]
  assert command(main.main, *arguments, directory=tmp_path) == 0
  before, after = (trained.read(x).params for x in (loops, tmp_path / "run"))
  assert not before["update_share"].any() and after["update_share"].any()
  for name in ("token_embedding", "final_norm"):
    jax.tree.map(np.testing.assert_array_equal, before[name], after[name])


def test_a_python_program_trains_an_imported_model(folder, tmp_path):
  model = loopjax.load(folder)
  rows = np.arange(4 * 16).reshape(4, 16) % 29 + 1
  batch = {"inputs": rows, "targets": np.roll(rows, -1, 1)}

  def repeated():
    while True:
      yield batch

  tuned = model.fit(repeated(), steps=20, tx=optax.adam(0.01), quiet=True)
  before, after = (
    float(loopjax.loss(x, rows, batch["targets"])[0]) for x in (model, tuned)
  )
  assert after < before - 0.1
  loopjax.save(tuned, tmp_path / "tuned")
  again = loopjax.load(tmp_path / "tuned")
  np.testing.assert_array_equal(again.logits(rows), tuned.logits(rows))
  assert (tmp_path / "tuned" / "hub" / "tokenizer.json").is_file()


def test_the_sweep_retrofit_trains_as_many_layer_applications(monkeypatch):
  """Of two layers, one in a loop that grows to four; and pairs beside it."""
  made = config_lib.make("recurrent", "text")
  config_lib.override(made, {
    "model.num_prelude": 1, "model.num_layers": 1, "model.num_coda": 0,
    "model.loop_norm": "final_only", "model.update": "gate",
    "model.num_loops": 4, "model.depth": "fixed", "model.num_with_gradient": 0,
  })  # fmt: skip
  monkeypatch.setattr(config_lib, "config_of_run", lambda *_: made)
  config = config_of("runs/loops", "run.num_steps=30")
  sweeps = items_lib.load_sweeps(CONFIG.partition("=")[2])
  items = items_lib.make_items(config, sweeps, "retrofit", {})
  assert [item.config["run"]["seed"] for item in items] == 6 * [0, 1]
  found = [item.config for item in items[::2]]
  # (1 + 2 + 4) / 3 applications of one layer, and one of the other.
  steps = [30, 30, 50]
  assert [x["run"]["num_steps"] for x in found] == [*steps, *steps]
  assert [x["model"]["num_loops"] for x in found] == 2 * [4, 1, 1]
  assert [x["model"]["growth_loops"] for x in found] == 2 * [[1, 2], [], []]
  assert [x["model"]["growth_steps"] for x in found[::3]] == 2 * [[10, 20]]
  assert [x["optim"]["lora_rank"] for x in found] == [0, 0, 0, 16, 16, 16]
  assert {x["run"]["init_from"] for x in found} == {"runs/loops"}
