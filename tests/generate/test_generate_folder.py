"""Downloaded folders generate what transformers' models would, and chat."""

import io
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tokenizers")
sys.path.append(str(pathlib.Path(__file__).parents[1] / "hub"))
import hub_examples as examples

from loopjax import config as config_lib
from loopjax import program
from loopjax.generate import __main__ as entry
from loopjax.generate import source
from loopjax.generate.engine import Engine, GenerationRequest, Sampling
from loopjax.hub import convert
from loopjax.saved import trained


def test_folders_are_read_in_float32_on_cpus_alone(monkeypatch):
  assert source.default_dtype() == "float32"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert source.default_dtype() == "bfloat16"


def test_what_multiplies_in_bfloat16_does_in_float32_on_a_cpu(tmp_path, capsys):
  folder, workdir = tmp_path / "hub", tmp_path / "run"
  examples.make_folder(folder)
  exact = source.load_folder(folder, dtype="float32")
  convert.import_folder(folder, workdir, dtype="bfloat16")
  assert not capsys.readouterr().err
  for flags in (
    source.ModelFlags(folder, dtype="bfloat16"),
    source.ModelFlags(workdir),
  ):
    found = source.load(flags)
    assert "computes in float32" in capsys.readouterr().err
    model = nnx.merge(found.graphdef, found.params)
    assert model.config.precision == "float32"
    jax.tree.map(
      lambda x, y: np.testing.assert_array_equal(x, y.astype("bfloat16")),
      jax.tree.map(lambda x: np.asarray(x, np.float32), found.params),
      exact.params,
    )
  settings = config_lib.of_run(workdir, "")
  graphdef, params = program.abstract_model(settings)
  assert trained.for_generation(settings, graphdef, params, "gpu") == (
    graphdef,
    params,
  )


def test_a_published_layout_writes_what_transformers_would(tmp_path):
  """Ouro's logits after its last loop, from Gemma 2 arranged as Ouro."""
  oracle = examples.oracle("ouro")
  folder = examples.make_folder(tmp_path / "ouro")
  language_model = source.load_folder(folder, dtype="float32")
  engine = source.make_engine(language_model, num_slots=2, max_tokens=16)
  tokens = np.asarray(oracle["tokens"])
  found = engine.generate(
    [
      GenerationRequest(tuple(row.tolist()), 1, Sampling(temperature=0))
      for row in tokens
    ]
  )
  expected = jax.nn.log_softmax(oracle["logits"][-1][:, -1])
  for (token,), row in zip(found, np.asarray(expected), strict=True):
    assert token.token == row.argmax()
    assert token.log_probability == pytest.approx(row.max(), abs=1e-4)


@pytest.mark.long
def test_a_chat_goes_on_from_what_was_said(tmp_path, capsys, monkeypatch):
  pytest.importorskip("jinja2")
  folder = examples.make_folder(tmp_path / "ouro")
  template = (
    "{% for m in messages %}{{ m.role[0] == 'u' and 'w1' or 'w2' }}"
    " {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
  )
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"chat_template": template})
  )
  monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6\n\nw7\n"))
  flags = (str(folder), "--temperature=0", "--max_new_tokens=3")
  assert entry.main([*flags, "--dtype=float32", "--chat"]) == 0
  first, second = capsys.readouterr().out.replace("> ", "").split("\n")[:2]
  language_model = source.load_folder(folder, dtype="float32")
  engine = source.make_engine(language_model, num_slots=1, max_tokens=64)
  said = "w1 w5 w6 w2"
  for answer in (first, second):
    (ids,) = language_model.tokenizer.encode([said])
    request = GenerationRequest(
      tuple(ids.tolist()), 3, Sampling(temperature=0), stop_tokens=(0,)
    )
    (tokens,) = engine.generate([request])
    written = [one.token for one in tokens if one.finish != "stop"]
    assert answer.strip() == language_model.tokenizer.decode(written)
    said += f" {answer.strip()} w1 w7 w2"


@pytest.fixture
def short_chat(tmp_path, monkeypatch):
  """Flags of a chat with room for twelve tokens, and the prompts it reads."""
  pytest.importorskip("jinja2")
  folder = examples.make_folder(tmp_path / "ouro")
  template = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"
  (folder / "tokenizer_config.json").write_text(
    json.dumps({"chat_template": template})
  )
  prompts, add = [], Engine.add

  def recorded(engine, request):
    prompts.append(request.prompt)
    return add(engine, request)

  monkeypatch.setattr(Engine, "add", recorded)
  flags = [str(folder), "--temperature=0", "--dtype=float32", "--chat"]
  return [*flags, "--max_tokens=12"], prompts


@pytest.mark.long
def test_a_long_chat_leaves_out_its_beginning(short_chat, capsys, monkeypatch):
  flags, prompts = short_chat
  monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6 w7 w8\nw4 w3 w9\n"))
  assert entry.main([*flags, "--max_new_tokens=3"]) == 0
  said = capsys.readouterr().out
  assert "(dropped the first 2 messages to fit --max_tokens)" in said
  tokenizer = source.load_folder(
    pathlib.Path(flags[0]), dtype="float32"
  ).tokenizer
  expected = tokenizer.encode(["w1 w5 w6 w7 w8 w2", "w1 w4 w3 w9 w2"])
  assert prompts == [tuple(ids.tolist()) for ids in expected]


@pytest.mark.long
def test_a_chat_continues_after_a_message_without_room(
  short_chat, capsys, monkeypatch
):
  """What was said before it stays."""
  flags, prompts = short_chat
  flags = [*flags, "--max_new_tokens=1"]
  long = " ".join(["w5"] * 20)
  monkeypatch.setattr("sys.stdin", io.StringIO(f"w5\n{long}\nw6\n"))
  assert entry.main(flags) == 0
  said = capsys.readouterr().out
  assert "(not read: 22 tokens, but there is room for 12: --max_tokens)" in said
  assert "dropped" not in said
  first, second = prompts
  assert second[: len(first) - 1] == first[:-1]
  assert len(second) > len(first)
  assert entry.main([*flags, f"--prompt={long}"]) == 2  # Nothing to go on from.
