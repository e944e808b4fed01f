"""Config files, presets and their mistakes."""

import copy
import dataclasses
import json

import jax
import pytest
from tests_support import (
  CONFIGS,
  OF_PAPERS,
  ROOT,
  load_config,
  namespace,
  refused,
)

from loopjax import checks, sections
from loopjax import config as config_lib
from loopjax.commands import command_line, describe
from loopjax.config import presets
from loopjax.data import TASKS
from loopjax.errors import UserError
from loopjax.models import MODELS, utm
from loopjax.program import budget
from loopjax.sweep import __main__ as sweep_entry

PRESETS = [
  (name, preset) for name in CONFIGS for preset in namespace(name)["PRESETS"]
]


def scales(*first):
  """All presets: of the first tier, of .ci/run, and those that others make.

  Tests of the sweep make every item of "smoke", and golden runs train them.
  """
  for name, preset in PRESETS:
    marks = () if preset in first else pytest.mark.long
    marks = pytest.mark.manual if preset == "smoke" else marks
    yield pytest.param(name, preset, marks=marks)


# The smallest and the largest.
@pytest.mark.parametrize(("name", "preset"), [*scales("tiny", "paper")])
def test_every_preset_of_every_config_builds(name, preset):
  described = describe.describe(load_config(name, preset))
  assert described["parameters"] == sum(
    described["parameters_by_module"].values()
  )
  flops = described["flops_per_example"]
  assert flops == sorted(flops)
  assert len(described["flops_per_token"]) == len(flops)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_the_presets_and_says_what_they_are(name):
  names = namespace(name)
  needed = {"gpu", "paper"} if "arXiv" in names["__doc__"] else set()
  assert {"tiny", "smoke", *needed} <= names["PRESETS"].keys()
  command = f"\n  loopjax train --config=configs/{name}.py\n"
  assert command in names["__doc__"]
  for preset in names["PRESETS"]:
    assert f"\n  {preset:7} " in names["__doc__"]
  assert (ROOT / "configs" / f"{name}.py").read_text().count("\n") < 150


@pytest.mark.parametrize(
  ("name", "preset"), [x for x in PRESETS if x[1] in ("tiny", "smoke")]
)
def test_small_presets_do_not_inherit_what_accelerators_need(name, preset):
  """Presets are laid over the paper's, whose batches and loops are split."""
  config = load_config(name, preset)
  assert (config.run.num_microbatches, config.loop.execution) == (1, "scan")


@pytest.mark.parametrize(("name", "preset"), [*scales("tiny")])
def test_every_sweep_item_resolves(name, preset):
  base = load_config(name, preset)
  for items in namespace(name).get("sweeps", lambda config: {})(base).values():
    for place, item in enumerate(items):
      earlier = [
        x for x in item.values() if isinstance(x, config_lib.WorkdirOf)
      ]
      assert all(0 <= run.item < place for run in earlier)
      # The sweep puts a directory in its place.
      item = {key: "runs/a" if x in earlier else x for key, x in item.items()}
      config = copy.deepcopy(base)
      config_lib.override(config, item)
      settings = config_lib.resolve(config)
      got = sections.flatten(config_lib.to_dict(config))
      for key, value in item.items():
        expected = list(value) if isinstance(value, tuple) else value
        assert got[key] == expected
      assert settings.family is MODELS[got["model.name"]]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_is_the_smallest_run_that_shows_the_effect(name):
  assert load_config(name, "") == load_config(name, "tiny")
  assert load_config(name, "run.seed=3") == load_config(name, "tiny,run.seed=3")
  settings = config_lib.resolve(load_config(name, ""))
  task = sections.flatten({"task": vars(settings.task)})
  assert not any("hf://" in str(value) for value in task.values())


def test_a_toy_task_has_no_paper():
  mine = {"run": {"num_steps": 7}}
  config = presets.apply(config_lib.make("utm", "sudoku"), "", {"tiny": mine})
  assert config.run.num_steps == 7
  with pytest.raises(
    UserError, match="PRESETS lacks the default preset 'tiny'"
  ):
    presets.apply(config_lib.make("utm", "sudoku"), "", {"small": mine})


