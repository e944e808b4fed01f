"""Settings know who set them: a preset's give way to the user's."""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import re

import jax
import pytest
from tests_support import CONFIGS, command, load_config, refused

import loopjax
from loopjax import checks, describe, sections
from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.commands import command_line
from loopjax.data import TASKS
from loopjax.models import MODELS
from loopjax.optim import chain
from loopjax.sweep import items as items_lib

# Besides every listed value of a setting, and every flag.
NATURAL = {
  "eval.every": (0,), "eval.depth_factor": (0, 1), "eval.num_examples": (0,),
  "eval.num_loops": (1,), "model.num_cycles": (1,), "model.num_global_slots":
  (0,), "model.num_latent_steps": (1,), "model.num_local_slots": (0,),
  "model.num_loops": (1, 2, 16), "model.num_memory_tokens": (0,),
  "model.num_prelude": (0,), "model.ponder_weight":
  (0.0, 0.1), "model.scale_from_step": (1,), "model.window": (16,),
  "optim.clip_norm": (0.0,), "optim.ema_decay": (0.0,), "optim.frozen": ("x",),
  "optim.warmup_steps": (0,), "optim.weight_decay": (0.0,), "run.batch_size":
  (1, 8), "run.init_from": ("runs/x",), "run.num_microbatches": (2,),
  "run.seed": (1,), "run.steps_per_call": (1,), "task.max_revealed": (0.0,),
  "task.num_train_mazes": (1000,), "task.num_train_puzzles": (0, 1000),
  "task.sequence_length": (64,), "task.test_files": ("x.txt",),
  "task.test_share": (0.1,), "task.train_files": ("x.txt",),
  "task.tokenizer": ("bytes",),
}  # fmt: skip
# Changes that a user must hear about: the change itself would do nothing, or it
# needs what only the user knows.
NEEDED = {
  "eval.answer=.*": "no effect while eval.num_starts=1",
  "eval.execution=while": "no effect: no token halts in this model",
  "model.distill=.*": "needs run.teacher",
  "model.name=melt": "needs run.teacher",
  "model.injection=add": "no effect while model.num_loops=1",
  "model.gradient_cut=.*": "no effect while model.num_with_gradient=0",
  "model.positions=.*": "no effect while model.mixer='mlp'",  # Of mazes.
  "task.augment=True": "no effect while task.num_train_mazes=0",
  "task.check_solutions=True": "no effect while task.test_csv=''",
  "task.on_bad_row=skip": "no effect while task.test_csv=''",
  "task.on_overlap=error": "no effect while task.test_csv=''",
  "optim.frozen=x": "matches no parameter",
  # Sizes of another task that the preset's do not fit.
  "task.name=(arithmetic|depo)": "must be a multiple of 5",
  "task.name=(depo|gsm)": "task.context_length=.* is too short",
  "task.name=depo": "fewer than the 60 of an answer",
  "model.window=16": "fewer than the 12 of an answer",  # Of Depo.
}


@pytest.mark.long
def test_every_natural_change_of_a_preset_runs_or_says_what_is_missing(
  monkeypatch,
):
  listed = {"model.name": MODELS, "task.name": TASKS}
  one_of = checks.one_of

  def recorded(section, record, **allowed):
    listed.update({f"{section}.{name}": x for name, x in allowed.items()})
    one_of(section, record, **allowed)

  monkeypatch.setattr(checks, "one_of", recorded)
  unexpected, used, num = [], set(), 0
  for name in CONFIGS:
    base = load_config(name, "tiny")
    config_lib.resolve(base)
    flat = sections.flatten(base)
    changes = [
      (key, value)
      for known in (dict(listed), NATURAL)
      for key, values in known.items()
      for value in values
    ]
    changes += [(k, not v) for k, v in flat.items() if isinstance(v, bool)]
    for key, value in changes:
      if key not in flat:
        continue
      num += 1
      config = copy.deepcopy(base)
      try:
        with contextlib.redirect_stderr(io.StringIO()):
          config_lib.set_by_user(config, {key: value})
          config_lib.resolve(config)
      except loopjax.errors.UserError as error:
        known = [
          change
          for change, message in NEEDED.items()
          if re.fullmatch(change, f"{key}={value}")
          and re.search(message, str(error))
        ]
        used.update(known)
        if not known:
          unexpected.append(f"{name}: {key}={value}: {error}")
  assert not unexpected, "\n".join(unexpected)
  assert used == NEEDED.keys()
  assert num > 1300


