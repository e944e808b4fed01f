"""MELT and Sleep made from an imported transformer: initially the same."""

import pathlib

import hub_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests_support import ROOT, command, load_config, long_case, refused

import loopjax
from loopjax import config as config_lib
from loopjax import main, train
from loopjax.hub import convert
from loopjax.models import looped, melt, sleep, starting
from loopjax.nn import lora
from loopjax.saved import trained
from loopjax.sweep import __main__ as sweep
from loopjax.sweep import items as items_lib

MELT, SLEEP = (
  f"--config={ROOT / 'configs' / name}"
  for name in ("lm_melt_tune.py", "lm_sleep.py")
)
SHORT = (
  "run.num_steps=2,run.log_every=1,run.checkpoint_every=2,run.batch_size=8,"
  "optim.warmup_steps=0,eval.every=0,eval.num_examples=0,"
  "task.sequence_length=16"
)
pytestmark = pytest.mark.usefixtures("sketches", "user_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A transformer of two layers; two heads of queries share one of keys."""
  return examples.make_folder(tmp_path_factory.mktemp("hub") / "small", "llama")


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "run"
  convert.import_folder(folder, workdir)
  return workdir


def first_model(name, argument):
  """The model that a config's run begins with."""
  settings = config_lib.resolve(load_config(name, argument))

  @jax.jit
  def make(key):
    rngs = nnx.Rngs(params=key)
    return nnx.split(
      settings.family.Model(settings.model, settings.spec, rngs=rngs)
    )

  graphdef, params = make(jax.random.key(0))
  loaded = trained.read(pathlib.Path(settings.run.init_from)).params
  params = lora.replaced(nnx.to_pure_dict(params), loaded)
  return nnx.merge(graphdef, params)


@pytest.mark.parametrize(
  ("name", "argument"),
  [
    ("lm_melt_tune", "tiny,model.num_loops=1,model.prefill_chunk=4"),
    # The first pass over a window predicts; nine tokens are within it.
    long_case("lm_sleep", "tiny,model.window=9,model.eviction=sliding"),
  ],
)
def test_what_is_made_computes_what_transformers_computes(name, argument, run):
  """Logits of `transformers` (tests/fixtures/make_hub.py)."""
  model = first_model(name, f"{argument},import={run}")
  oracle = examples.oracle("llama")
  logits = jax.jit(lambda x: model(x).logits)(jnp.asarray(oracle["tokens"]))
  np.testing.assert_allclose(logits, oracle["logits"][0], atol=1e-5, rtol=0)


def test_a_transformer_says_nothing_about_loops(run):
  """All else of its model that a family has is the new one's."""
  there = config_lib.of_run(run, "run").model
  assert (there.num_key_value_heads, there.norm_epsilon) == (2, 1e-5)
  for name, loops in (("lm_melt_tune", 3), ("lm_sleep", 4)):
    argument = f"import={run},model.num_loops={loops}"
    model = config_lib.resolve(load_config(name, argument)).model
    assert model.num_loops == loops
    for field in ("width", "num_heads", "head_width", "num_key_value_heads",
                  "norm_epsilon", "mlp", "mlp_ratio", "rope_base", "tied",
                  "num_layers", "norm_order", "exit_gate"):  # fmt: skip
      assert getattr(model, field) == getattr(there, field), field


def test_a_looped_model_says_how_many_loops_it_has():
  theirs = looped.Config(num_loops=3, exit_gate="joint", tied=False)
  for family in (melt, sleep):
    found = starting.settings(theirs, family.Config)
    assert (found["num_loops"], found["exit_gate"]) == (3, "unused")
    assert "dropout" not in found


@pytest.mark.parametrize(
  ("layers", "memories"), [(24, 6), (30, 6), (28, 7), (2, 1), (1, 1), (13, 1)]
)
def test_memories_are_a_quarter_of_the_layers_at_most(layers, memories):
  made = sleep.FAMILY.made_from(looped.Config(num_layers=layers))
  assert made.settings["num_memory_layers"] == memories
  sleep.Config(**made.settings)


@pytest.mark.parametrize(("changes", "message"), [
  ({"qk_norm": True}, "its qk_norm is True, expected False: this family"),
  ({"value_bias": True}, "its value_bias is True, expected False"),
  ({"rope_scaling": (8.0, 1.0, 4.0, 64.0)}, r"its rope_scaling is \(8.0"),
])  # fmt: skip
@pytest.mark.parametrize("family", [melt, sleep])
def test_what_a_family_cannot_compute_is_one_line(family, changes, message):
  theirs = looped.Config(num_loops=1, **changes)
  with refused(message):
    family.FAMILY.made_from(theirs)
  with refused("its model is not of the family 'looped'"):
    family.FAMILY.made_from(sleep.Config())


def test_an_import_that_cannot_be_made_names_itself(run, monkeypatch):
  read = config_lib.config_of_run

  def changed(*arguments):
    config = read(*arguments)
    config_lib.override(config, {"model.qk_bias": True})
    return config

  monkeypatch.setattr(config_lib, "config_of_run", changed)
  with refused("import=.*: its qk_bias is True"):
    load_config("lm_sleep", f"import={run}")


def test_one_command_imports_and_plans_all_phases(folder, tmp_path, capsys):
  argument = f"{MELT}:import={folder}"
  flags = ("--sweep=phases", "--dry_run")
  assert command(sweep.main, argument, *flags, directory=tmp_path) == 0
  said = capsys.readouterr().out
  assert f"imported {folder} to runs/small" in said
  config = load_config("lm_melt_tune", f"import={tmp_path / 'runs/small'}")
  sweeps = items_lib.load_sweeps(MELT.partition("=")[2])
  items = items_lib.make_items(config, sweeps, "phases", {})
  loops, first, second = [item.config for item in items]
  assert [len(item.needs) for item in items] == [0, 1, 2]
  assert [x["model"]["name"] for x in (loops, first, second)] == [
    "looped", "melt", "melt",
  ]  # fmt: skip
  assert [x["run"]["init_fresh"] for x in (loops, first, second)] == [
    "", "^latent_gates/", "",
  ]  # fmt: skip
  assert (first["model"]["alpha"], second["model"]["align_weight"]) == (0, 0.1)


def test_caches_are_compared_from_the_same_loops(run):
  """As many steps each, the transformer's both together; fresh gates alone."""
  config = load_config("lm_melt_tune", f"import={run},run.num_steps=10")
  sweeps = items_lib.load_sweeps(MELT.partition("=")[2])
  items = items_lib.make_items(config, sweeps, "sharing", {})
  assert [len(item.needs) for item in items] == [0, 1, 1, 1, 0]
  found = [
    (x["model"]["name"], x["model"]["num_loops"], x["run"]["num_steps"],
     x["run"]["init_fresh"])
    for x in (item.config for item in items)
  ]  # fmt: skip
  assert found == [
    ("looped", 2, 10, ""), ("looped", 2, 4, ""),
    ("melt", 2, 4, "^latent_gates/"), ("plt", 2, 4, "window_gates"),
    ("looped", 1, 14, ""),
  ]  # fmt: skip
  # The first loop with windows has no place for zoo:novels' exit gate.
  config = load_config("lm_melt_tune", "smoke")
  items = items_lib.make_items(config, sweeps, "sharing", {})
  names = [item.config["model"]["name"] for item in items]
  assert names == ["looped", "looped", "melt", "looped"]


@pytest.mark.manual
@pytest.mark.parametrize("name, melt_at", [("phases", -1), ("sharing", 2)])
def test_sweeps_of_melt_run_and_its_text_can_be_read(
  name, melt_at, run, text, tmp_path
):
  argument = f"import={run},task.train_files={text},{SHORT}"
  config = load_config("lm_melt_tune", argument)
  sweeps = items_lib.load_sweeps(MELT.partition("=")[2])
  items = items_lib.make_items(config, sweeps, name, {}, tmp_path)
  for item in items:
    one = config.copy_and_resolve_references()
    config_lib.override(one, item.overrides)
    train.run(one, tmp_path / item.slug, "train")
  workdir = tmp_path / items[melt_at].slug
  gates = trained.read(workdir).params["latent_gates"]
  assert np.abs(gates["bias"]).max() > 0
  made = loopjax.load(workdir).generate(
    "w1 w2", max_new_tokens=3, temperature=0
  )
  assert 0 < len(made.split()) <= 3


@pytest.mark.manual
def test_one_command_trains_the_memory_of_a_folder(folder, text, tmp_path):
  """`warm_up` leaves the transformer as it was."""
  argument = f"{SLEEP}:smoke,warm_up,import={folder},{SHORT}"
  argument += f",task.train_files={text}"
  flags = ("--mode=train", f"--workdir={tmp_path / 'slept'}")
  assert command(main.main, argument, *flags, directory=tmp_path) == 0
  before = trained.read(tmp_path / "runs" / "small").params
  after = trained.read(tmp_path / "slept").params
  memories = after.pop("memories")
  jax.tree.map(np.testing.assert_array_equal, before, after)
  output = memories["memory"]["fast_weights"]["output"]["kernel"]
  assert np.abs(output).max() > 0
