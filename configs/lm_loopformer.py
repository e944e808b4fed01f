"""LoopFormer on text: loops that know their time and step size.

  loopjax train --config=configs/lm_loopformer.py

Source: arXiv 2602.11451. The trained model runs with any number of loops:
`loopjax score runs/lm_loopformer --config.eval.num_loops=2`. Your own text:
--config.task.train_files='books/*.txt'. Presets:

  tiny    bytes of synthetic arithmetic or your text; two layers of width 128,
          four loops. Sizes and rates are not tuned. Measured with one layer of
          width 32, in about two minutes on a core shared with other work: on
          novels, 3.07 bits per byte after 400 steps (benchmarks/results).
  gpu     the same with three layers of width 512 and eight loops. Not measured.
  paper   three layers of width 2048, eight loops. Set task.train_files and
          task.tokenizer. Rotary positions instead of learned ones. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["LM_TINY"], {
  "model": {"num_loops": 4, "mlp_ratio": 4.0},
  "run": {"num_steps": 500, "checkpoint_every": 250},
  "eval": {"depth_factor": 2, "depth_examples": 256},
})  # fmt: skip
PRESETS = {
  "paper": {
    "task": {"vocab_size": 50_304, "sequence_length": 1024},
    "model": {
      "width": 2048, "num_layers": 3, "num_heads": 32, "mlp": "gelu",
      "mlp_ratio": 2.5, "num_loops": 8, "init_std": 0.02,
      "short_weight": 0.1, "consistency_weight": 0.1, "precision": "bfloat16",
    },
    "loop": {"remat": "outputs"},
    "optim": {
      "name": "adamw", "learning_rate": 6e-4, "final_learning_rate": 6e-5,
      "schedule": "cosine", "warmup_steps": 2000, "b2": 0.95,
      "weight_decay": 0.2, "decay": "tables", "clip_norm": 1.0,
      "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 50_000, "batch_size": 480, "steps_per_call": 1,
      "log_every": 100, "checkpoint_every": 1000,
    },
    "eval": {"every": 1000, "batch_size": 96, "num_examples": 1024,
             "depth_factor": 0},
  },
  "gpu": presets.merged(_TINY, _COMMON["LM_GPU"], {
    "model": {"num_layers": 3, "num_loops": 8},
  }),
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, _COMMON["LM_SMOKE"]),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("loopformer", "text"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: what makes other numbers of loops useful.

  Every run ends with the scores of 1, 2, 4, .. loops (`depth/...`).
  """
  axis, product = config_lib.axis, config_lib.product
  seeds, loops = axis("run.seed", 0, 1, 2), config.model.num_loops
  looped = {"model.name": "looped"}  # The same stack, without conditioning.
  recurrent = {  # A random number of loops, and a layer before and after them.
    "model.name": "recurrent", "model.num_prelude": 1, "model.num_coda": 1,
    "model.num_with_gradient": loops,
  }  # fmt: skip
  alone = {"model.short_weight": 0.0, "model.consistency_weight": 0.0}
  apart = {"model.consistency_weight": 0.0}
  return {
    "loss_against_loops": product([{}, looped, recurrent], seeds),
    # Conditioning without short trajectories, and without their alignment.
    "objectives": product([{}, apart, alone], seeds),
    "loops": axis("model.num_loops", 2, 4, 8),
    "learning_rates": _COMMON["learning_rates"](config),
  }