def test_the_papers_scale():
  config = load_config("sudoku_utm", "paper")
  settings = config_lib.resolve(config)
  assert settings.model == utm.Config()
  assert settings.optim.learning_rate == 3e-4
  assert settings.run.num_steps >= 59_872
  assert settings.run.batch_size == 256
  assert settings.task.train_csv.startswith("hf://")
  assert describe.describe(config)["parameters"] == 3_177_612


MUON = {"optim.learning_rate": 5e-5, "optim.muon_learning_rate": 2e-3}
PAPERS = {
  # 4 epochs of Sudoku-Extreme (section 4.1 and the authors' code).
  "sudoku_utm": {
    "run.num_steps": 4 * (3_831_994 // 256), "run.batch_size": 256,
    "optim.learning_rate": 3e-4, "optim.warmup_steps": 1000,
    "model.num_loops": 18, "model.num_memory_tokens": 16,
  },
  # The authors' code: 12 rows of 1,024 tokens in 40 microbatches.
  "lm_loopformer": {
    "run.num_steps": 50_000, "run.batch_size": 480,
    "task.sequence_length": 1024, "optim.learning_rate": 6e-4,
    "optim.final_learning_rate": 6e-5, "optim.warmup_steps": 2000,
    "optim.weight_decay": 0.2, "model.width": 2048, "model.num_layers": 3,
    "model.num_heads": 32, "model.num_loops": 8, "model.short_weight": 0.1,
    "model.consistency_weight": 0.1,
  },
  # Huginn-3.5B: 800 billion tokens in batches of 16 million.
  "lm_recurrent": {
    "run.num_steps": 48_000, "run.batch_size": 4096,
    "task.sequence_length": 4096, "optim.learning_rate": 4e-4,
    "model.width": 5280, "model.num_prelude": 2, "model.num_layers": 4,
    "model.num_coda": 2, "model.num_heads": 55, "model.num_loops": 32,
    "model.num_with_gradient": 8, "model.norm_order": "sum",
  },
  # 50,000 epochs of 1,000 puzzles, an example for up to 16 steps; the mixer is
  # an MLP on Sudoku (section 5 and the authors' code).
  "sudoku_trm": {
    "run.num_steps": 65_104, "run.batch_size": 768,
    "task.num_train_puzzles": 1000, "optim.learning_rate": 1e-4,
    "optim.warmup_steps": 2000, "optim.weight_decay": 1.0,
    "optim.ema_decay": 0.999, "model.mixer": "mlp", "model.num_loops": 16,
    "model.num_cycles": 3, "model.num_latent_steps": 6,
  },
  # 50,000 steps of 768; TRM's model and rates.
  "sudoku_eqr": {
    "run.num_steps": 50_000, "run.batch_size": 768,
    "task.num_train_puzzles": 1000, "optim.name": "adam_atan2",
    "optim.learning_rate": 1e-4, "optim.warmup_steps": 2000,
    "optim.weight_decay": 1.0, "optim.b1": 0.9, "optim.b2": 0.95,
    "optim.ema_decay": 0.999, "model.mixer": "mlp", "model.num_loops": 16,
    "model.num_cycles": 3, "model.num_latent_steps": 6,
    "model.start": "normal", "model.damping": 0.05, "model.path_noise": 0.01,
    "model.token_loss": "stablemax", "model.exploration": 0.1,
  },
  "maze_trm": {
    "run.num_steps": 65_104, "run.batch_size": 768, "task.size": 30,
    "task.num_train_mazes": 1000, "optim.learning_rate": 1e-4,
    "model.mixer": "attention", "model.num_latent_steps": 4,
  },
  # 20,000 epochs of 1,000 puzzles, the recipe for eight GPUs.
  "sudoku_hrm": {
    "run.num_steps": 26_040, "run.batch_size": 768,
    "task.num_train_puzzles": 1000, "optim.learning_rate": 1e-4,
    "optim.weight_decay": 1.0, "optim.ema_decay": 0.0, "model.num_loops": 16,
    "model.num_cycles": 2, "model.num_low_steps": 2,
  },
  # 50,000 epochs of 1,000 puzzles.
  "sudoku_urm": {
    "run.num_steps": 390_624, "run.batch_size": 128,
    "task.num_train_puzzles": 1000, "optim.learning_rate": 1e-4,
    "optim.weight_decay": 1.0, "optim.ema_decay": 0.999,
    "model.num_layers": 4, "model.num_loops": 16, "model.num_cycles": 2,
    "model.num_inner_steps": 6,
  },
  # 3,000 epochs of 20,000 sequences (section 3.1), 5,000 in English (A.3).
  "multihop_disco": {
    "run.num_steps": 3000 * 20_000 // 500, "run.batch_size": 500,
    "optim.learning_rate": 1e-4, "model.num_loops": 2,
  },
  "language_disco": {
    "run.num_steps": 5000 * 20_000 // 500, "run.batch_size": 500,
    "model.gate": "learned",
  },
  # Appendix B; 20 billion tokens.
  "lm_disco": {
    "run.num_steps": 19_074, "run.batch_size": 128, "task.name": "text",
    "task.sequence_length": 8192, "task.vocab_size": 129_280,
    "model.width": 1024, "model.num_layers": 24, "model.num_heads": 16,
    "model.num_loops": 4, "model.top_k": 128, "model.mlp": "swiglu",
    "model.rope_base": 1e6, "optim.name": "muon", "optim.learning_rate": 3e-3,
    "optim.eps": 1e-15, "optim.muon_momentum": 0.95, "optim.clip_norm": 1.0,
    "optim.warmup_steps": 1000, "optim.schedule": "linear",
    "optim.final_learning_rate": 1e-5,
  },
  # About 5 billion tokens, 100 an example (section 6.1).
  "automaton_sleep": {
    "run.num_steps": 98_000, "run.batch_size": 512, "task.num_steps": 32, **MUON
  },
  # About 360,000 tokens a step (section A.1).
  "lm_adaptive": {
    "run.num_steps": 38_620, "run.batch_size": 352,
    "task.sequence_length": 1024, "task.vocab_size": 50_304,
    "optim.learning_rate": 3e-3, "model.width": 768, "model.num_layers": 12,
    "model.num_local_slots": 1024, "model.num_global_slots": 512,
    "model.loop_scale": -7.0, "model.loop_update": "literal",
  },
  # MELT-1.6B (table 6).
  "lm_melt": {
    "run.num_steps": 500, "run.batch_size": 32, "task.sequence_length": 10_000,
    "model.chunk_size": 500, "model.num_layers": 24, "model.width": 2048,
    "model.num_loops": 4, "optim.learning_rate": 8e-6,
    "optim.rates": ["latent_gates=62.5"],
    "optim.b2": 0.95, "optim.weight_decay": 1e-4, "optim.clip_norm": 1.0,
  },
  # Stage 1b: 3 trillion tokens, 4 loops (arXiv 2510.25741).
  "lm_looped": {
    "run.num_steps": 715_000, "run.batch_size": 1024,
    "task.sequence_length": 4096, "task.vocab_size": 49_152,
    "model.num_loops": 4, "model.exit_gate": "joint",
    "model.entropy_weight": 0.05, "model.rope_base": 1e4,
    "optim.learning_rate": 3e-4, "optim.schedule": "constant",
    "optim.b2": 0.95, "optim.weight_decay": 0.1,
  },
  "depo_sleep": {"run.batch_size": 128, "task.num_nodes": 75, **MUON},
  "gsm_sleep": {
    "run.batch_size": 256, **MUON, "optim.muon_learning_rate": 1e-3,
    "task.context_length": 3300, "task.min_length": 2000,
    "task.max_length": 3300, "model.window": 2000,
  },
}  # fmt: skip


@pytest.mark.parametrize("name", OF_PAPERS)
def test_presets_have_the_papers_numbers(name):
  config = sections.flatten(config_lib.to_dict(load_config(name, "paper")))
  assert {key: config[key] for key in PAPERS[name]} == PAPERS[name]


def language_models(sweep):
  """(model.name, resolved settings) of every item of a sweep, first seeds."""
  base = load_config("lm_disco", "paper")
  for item in namespace("lm_disco")["sweeps"](base)[sweep]:
    if not item.get("run.seed"):
      config = load_config("lm_disco", "paper")
      config_lib.override(config, item)
      yield config.model.name, config_lib.resolve(config)


def test_the_language_models_have_440_million_parameters():
  """DiscoLoop, appendix B; every number by hand."""
  width, features, layers, vocab = 1024, 2816, 24, 129_280
  matrices = vocab * width + layers * (4 * width**2 + 3 * width * features)
  assert matrices == 440_664_064
  norms = layers * 4 * width + width  # Two around each branch, one at the end.
  gate = width + 1
  found = {
    name: budget.parameters(settings)
    for name, settings in language_models("language_models")
  }
  assert found == {
    "disco": matrices + norms + gate,
    "looped": matrices + norms,
    "ponderlm": matrices + norms,
  }
  assert found["disco"] == 440_764_417  # As the config says.


@pytest.mark.parametrize(
  ("preset", "parameters"),
  [
    ("paper", 1_434_652_673),
    ("looplm_1_4b", 1_434_652_673),
    ("looplm_2_6b", 2_667_974_657),
  ],
)
def test_looplm_has_the_published_sizes(preset, parameters):
  settings = config_lib.resolve(load_config("lm_looped", preset))
  assert budget.parameters(settings) == parameters
  assert f"{parameters:,}" in namespace("lm_looped")["__doc__"]


@pytest.mark.parametrize(
  ("sweep", "measure", "tolerance"),
  [
    ("equal_parameters", budget.parameters, 1e-5),
    ("equal_flops", budget.flops, 1e-3),
  ],
)
def test_language_models_are_compared_at_equal_cost(sweep, measure, tolerance):
  """The tolerances: the gate's parameters, half a feature of each MLP."""
  amounts = {name: measure(s) for name, s in language_models(sweep)}
  assert amounts.keys() == {"disco", "looped", "ponderlm", "transformer"}
  for amount in amounts.values():
    assert amount == pytest.approx(amounts["disco"], rel=tolerance)


def test_the_papers_ponder_cost_warms_up_over_20_000_steps():
  config = load_config("sudoku_utm", "paper")
  sweeps = namespace("sudoku_utm")["sweeps"](config)
  items = [*sweeps["tradeoff"], *sweeps["lambda"], *sweeps["fixed_depth"]]
  steps = {item["model.ponder_warmup_steps"] for item in items}
  assert steps == {0, 20_000}
  # Table 4 at 64 tokens: half the batch, as many puzzles (Figure 4).
  (half,) = [i for i in items if i.get("model.num_memory_tokens") == 64]
  assert half["run.batch_size"] == 128
  assert half["run.num_steps"] == 2 * config.run.num_steps
  assert half["model.ponder_warmup_steps"] == 20_000


def test_without_memory_every_start_mode_and_depth_is_tried():
  """UTM, contribution 1; Muon is an open question of its section 7."""
  sweeps = namespace("sudoku_utm")["sweeps"](load_config("sudoku_utm", "paper"))
  items = sweeps["no_memory"]
  tried = {
    (
      item.get("model.halting", "act"),
      item.get("model.router_bias", -3.0),  # The preset's.
      item["model.num_loops"],
    )
    for item in items
  }
  assert {item["model.num_memory_tokens"] for item in items} == {0}
  starts = [("act", 0.0), ("act", -3.0), ("act", 1.0), ("fixed", -3.0)]
  assert tried == {(*start, loops) for start in starts for loops in (18, 36)}
  assert {item["optim.name"] for item in sweeps["muon"]} == {"adamw", "muon"}
  assert "model.router_bias" not in sweeps["muon"][0]  # The deep start.


def test_the_argument_overrides_the_preset():
  config = load_config("sudoku_utm", "smoke,model.width=32,model.norm=rmsnorm")
  assert (config.model.width, config.model.norm) == (32, "rmsnorm")
  assert config.is_locked
  # Wherever the preset stands.
  assert load_config("sudoku_utm", "model.width=32,smoke").model.width == 32


def test_changes_come_after_a_preset():
  config = load_config("gsm_sleep", "smoke,inserted,run.seed=1")
  assert not config.model.memory_mlp
  assert config.model.width == 16
  config = load_config("gsm_sleep", "inserted")
  assert config.model.width == load_config("gsm_sleep", "tiny").model.width


def test_blocks_lie_on_top_of_each_other():
  below = {"run": {"seed": 1, "num_steps": 2}, "eval": {"every": 3}}
  got = presets.merged(below, {"run": {"seed": 4}, "loop": {"remat": "full"}})
  assert got == {
    "run": {"seed": 4, "num_steps": 2},
    "eval": {"every": 3},
    "loop": {"remat": "full"},
  }
  assert below["run"]["seed"] == 1


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    (
      "huge",
      "unknown preset 'huge'; expected one of extreme, gpu, nine, paper",
    ),
    ("nin", "smoke, tiny; did you mean 'nine'?"),
    ("model.name=lopped", "utm; did you mean 'looped'?"),
    ("tiny,gpu", "presets tiny and gpu exclude each other; choose one"),
    (
      "smoke,model.witdh=3",
      "unknown setting 'model.witdh'; did you mean model.width",
    ),
    (
      "smoke,task.train_files=x",
      "'task.train_files': task.name='sudoku' does not have it, only text",
    ),
    ("smoke,model.width=wide", "model.width='wide'"),
    ("smoke,model.width=1.5", "model.width=1.5"),
  ],
)
def test_wrong_arguments_are_named(arg, message):
  with refused(message):
    load_config("sudoku_utm", arg)


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"model.name": "gpt"}, "model.name='gpt'"),
    ({"task.name": "chess"}, "task.name='chess'"),
    ({"model.halting": "atc"}, "act, ponder, fixed; did you mean 'act'"),
    ({"loop.execution": "while"}, "loop.execution='while'"),
    ({"loop.remat": "some"}, "loop.remat='some'"),
    ({"run.num_steps": 0}, "run.num_steps=0"),
    ({"eval.num_loops": 10**30}, r"eval.num_loops=1(0{30}) must be less than"),
    ({"run.checkpoint_every": 12}, "run.checkpoint_every=12 must be a multi"),
    ({"run.keep_best": 1}, "run.keep_best=1 needs a step"),
    ({"run.init_fresh": "gate"}, "run.init_fresh has no effect"),
    ({"run.init_from": "x", "run.init_fresh": "("}, "run.init_fresh="),
    ({"run.profile_steps": "5"}, "run.profile_steps='5'"),
    ({"run.profile_steps": "5:21"}, "run.profile_steps='5:21'"),
    ({"run.num_microbatches": 0}, "run.num_microbatches=0"),
    ({"eval.checkpoint": "last"}, "eval.checkpoint='last'"),
    ({"run.log_every": 1}, "run.log_every=1 must be a multiple"),
    ({"eval.every": 7}, "eval.every=7"),
    ({"eval.execution": "unroll"}, "eval.execution='unroll'"),
    ({"eval.num_examples": 64}, "eval.num_examples has no effect"),
    ({"mesh.data": 0}, "needs positive sizes"),
    ({"mesh.gather": "once"}, "mesh.gather='once' is not one of step, weigh"),
    (
      {"mesh.tensor": 2, "mesh.gather": "weights"},
      "mesh.gather has no effect while mesh.tensor=2",
    ),
    ({"model.router_bias": float("nan")}, "must be a finite float"),
    ({"model.rope_base": 0.0}, "model.rope_base=0.0"),
    ({"model.mlp_ratio": 0.0}, "model.mlp_ratio=0.0"),
    ({"optim.eps": float("inf")}, "must be a finite float"),
    ({"optim.eps": 0.0}, "optim.eps=0.0"),
    ({"run.seed": None}, "run.seed=None must be of type int"),
    ({"eval.num_loops": -1}, "eval.num_loops=-1"),
    ({"optim.warmup_steps": 20}, "optim.warmup_steps=20"),
  ],
)
def test_impossible_settings_are_named(overrides, message):
  config = load_config("sudoku_utm", "smoke")
  with pytest.raises(UserError, match=message):
    config_lib.override(config, overrides)
    config_lib.resolve(config)


