"""Model cards and uploads."""

import json
import shutil
import sys
import types

import hub_examples as examples
import pytest
from safetensors.numpy import load_file, save_file
from tests_support import summary_of

from loopjax.errors import UserError
from loopjax.hub import __main__ as hub
from loopjax.hub import card, convert, push


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """An imported run, and the folder of its export."""
  directory = tmp_path_factory.mktemp("card")
  folder = examples.make_folder(directory / "hub" / "Ouro-tiny")
  run, out = directory / "run", directory / "out"
  convert.import_folder(folder, run, sequence_length=9)
  convert.export_run(run, out, convert.Export("ouro", "float32"))
  return run, out


@pytest.fixture
def copies(made, tmp_path):
  """A copy for changes."""
  return [shutil.copytree(path, tmp_path / path.name) for path in made]


COUNTS = ("documents", "rows", "tokens", "bytes")


def trained(run, **changes):
  """Makes the run a trained one, with scores."""
  path = run / "summary.json"
  summary = json.loads(path.read_text())
  summary.pop("imported")
  summary |= {
    "wall_seconds": 12.4,
    "data": {
      f"{split}_{name}": 1000 * number + len(name)
      for number, split in enumerate(("train", "validation", "test"), 1)
      for name in COUNTS
    },
    "metrics": {
      "validation/loss": 1.5,
      "test/loss": 1.25,
      "test/loss/standard_error": 0.0625,
      "test/loss/source=/home/me/secret.txt": 1.0,
      "test/bits_per_byte": 1.8034,
      "train/loss": 9.0,
    },
    **changes,
  }
  path.write_text(json.dumps(summary))
  config = json.loads((run / "config.json").read_text())
  config["task"]["train_files"] = "/home/me/a|b.txt, /home/me/<c>/*.jsonl"
  (run / "config.json").write_text(json.dumps(config))


@pytest.mark.long
def test_a_card_has_what_the_run_has_written(copies):
  run, out = copies
  trained(run)
  text = card.card(run, out)
  summary = summary_of(run)
  assert text.startswith("---\nlibrary_name: loopjax\n")
  for expected in (
    f"{summary['parameters']:,} parameters",
    "applied 4 times",
    summary["digest"],
    "Sources: a\\|b.txt, \\*.jsonl",
    "| train | 1,009 | 1,004 | 1,006 | 1,005 |",
    "| validation | loss | 1.5000 |",
    "| test | loss | 1.2500 ± 0.0625 |",
    "| test | bits\\_per\\_byte | 1.8034 |",
  ):
    assert expected in text, expected
  for secret in ("/home/me", "9.0000", str(run)):
    assert secret not in text


def test_every_number_of_a_cards_text_is_the_records(copies):
  run, out = copies
  trained(
    run, steps=1800, parameters=54_321, devices="3 TPU v9", revision="abc1234",
    versions={"jax": "9.8", "flax": "7.6"}, wall_seconds=3725.4,
  )  # fmt: skip
  exported = json.loads((out / "config.json").read_text())
  exported[convert.STEP] = 1800
  (out / "config.json").write_text(json.dumps(exported))
  config = json.loads((run / "config.json").read_text())
  config["run"] |= {"batch_size": 48, "seed": 17}
  (run / "config.json").write_text(json.dumps(config))
  model = config["model"]
  text = card.card(run, out)
  assert (
    f"A looped language model: 54,321 parameters, {model['num_layers']} layers"
    f" of width {model['width']}, applied {model['num_loops']} times to each"
    f" token. Its context length is {config['task']['sequence_length']} tokens."
    f" Trained for 1,800 steps of 48 rows with {config['optim']['name']}, seed"
    " 17, in 3,725 s on 3 TPU v9."
  ) in " ".join(text.replace("\\", "").split())
  for number, split in enumerate(("train", "validation", "test"), 1):
    counts = (f"{number},{0:02}{len(x)}" for x in COUNTS)
    assert f"| {split} | {' | '.join(counts)} |" in text
  assert "On all rows of the split, with 4 loops and documents" in text
  assert "Versions: jax 9.8, flax 7.6; revision abc1234" in text
  assert "Tokenizer: tokenizer.json" in text


