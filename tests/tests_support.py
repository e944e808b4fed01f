"""Configs for tests."""

import pathlib

import jax

from loopjax import config as config_lib
from loopjax import presets, sharding, train

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*_*.py"))
# A config file and preset of seconds for every family.
SMOKE = {
  "disco": ("multihop_disco", "smoke"),
  "looped": ("multihop_disco", "smoke,model.name=looped"),
  "ponderlm": ("multihop_disco", "smoke,model.name=ponderlm"),
  "sleep": ("automaton_sleep", "smoke"),
  "transformer": ("multihop_disco", "smoke,model.name=transformer"),
  "utm": ("sudoku_utm", "smoke"),
}


def load_config(name: str, arg: str):
  """The config that `--config=configs/NAME.py:ARG` gives."""
  return namespace(name)["get_config"](arg)


def namespace(name: str) -> dict:
  """What configs/NAME.py defines."""
  return presets.read(ROOT / "configs" / f"{name}.py")


def make_datasets(settings):
  """Both splits as one process reads them."""
  mesh = sharding.make_mesh(sharding.Config(), jax.devices()[:1])
  return train.make_datasets(settings, mesh)


def smoke(**overrides):
  """The Sudoku smoke config; section__key=value overrides."""
  config = load_config("sudoku_utm", "smoke")
  config_lib.override(
    config, {key.replace("__", "."): v for key, v in overrides.items()}
  )
  return config