def test_all_mistakes_are_named_at_once():
  """Of one section, of several, and of sections that do not fit together."""
  config = load_config("sudoku_utm", "smoke")
  wrong = {
    "model.num_loops": 0, "model.rope_base": 0.0, "optim.schedule": "x",
    "optim.name": "sgd", "eval.execution": "unroll",
  }  # fmt: skip
  config_lib.override(config, wrong)
  with pytest.raises(UserError) as raised:
    config_lib.resolve(config)
  lines = str(raised.value).splitlines()
  assert len(lines) == len(wrong)
  for key in wrong:
    assert sum(line.startswith(f"{key}=") for line in lines) == 1, key
  config = load_config("sudoku_utm", "smoke")
  config_lib.override(config, {"eval.every": 7, "optim.warmup_steps": 20})
  with pytest.raises(UserError) as raised:
    config_lib.resolve(config)
  assert str(raised.value).count("\n") == 1
  assert "eval.every=7 must be" in str(raised.value)
  assert "optim.warmup_steps=20" in str(raised.value)


def test_a_schedule_ends_with_the_run():
  """Else MELT would be read with a latent that it was not trained with."""
  steps = {"model.alpha": 0.0, "run.num_steps": 20}
  config = load_config("lm_melt", "smoke")
  config_lib.override(config, {**steps, "model.interpolation_steps": 20})
  config_lib.resolve(config)
  config_lib.override(config, {"model.interpolation_steps": 21})
  settings = config_lib.resolve(config)
  with pytest.raises(UserError, match=r"^model.interpolation_steps=21 .*=20: "):
    settings.check_schedule()


