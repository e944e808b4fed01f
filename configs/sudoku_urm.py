"""URM on Sudoku: one state, and an MLP that convolves neighbouring cells.

  loopjax train --config=configs/sudoku_urm.py

Source: arXiv 2512.14693 and the authors' code. A step is one segment of
supervision: an example has up to model.num_loops segments. Presets:

  tiny    6x6 boards, about 5 minutes on one CPU core. Exact match 0.920:
          docs/families/peers.md.
  nine    9x9 boards, as `nine` of sudoku_utm.py. 11 minutes on one CPU core, 17
          with evaluations. Exact match 0.305: docs/families/peers.md.
  gpu     the paper's model, packaged 9x9 puzzles. Not run.
  paper   1,000 puzzles of Sudoku-Extreme, from the Hugging Face Hub,
          390,624 steps of 128. Not run; the paper's exact match is 0.776.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["SUDOKU_PEER_TINY"], {
  "model": {"num_layers": 2, "num_cycles": 2, "num_inner_steps": 4},
})  # fmt: skip

PRESETS = {
  "paper": presets.merged(_COMMON["SUDOKU_PEER"], {
    "run": {"num_steps": 390_624, "batch_size": 128},
  }),
  "gpu": {
    "task": _COMMON["SUDOKU_PACKAGED"], "run": {"num_steps": 20_000},
    "eval": {"num_examples": 2048},
  },
  "tiny": _TINY,
  "nine": presets.merged(_TINY, _COMMON["SUDOKU_PEER_NINE"], {
    "run": {"num_steps": 6_200},
  }),
  "smoke": presets.merged(_COMMON["SUDOKU_PEER_SMOKE"], {
    "model": {"num_layers": 1, "num_inner_steps": 2},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("urm", "sudoku"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config  # Presets share the sweeps.
  axis, product = config_lib.axis, config_lib.product
  seeds = axis("run.seed", 0, 42, 123)
  return {
    "seeds": seeds,
    "recursions": product(
      axis("model.num_cycles", 1, 2, 3), axis("model.num_inner_steps", 2, 4, 6)
    ),
    "supervision": product(axis("model.num_loops", 1, 4, 16), seeds),
  }
