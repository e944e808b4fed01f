"""Old names of settings: in a config.json, a config file, on a command line."""

import json
import re

import pytest
from tests_support import ROOT, load_config, refused

from loopjax import config as config_lib
from loopjax.commands import command_line
from loopjax.errors import UserError
from loopjax.models import MODELS
from loopjax.report import runs as runs_lib
from loopjax.run import naming, renames, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.sections import flatten
from loopjax.sweep import items as items_lib

# Values of the settings that have as many as before.
OTHERS = {
  "loop.kind": "unroll", "eval.loop_kind": "while", "optim.gate_rate": 4.0,
}  # fmt: skip
SETTINGS = {k: v for k, v in renames.RENAMED.items() if k[0] != renames.REQUEST}
CASES = [
  (family, old, value)
  for (family, old), renamed in SETTINGS.items()
  for value in renamed.values or [OTHERS.get(old, 1)]
] + [("recurrent", "model.exit_norm", "plain")]


def file_of(family):
  """A config of a family, and the family."""
  family = "looped" if family == renames.ANY else family
  return f"{ROOT}/configs/lm_disco.py:smoke,model.name={family}", family


def parsed(*words):
  return command_line.ConfigParser("main", "").parse_config(words)


def expected(family, old, value):
  """The present name and value."""
  renamed = renames.RENAMED[family, old]
  return renamed.name, renamed.value(value)


@pytest.mark.parametrize("family", MODELS)
def test_the_table_has_present_settings_that_had_other_names(family):
  config = flatten(config_lib.make(family, "text"))
  entries = {
    old: new.name for (of, old), new in SETTINGS.items() if of == family
  }
  assert {*entries.values()} <= config.keys()
  assert not entries.keys() & config.keys()


@pytest.mark.parametrize(
  ("family", "old", "value", "name", "now"),
  [
    ("looped", "model.post_norm", True, "norm_order", "branch"),
    ("transformer", "model.post_norm", False, "norm_order", "pre"),
    ("recurrent", "model.exit_norm", "none", "loop_norm", "final_only"),
    ("recurrent", "model.exit_norm", "coda", "loop_norm", "coda"),
    ("sleep", "model.pass_norm", False, "loop_norm", "final_only"),
    ("sleep", "model.pass_norm", True, "loop_norm", "per_loop"),
    ("sleep", "model.inject", False, "injection", "none"),
    ("sleep", "model.inject", True, "injection", "add"),
    ("sleep", "model.num_passes", 3, "num_loops", 3),
    ("sleep", "model.num_prelude_layers", 1, "num_prelude", 1),
    ("sleep", "model.num_coda_layers", 1, "num_coda", 1),
    ("sleep", "model.gradient_passes", 2, "num_with_gradient", 2),
  ],
)
def test_what_old_settings_mean(family, old, value, name, now):
  assert renames.present(family, {old: value}) == {f"model.{name}": now}


def test_what_old_settings_of_all_families_mean():
  old = {"loop.kind": "unroll", "eval.loop_kind": "while"}
  assert renames.present("melt", old | {"optim.gate_rate": 4.0}) == {
    "loop.execution": "unroll",
    "eval.execution": "while",
    "optim.rates": ["latent_gates=4.0"],
  }
  assert renames.present("melt", {"optim.gate_rate": 1.0}) == {
    "optim.rates": []
  }
  assert renames.present(renames.REQUEST, {"exit": 0.5, "loops": 2}) == {
    "exit_threshold": 0.5,
    "num_loops": 2,
  }


@pytest.mark.parametrize(("family", "old", "value"), CASES)
@pytest.mark.parametrize("place", ["flag", "colon"])
def test_an_old_name_on_the_command_line(family, old, value, place, capsys):
  file, _ = file_of(family)
  if place == "flag":
    options = parsed(f"--config={file}", f"--config.{old}={value}")
  else:
    options = parsed(f"--config={file},{old}={value}")
  name, now = expected(family, old, value)
  assert flatten(config_lib.to_dict(options.config))[name] == now
  assert name in config_lib.by_user(options.config)
  stored = json.loads(json.dumps(options.overrides))
  assert stored == ({name: now} if place == "flag" else {})
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"note: {old} is now {name}")
  assert not renames.RENAMED[family, old].values or repr(now) in line


@pytest.mark.parametrize(
  ("word", "now"),
  [
    ("--config.model.post_norm", "branch"),
    ("--config.model.post_norm=true", "branch"),
    ("--config.model.post_norm=0", "pre"),
  ],
)
def test_an_old_flag_is_written_as_before(word, now):
  file, _ = file_of("looped")
  assert parsed(f"--config={file}", word).config.model.norm_order == now