def resolved(name, arg):
  settings = config_lib.resolve(load_config(name, arg))
  settings.check_schedule()
  return settings


def test_a_preset_gives_way_to_the_user_and_a_line_says_it(capsys):
  config = load_config("lm_looped", "tiny,optim.name=adamw")
  settings = config_lib.resolve(config)
  line = (
    "note: the preset's optim.muon_learning_rate=0.02 does not apply with"
    " optim.name='adamw'; set to 0.002\n"
  )
  assert capsys.readouterr() == ("", line)
  assert settings.optim.muon_learning_rate == 0.002
  assert settings.plain["optim"]["muon_learning_rate"] == 0.002
  # The config says the same now, and what it resolves to says nothing more.
  assert config_lib.resolve(config) == settings
  stored = config_lib.make("looped", "text")
  config_lib.override(stored, sections.flatten(settings.plain))
  assert config_lib.resolve(stored).plain == settings.plain
  assert capsys.readouterr().err == ""


def test_a_rate_names_what_it_applies_to():
  config = load_config("lm_melt", "tiny,optim.rates=('gate=2','mlp/gate=3')")
  with refused("'mlp/gate=3' applies to no parameter of this model"):
    config_lib.resolve(config)


@pytest.mark.parametrize(
  ("name", "arg", "key", "value"),
  [
    ("sudoku_utm", "nine,task.max_revealed=0.0", "task.num_revealed_examples",
     0),
    ("sudoku_utm", "nine,task.num_revealed_examples=0", "task.max_revealed",
     0.0),
    ("lm_looped", "tiny,model.num_loops=1", "model.exit_gate", "none"),
    ("lm_melt", "tiny,model.gate=last", "optim.rates", []),
    ("sudoku_utm", "tiny,model.name=transformer", "eval.depth_factor", 0),
    ("lm_looped", "tiny,run.num_steps=40", "optim.warmup_steps", 4),
    ("sudoku_utm", "tiny,run.num_steps=600", "model.ponder_warmup_steps", 200),
  ],
)  # fmt: skip
def test_what_gives_way(name, arg, key, value, capsys):
  settings = resolved(name, arg)
  assert sections.flatten(settings.plain)[key] == value
  lines = capsys.readouterr().err.splitlines()
  (line,) = [x for x in lines if " keeps of " not in x]
  assert f" {key}=" in line


def test_a_setting_crosses_only_to_what_means_the_same(capsys):
  """DiscoLoop's epsilon is of a norm, UTM's ends a token's loops."""
  for arg, key, expected, line in (
    ("multihop_disco:utm", "epsilon", 0.05, "width=384, num_heads=6, mlp_rat"),
    ("sudoku_utm:disco", "epsilon", 1e-6, "width=64, num_heads=8, mlp_ratio="),
    ("lm_looped:recurrent", "loop_norm", "coda", "width=128, num_layers=2, "),
  ):
    name, family = arg.split(":")
    config = load_config(name, f"tiny,model.name={family}")
    before = name.partition("_")[2]
    said = f"note: model.name={family!r} keeps of {before!r}: {line}"
    assert capsys.readouterr().err.startswith(said)
    assert config.model[key] == expected


def test_what_a_reset_makes_moot_is_reset_too(capsys):
  config = load_config("lm_looped", "tiny,model.num_loops=1")
  config_lib.override(config, {"model.entropy_weight": 0.1})
  model = config_lib.resolve(config).model
  assert (model.exit_gate, model.entropy_weight) == ("none", 0.05)
  lines = capsys.readouterr().err.splitlines()
  assert [line.split("=")[0] for line in lines] == [
    "note: the preset's model.exit_gate",
    "note: the preset's model.entropy_weight",
  ]


