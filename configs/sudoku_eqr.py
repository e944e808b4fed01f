r"""Equilibrium Reasoners on Sudoku: TRM, trained to settle from any start.

  loopjax train --config=configs/sudoku_eqr.py

Source: arXiv 2605.21488 and the authors' code. TRM with a random initial state
for every example (model.start), damped and disturbed states (model.damping,
model.path_noise) and the optimizer Adam-atan2. More segments and more starts
then solve more (docs/evaluation.md, "More starts"):

  loopjax score runs/sudoku_eqr --config.eval.num_loops=32 \
    --config.eval.num_starts=16

Presets:

  tiny    6x6 boards, 1,200 steps, 2 minutes on one CPU core. Exact match in
          three seeds 0.798, 0.744, 0.782: docs/families/peers.md.
  nine    9x9 boards, as `nine` of sudoku_trm.py, 12,000 steps. Not run.
  gpu     the paper's model, packaged 9x9 puzzles. Not run.
  paper   1,000 puzzles of Sudoku-Extreme, from the Hugging Face Hub, 50,000
          steps of 768. Not run; the paper's exact match is 0.864 with 16
          segments, 0.930 with 64, and 0.998 with 64 from 128 starts.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_COMMON = presets.beside(__file__, "common.py")
_TRM = presets.beside(__file__, "sudoku_trm.py")["PRESETS"]
_EQR = {
  "model": {"start": "normal", "damping": 0.05, "path_noise": 0.01},
  "optim": {"name": "adam_atan2"},
}  # fmt: skip


def _with(preset: str, changes: dict) -> dict:
  return presets.merged(_TRM[preset], _EQR, changes)


PRESETS = {
  "paper": _with("paper", {"run": {"num_steps": 50_000}}),
  "gpu": _with("gpu", {}),
  "tiny": _with("tiny", {"run": {"num_steps": 1200, "checkpoint_every": 400},
                         "eval": {"every": 400}}),
  "nine": _with("nine", {"run": {"num_steps": 12_000}}),
  "smoke": _with("smoke", {}),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("trm", "sudoku"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the parts of the paper, added in turn."""
  del config  # Presets share the sweeps.
  axis, product = config_lib.axis, config_lib.product
  plain = {
    "model.start": "fixed",
    "model.damping": 0.0,
    "model.path_noise": 0.0,
  }
  parts = [plain, {**plain, "model.start": "normal"}, {}]
  return {"parts": product(parts, axis("run.seed", 0, 42, 123))}
