"""Sleep on Depo: k steps along a cycle given earlier; figure 3.

  loopjax train --config=configs/depo_sleep.py

Source: arXiv 2605.26099, section 6.2. `model.num_loops` is N. Presets:

  tiny    two hops among six nodes, N = 4; 4 minutes on a CPU core. Two-hop
          answers in three seeds: 0.989, 0.982, 0.996 correct; with N = 1 (75
          seconds) 0.572, 0.394, 0.701, in 4 minutes 0.792, 0.566, 0.819:
          benchmarks/results/2026-11-28_cpu_2cores_sleep.md
  gpu     as `paper`, with fewer steps. Not measured.
  paper   75 nodes, 16 hops, ten layers of width 512, Muon. Not run. Ours:
          steps, warm-up, weight decay and sizes of heads (docs/papers.md).
  hybrid  Figure 3's caption has four layers, alternating attention and gated
          delta nets, where the text has ten; width 512 as in the text. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

COMMON = presets.beside(__file__, "common.py")

PRESETS = {
  "paper": presets.merged(COMMON["SLEEP"], {
    "model": {
      "width": 512, "num_layers": 5, "num_heads": 8, "num_memory_layers": 5,
      "memory": "jet", "num_memory_heads": 4, "key_width": 96,
      "value_width": 256, "window": 75,
    },
    "run": {"num_steps": 100_000, "batch_size": 128},
    "loop": {"execution": "unroll"},  # Residuals need no stacks.
  }),
  "gpu": {"run": {"num_steps": 20_000}},
  "tiny": {
    "task": {
      "num_nodes": 6, "max_hops": 2, "num_queries": 3, "word_base": 8,
      "max_word": 1, "context_length": 12,
    },
    "model": {
      "width": 64, "num_layers": 1, "num_heads": 2, "num_memory_layers": 1,
      "memory": "gated_delta", "num_memory_heads": 2, "key_width": 32,
      "value_width": 32, "mlp_ratio": 1.0, "window": 12, "num_loops": 4,
      "init_std": 0.12,
    },
    "optim": {"name": "adamw", "learning_rate": 4e-3, "warmup_steps": 100},
    "loop": {"execution": "scan", "remat": "none"},
    "run": {"num_steps": 1200, "log_every": 100, "checkpoint_every": 600},
    "eval": {"every": 200},
  },
  "hybrid": {
    "model": {
      "num_layers": 2, "num_memory_layers": 2, "memory": "gated_delta",
      "value_width": 192,
    },
  },
  "smoke": presets.merged(COMMON["SLEEP_SMOKE"], {
    "task": {
      "num_nodes": 4, "max_hops": 2, "num_queries": 1, "word_base": 6,
      "max_word": 1, "context_length": 8, "num_eval_examples": 64,
    },
    "model": {"window": 4}, "loop": {"execution": "scan", "remat": "none"},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("sleep", "depo"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  rates = COMMON["learning_rates"](config)
  passes = config_lib.axis("model.num_loops", 1, 2, 4)
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  memories = config_lib.axis("model.memory", "gated_delta", "jet")
  evictions = config_lib.axis("model.eviction", "hard", "sliding")
  return {
    "passes": config_lib.product(passes, seeds),  # Figure 3.
    # As in the paper: found with one pass, used for all (section 6).
    "learning_rate": config_lib.product(passes[:1], rates),
    "memory": config_lib.product(memories, passes[::2]),
    "eviction": config_lib.product(evictions, passes[::2]),
  }