def test_a_schedule_that_train_refuses_is_not_described():
  growth = {"model.growth_steps": (20,), "model.growth_loops": (2,)}
  config = load_config("lm_recurrent", "smoke")
  config_lib.override(config, {**growth, "model.depth": "fixed"})
  config_lib.override(config, {"run.num_steps": 20})
  with pytest.raises(UserError, match=r"^model.growth_steps=.* no step would"):
    describe.describe(config)


def test_another_family_keeps_what_both_have():
  config = load_config("multihop_disco", "smoke,model.name=transformer")
  assert config.model.name == "transformer"
  assert config.model.width == 16
  assert "gate" not in config.model
  assert config_lib.resolve(config).family is MODELS["transformer"]
  with pytest.raises(UserError, match="model.name='none' is not one of"):
    load_config("multihop_disco", "smoke,model.name=none")


def test_another_task_keeps_what_both_have():
  config = load_config("lm_disco", "smoke")
  assert (config.task.name, "train_files" in config.task) == (
    "arithmetic",
    False,
  )
  config = load_config(
    "depo_sleep", "smoke,task.context_length=64,task.name=gsm"
  )
  assert config.task.name == "gsm"
  assert config.task.context_length == 64
  assert "num_nodes" not in config.task


@pytest.mark.parametrize(
  ("section", "name"), [("model", "transformer"), ("task", "sudoku")]
)
def test_another_name_on_the_command_line_goes_after_the_colon(section, name):
  config = load_config("multihop_disco", "smoke")
  config[section].name = name
  message = f"{section}.name='{name}' has other settings, so select it after"
  with pytest.raises(UserError, match=message):
    config_lib.resolve(config)


