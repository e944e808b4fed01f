"""Sleep on word problems among distractors; figures 4 and 5.

  python -m loopjax.main --config=configs/gsm_sleep.py:gpu --workdir=runs/a

Source: arXiv 2605.26099, sections 6.3 and 6.4. `model.num_passes` is N. The
paper fine-tunes pre-trained models; here a stack of half attention and half
memory starts from scratch, or attention alone from a `looped` run:

  base=configs/gsm_sleep.py:gpu
  python -m loopjax.main --config=$base,model.name=looped --workdir=runs/looped
  base=$base,model.num_passes=4,inserted
  python -m loopjax.main --workdir=runs/warm \
    --config=$base,warm_up,run.init_from=runs/looped
  python -m loopjax.main --workdir=runs/slept \
    --config=$base,model.eviction=sliding,run.init_from=runs/warm

The memory layers begin as nothing and are trained alone at first, with windows
dropped whole (section 6.4: crucial for N > 1), then all. They are a larger part
of so small a model than the paper's tenth; `looped` knows no padding and reads
what stands in front of a text as tokens. Presets:

  (none)  texts of 4096 tokens, windows of 2048; the paper's have 2000 to 3300,
          and 2000. Not run.
  gpu     texts of 512 tokens. Not measured.
  tiny    short texts on two CPU cores. Not measured.
  smoke   seconds; what the tests run.
  inserted, warm_up  behind one of them, as above.
"""

import ml_collections

from loopjax import config as config_lib

PRESETS = {
  "paper": {
    "task": {"context_length": 4096},
    "model": {
      "width": 512, "num_layers": 6, "num_heads": 8, "num_memory_layers": 6,
      "num_prelude_layers": 2, "num_coda_layers": 1, "memory": "jet",
      "num_memory_heads": 4, "key_width": 96, "value_width": 256,
      "window": 2048,
    },
    "optim": {
      "name": "muon", "learning_rate": 5e-5, "muon_learning_rate": 1e-3,
      "schedule": "constant", "warmup_steps": 500, "b2": 0.95,
      "weight_decay": 1e-4, "decay": "matrices", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 50_000, "batch_size": 256, "steps_per_call": 10,
      "log_every": 100, "checkpoint_every": 2500,
    },
    "eval": {"every": 2500, "batch_size": 200, "depth_factor": 0},
    "loop": {"remat": "full"},  # A pass at a time in the backward pass.
  },
  "gpu": {
    "task": {"context_length": 512},
    "model": {"window": 128},
    "run": {"num_steps": 20_000},
  },
  "tiny": {
    "task": {
      "context_length": 192, "train_ops": (1, 2, 3), "eval_ops": (1, 2, 3),
      "max_constant": 10, "max_value": 100, "num_eval_examples": 600,
    },
    "model": {
      "width": 64, "num_layers": 2, "num_heads": 2, "num_memory_layers": 2,
      "num_prelude_layers": 0, "num_coda_layers": 0, "num_memory_heads": 2,
      "key_width": 32, "value_width": 32, "window": 64,
    },
    "optim": {
      "learning_rate": 1e-3, "muon_learning_rate": 5e-3, "warmup_steps": 100,
    },
    "loop": {"remat": "none"},
    "run": {
      "num_steps": 4000, "batch_size": 64, "checkpoint_every": 2000,
    },
    "eval": {"every": 1000},
  },
  "smoke": {
    "task": {
      "context_length": 192, "train_ops": (1, 2), "eval_ops": (1, 2),
      "num_eval_examples": 32,
    },
    "model": {
      "width": 16, "num_heads": 2, "num_layers": 1, "num_memory_layers": 1,
      "num_prelude_layers": 0, "num_coda_layers": 0, "num_memory_heads": 2,
      "key_width": 8, "value_width": 8, "window": 64, "num_passes": 2,
    },
    "optim": {"warmup_steps": 2},
    "loop": {"remat": "none"},
    "run": {
      "num_steps": 20, "batch_size": 8, "steps_per_call": 5,
      "log_every": 10, "checkpoint_every": 10,
    },
    "eval": {"every": 0, "batch_size": 32},
  },
  "inserted": {
    "model": {
      "num_prelude_layers": 0, "num_coda_layers": 0, "memory": "jet",
      "memory_mlp": False, "pass_norm": True,
    },
  },
  "warm_up": {
    "model": {"eviction": "hard"},
    "optim": {"frozen": "^(token_embedding|layers|final_norm)/"},
    "run": {"init_fresh": "^memories/"},
  },
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The paper's config, changed by `preset[,section.key=value...]`."""
  config = config_lib.make("sleep", "gsm")
  return config_lib.apply_presets(config, f"paper,{arg}", PRESETS)


def sweeps(config: ml_collections.ConfigDict | None = None) -> dict[str, list]:
  """Overrides by sweep and item."""
  config = config or get_config()
  passes = config_lib.axis("model.num_passes", 1, 2, 4, 6)
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  # Figure 5: a quarter of figure 4's window.
  window = config.model.window // 4
  sliding = [{"model.eviction": "sliding", "model.window": window}]
  return {
    "passes": config_lib.product(passes, seeds),  # Figure 4.
    "sliding": config_lib.product(sliding, passes[:3], seeds),
  }