@pytest.mark.parametrize(
  ("name", "arg", "message"),
  [
    ("lm_looped", "optim.name=adamw,optim.muon_learning_rate=0.02",
     "muon_learning_rate has no effect while optim.name='adamw'"),
    # Even to the preset's own value: it was asked for.
    ("lm_looped", "eval.every=0,eval.num_examples=128",
     "num_examples has no effect while eval.every=0"),
    ("lm_looped", "model.num_loops=1,model.exit_gate=joint",
     "exit_gate='joint' needs model.num_loops of at least 2"),
    ("lm_melt", "model.gate=last,optim.rates=('latent_gates=4',)",
     "optim.rates: 'latent_gates=4' applies to no parameter"),
    # Though the family freezes the gate.
    ("lm_looped", "model.exit_gate=unused,optim.frozen=heads",
     "optim.frozen='heads' matches no parameter"),
    ("sudoku_utm", "model.name=transformer,eval.depth_factor=4",
     "eval.depth_factor=4: num_loops=48 must be 1 to 12"),
    ("sudoku_utm", "model.name=adaptive,model.norm=derf_utm",
     "model.norm='derf_utm' is not one of"),
    ("sudoku_utm", "run.num_steps=60,optim.warmup_steps=60",
     "optim.warmup_steps=60 must be less than run.num_steps=60"),
    ("sudoku_utm", "model.ponder_weight=0.1,model.ponder_warmup_steps=100000",
     "ponder_warmup_steps=100000 must be less than run.num_steps="),
    ("lm_looped", "optim.schedule=constant,optim.warmup_steps=100000",
     "optim.warmup_steps=100000 must be at most run.num_steps="),
    ("lm_looped", "eval.execution=while", "eval.execution='while' has no eff"),
    ("lm_looped", "eval.depth_factor=0,eval.depth_examples=5",
     "eval.depth_examples has no effect while eval.depth_factor=0"),
    ("lm_looped", "optim.weight_decay=0.0,optim.decay=matrices",
     "optim.decay has no effect while optim.weight_decay=0.0"),
    ("depo_sleep", "model.num_loops=1,model.injection=add",
     "model.injection has no effect while model.num_loops=1"),
    # What only the user set does nothing beside the preset's.
    ("maze_trm", "model.num_heads=4",
     "num_heads has no effect while model.mixer='mlp'"),
    ("lm_looped", "optim.schedule=sine", "optim.schedule='sine' is not one"),
  ],
)  # fmt: skip
def test_only_settings_of_the_user_contradict_each_other(
  name, arg, message, capsys
):
  with refused(message):
    resolved(name, f"tiny,{arg}")
  lines = capsys.readouterr().err.splitlines()
  assert all(" keeps of " in line for line in lines)


def test_presets_and_changes_are_not_the_users():
  """What contradicts itself in a config file is its author's mistake."""
  config = load_config("lm_looped", "tiny,second_stage")
  config_lib.override(config, {"optim.name": "adamw"})
  with refused("optim.muon_learning_rate has no effect"):
    config_lib.resolve(config)


def test_every_way_of_the_command_line_is_the_users(capsys):
  flag = "--config.optim.muon_learning_rate=0.02"
  with refused("optim.muon_learning_rate has no effect"):
    options = command_line.ConfigParser("test", "").parse_config(
      ["--config=configs/lm_looped.py:tiny,optim.name=adamw", flag]
    )
    config_lib.resolve(options.config)
  entry = "--config=configs/lm_looped.py:tiny"
  flags = ("--json", "--config.eval.every=0")
  assert command(describe.main, entry, *flags) == 0
  output, error = capsys.readouterr()
  assert json.loads(output)["parameters"]
  assert error.count("note: the preset's eval.num_examples=128 does not") == 1
  assert error.count("\n") == 1
  assert command(describe.main, entry, *flags, "--config.eval.num_examples=1")
  assert "error: eval.num_examples has no effect" in capsys.readouterr().err