def test_a_tuple_and_text_after_the_colon():
  config = load_config(
    "multihop_disco",
    "smoke,task.num_train_chains=(30,),eval.checkpoint=10,run.seed=3",
  )
  assert config.task.num_train_chains == (30,)
  assert config.eval.checkpoint == "10"
  assert config.run.seed == 3


def test_items_of_a_sweep_are_every_combination():
  rates = config_lib.axis("optim.learning_rate", 1, 2)
  items = config_lib.product(rates, [{}, {"optim.learning_rate": 3, "a.b": 4}])
  assert items == [
    {"optim.learning_rate": 1},
    {"optim.learning_rate": 3, "a.b": 4},
    {"optim.learning_rate": 2},
    {"optim.learning_rate": 3, "a.b": 4},
  ]


@pytest.mark.parametrize("setting", ["eval.num_loops=9", "eval.depth_factor=4"])
def test_a_depth_that_a_transformer_has_not_is_named_before_training(setting):
  argument = f"smoke,model.name=transformer,eval.depth_factor=0,{setting}"
  config = load_config("multihop_disco", argument)
  with pytest.raises(UserError, match=f"{setting}: num_loops=.* must be 1 to"):
    config_lib.resolve(config)


def test_a_seed_means_the_same_numbers_everywhere():
  """JAX's options for others, often set for a whole machine, are refused."""
  config = load_config("sudoku_utm", "smoke")
  for other, name in (
    (jax.default_prng_impl("rbg"), "JAX_DEFAULT_PRNG_IMPL=rbg changes"),
    (jax.threefry_partitionable(False), "JAX_THREEFRY_PARTITIONABLE=False"),
  ):
    with other, pytest.raises(UserError, match=name):
      config_lib.resolve(config)


