"""Sleep on Rule 110: figure 2 of its paper.

  python -m loopjax.main --config=configs/automaton_sleep.py --workdir=runs/a

Source: arXiv 2605.26099, sections 4 and 6.1. `model.num_passes` is N. Presets:

  (none)  the paper's t = 32, width 256, about 5 billion tokens. Not run.
  gpu     t = 32, fewer steps. Not measured.
  tiny    t = 5, two states of 12 cells, N = 4; 5 minutes on a CPU core. Exact
          match in three seeds 0.977, 0.922, 0.943; with N = 1, one minute,
          0.668, 0.437, 0.655: benchmarks/results/2026-11-21_cpu_2cores_sleep.md
  smoke   seconds; what the tests run.
"""

import ml_collections

from loopjax import config as config_lib

PRESETS = {
  "paper": {
    "optim": {
      "name": "muon", "learning_rate": 5e-5, "muon_learning_rate": 2e-3,
      "schedule": "constant", "warmup_steps": 500, "b2": 0.95,
      "weight_decay": 1e-4, "decay": "matrices", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 98_000, "batch_size": 512, "steps_per_call": 20,
      "log_every": 200, "checkpoint_every": 5000,
    },
    "eval": {"every": 2000, "batch_size": 1024, "depth_factor": 0},
  },
  "gpu": {
    "run": {"num_steps": 20_000},
  },
  "tiny": {
    "task": {"num_states": 2, "state_width": 12, "num_steps": 5},
    "model": {
      "width": 32, "num_layers": 1, "num_heads": 2, "num_memory_layers": 1,
      "num_memory_heads": 2, "key_width": 16, "value_width": 16,
      "mlp_ratio": 1.0, "window": 12, "num_passes": 4, "init_std": 0.12,
    },
    "optim": {"name": "adamw", "learning_rate": 2e-3, "warmup_steps": 100},
    "run": {
      "num_steps": 1200, "batch_size": 128, "log_every": 100,
      "checkpoint_every": 600,
    },
    "eval": {"every": 200},
  },
  "smoke": {
    "task": {
      "num_states": 2, "state_width": 8, "num_steps": 2,
      "num_eval_examples": 64,
    },
    "model": {
      "width": 16, "num_heads": 2, "num_layers": 1, "num_memory_layers": 1,
      "num_memory_heads": 2, "key_width": 8, "value_width": 8, "window": 8,
      "num_passes": 2,
    },
    "optim": {"name": "adamw", "learning_rate": 3e-4, "warmup_steps": 2},
    "run": {
      "num_steps": 20, "batch_size": 16, "steps_per_call": 5,
      "log_every": 10, "checkpoint_every": 10,
    },
    "eval": {"every": 0, "batch_size": 64},
  },
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The paper's config, changed by `preset[,section.key=value...]`."""
  config = config_lib.make("sleep", "automaton")
  return config_lib.apply_presets(config, f"paper,{arg}", PRESETS)


def sweeps(config: ml_collections.ConfigDict | None = None) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config  # The same for every preset.
  passes = config_lib.axis("model.num_passes", 1, 2, 3, 4)
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  steps = config_lib.axis("task.num_steps", 1, 2, 4, 8, 16, 32)
  again = {"model.inject": True, "model.pass_norm": True}
  restart = {**again, "model.carry_state": False}
  turning = {"model.negative_eigenvalues": True}
  return {
    "depth": config_lib.product(steps, passes[:1], seeds),  # Figure 2, left.
    "passes": config_lib.product(passes, seeds),  # Figure 2, right.
    # Open in the paper (section 7): what a step costs, and how stable it is.
    "gradients": config_lib.product(
      passes[3:],
      [
        {},
        {"model.gradient_passes": 1},
        {"model.gradient_passes": 2},
        restart,  # What a fixed point needs.
        {**restart, "model.implicit_terms": 4},
      ],
    ),
    "states": config_lib.product(
      passes[3:], [{}, {"model.pass_norm": True}, again, restart, turning]
    ),
  }
