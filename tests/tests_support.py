"""Configs for tests."""

import pathlib

from loopjax import config as config_lib

ROOT = pathlib.Path(__file__).parent.parent


def load_config(name: str, arg: str):
  """The config that `--config=configs/NAME.py:ARG` gives."""
  return namespace(name)["get_config"](arg)


def namespace(name: str) -> dict:
  """What configs/NAME.py defines."""
  names: dict = {"__name__": name}
  path = ROOT / "configs" / f"{name}.py"
  exec(compile(path.read_text(), path, "exec"), names)
  return names


def smoke(**overrides):
  """The Sudoku smoke config; section__key=value overrides."""
  config = load_config("sudoku_utm", "smoke")
  config_lib.override(
    config, {key.replace("__", "."): v for key, v in overrides.items()}
  )
  return config