@pytest.mark.parametrize(
  ("word", "message"),
  [
    ("--config.model.post_norm=often", "norm_order='often' is not one of"),
    ("--config.loop.kind", "--config.loop.kind needs a value"),
    ("--config.model.num_passes=2", "unknown setting 'model.num_passes'"),
  ],
)
def test_mistakes_in_old_names(word, message):
  file, _ = file_of("looped")
  with refused(message):
    config_lib.resolve(parsed(f"--config={file}", word).config)


@pytest.mark.parametrize(("family", "old", "value"), CASES)
def test_an_old_name_in_a_config_json(family, old, value, tmp_path, capsys):
  """The run is read, reported and resumed; a line says the present name."""
  file, of = file_of(family)
  config = parsed(f"--config={file}").config
  name, now = expected(family, old, value)
  config_lib.override(config, {name: now})
  present = config_lib.to_dict(config)
  there = json.loads(json.dumps(present))
  section, _, key = name.partition(".")
  del there[section][key]
  there[section][old.partition(".")[2]] = value
  (tmp_path / "config.json").write_text(json.dumps(there))
  found = config_lib.config_of_run(tmp_path, "RUN")
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"note: {tmp_path}/config.json: {old} is now {name}")
  assert config_lib.to_dict(found) == present
  assert workdir_lib.read_config(tmp_path) == present
  for mode in ("train", "eval"):
    config_lib.check_config(tmp_path, present, mode)
  run = runs_lib.read_run(tmp_path, {name: now}, {})
  assert run.config == present and run.state.startswith("incomplete")
  assert not capsys.readouterr().err and of == present["model"]["name"]


def test_a_setting_that_is_newer_than_a_run_has_its_default_there(tmp_path):
  file, _ = file_of("looped")
  config = parsed(f"--config={file}").config
  there = config_lib.to_dict(config)
  del there["optim"]["lora_rank"], there["run"]["stop_after"]
  (tmp_path / "config.json").write_text(json.dumps(there))
  config_lib.check_config(tmp_path, config_lib.to_dict(config), "train")
  config_lib.override(config, {"optim.lora_rank": 8})
  with pytest.raises(UserError, match=r"optim.lora_rank \(0 there, 8 here\)$"):
    config_lib.check_config(tmp_path, config_lib.to_dict(config), "train")


@pytest.mark.parametrize(("family", "setting"), renames.REMOVED)
def test_a_removed_setting_in_a_config_json(family, setting, tmp_path):
  """At its default it is left out; a run with another value is refused."""
  of = "utm" if family == "sudoku" else family
  task = "sudoku" if of == "utm" else "text"
  present = config_lib.to_dict(config_lib.make(of, task))
  section, _, key = setting.partition(".")
  assert key not in present[section]
  default = renames.REMOVED[family, setting]
  path = tmp_path / "config.json"
  readings = (
    lambda: config_lib.to_dict(config_lib.config_of_run(tmp_path, "RUN")),
    lambda: workdir_lib.read_config(tmp_path),
    lambda: runs_lib.read_run(tmp_path, {}, {}).config,
  )
  there = json.loads(json.dumps(present))
  there[section][key] = default
  path.write_text(json.dumps(there))
  for read in readings:
    assert read() == present
  there[section][key] = "another"
  path.write_text(json.dumps(there))
  for read in readings[:2]:
    with refused(
      f"{setting}='another' is no longer supported: it is always "
      + re.escape(repr(default))
    ):
      read()


def test_a_removed_setting_in_a_sweep(tmp_path):
  """An item that set it is the same run without it; its directory is kept."""
  config = load_config("sudoku_utm", "smoke")
  present = config_lib.resolve(config).plain
  stored = json.loads(json.dumps(present))
  stored["model"]["router_input"] = "block"
  overrides = {"model.router_input": "block", "run.seed": 0}
  item = {"overrides": overrides, "config": stored, "directory": "old"}
  manifest = {"sweep": "x", "config": "c.py", "items": [item]}
  (tmp_path / "sweep-x.json").write_text(json.dumps(manifest))
  (tmp_path / "old").mkdir()
  workdir_lib.write_json(tmp_path / "old" / "config.json", stored)

  def listed():
    ((run,),) = (plan.runs for plan in runs_lib.collect([tmp_path])[0])
    return run

  def planned():
    sweeps = {"x": [{"run.seed": 0}]}
    return items_lib.make_items(config, lambda _: sweeps, "x", {}, tmp_path)

  assert listed().overrides == {"run.seed": 0}
  assert listed().state.startswith("incomplete")
  assert [item.slug for item in planned()] == ["old"]
  manifest["items"][0]["config"]["model"]["router_input"] = "halted"
  (tmp_path / "sweep-x.json").write_text(json.dumps(manifest))
  for read in (listed, planned):
    with refused("sweep-x.json: model.router_input='halted' is no longer"):
      read()


