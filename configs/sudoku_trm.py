"""TRM on Sudoku: a tiny network that improves its answer, segment by segment.

  loopjax train --config=configs/sudoku_trm.py

Source: arXiv 2510.04871, section 5 and the authors' code. A step is one segment
of supervision: an example has up to model.num_loops segments. Presets:

  tiny    6x6 boards, 5 minutes on one CPU core. Exact match 0.806:
          docs/families/peers.md.
  nine    9x9 boards, as `nine` of sudoku_utm.py. 12 minutes on one CPU core, 20
          with evaluations. Exact match 0.111: docs/families/peers.md.
  gpu     the paper's model, packaged 9x9 puzzles. Not run.
  paper   1,000 puzzles of Sudoku-Extreme, from the Hugging Face Hub, 65,104
          steps of 768. Not run; the paper's exact match is 0.874.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["SUDOKU_PEER_TINY"], {
  "model": {"mixer": "attention", "num_cycles": 2, "num_latent_steps": 3},
})  # fmt: skip

PRESETS = {
  "paper": presets.merged(_COMMON["SUDOKU_PEER"], {
    "model": {"mixer": "mlp"}, "run": {"num_steps": 65_104, "batch_size": 768},
  }),
  "gpu": {
    "task": _COMMON["SUDOKU_PACKAGED"], "run": {"num_steps": 20_000},
    "eval": {"num_examples": 2048},
  },
  "tiny": _TINY,
  "nine": presets.merged(_TINY, _COMMON["SUDOKU_PEER_NINE"], {
    "run": {"num_steps": 8_000},
  }),
  "smoke": presets.merged(_COMMON["SUDOKU_PEER_SMOKE"], {
    "model": {"mixer": "attention", "num_cycles": 2, "num_latent_steps": 2},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("trm", "sudoku"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  seeds = axis("run.seed", 0, 42, 123)
  tokens = axis("model.num_memory_tokens", 0, 1, 4, 16, 32)
  attention = {"model.mixer": "attention", "model.token_mlp_width": 512}
  unplaced = {"model.num_heads": 8, "model.positions": "offset",
              "model.rope_base": 10_000.0}  # fmt: skip
  mixers = [attention, {"model.mixer": "mlp", **unplaced}]
  cycles = product(
    axis("model.num_cycles", 1, 2, 3), axis("model.num_latent_steps", 1, 3, 6)
  )
  return {
    "mixer": product(mixers, seeds),
    "memory_curve": product([attention], tokens, seeds),
    "memory_curve_mlp": product(mixers[1:], tokens, seeds),
    "recursions": cycles,
    "supervision": product(axis("model.num_loops", 1, 4, 16), seeds),
    "losses": axis("model.token_loss", "softmax", "stablemax"),
  }
