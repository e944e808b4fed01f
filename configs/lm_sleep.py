"""Sleep on text: memory inserted into a trained transformer or LoopLM.

  loopjax train --config=configs/lm_sleep.py

As in sections 6.3 and 6.4 of Sleep's paper (docs/families/sleep.md). With
`import=`, the model comes from a run, zoo:NAME, a folder of the Hub or a GGUF
file; without it, zoo:novels. Memory layers without effect go between its
layers. A row is one document, or a part of one. `warm_up` trains the memory
only; the sweep `stages` then trains everything, with a sliding window:

  loopjax sweep --sweep=stages \
      --config=configs/lm_sleep.py:import=SmolLM2-135M,task.train_files=my.txt

`model.num_loops` is N, 2 for a transformer. Presets:

  tiny    200 steps of 8 rows of 256 tokens, in windows of 64, of synthetic
          arithmetic or your text. Not measured.
  gpu     2,000 steps of 32 rows of 1,024 tokens, in windows of 256. Not
          measured.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets
from loopjax.sections import flatten

_COMMON = presets.beside(__file__, "common.py")
_INSERTED = {
  "task": {"packed": False},
  "model": {
    "memory": "jet", "loop_norm": "per_loop", "num_loops": 2, "window": 64,
  },
  "loop": {"remat": "full"},  # Backward pass by group.
}  # fmt: skip
PRESETS = {
  "tiny": presets.merged(_COMMON["TUNE"], _INSERTED),
  "gpu": presets.merged(
    _COMMON["TUNE_GPU"], _INSERTED, {"model": {"window": 256}}
  ),
  "smoke": presets.merged(
    _COMMON["TUNE_SMOKE"], _INSERTED,
    {"model": {"window": 8}, "loop": {"remat": "none"}},
  ),
}  # fmt: skip
CHANGES = {"warm_up": _COMMON["SLEEP_WARM_UP"]}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change][,import=RUN][,section.key=value...]`."""
  sections = config_lib.make("sleep", "text")
  return presets.apply(sections, arg, PRESETS, CHANGES, source="zoo:novels")


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  third = presets.steps(config, 1, 3)
  warm_up = {**flatten(CHANGES["warm_up"]), "run.num_steps": third}
  whole = {
    "model.eviction": "sliding", "run.init_from": WorkdirOf(0),
    "run.init_fresh": "", "run.num_steps": 2 * third,
  }  # fmt: skip
  return {
    "stages": [warm_up, whole],  # Section 6.4.
    "passes": config_lib.axis("model.num_loops", 1, 2, 4),
    "learning_rates": _COMMON["learning_rates"](config),
  }
