"""Sleep on word problems among distractors; figures 4 and 5 of the paper.

  loopjax train --config=configs/gsm_sleep.py
  loopjax sweep --config=configs/gsm_sleep.py:looplm --sweep=stages

Source: arXiv 2605.26099, sections 6.3 and 6.4. `model.num_loops` is N. The
paper fine-tunes pre-trained models; here a model with half attention and half
memory layers starts from scratch, or memory is inserted into a LoopLM
(docs/families/sleep.md): the sweep trains a LoopLM, or uses yours
(`:looplm,run.init_from=DIR`), trains only the memory, then everything. Presets:

  tiny    short texts on two CPU cores. With batches of 16, one and four passes
          reach 0.29, little more than copying a number from the text:
          docs/results.md.
  gpu     texts of 320 to 512 tokens. Not measured.
  paper   texts of 2000 to 3300 tokens and windows of 2000, as in the paper: one
          window is slept on, the rest is processed with the answer. Not run.
          Ours: all sizes, steps, warm-up, weight decay (docs/papers.md).
  smoke   used by tests.

Changes after a preset: `inserted` and `warm_up`, memory added to a trained
model; `looplm`, the same for Ouro's blocks, with half as many memory layers.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets
from loopjax.sections import flatten

COMMON = presets.beside(__file__, "common.py")

PRESETS = {
  "paper": presets.merged(COMMON["SLEEP"], {
    "task": {"context_length": 3300, "min_length": 2000, "max_length": 3300},
    "model": {
      "width": 512, "num_layers": 6, "num_heads": 8, "num_memory_layers": 6,
      "num_prelude": 2, "num_coda": 1, "memory": "jet",
      "num_memory_heads": 4, "key_width": 96, "value_width": 256,
      "window": 2000,
    },
    "optim": {"muon_learning_rate": 1e-3},
    "run": {
      "num_steps": 50_000, "batch_size": 256, "steps_per_call": 10,
      "log_every": 100, "checkpoint_every": 2500,
    },
    "eval": {"every": 2500},
    "loop": {"remat": "full"},  # Backward pass by group.
  }),
  "gpu": {
    "task": {"context_length": 512, "min_length": 320, "max_length": 512},
    "model": {"window": 320},
    "run": {"num_steps": 20_000},
  },
  "tiny": {
    "task": {
      "context_length": 192, "min_length": 120, "max_length": 192,
      "train_ops": (1, 2, 3), "eval_ops": (1, 2, 3),
      "max_constant": 10, "max_value": 100, "num_eval_examples": 600,
    },
    "model": {
      "width": 64, "num_layers": 2, "num_heads": 2, "num_memory_layers": 2,
      "num_prelude": 0, "num_coda": 0, "num_memory_heads": 2,
      "key_width": 32, "value_width": 32, "window": 120,
    },
    "optim": {
      "learning_rate": 1e-3, "muon_learning_rate": 5e-3, "warmup_steps": 100,
    },
    "loop": {"remat": "none"},
    "run": {"num_steps": 4000, "batch_size": 64, "checkpoint_every": 2000},
    "eval": {"every": 1000},
  },
  "smoke": presets.merged(COMMON["SLEEP_SMOKE"], {
    "task": {
      "context_length": 192, "min_length": 120, "max_length": 192,
      "train_ops": (1, 2), "eval_ops": (1, 2), "num_eval_examples": 32,
    },
    "model": {"num_prelude": 0, "num_coda": 0, "window": 64},
    "loop": {"remat": "none"},
    "run": {"batch_size": 8}, "eval": {"batch_size": 32},
  }),
}  # fmt: skip
_INSERTED = {
  "num_prelude": 0, "num_coda": 0, "memory": "jet",
  "memory_mlp": False, "loop_norm": "per_loop",
}  # fmt: skip
CHANGES = {
  "inserted": {"model": _INSERTED},
  "looplm": {
    "model": {
      **_INSERTED, "norm_order": "branch", "tied": False, "num_layers": 4,
      "num_memory_layers": 2, "num_loops": 4,
    },
  },
  "warm_up": COMMON["SLEEP_WARM_UP"],
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change...][,section.key=value...]`."""
  sections = config_lib.make("sleep", "gsm")
  return presets.apply(sections, arg, PRESETS, CHANGES)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  passes = config_lib.axis("model.num_loops", 1, 2, 4, 6)
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  quarter = config.model.window // 4
  window = {"model.window": 1 << (quarter - 1).bit_length()}  # 2,000: 512.
  sliding = [{"model.eviction": "sliding", **window}]
  first = [] if config.run.init_from else [
    {"model.name": "looped", "model.loop_norm": "per_loop"}
  ]  # fmt: skip
  third = presets.steps(config, 1, 3)
  warm_up = {
    **flatten(CHANGES["warm_up"]), **window,
    "run.init_from": config.run.init_from or WorkdirOf(0),
    "run.num_steps": third,
  }  # fmt: skip
  whole = {
    "model.eviction": "sliding", **window,
    "run.init_from": WorkdirOf(len(first)), "run.num_steps": 2 * third,
  }  # fmt: skip
  return {
    "passes": config_lib.product(passes, seeds),  # Figure 4.
    "sliding": config_lib.product(sliding, passes[:3], seeds),  # Figure 5.
    "stages": [*first, warm_up, whole],  # Section 6.4.
  }
