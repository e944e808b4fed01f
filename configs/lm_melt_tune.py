"""MELT from a trained transformer or looped model, on your text.

  loopjax train --config=configs/lm_melt_tune.py

With `import=`, the model comes from a run, zoo:NAME, a folder of the Hub or a
GGUF file; without it, zoo:novels. The sweep `phases` trains loops around a
transformer, or a looped model's own, then both phases of MELT with these as
teacher (docs/hub.md):

  loopjax sweep --sweep=phases \
      --config=configs/lm_melt_tune.py:import=SmolLM2-135M,task.train_files=my.txt

A transformer gets two loops (`model.num_loops`). The sweep `sharing` trains
them, and from them, for two fifths as many steps each: the loops themselves,
MELT without a teacher, and a shared first loop with windows of 16 tokens (not
if the model has an exit gate, as zoo:novels has). Last comes the model with
one loop, for as many steps as loops and continuation. Presets:

  tiny    200 steps of 8 rows of 256 tokens, of synthetic arithmetic or your
          text, in chunks of 16. Not measured.
  gpu     2,000 steps of 32 rows of 1,024 tokens, in chunks of 128. Not
          measured.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets

_COMMON = presets.beside(__file__, "common.py")
_MELT = {
  "model": {"distill": "none", "num_loops": 2, "chunk_size": 16},
  "optim": {"rates": ("latent_gates=10",)},
}  # fmt: skip
PRESETS = {
  "tiny": presets.merged(_COMMON["TUNE"], _MELT),
  "gpu": presets.merged(
    _COMMON["TUNE_GPU"], _MELT, {"model": {"chunk_size": 128}}
  ),
  "smoke": presets.merged(
    _COMMON["TUNE_SMOKE"], _MELT, {"model": {"chunk_size": 8}}
  ),
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,import=RUN][,section.key=value...]`."""
  sections = config_lib.make("melt", "text")
  return presets.apply(sections, arg, PRESETS, source="zoo:novels")


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  loops = {"model.name": "looped", "optim.rates": (), "run.init_fresh": ""}
  taught = {"model.distill": "all", "run.teacher": WorkdirOf(0)}
  phase_1 = {
    **taught, "run.init_from": WorkdirOf(0), "model.alpha": 0.0,
    "model.interpolation_steps": config.run.num_steps,
  }  # fmt: skip
  phase_2 = {
    **taught, "run.init_from": WorkdirOf(1), "run.init_fresh": "",
    "model.align_weight": 0.1,
  }  # fmt: skip
  on = {
    "run.init_from": WorkdirOf(0), "run.num_steps": presets.steps(config, 2, 5),
  }  # fmt: skip
  windows = {
    **loops, **on, "model.name": "plt", "model.loop_norm": "per_loop",
    "model.window": 16, "run.init_fresh": "window_gates",
    "optim.rates": ("window_gates=10",),
  }  # fmt: skip
  # `plt` has no place for the parameters of an exit gate.
  by_windows = [windows] if config.model.exit_gate == "none" else []
  # With one loop, its cache is the whole cache.
  once = {
    **loops, "model.num_loops": 1, "run.num_steps": presets.steps(config, 7, 5),
  }  # fmt: skip
  return {
    "phases": [loops, phase_1, phase_2],
    "sharing": [loops, {**loops, **on}, on, *by_windows, once],
    "learning_rates": _COMMON["learning_rates"](config),
  }