def test_a_cards_checksums_are_those_of_the_files(copies):
  run, out = copies
  before = card.card(run, out)
  tensors = load_file(out / "model.safetensors")
  tensors["model.norm.weight"][3] += 1
  save_file(tensors, out / "model.safetensors")
  after = card.card(run, out)
  (line,) = [x for x in before.splitlines() if "model.safetensors" in x]
  assert len(line.split()[0]) == 64
  assert line not in after


def test_an_imported_model_names_its_base_and_has_no_scores(made):
  text = card.card(*made)
  assert 'base_model: "Ouro-tiny"' in text
  assert "Imported, not trained here." in text
  assert "The run recorded no scores." in text


def test_a_folder_that_is_no_export_gets_no_card(made, tmp_path, capsys):
  assert hub.main(["card", str(made[0]), str(tmp_path)]) == 2
  assert capsys.readouterr().err == (
    f"error: {tmp_path}: is not a folder that loopjax hub export wrote\n"
  )


def test_scores_of_another_step_are_not_the_models(copies, capsys):
  run, out = copies
  trained(run, steps=800)
  arguments = ["card", str(run), str(out)]
  assert hub.main(arguments) == 2
  error = capsys.readouterr().err
  assert (
    "has the parameters of step 0" in error and "those of step 800" in error
  )
  assert error.count("\n") == 1
  assert not (out / "README.md").exists()
  trained_at = json.loads((out / "config.json").read_text())
  trained_at[convert.STEP] = 800
  (out / "config.json").write_text(json.dumps(trained_at))
  with pytest.raises(UserError, match="is not a folder that"):
    card.card(run, out.parent)  # Nothing exported.
  assert hub.main(arguments) == 0
  assert (out / "README.md").read_text() == card.card(run, out)


@pytest.fixture
def hub_of_others(monkeypatch):
  """The library's calls, without its network."""
  calls = []

  class Api:
    def create_repo(self, name, **options):
      calls.append(("create", name, options))

    def upload_folder(self, **options):
      calls.append(("upload", options.pop("repo_id"), options))
      if "full" in calls[-1][1]:
        raise ConnectionError("no\nroute")
      return types.SimpleNamespace(commit_url="https://hub/commit/1")

  module = types.SimpleNamespace(HfApi=Api)
  monkeypatch.setitem(sys.modules, "huggingface_hub", module)
  return calls


def test_what_is_pushed(copies, hub_of_others, capsys):
  run, out = copies
  card.write(run, out)
  assert hub.main(["push", str(out), "me/model"]) == 0
  assert "https://hub/commit/1" in capsys.readouterr().out
  create, upload = hub_of_others
  assert create == ("create", "me/model", {"private": True, "exist_ok": True})
  assert upload[:2] == ("upload", "me/model")
  assert upload[2]["folder_path"] == str(out)
  patterns = upload[2]["allow_patterns"]
  assert {"config.json", "*.safetensors", "README.md"} <= set(patterns)
  assert {"model.safetensors.index.json", "tokenizer.json"} <= set(patterns)
  assert "*" not in patterns
  push.push(out, "me/model", public=True)
  assert hub_of_others[2][2]["private"] is False


def cut(folder):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(("damage", "name", "message"), [
  (lambda x: (x / "README.md").unlink(), "me/m", "contains no README.md"),
  (lambda x: (x / "config.json").unlink(), "me/m", "contains no config.json"),
  (cut, "me/m", "cannot be read"),
  (lambda x: None, "m", "m: expected OWNER/NAME"),
  (lambda x: None, "me/full", "failed .ConnectionError: no route"),
])  # fmt: skip
def test_mistakes_upload_nothing(damage, name, message, copies, hub_of_others):
  run, out = copies
  card.write(run, out)
  damage(out)
  with pytest.raises(UserError, match=message):
    push.push(out, name)
  assert not hub_of_others or name == "me/full"


def test_the_library_is_asked_for(copies, monkeypatch):
  run, out = copies
  card.write(run, out)
  monkeypatch.setitem(sys.modules, "huggingface_hub", None)
  with pytest.raises(UserError, match=r"pip install 'loopjax\[hub\]'"):
    push.push(out, "me/model")
