"""UTM on Sudoku."""

import ml_collections

from loopjax import config as config_lib

PRESETS = {
  "smoke": {
    "task.box_rows": 2,
    "task.box_cols": 2,
    "task.augment": True,
    "model.width": 16,
    "model.num_heads": 2,
    "model.num_loops": 3,
    "model.num_memory_tokens": 2,
    "optim.warmup_steps": 2,
    "run.num_steps": 20,
    "run.batch_size": 16,
    "run.steps_per_call": 5,
    "run.log_every": 10,
    "run.checkpoint_every": 10,
    "eval.batch_size": 64,
    "eval.depth_examples": 64,
  },
  "tiny": {
    "task.box_rows": 2,
    "task.box_cols": 3,
    "task.augment": True,
    "model.width": 64,
    "model.num_heads": 2,
    "model.num_loops": 8,
    "model.num_memory_tokens": 4,
    "optim.learning_rate": 2e-3,
    "optim.warmup_steps": 100,
    "run.num_steps": 1500,
    "run.batch_size": 64,
    "eval.every": 300,
    "eval.num_examples": 512,
  },
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  config = config_lib.make("utm", "sudoku")
  return config_lib.apply_presets(config, arg, PRESETS)
