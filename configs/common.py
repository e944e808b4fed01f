"""Blocks of settings that several configs share; not a config.

Configs are loaded by path and read these with `presets.beside`. A block that
only one config uses is in that config.

  SMOKE         the base of most smoke presets
  SLEEP*        Sleep's tasks: automaton, depo, gsm
  DISCO         presets of DiscoLoop's tasks: language, multihop
  LM_*          training on text, and on arithmetic in the tests
  TUNE*         further training of a trained model on text
  SUDOKU_*      Sudoku; SUDOKU_PEER*: TRM, HRM and URM
"""

from loopjax.config import presets

SMOKE = {  # Takes seconds; used by tests.
  "model": {"width": 16, "num_heads": 2}, "optim": {"warmup_steps": 2},
  "run": {
    "num_steps": 20, "batch_size": 16, "steps_per_call": 5, "log_every": 10,
    "checkpoint_every": 10,
  },
  "eval": {"every": 0, "num_examples": 0, "batch_size": 64},
}  # fmt: skip
SLEEP = {  # Sleep's paper, arXiv 2605.26099.
  "optim": {
    "name": "muon", "learning_rate": 5e-5, "muon_learning_rate": 2e-3,
    "schedule": "constant", "warmup_steps": 500, "b2": 0.95,
    "weight_decay": 1e-4, "decay": "matrices", "ema_decay": 0.0,
  },
  "run": {"steps_per_call": 20, "log_every": 200, "checkpoint_every": 5000},
  "eval": {"every": 2000, "batch_size": 200, "depth_factor": 0},
}  # fmt: skip

# Memory in a trained model; `warm_up` trains nothing else (section 6.4).
SLEEP_WARM_UP = {
  "model": {"eviction": "hard"},
  "optim": {"frozen": "^(?!memories/)"},
  "run": {"init_fresh": "^memories/"},
}  # fmt: skip
DISCO = {  # Presets of DiscoLoop, arXiv 2607.00341; tasks set the steps.
  "paper": {
    "optim": {
      "learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 2000,
      "weight_decay": 0.1, "decay": "tables", "ema_decay": 0.0,
    },
    "run": {"batch_size": 500, "steps_per_call": 40, "log_every": 400},
    "eval": {"every": 4000, "batch_size": 1000, "depth_factor": 0},
  },
  "gpu": {
    "model": {"width": 256, "num_heads": 8},
    "optim": {"learning_rate": 3e-4},
  },
  "tiny": {
    "task": {
      "num_entities": 100, "num_relations": 5, "out_degree": 5,
      "num_train_chains": (2000,), "num_test_chains": (250,),
      "num_fact_repeats": 18, "num_scored_train": 500,
    },
    "model": {
      "width": 384, "num_layers": 1, "num_heads": 6, "dropout": 0.2,
      "init_std": 0.035,
    },
    "optim": {
      "learning_rate": 1.4e-3, "schedule": "cosine", "warmup_steps": 500,
      "b2": 0.99,
    },
    "run": {
      "num_steps": 10_000, "batch_size": 100, "steps_per_call": 100,
      "log_every": 500, "checkpoint_every": 2500,
    },
    "eval": {"every": 1000, "batch_size": 500},
  },
  "smoke": presets.merged(SMOKE, {
    "task": {
      "num_entities": 12, "num_relations": 5, "out_degree": 3,
      "num_train_chains": (40,), "num_test_chains": (10,), "vocab_multiple": 8,
    },
    "model": {"num_layers": 2},
  }),
}  # fmt: skip
SLEEP_SMOKE = presets.merged(SMOKE, {
  "model": {
    "num_layers": 1, "num_memory_layers": 1, "num_memory_heads": 2,
    "key_width": 8, "value_width": 8, "num_loops": 2,
  },
})  # fmt: skip
LM_TINY = {  # Bytes of synthetic arithmetic, or of your text.
  "task": {
    "train_files": "made:arithmetic", "vocab_size": 0, "sequence_length": 128,
    "validation_share": 0.02, "test_share": 0.02,
  },
  "model": {
    "width": 128, "num_layers": 2, "num_heads": 4, "rope_base": 1e4,
    "init_std": 0.05, "precision": "float32",
  },
  "optim": {
    "name": "muon", "learning_rate": 4e-3, "muon_learning_rate": 0.02,
    "final_learning_rate": 1e-4, "schedule": "cosine", "warmup_steps": 50,
    "b2": 0.98,
  },
  "loop": {"remat": "auto"},
  "run": {"batch_size": 16, "steps_per_call": 10, "log_every": 50},
  "eval": {"every": 100, "batch_size": 64, "num_examples": 128},
}  # fmt: skip
LM_GPU = {  # On top of a family's "tiny".
  "task": {"sequence_length": 1024},
  "model": {
    "width": 512, "num_heads": 8, "init_std": 0.02, "precision": "bfloat16",
  },
  "loop": {"remat": "outputs"},
  "run": {"num_steps": 4000, "batch_size": 64},
}  # fmt: skip
LM_SMOKE = presets.merged(SMOKE, {
  "task": {
    "name": "arithmetic", "modulus": 11, "max_operations": 2,
    "num_eval_examples": 64,
  },
  "model": {"num_layers": 2, "num_loops": 3},
})  # fmt: skip