def test_a_setting_that_is_newer_than_a_run_has_its_default_there(tmp_path):
  config = load_config("lm_looped", "smoke")
  there = config_lib.to_dict(config)
  del there["optim"]["lora_rank"], there["run"]["stop_after"]
  (tmp_path / "config.json").write_text(json.dumps(there))
  config_lib.check_config(tmp_path, config_lib.to_dict(config), "train")
  config_lib.override(config, {"optim.lora_rank": 8})
  with pytest.raises(UserError, match=r"optim.lora_rank \(0 there, 8 here\)$"):
    config_lib.check_config(tmp_path, config_lib.to_dict(config), "train")


def test_a_kept_run_is_a_config(tmp_path):
  """What a result page's runs had, and what --config changes of it."""

  def parsed(*words):
    return command_line.ConfigParser("test", "").parse_config(words).config

  file = ROOT / "benchmarks/runs/depo.runs.json"
  item = json.loads(file.read_text())["items"][0]
  name, settings = item["directory"], item["config"]
  found = sections.flatten(
    config_lib.to_dict(parsed(f"--config={file}#{name}"))
  )
  assert found | sections.flatten(settings) == found
  changed = parsed(f"--config={file}#{name}", "--config.run.seed=5")
  assert changed.run.seed == 5 != settings["run"]["seed"]
  assert config_lib.by_user(changed) == {"run.seed"}
  with refused("expected RUN/config.json, .* did you mean 'depo_n1_s1"):
    parsed(f"--config={file}#depo_n1_s1")
  with refused("expected RUN/config.json, or FILE.runs.json#NAME with one of"):
    parsed(f"--config={file}")
  with refused("no such file"):
    parsed(f"--config={tmp_path}/config.json")
  for place in (f"{tmp_path}/config.json,", f"{file}#{name},", f"{file}:"):
    with refused("a recorded config takes --config.section.key=value"):
      parsed(f"--config={place}run.num_steps=6")
  with refused("a sweep needs a config file, FILE.py"):
    sweep_entry.main.__wrapped__([f"--config={file}#{name}", "--sweep=seeds"])


