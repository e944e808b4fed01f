"""Recurrent depth on text: prelude, looped core and coda, random depth.

  loopjax train --config=configs/lm_recurrent.py

Source: arXiv 2502.05171 (Huginn); arXiv 2604.12946 (Parcae), 2609.19107 and
LoopLM are other settings of the same family (docs/families/recurrent.md). Your
own text: --config.task.train_files='books/*.txt'. Presets:

  tiny    bytes of synthetic arithmetic or your text; layers 1, 2 and 1 of width
          128 before, in and after the loop, 9 loops on average, random per
          step, gradients through four. Sizes and rates are not tuned.
  gpu     the same with layers 2, 4 and 2 of width 512. Not measured.
  paper   Huginn-3.5B: 3,564,976,800 parameters, 33 loops on average. Set
          task.train_files and task.tokenizer. Not run.
  parcae  Parcae's 140M: two layers each, diagonal injection, depth per row. Its
          value embeddings and squared ReLU are missing; training as in `paper`,
          except Muon and AdamW's rate. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["LM_TINY"], {
  "model": {
    "num_prelude": 1, "num_coda": 1, "num_loops": 8, "num_with_gradient": 4,
    "mlp": "swiglu", "mlp_ratio": 8 / 3, "qk_bias": False, "input_scale": 1.0,
  },
  "run": {"num_steps": 500, "checkpoint_every": 250},
  "eval": {"depth_factor": 8, "depth_examples": 256},
})  # fmt: skip
PRESETS = {
  "paper": {
    "task": {"vocab_size": 65_536, "sequence_length": 4096},
    "model": {
      "width": 5280, "num_prelude": 2, "num_layers": 4, "num_coda": 2,
      "num_heads": 55, "mlp": "swiglu", "mlp_ratio": 17_920 / 5280,
      "qk_bias": True, "rope_base": 50_000.0, "input_scale": 5280**0.5,
      "init_std": (2 / 5 / 5280) ** 0.5, "precision": "bfloat16",
    },
    "optim": {
      "learning_rate": 4e-4, "schedule": "constant", "warmup_steps": 4096,
      "b2": 0.95, "weight_decay": 0.1, "decay": "matrices", "ema_decay": 0.0,
    },
    "loop": {"remat": "full"},
    "run": {
      "num_steps": 48_000, "batch_size": 4096, "steps_per_call": 1,
      "log_every": 100, "checkpoint_every": 1000,
    },
    "eval": {"every": 1000, "batch_size": 128, "num_examples": 1024,
             "depth_factor": 0},
  },
  "parcae": {
    "model": {
      "width": 768, "num_layers": 2, "num_heads": 12, "mlp_ratio": 4.0,
      "qk_norm": True, "qk_bias": False, "norm_order": "pre",
      "injection": "diagonal", "prelude_norm": True, "loop_norm": "final_only",
      "num_loops": 8, "depth": "poisson", "depth_per": "row",
      "num_with_gradient": 4, "input_scale": 1.0, "init_std": 0.02,
      "rope_base": 1e4,
    },
    "optim": {"name": "muon", "learning_rate": 8e-3},
  },
  "gpu": presets.merged(_TINY, _COMMON["LM_GPU"], {
    "model": {"num_prelude": 2, "num_layers": 4, "num_coda": 2},
  }),
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, _COMMON["LM_SMOKE"], {
    "model": {"num_with_gradient": 2},
    "eval": {"depth_factor": 2},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("recurrent", "text"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: what makes extra depth useful."""
  axis, product = config_lib.axis, config_lib.product
  seeds, loops = axis("run.seed", 0, 1, 2), config.model.num_loops
  fixed = {
    "model.depth": "fixed", "model.depth_per": "step",
    "model.num_with_gradient": 0,
  }  # fmt: skip
  drawn = [
    {"model.depth": "poisson", "model.depth_per": x} for x in ("step", "row")
  ]
  until = tuple(presets.steps(config, n, 3) for n in (1, 2))
  grows = {
    **fixed, "model.growth_steps": until,
    "model.growth_loops": (max(1, loops // 4), max(1, loops // 2)),
  }  # fmt: skip
  warmed = {**grows, "optim.warm_again": until}
  plain = {
    "model.injection": "none", "model.state": "input",
    "model.loop_norm": "final_only",
  }  # fmt: skip
  kinds = axis("model.injection", "add", "linear", "diagonal")
  muon = config.optim.name == "muon"
  name = "muon_learning_rate" if muon else "learning_rate"
  rate = config.optim[name]
  once = {**fixed, **plain, "model.num_loops": 1}
  unshared = {**once, "model.num_layers": loops * config.model.num_layers}
  return {
    "depth_sampling": product([fixed, {}, *drawn], seeds),
    "injection": product(
      [plain, *kinds], axis(f"optim.{name}", rate, 4 * rate), seeds
    ),
    "gradient_loops": product(
      axis("model.num_with_gradient", 1, 2, 4, 8), seeds
    ),
    "growth": product([fixed, grows, warmed], seeds),
    # A stack with equal FLOPs, and one with equal parameters.
    "equal_flops": product([fixed, unshared, once], seeds),
    "retrofit": _retrofit(config, once, grows),
    "learning_rates": _COMMON["learning_rates"](config),
  }


def _retrofit(config, once, grows) -> list[dict]:
  """Loops in a trained transformer: untrained, further trained, and without."""
  once = {**once, "model.norm_order": "pre", "model.prelude_norm": False}
  source = {"run.init_from": WorkdirOf(0)}
  damped = {  # One step at rate 0.
    **once, **source, "model.update": "damped",
    "run.num_steps": 1, "run.steps_per_call": 1, "run.log_every": 1,
    "run.checkpoint_every": 1, "eval.every": 0, "eval.num_examples": 0,
    "optim.schedule": "constant", "optim.warmup_steps": 1,
    "optim.final_learning_rate": 1e-5,
  }  # fmt: skip
  gate = {
    **once, **grows, **source, "run.init_fresh": "update_share",
    "model.update": "gate", "model.num_loops": config.model.num_loops,
  }  # fmt: skip
  loops = config_lib.axis("model.num_loops", 1, 2, 4, 8)
  still = config_lib.product([damped], loops)
  return [once, *still, gate, {**once, **source}]
