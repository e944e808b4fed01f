"""DiscoLoop on multi-hop facts in English: figures 4 and 6 of its paper.

  python -m loopjax.main --config=configs/language_disco.py:gpu --workdir=runs/b

Source: arXiv 2607.00341, section 5.2 and appendix A.3. Facts read "Finley's
teacher is Anya"; questions come direct ("Finley's teacher's wife is") or in
reverse ("Who is the wife of the teacher of Finley? Answer:"), in a closed
vocabulary of words. The gate is learned. Presets as in
`configs/multihop_disco.py`:

  (none)  500 + 500 entities, 5,000 epochs of 20,000 sequences. Not run.
  gpu     the same task, width 256. Not measured.
  tiny    a smaller task on two CPU cores. Not measured.
  smoke   seconds; what the tests run.
"""

import ml_collections

from loopjax import config as config_lib

PRESETS = {
  "paper": {
    "task": {"format": "direct"},
    "model": {"gate": "learned"},
    "optim": {
      "learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 2000,
      "weight_decay": 0.1, "decay": "tables", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 200_000, "batch_size": 500, "steps_per_call": 40,
      "log_every": 400, "checkpoint_every": 20_000,
    },
    "eval": {"every": 4000, "batch_size": 1000, "depth_factor": 0},
  },
  "gpu": {
    "model": {"width": 256, "num_heads": 8},
    "optim": {"learning_rate": 3e-4},
  },
  "tiny": {  # As in `configs/multihop_disco.py`.
    "task": {
      "num_entities": 100, "num_relations": 5, "out_degree": 5,
      "num_train_chains": (2000,), "num_test_chains": (500,),
      "num_fact_repeats": 18, "num_scored_train": 500,
    },
    "model": {
      "width": 384, "num_layers": 1, "num_heads": 6, "dropout": 0.2,
      "init_std": 0.035,
    },
    "optim": {
      "learning_rate": 7e-4, "schedule": "cosine", "warmup_steps": 500,
      "b2": 0.99,
    },
    "run": {
      "num_steps": 10_000, "batch_size": 100, "steps_per_call": 100,
      "log_every": 500, "checkpoint_every": 2500,
    },
    "eval": {"every": 1000, "batch_size": 500},
  },
  "smoke": {
    "task": {
      "num_entities": 12, "num_relations": 5, "out_degree": 3,
      "num_train_chains": (40,), "num_test_chains": (20,), "vocab_multiple": 8,
    },
    "model": {"width": 16, "num_layers": 2, "num_heads": 2},
    "optim": {"warmup_steps": 2},
    "run": {
      "num_steps": 20, "batch_size": 16, "steps_per_call": 5,
      "log_every": 10, "checkpoint_every": 10,
    },
    "eval": {"every": 0, "batch_size": 64},
  },
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The paper's config, changed by `preset[,section.key=value...]`."""
  config = config_lib.make("disco", "multihop")
  return config_lib.apply_presets(config, f"paper,{arg}", PRESETS)


def sweeps(config: ml_collections.ConfigDict | None = None) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config
  formats = config_lib.axis("task.format", "direct", "reverse")
  models = config_lib.axis("model.name", "disco", "looped", "transformer")
  gates = config_lib.axis("model.gate", "learned", "fixed")
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  return {
    "models": config_lib.product(formats, models, seeds),  # Figures 4 and 6.
    "gate": config_lib.product(formats, gates, seeds),
  }