def test_a_task_of_ones_own_may_have_a_removed_name():
  """Only Sudoku's `loss_on` is gone."""
  config = {"model": {"name": "utm"}, "task": {"name": "own", "loss_on": "x"}}
  assert renames.of_config(config) == config


@pytest.mark.parametrize(("family", "old"), SETTINGS)
def test_an_old_and_a_present_name_together_are_refused(family, old, tmp_path):
  file, of = file_of(family)
  name = SETTINGS[family, old].name
  value = next(iter(SETTINGS[family, old].values), OTHERS.get(old, 1))
  now = expected(family, old, value)[1]
  message = f"{old} is the old name of {name}"
  words = f"{old}={value}", f"{name}={now}"
  for first, second in (words, words[::-1]):
    with refused(message):
      parsed(f"--config={file}", f"--config.{first}", f"--config.{second}")
    with refused(message):
      parsed(f"--config={file},{first}", f"--config.{second}")
  for both in ({old: value, name: now}, {name: now, old: value}):
    with refused(message):
      config_lib.override(config_lib.make(of, "text"), both)
    there = config_lib.to_dict(config_lib.make(of, "text"))
    there[old.partition(".")[0]][old.partition(".")[2]] = value
    (tmp_path / "config.json").write_text(json.dumps(there))
    for read in (
      lambda: config_lib.config_of_run(tmp_path, "RUN"),
      lambda: workdir_lib.read_config(tmp_path),
    ):
      with refused(message):
        read()


def test_a_preset_s_old_name_does_not_bind_the_user(capsys):
  """A config file of an earlier version, whose values can be changed."""
  config = config_lib.make("sleep", "automaton")
  config_lib.override(config, {"model.num_passes": 4})
  config_lib.set_by_user(config, {"model.num_loops": 2})
  assert config.model.num_loops == 2
  assert capsys.readouterr().err == (
    "note: model.num_passes is now model.num_loops\n"
  )
  config_lib.set_by_user(config, {"model.num_loops": 3})  # Twice is no mistake.
  assert config.model.num_loops == 3


def test_a_name_of_another_family_in_order(capsys):
  """The settings before a new family are its predecessor's."""
  config = config_lib.make("sleep", "gsm")
  values = {
    "model.pass_norm": True,
    "model.name": "looped",
    "model.post_norm": True,
  }
  assert config_lib.set_by_user(config, values) == {
    "model.loop_norm": "per_loop",
    "model.name": "looped",
    "model.norm_order": "branch",
  }
  assert (config.model.loop_norm, config.model.norm_order) == (
    "per_loop",
    "branch",
  )
  assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_folder_of_a_run_has_the_present_name():
  old, now = (
    parsed(f"--config={ROOT}/configs/automaton_sleep.py:{word}").config
    for word in ("model.num_passes=2", "model.num_loops=2")
  )
  names = {
    naming.workdir(
      "automaton_sleep.py:x=1",
      config_lib.by_user(config),
      config_lib.to_dict(config),
    )
    for config in (old, now)
  }
  (name,) = names
  assert name.name == "automaton_sleep-model.num_loops=2"


@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_package_are_read_without_a_word(name, capsys):
  config = config_lib.config_of_run(f"{zoo.PREFIX}{name}", name)
  there = json.loads((zoo.ROOT / name / "config.json").read_text())
  assert config.model.num_loops == there["model"].get(
    "num_passes", there["model"].get("num_loops")
  )
  assert not capsys.readouterr().err


def test_kept_runs_have_present_names():
  plans, others = runs_lib.collect([ROOT / "benchmarks" / "runs"])
  runs = [run for plan in plans for run in plan.runs] + others
  assert runs
  for run in runs:
    family = run.config["model"]["name"]
    present = flatten(config_lib.make(family, run.config["task"]["name"]))
    for values in (flatten(run.config), run.overrides, run.settings):
      assert not [x for x in values if renames.find(family, x)], run.directory
      assert set(values) <= set(present), run.directory
