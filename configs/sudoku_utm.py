"""UTM on Sudoku: memory tokens and adaptive computation time.

  python -m loopjax.main --config=configs/sudoku_utm.py:tiny --workdir=runs/tiny

Source: arXiv 2604.21999, section 4.1. Presets:

  (none)  the paper: 3.2 M parameters, 18 loops, Sudoku-Extreme (downloaded),
          59,872 steps of 256 puzzles. Not run; the paper reports 56.9 % exact
          match on samples of 12,800 test puzzles.
  gpu     the paper's model in bfloat16, packaged 9x9 puzzles. Not measured.
  tiny    6x6 boards: exact match 0.967 on 3,941 test puzzles, 4 minutes on two
          CPU cores with the command above (benchmarks/results/).
  smoke   seconds; what the tests run.
"""

import ml_collections

from loopjax import config as config_lib

_HUB = "hf://sapientinc/sudoku-extreme"
_PACKAGED = {"train_csv": "", "test_csv": "", "augment": True}

PRESETS = {
  "paper": {
    "task": {"train_csv": f"{_HUB}/train.csv", "test_csv": f"{_HUB}/test.csv"},
    "run": {
      "num_steps": 59_872, "steps_per_call": 4, "checkpoint_every": 2500,
    },
    "eval": {"every": 1000, "num_examples": 12_800},
  },
  "gpu": {
    "task": _PACKAGED,
    "model": {"precision": "bfloat16"},
    "run": {"num_steps": 20_000, "steps_per_call": 10},
    "eval": {"num_examples": 2048},
  },
  "tiny": {
    "task": {**_PACKAGED, "box_rows": 2, "box_cols": 3},
    "model": {
      "width": 64, "num_heads": 8, "num_loops": 12, "num_memory_tokens": 4,
      "positions": "grid", "rope_base": 10.0,
    },
    "optim": {
      "learning_rate": 4e-3, "warmup_steps": 300, "b2": 0.98, "ema_decay": 0.98,
    },
    "run": {
      "num_steps": 2600, "batch_size": 16, "steps_per_call": 10,
      "checkpoint_every": 600,
    },
    "eval": {"every": 600, "num_examples": 512},
  },
  "smoke": {
    "task": {**_PACKAGED, "box_rows": 2, "box_cols": 2},
    "model": {
      "width": 16, "num_heads": 2, "num_loops": 3, "num_memory_tokens": 2,
    },
    "optim": {"warmup_steps": 2},
    "run": {
      "num_steps": 20, "batch_size": 16, "steps_per_call": 5,
      "log_every": 10, "checkpoint_every": 10,
    },
    "eval": {"every": 0, "num_examples": 0, "batch_size": 64},
  },
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The paper's config, changed by `preset[,section.key=value...]`."""
  config = config_lib.make("utm", "sudoku")
  return config_lib.apply_presets(config, f"paper,{arg}", PRESETS)


def sweeps(config: ml_collections.ConfigDict | None = None) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  config = config or get_config()
  third = config.run.num_steps // 3  # The paper: 20k of 59,872 steps.
  memory = "model.num_memory_tokens"
  tokens = config_lib.axis(memory, 0, 4, 8, 16, 32, 64)
  own = config_lib.axis(memory, *sorted({0, config.model.num_memory_tokens}))
  seeds = config_lib.axis("run.seed", 0, 42, 123)
  free = {"model.ponder_weight": 0.0, "model.ponder_warmup_steps": 0}
  cold = {**free, "model.ponder_weight": 1e-3}
  warm = {**cold, "model.ponder_warmup_steps": third}
  unrotated = {"model.positions": "none", "model.rope_base": 10_000.0}
  places = [
    *config_lib.axis("model.positions", "overlap", "offset", "grid"),
    unrotated,
  ]
  flat, deep, graves = config_lib.axis("model.router_bias", 0.0, -3.0, 1.0)
  # A router that does nothing must keep the default start.
  fixed = {"model.halting": "fixed", **deep, **free}
  small = {"task.num_train_puzzles": 1000, "task.augment": True, **seeds[0]}
  wide = {"model.width": 768, "model.num_heads": 12, **deep}
  return {
    "memory_curve": config_lib.product(tokens, seeds),
    "router_init": config_lib.product([flat], [tokens[0], *tokens[2:]], seeds)
    + config_lib.product([deep], tokens, seeds)
    + config_lib.product([graves], [tokens[3]], seeds),
    "tradeoff": config_lib.product([warm], tokens[2:], seeds[:1]),
    "fixed_depth": config_lib.product([free, warm, fixed], seeds),
    "small_data": [
      {**small, **free, "optim.weight_decay": 0.01},
      {**small, **warm, "optim.weight_decay": 0.1},
    ],
    "lambda": config_lib.product([free, cold, warm], seeds),
    "depth": config_lib.product([warm, free, {**flat, **free}], seeds[2:]),
    "norm": config_lib.product(
      [flat], config_lib.axis("model.norm", "derf_utm", "rmsnorm"), seeds
    ),
    "ablation": config_lib.product([{}, tokens[0], flat], seeds),
    "positions": config_lib.product(places, own, seeds),
    "width": config_lib.product([wide], seeds),
  }
