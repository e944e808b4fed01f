"""Loops around layers of a trained transformer: initially the same model."""

import pathlib

import hub_examples as examples
import jax
import numpy as np
import pytest
from flax import nnx
from tests_support import summary_of

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.hub import __main__ as hub
from loopjax.hub import convert
from loopjax.hub import retrofit as retrofit_lib
from loopjax.hub.retrofit import Retrofit, retrofit
from loopjax.saved import language_model

TOKENS = np.arange(18).reshape(2, 9) % 11
PLAIN = {
  "injection": "none", "state": "input", "loop_norm": "final_only",
  "norm_order": "pre", "depth": "fixed", "num_with_gradient": 0,
  "num_prelude": 1, "num_layers": 2, "num_coda": 1, "num_loops": 1,
}  # fmt: skip
SOURCES = {  # Four layers each.
  "transformer": {"num_loops": 1, "num_layers": 4},
  "transformer of copies": {
    "num_loops": 2, "num_layers": 2, "loop_norm": "final_only",
  },
  "looped": {
    "num_loops": 1, "num_layers": 4, "tied": False, "norm_order": "branch",
    "num_key_value_heads": 1, "qk_norm": True, "value_bias": True,
    "norm_epsilon": 0.01, "exit_gate": "unused",
  },
  "recurrent": PLAIN,
}  # fmt: skip


def settings_of(name):
  """(config, settings) of a source."""
  config = config_lib.make(name.partition(" ")[0], "text")
  values = {"mlp": "swiglu", "width": 16, "num_heads": 2, "init_std": 0.1}
  values |= SOURCES[name]
  config_lib.override(
    config,
    {
      **{f"model.{key}": value for key, value in values.items()},
      "task.sequence_length": 9,
      "optim.warmup_steps": 0,
      "eval.depth_factor": 0,
    },
  )
  return config, config_lib.resolve(config)


def source_of(name, workdir):
  """(a run of zero steps, its logits)."""
  config, settings = settings_of(name)

  @jax.jit
  def run(key):
    rngs = nnx.Rngs(params=key)
    model = settings.family.Model(settings.model, settings.spec, rngs=rngs)
    return nnx.to_pure_dict(nnx.state(model)), model(TOKENS).logits

  params, logits = run(jax.random.key(0))
  convert.write_run(workdir, config, params, workdir, {})
  return workdir, logits


def logits_of(workdir, num_loops=None, tokens=TOKENS):
  found = language_model.load(workdir, num_loops=num_loops)

  def run(params):
    return nnx.merge(found.graphdef, params)(tokens, **found.call).logits

  return jax.jit(run)(found.params)


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "core", "loops"),
  [
    ("transformer", "1:3", 4),
    ("recurrent", "2:3", 4),
    ("transformer of copies", "1:3", 4),
    # The same with the layers of the first.
    pytest.param("looped", "3:4", 4, marks=pytest.mark.manual),
    pytest.param("looped", "1:3", 1, marks=pytest.mark.manual),
    pytest.param("looped", "0:4", 3, marks=pytest.mark.manual),
  ],
)
def test_a_gated_loop_is_the_transformer_at_first(name, core, loops, tmp_path):
  """For any number of loops and any place of the loop."""
  source, expected = source_of(name, tmp_path / "run")
  retrofit(source, tmp_path / "loops", Retrofit(core))
  logits = logits_of(tmp_path / "loops", loops)
  np.testing.assert_allclose(logits, expected, atol=1e-6, rtol=0)


@pytest.mark.long
def test_a_damped_loop_is_the_transformer_with_one_loop(tmp_path):
  """With more loops it is another model, without training."""
  source, expected = source_of("looped", tmp_path / "run")
  out = tmp_path / "loops"
  retrofit(source, out, Retrofit("1:3", update="damped", num_loops=2))
  np.testing.assert_allclose(logits_of(out, 1), expected, atol=1e-6, rtol=0)
  assert np.max(np.abs(logits_of(out) - expected)) > 1e-4


@pytest.mark.long
def test_relaxed_loops_of_full_rank_are_the_layers_they_replace(tmp_path):
  source, expected = source_of("looped", tmp_path / "run")
  far = []
  for rank in (8, 16):
    out = tmp_path / f"rank_{rank}"
    retrofit(source, out, Retrofit("0:4", "relaxed", 2, relaxed_rank=rank))
    far.append(np.max(np.abs(logits_of(out) - expected)))
  assert far[0] > 1e-2 and far[1] < 1e-5


