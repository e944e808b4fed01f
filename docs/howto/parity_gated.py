"""A family and a task from outside the package: gated.py on parity.py.

  loopjax train --config=parity_gated.py

Presets:

  tiny    12 bits, two layers looped four times; a few minutes on a CPU core.
          0.07 of 512 rows were then right, and 0.66 with
          --config=parity_gated.py:model.name=looped. Nothing is searched.
  smoke   what the tests run.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_TINY = {
  "model": {
    "width": 64, "num_layers": 2, "num_heads": 2, "num_loops": 4,
    "init_std": 0.1,
  },
  "optim": {"learning_rate": 4e-3, "warmup_steps": 50},
  "run": {"num_steps": 1000, "batch_size": 128},
  "eval": {"every": 200},
}  # fmt: skip
PRESETS = {
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, {
    "model": {"width": 16, "num_layers": 1, "num_loops": 2},
    "optim": {"warmup_steps": 2},
    "run": {"num_steps": 4, "batch_size": 16, "steps_per_call": 2,
            "log_every": 2, "checkpoint_every": 4},
    "eval": {"every": 0, "depth_factor": 0},
  }),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  # Modules: files here, or `my_package.gated`.
  return presets.apply(config_lib.make("gated", "parity"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config
  return {"loops": config_lib.axis("model.num_loops", 1, 2, 4)}