def test_items_of_a_sweep_are_the_users(capsys):
  names = config_lib.axis("optim.name", "adamw", "muon")
  seeds = config_lib.axis("run.seed", 0, 1)
  items = {"optimizers": config_lib.product(names, seeds)}

  def made(arg):
    return items_lib.make_items(
      load_config("lm_looped", arg), lambda config: items, "optimizers", {}
    )

  adamw, again, muon, _ = made("tiny")
  assert adamw.overrides == {"optim.name": "adamw", "run.seed": 0}
  for item in (adamw, again):
    assert item.config["optim"]["muon_learning_rate"] == 0.002
  assert muon.config["optim"]["muon_learning_rate"] == 0.02
  assert capsys.readouterr().err.count("\n") == 1  # For both items.
  with refused("optim.muon_learning_rate has no effect"):
    made("tiny,optim.muon_learning_rate=0.02")  # Copies remember it.


def test_arguments_in_python_are_the_users(capsys):
  sizes = {"width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 2}
  model = loopjax.build("recurrent", **sizes, relaxed_rank=2)
  assert model.about.settings.model.depth == "fixed"
  assert capsys.readouterr().err == (
    "note: the default model.depth='poisson_lognormal' does not apply with"
    " model.relaxed_rank=2; set to 'fixed'\n"
  )
  with refused("model.relaxed_rank=2 needs model.depth='fixed'"):
    loopjax.build("recurrent", **sizes, relaxed_rank=2, depth="poisson")


def test_a_config_remembers_who_set_what_beside_its_values():
  config = load_config("sudoku_utm", "tiny,run.seed=3")
  assert "run.seed" in config_lib.overrides.by_user(copy.deepcopy(config))
  copied = config.copy_and_resolve_references()
  assert config_lib.overrides.by_user(copied) == {"run.seed"}
  same = load_config("sudoku_utm", "tiny")
  config_lib.override(same, {"run.seed": 3})
  assert config == same and config.to_json() == same.to_json()


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_defaults_fit_together(task):
  settings = config_lib.resolve(config_lib.make("looped", task))
  assert settings.optim.warmup_steps < settings.run.num_steps


# Another value of each setting of section optim, and what makes it matter.
OPTIM = {
  "name": ("adam_atan2", {}), "learning_rate": (0.5, {}),
  "final_learning_rate": (0.25, {}), "schedule": ("linear", {}),
  "muon_learning_rate": (0.5, {"name": "muon"}),
  "muon_momentum": (0.5, {"name": "muon"}), "warmup_steps": (3, {}),
  "warm_again": ((4,), {"warmup_steps": 2}), "b1": (0.5, {}), "b2": (0.5, {}),
  "cooldown_fraction": (0.5, {"schedule": "wsd"}), "eps": (0.5, {}),
  "weight_decay": (0.5, {}), "decay": ("all", {}), "clip_norm": (0.5, {}),
  "rates": (("embedding=0.5", "norm=2"), {}), "ema_decay": (0.5, {}),
  "frozen": ("token_embedding", {}),
  **{
    f"lora_{name}": (value, {"lora_rank": 2})
    for name, value in (
      ("rank", 3), ("alpha", 2.0), ("targets", "mlp/[a-z]+/kernel"),
      ("whole", "norm"),
    )
  },
}  # fmt: skip


@pytest.mark.manual
def test_every_setting_of_the_optimizer_changes_the_train_step():
  """Each alone; settings of models and tasks are in tests of these."""
  assert OPTIM.keys() == {x.name for x in dataclasses.fields(chain.Config)}

  @functools.cache
  def text(changes):
    config = config_lib.make("looped", "automaton")
    small = {
      "model.width": 16, "model.num_layers": 1, "model.num_heads": 2,
      "run.num_steps": 10, "run.batch_size": 4, "run.steps_per_call": 1,
      "optim.warmup_steps": 1, "optim.decay": "matrices",
    }  # fmt: skip
    config_lib.set_by_user(config, small)
    config_lib.set_by_user(config, dict(changes))
    settings = config_lib.resolve(config)
    program = program_lib.make_program(settings, jax.devices()[:1])
    batch = settings.task_module.abstract_batch(settings.task, 4)
    rows = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), batch
    )
    return program.train.lower(program.abstract_state, rows, {}).as_text()

  def named(values):
    return tuple((f"optim.{name}", value) for name, value in values.items())

  assert not [
    name
    for name, (value, under) in OPTIM.items()
    if text(named(under)) == text(named({**under, name: value}))
  ]
