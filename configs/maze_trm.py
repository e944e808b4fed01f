"""TRM on mazes: mark a shortest path.

  loopjax train --config=configs/maze_trm.py

Source: arXiv 2510.04871, section 5 (Maze-Hard), on generated mazes
(loopjax/data/maze). Presets:

  tiny    8x8 grids, an MLP over positions; 10 minutes on one CPU core. Shortest
          path found in 0.901 of test mazes (two other seeds 0.888, 0.780):
          docs/families/peers.md.
  gpu     30x30 grids, an endless stream. Not run.
  paper   1,000 mazes of 30x30 with paths of 110 steps or more where possible,
          65,104 steps of 768. Not run; the paper's exact match on Maze-Hard is
          0.853.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_PEER, _TINY = _COMMON["SUDOKU_PEER"], _COMMON["SUDOKU_PEER_TINY"]
_STREAM = {"num_train_mazes": 0, "augment": False}
# For the positions of a small grid.
_MLP = {
  "mixer": "mlp", "token_mlp_width": 256, "positions": "offset",
  "rope_base": 10_000.0,
}  # fmt: skip

PRESETS = {
  "paper": {
    "task": {"num_train_mazes": 1000, "augment": True},
    "model": {"num_latent_steps": 4},
    "loop": {"remat": "outputs"},
    "optim": _PEER["optim"],
    "run": {**_PEER["run"], "num_steps": 65_104, "batch_size": 768},
    "eval": {"every": 4000, "depth_factor": 0},
  },
  "gpu": {
    "task": _STREAM,
    "loop": {"remat": "dots_no_batch"},
    "run": {"num_steps": 20_000, "batch_size": 128},
  },
  "tiny": {
    "loop": {"remat": "auto"},
    "task": {**_STREAM, "size": 8, "min_path": 1},
    "model": {
      **_TINY["model"], "num_cycles": 2, "num_latent_steps": 3, **_MLP,
      "token_loss": "softmax",
    },
    "optim": _TINY["optim"],
    "run": {**_TINY["run"], "num_steps": 3000, "batch_size": 32},
    "eval": {"every": 500, "num_examples": 256, "depth_factor": 2},
  },
  "smoke": presets.merged(_COMMON["SMOKE"], {
    "loop": {"remat": "auto"},
    "task": {"size": 8, "min_path": 6, "num_train_mazes": 0, "augment": False,
             "num_eval_examples": 64},
    "model": {
      "num_layers": 1, "num_loops": 3, "num_cycles": 2, "num_latent_steps": 2,
      "num_memory_tokens": 2, "precision": "float32", "mlp_ratio": 2.0,
    },
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("trm", "maze"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config  # Presets share the sweeps.
  axis = config_lib.axis
  grid = {"model.positions": "grid", "model.rope_base": 20.0}
  # Shared settings stay: one width and number of layers for all families.
  others = axis("model.name", "hrm", "urm", "utm")
  attention = {
    "model.mixer": "attention", "model.token_mlp_width": 512, **grid,
  }  # fmt: skip
  mlp = {"model.mixer": "mlp", "model.num_heads": 8,
         "model.positions": "offset", "model.rope_base": 10_000.0}  # fmt: skip
  return {
    "mixer": [attention, mlp],
    "maze_families": [attention, *({**other, **grid} for other in others)],
    "maze_memory": axis("model.num_memory_tokens", 0, 4, 16),
    "openness": axis("task.openness", 0.0, 0.05, 0.2),
  }
