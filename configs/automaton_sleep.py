"""Sleep on Rule 110: predict a state after some steps; figure 2 of the paper.

  loopjax train --config=configs/automaton_sleep.py

Source: arXiv 2605.26099, sections 4 and 6.1. `model.num_loops` is N. Presets:

  tiny    t = 5, two states of 12 cells, N = 4; 3 minutes on a CPU core. Exact
          match in three new seeds: 0.916, 0.959, 0.684
          (benchmarks/results/2026-11-28_cpu_2cores_sleep.md). With a
          decay searched for each N, N = 1 in the same time is better:
          benchmarks/results/2026-11-28_cpu_2cores_sleep.md
  gpu     t = 32, fewer steps. Not measured.
  paper   t = 32, width 256, about 5 billion tokens. Not run. Ours: warm-up,
          weight decay and the sizes of heads (docs/papers.md).
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

COMMON = presets.beside(__file__, "common.py")

PRESETS = {
  "paper": presets.merged(COMMON["SLEEP"], {
    "run": {"num_steps": 98_000, "batch_size": 512},
    "eval": {"batch_size": 1024},
  }),
  "gpu": {"run": {"num_steps": 20_000}},
  "tiny": {
    "task": {"num_states": 2, "state_width": 12, "num_steps": 5},
    "model": {
      "width": 32, "num_layers": 1, "num_heads": 2, "num_memory_layers": 1,
      "num_memory_heads": 2, "key_width": 16, "value_width": 16,
      "mlp_ratio": 1.0, "window": 12, "num_loops": 4, "init_std": 0.12,
      # Every pass decays the state. The search preferred the default, (0, 16).
      "A_range": (0.0, 1.0),
    },
    "optim": {"name": "adamw", "learning_rate": 2e-3, "warmup_steps": 100},
    "run": {
      "num_steps": 1200, "batch_size": 128, "log_every": 100,
      "checkpoint_every": 600,
    },
    "eval": {"every": 200},
  },
  "smoke": presets.merged(COMMON["SLEEP_SMOKE"], {
    "task": {
      "num_states": 2, "state_width": 8, "num_steps": 2,
      "num_eval_examples": 64,
    },
    "model": {"window": 8}, "optim": {"name": "adamw", "learning_rate": 3e-4},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("sleep", "automaton"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  rates = COMMON["learning_rates"](config)
  passes = config_lib.axis("model.num_loops", 1, 2, 3, 4)
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  steps = config_lib.axis("task.num_steps", 1, 2, 4, 8, 16, 32)
  again = {"model.injection": "add", "model.loop_norm": "per_loop"}
  restart = {**again, "model.carry_state": False}
  turning = {"model.negative_eigenvalues": True}
  return {
    "depth": config_lib.product(steps, passes[:1], seeds),  # Figure 2, left.
    "passes": config_lib.product(passes, seeds),  # Figure 2, right.
    # As in the paper: found with one pass, used for all (section 6).
    "learning_rate": config_lib.product(passes[:1], rates),
    # Open in the paper (section 7): cost and stability of a step.
    "gradients": config_lib.product(
      passes[3:],
      [
        {},
        {"model.num_with_gradient": 1},
        {"model.num_with_gradient": 2},
        {"model.num_with_gradient": 1, "model.gradient_cut": "both"},
        restart,
      ],
    ),
    "states": config_lib.product(
      passes[3:], [{}, {"model.loop_norm": "per_loop"}, again, restart, turning]
    ),
  }
