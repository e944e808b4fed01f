"""HRM on Sudoku: a slow and a fast network, with a one-step gradient.

  loopjax train --config=configs/sudoku_hrm.py

Source: arXiv 2506.21734 and the authors' code. A step is one segment of
supervision: an example has up to model.num_loops segments. Presets:

  tiny    6x6 boards, 3 minutes on one CPU core. Exact match 0.586:
          docs/families/peers.md.
  nine    9x9 boards, as `nine` of sudoku_utm.py. 11 minutes on one CPU core, 14
          with evaluations. Exact match 0.084: docs/families/peers.md.
  gpu     the paper's model, packaged 9x9 puzzles. Not run.
  paper   1,000 puzzles of Sudoku-Extreme, from the Hugging Face Hub,
          26,040 steps of 768. Not run; the paper's exact match is 0.55.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["SUDOKU_PEER_TINY"], {
  "model": {"num_layers": 1, "num_cycles": 2, "num_low_steps": 3},
})  # fmt: skip

PRESETS = {
  "paper": presets.merged(_COMMON["SUDOKU_PEER"], {
    "optim": {"ema_decay": 0.0},
    "run": {"num_steps": 26_040, "batch_size": 768},
  }),
  "gpu": {
    "task": _COMMON["SUDOKU_PACKAGED"], "run": {"num_steps": 20_000},
    "optim": {"ema_decay": 0.999}, "eval": {"num_examples": 2048},
  },
  "tiny": _TINY,
  "nine": presets.merged(_TINY, _COMMON["SUDOKU_PEER_NINE"], {
    "run": {"num_steps": 14_400},
  }),
  "smoke": presets.merged(_COMMON["SUDOKU_PEER_SMOKE"], {
    "model": {"num_layers": 1},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("hrm", "sudoku"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config  # Presets share the sweeps.
  axis, product = config_lib.axis, config_lib.product
  seeds = axis("run.seed", 0, 42, 123)
  return {
    "seeds": seeds,
    "recursions": product(
      axis("model.num_cycles", 1, 2, 4), axis("model.num_low_steps", 1, 2, 4)
    ),
    "supervision": product(axis("model.num_loops", 1, 4, 16), seeds),
  }
