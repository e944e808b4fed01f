"""Memory put into a trained looped model, as docs/insertion.md says."""

import jax
import numpy as np
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.run import restore

SHORT = "run.num_steps=5,run.log_every=5,run.checkpoint_every=5"


def params(config, workdir):
  program = program_lib.make_program(config_lib.resolve(config))
  return restore.params(workdir, 5, program.abstract_state.params)


def test_only_what_was_inserted_is_trained(tmp_path):
  base = f"smoke,{SHORT}"
  looped = load_config("gsm_sleep", f"{base},model.name=looped")
  train.run(looped, tmp_path / "looped", "train")
  source = f"run.init_from={tmp_path / 'looped'}"
  warm = load_config("gsm_sleep", f"{base},inserted,warm_up,{source}")
  train.run(warm, tmp_path / "warm", "train")
  before = params(looped, tmp_path / "looped")
  after = params(warm, tmp_path / "warm")
  inserted = after.pop("memories")
  jax.tree.map(np.testing.assert_array_equal, after, before)
  # It began as zero.
  assert (
    np.abs(inserted["memory"]["fast_weights"]["output"]["kernel"]).max() > 0
  )
