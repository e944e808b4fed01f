"""UTM on Sudoku: memory tokens and adaptive computation time.

  loopjax train --config=configs/sudoku_utm.py

Source: arXiv 2604.21999, section 4.1. Presets:

  tiny    6x6 boards, 5 minutes on 2 CPU cores beside other work. Exact match
          0.967 (seed 0, which the search used), 7.4 of 12 loops per token;
          without the penalty on loops 0.959, 0.969, 0.964 in three new seeds:
          docs/results.md.
  nine    9x9 boards, 34 minutes on a CPU core. Exact match 0.947 to 0.971
          without guesses, 0.601 to 0.649 over all ratings: docs/results.md.
  extreme trains `zoo:sudoku_nine` further on Sudoku-Extreme; not run. On other
          public hard puzzles 0.371 after 94 minutes on one core, and 0 on the
          hardest list: docs/results.md.
  gpu     the paper's model in bfloat16, packaged 9x9 puzzles. On an H200, 27
          steps per second with `loop.kernels=gpu` (docs/scaling.md); not
          trained.
  paper   59,872 steps of 256 puzzles of Sudoku-Extreme, from the Hugging Face
          Hub. Not run; the paper's exact match is 0.569 on 12,800 puzzles.
          Ours: a twentieth of the puzzles is held out, which makes these steps
          4.2 epochs instead of 4 (docs/papers.md).
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_HUB = "hf://sapientinc/sudoku-extreme"
_EXTREME = {"train_csv": f"{_HUB}/train.csv", "test_csv": f"{_HUB}/test.csv"}
_PACKAGED = {"train_csv": "", "test_csv": "", "augment": True}
_SMALL = {
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
}  # fmt: skip
# A penalty on loops, so that cells halt when they are done: 7 of 12 loops.
_TINY = presets.merged(_SMALL, {
  "model": {"ponder_weight": 1e-3, "ponder_warmup_steps": 868},
})  # fmt: skip
_NINE = presets.merged(_SMALL, {
  "task": {"box_rows": 3, "max_revealed": 1.0, "num_revealed_examples": 24_000},
  "model": {"num_loops": 16}, "run": {"num_steps": 16_000},
  "eval": {"num_loops": 24},
})  # fmt: skip

PRESETS = {
  "paper": {
    "task": _EXTREME,
    "run": {"num_steps": 59_872, "steps_per_call": 4, "checkpoint_every": 2500},
    "eval": {"every": 1000, "num_examples": 12_800},
  },
  "gpu": {
    "task": _PACKAGED, "run": {"num_steps": 20_000, "steps_per_call": 10},
    "model": {"precision": "bfloat16"}, "eval": {"num_examples": 2048},
    "loop": {"execution": "unroll"},  # Residuals need no stacks.
  },
  "tiny": _TINY,
  "nine": _NINE,
  "extreme": presets.merged(_NINE, {
    "task": {**_EXTREME, "max_revealed": 0.0, "num_revealed_examples": 0},
    "optim": {"learning_rate": 1e-3},
    "run": {"num_steps": 40_000, "init_from": "zoo:sudoku_nine",
            "checkpoint_every": 2000},
    "eval": {"every": 2000, "num_examples": 1024}}),
  "smoke": presets.beside(__file__, "common.py")["SUDOKU_SMOKE"],
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("utm", "sudoku"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  memory, loops = "model.num_memory_tokens", config.model.num_loops
  batch, steps = config.run.batch_size, config.run.num_steps
  tokens = axis(memory, 0, 4, 8, 16, 32, 64)
  with_and_without = axis(memory, *sorted({0, config.model.num_memory_tokens}))
  seeds = axis("run.seed", 0, 42, 123)
  free = {"model.ponder_weight": 0.0, "model.ponder_warmup_steps": 0}
  cold = {**free, "model.ponder_weight": 1e-3}
  warm = {**cold, "model.ponder_warmup_steps": steps * 20_000 // 59_872}
  unrotated = {"model.positions": "none", "model.rope_base": 10_000.0}
  places = [*axis("model.positions", "overlap", "offset", "grid"), unrotated]
  flat, deep, graves = axis("model.router_bias", 0.0, -3.0, 1.0)
  fixed = {"model.halting": "fixed", **deep, **free}  # Needs the default start.
  modes = [free, warm, {**flat, **free}, {**graves, **free}, fixed]
  depths = axis("model.num_loops", loops, 2 * loops)
  half = {**tokens[5], "run.batch_size": batch // 2, "run.num_steps": 2 * steps}
  decays = axis("optim.weight_decay", 0.01, 0.1)
  small = {"task.num_train_puzzles": 1000, "task.augment": True, **seeds[0]}
  wide = {"model.width": 768, "model.num_heads": 12, **deep}
  return {
    "memory_curve": product(tokens, seeds),
    "router_init": product([flat], [tokens[0], *tokens[2:]], seeds)
    + product([deep], tokens, seeds)
    + product([graves], [tokens[3]], seeds),
    "tradeoff": product([warm], [*tokens[2:5], half], seeds[:1]),
    "fixed_depth": product([free, warm, fixed], seeds),
    "small_data": [{**small, **modes[i], **decays[i]} for i in (0, 1)],
    "lambda": product([free, cold, warm], seeds),
    "depth": product(modes[:3], seeds[2:]),
    "norm": product([flat], axis("model.norm", "derf_utm", "rmsnorm"), seeds),
    "ablation": product([{}, tokens[0], flat], seeds),
    "positions": product(places, with_and_without, seeds),
    "width": product([wide], seeds),
    "no_memory": product(tokens[:1], modes, depths, seeds),
    "muon": product(axis("optim.name", "adamw", "muon"), modes[:2], seeds),
  }