@pytest.mark.parametrize(
  ("update", "num_layers"), [("gate", 2), ("relaxed", 1)]
)
def test_the_loop_has_the_layers_between_the_others(update, num_layers):
  config, _ = settings_of("looped")
  how = Retrofit("1:3", update, 2, relaxed_rank=4 * (update == "relaxed"))
  model = retrofit_lib._set_loop(config, 1, 3, 4, how).model
  assert model.num_layers == num_layers
  assert (model.num_prelude, model.num_coda, model.num_loops) == (1, 1, 2)


@pytest.mark.parametrize(
  ("how", "message"),
  [
    (Retrofit("0:3", "relaxed", 2, relaxed_rank=1), "3 layers cannot be"),
    (Retrofit("0:4", "relaxed", 2), "--update=relaxed needs a positive rank"),
    (Retrofit("0:4", relaxed_rank=1), "other updates have none"),
  ],
)
def test_relaxed_loops_need_a_rank_and_layers(
  how, message, tmp_path, monkeypatch
):
  config, _ = settings_of("looped")
  monkeypatch.setattr(
    retrofit_lib, "read_source", lambda *_: (config, {}, None)
  )
  with pytest.raises(UserError, match=message):
    retrofit(tmp_path / "run", tmp_path / "loops", how)


@pytest.mark.long
@pytest.mark.parametrize("first", ["import", "directly"])
def test_an_imported_model_gets_loops_by_command(first, tmp_path, capsys):
  """With its tokenizer and end token."""
  folder = examples.make_folder(tmp_path / "hub", "llama")
  source, out = folder, str(tmp_path / "loops")
  if first == "import":
    source = tmp_path / "run"
    convert.import_folder(folder, source)
  arguments = ["retrofit", str(source), out, "--core=1:2", "--num_loops=3"]
  assert hub.main(arguments) == 0
  assert "layers 1:2 of" in capsys.readouterr().out
  found = language_model.load(pathlib.Path(out))
  assert found.facts["model"] == "recurrent" and found.facts["num_loops"] == 3
  assert found.tokenizer.end == 0
  oracle = examples.oracle("llama")
  logits = logits_of(pathlib.Path(out), tokens=oracle["tokens"])
  np.testing.assert_allclose(logits, oracle["logits"][0], atol=1e-5, rtol=0)
  summary = summary_of(tmp_path / "loops")
  assert summary["retrofitted"] == str(source) and summary["core"] == "1:2"


@pytest.mark.parametrize(
  ("name", "changes", "core", "message"),
  [
    ("looped", {}, "2:2", "--core=2:2: expected s:t, for layers s to t - 1"),
    ("looped", {}, "1:5", "to t - 1 of 4"),
    ("looped", {}, "1-3", "expected s:t"),
    ("looped", {"num_loops": 2}, "1:3", "num_loops=2: expected a transformer"),
    ("recurrent", {"num_loops": 2}, "1:3", "model.num_loops=2: expected"),
    ("disco", {}, "1:3", "model.name='disco'"),
    (
      "transformer of copies",
      {"loop_norm": "per_loop"},
      "1:3",
      "norms between layers are unsupported",
    ),
  ],
)
def test_what_has_loops_already_is_one_line(
  name, changes, core, message, tmp_path, monkeypatch
):
  monkeypatch.setitem(SOURCES, name, {**SOURCES.get(name, {}), **changes})
  config, settings = settings_of(name)
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype), convert.abstract_params(settings)
  )
  monkeypatch.setattr(
    retrofit_lib, "read_source", lambda *_: (config, params, None)
  )
  with pytest.raises(UserError, match=message) as caught:
    retrofit(tmp_path / "run", tmp_path / "loops", Retrofit(core))
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "loops").exists()


def test_the_command_passes_on_what_is_asked_for(tmp_path, monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(retrofit_lib, "retrofit", lambda *x: asked.append(x))
  source, workdir = tmp_path / "run", tmp_path / "loops"
  flags = ["--core=1:3", "--update=relaxed", "--num_loops=2"]
  arguments = ["retrofit", str(source), str(workdir), *flags]
  assert hub.main([*arguments, "--relaxed_rank=4"]) == 0
  how = Retrofit("1:3", "relaxed", 2, relaxed_rank=4)
  assert [(str(x), y, z) for x, y, z in asked] == [(str(source), workdir, how)]
  assert "layers 1:3 of" in capsys.readouterr().out