def test_what_is_wrong_with_a_kept_run_is_said_in_a_line(tmp_path):
  """Its file and name, and not all the other names."""
  record = config_lib.to_dict(config_lib.make("looped", "arithmetic"))
  left = {**record, "task": {**record["task"], "name": "gone"}}
  renamed = {**record, "model": {**record["model"], "gone": 1}}
  configs = [{}, left, renamed, *[record] * 50]
  items = [
    {"directory": f"run_{n}", "config": x} for n, x in enumerate(configs)
  ]
  file = tmp_path / "x.runs.json"
  file.write_text(json.dumps({"items": items}))

  def parsed(name):
    words = [f"--config={file}#{name}"]
    return command_line.ConfigParser("test", "").parse_config(words).config

  assert config_lib.to_dict(parsed("run_3")) == record
  with refused("one of run_0, run_1, run_2, and 50 more$"):
    parsed("zzzzzzzz")
  with refused("x.runs.json#run_0: not the config of a loopjax run"):
    parsed("run_0")
  for name in ("run_1", "run_2"):
    with refused(f"x.runs.json#{name}: .*gone.*of an older version of loopjax"):
      parsed(name)


def beyond(bounds):
  """Values that the bounds of a `checks.setting` exclude, and the words."""
  if bounds.get("least") is not None:
    yield bounds["least"] - 1, f"must be at least {bounds['least']}"
  if bounds.get("above") is not None:
    yield bounds["above"], f"must be > {bounds['above']}"
  if interval := bounds.get("within"):
    low, high = map(float, interval[1:-1].split(","))
    for end, outwards, included in ((low, -1, "["), (high, 1, "]")):
      step = outwards if included in interval else 0
      yield end + step, f"must be in {interval}"


def test_every_bound_of_every_setting_is_kept():
  """Also where a family gives the setting another default."""
  records = [
    *config_lib.overrides.SECTIONS.items(),
    *(("model", family.Config) for family in MODELS.values()),
    *(("task", task.Config) for task in TASKS.values()),
  ]
  num = 0
  for section, record in records:
    for field in dataclasses.fields(record):
      for value, says in beyond(checks.setting_of(record, field.name)):
        given, num = type(field.default)(value), num + 1
        with pytest.raises(UserError) as caught:
          record(**{field.name: given})
        expected = f"{section}.{field.name}={given} {says}"
        assert expected in str(caught.value).split("\n"), record
  assert num > 220
  with refused("model.num_loops=0 must be at least 1"):
    MODELS["ponderlm"].Config(num_loops=0)