# Trained models, trained further on text.
TUNE = {
  "task": {
    "train_files": "made:arithmetic", "sequence_length": 256,
    "validation_share": 0.02, "test_share": 0.02,
  },
  "optim": {
    "learning_rate": 3e-4, "final_learning_rate": 0.0, "schedule": "cosine",
    "warmup_steps": 10, "b2": 0.95, "decay": "matrices", "ema_decay": 0.0,
  },
  "run": {
    "num_steps": 200, "batch_size": 8, "steps_per_call": 1, "log_every": 20,
    "checkpoint_every": 100,
  },
  "eval": {
    "every": 100, "batch_size": 16, "num_examples": 64, "depth_factor": 0,
  },
}  # fmt: skip
TUNE_GPU = presets.merged(TUNE, {
  "task": {"sequence_length": 1024},
  "run": {
    "num_steps": 2000, "batch_size": 32, "steps_per_call": 5, "log_every": 50,
    "checkpoint_every": 500,
  },
})  # fmt: skip
TUNE_SMOKE = presets.merged(TUNE, {
  "task": {"sequence_length": 32},
  "optim": {"warmup_steps": 2},
  "run": {"num_steps": 10, "log_every": 5, "checkpoint_every": 5},
  "eval": {"every": 0, "num_examples": 0},
})  # fmt: skip
SUDOKU_SMOKE = presets.merged(SMOKE, {
  "task": {
    "train_csv": "", "test_csv": "", "augment": True, "box_rows": 2,
    "box_cols": 2,
  },
  "model": {"num_loops": 3, "num_memory_tokens": 2},
})  # fmt: skip

# TRM, HRM and URM on Sudoku. 1,000 puzzles, as in all three papers.
SUDOKU_PACKAGED = {
  "train_csv": "", "test_csv": "", "augment": True, "num_train_puzzles": 0,
}  # fmt: skip
SUDOKU_PEER = {
  "task": {
    "train_csv": "hf://sapientinc/sudoku-extreme/train.csv",
    "test_csv": "hf://sapientinc/sudoku-extreme/test.csv",
    "num_train_puzzles": 1000, "augment": True,
  },
  "optim": {
    "learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 2000,
    "b2": 0.95, "weight_decay": 1.0, "clip_norm": 0.0,
  },
  "run": {"steps_per_call": 4, "checkpoint_every": 4000},
  "eval": {"every": 4000, "num_examples": 12_800, "depth_factor": 0},
}  # fmt: skip
SUDOKU_PEER_TINY = {
  "task": {**SUDOKU_PACKAGED, "box_rows": 2, "box_cols": 3},
  "model": {
    "width": 64, "num_heads": 8, "num_loops": 8, "num_memory_tokens": 4,
    "mlp_ratio": 8 / 3, "positions": "grid", "rope_base": 10.0,
    "precision": "float32",
  },
  "optim": {
    "learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 200,
    "b2": 0.98, "ema_decay": 0.98, "weight_decay": 0.1, "clip_norm": 1.0,
  },
  "run": {
    "num_steps": 2000, "batch_size": 16, "steps_per_call": 10,
    "checkpoint_every": 500,
  },
  "eval": {"every": 500, "num_examples": 512, "depth_factor": 2},
}  # fmt: skip
SUDOKU_PEER_NINE = {
  "task": {
    "box_rows": 3, "max_revealed": 1.0, "num_revealed_examples": 24_000,
  },
  "eval": {"every": 1000},
}  # fmt: skip
SUDOKU_PEER_SMOKE = presets.merged(SUDOKU_SMOKE, {
  "task": {"num_train_puzzles": 0},
  "model": {"precision": "float32", "mlp_ratio": 2.0},
})  # fmt: skip


def learning_rates(config) -> list[dict]:
  """A search around the preset's rate.

  With Muon, varies Muon's rate only, as Sleep's paper does.
  """
  name = (
    "muon_learning_rate" if config.optim.name == "muon" else "learning_rate"
  )
  rate = config.optim[name]
  return [{f"optim.{name}": rate * by} for by in (0.25, 0.5, 1.0, 2.0, 4.0)]
