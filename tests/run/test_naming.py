"""Default work directories."""

import pytest
from tests_support import load_config

from loopjax import config as config_lib
from loopjax.run import naming

FILE = "configs/sudoku_utm.py"


def name(argument="", **flags):
  """The directory of --config=FILE[:argument] --config.section.key=value..."""
  flags = {key.replace("__", "."): value for key, value in flags.items()}
  config = load_config("sudoku_utm", argument)
  config_lib.override(config, flags)
  config_name = f"{FILE}:{argument}" if argument else FILE
  path = naming.workdir(config_name, flags, config_lib.to_dict(config))
  assert path.parts[0] == "runs" and len(path.parts) == 2
  return path.name


@pytest.mark.parametrize(
  ("argument", "expected"),
  [
    ("", "sudoku_utm"),
    ("paper", "sudoku_utm-paper"),
    ("model.num_loops=8", "sudoku_utm-model.num_loops=8"),  # Not eval's.
    ("gpu,run.seed=1,model.width=64", "sudoku_utm-gpu,width=64,seed=1"),
    (
      "task.train_csv=a/b.csv,task.test_csv=c",
      "sudoku_utm-test_csv=c,train_csv=a%2Fb.csv",
    ),
  ],
)
def test_what_was_typed_is_the_name(argument, expected):
  assert name(argument) == expected


def test_the_same_settings_have_the_same_name_however_they_are_written():
  assert name("optim.learning_rate=1e-3") == name(optim__learning_rate=0.001)
  assert name("gpu,model.width=64") == name("gpu", model__width=64)
  twice = name("run.seed=1,model.width=64"), name("model.width=64,run.seed=1")
  assert twice[0] == twice[1]


def test_what_a_run_may_go_on_with_does_not_change_its_name():
  free = {"eval__num_loops": 16, "mesh__fsdp": 2, "run__keep_best": 1}
  assert name("gpu", **free) == name("gpu")


def test_different_settings_have_different_names():
  names = [
    name("task.train_csv=a,task.test_csv=b"),
    name("task.train_csv=a+b,task.test_csv=b"),
    name("task.train_csv=a b,task.test_csv=b"),
    name("run.batch_size=8"),
    name("eval.batch_size=8"),
    name(task__train_csv="a" * 300, task__test_csv="b"),
    name(task__train_csv="a" * 301, task__test_csv="b"),
  ]
  assert len(set(names)) == len(names)
  assert all("/" not in each and len(each) < 200 for each in names)


def test_names_of_changes_are_in_it():
  config = load_config("gsm_sleep", "gpu,inserted")
  plain = config_lib.to_dict(config)
  path = naming.workdir("c/gsm_sleep.py:gpu,inserted", (), plain)
  assert path.name == "gsm_sleep-gpu,inserted"
