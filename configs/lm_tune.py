"""Trains a trained language model further on your text, whole or with LoRA.

  python -m loopjax.main --config=configs/lm_tune.py

With `import=`, model, tokenizer and vocabulary come from a run, zoo:NAME, a
folder of the Hub or a GGUF file; without it, of zoo:novels. `lora` trains pairs
of rank 16 beside the frozen matrices (docs/hub.md):

  python -m loopjax.main \
      --config=configs/lm_tune.py:lora,import=SmolLM2-135M,task.train_files=my.txt

Presets:

  tiny    200 steps of 8 rows of 256 tokens, of synthetic arithmetic or your
          text. The rates fit models of up to a few hundred million parameters.
  gpu     2,000 steps of 32 rows of 1,024 tokens. Not measured.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets
from loopjax.sections import flatten

_COMMON = presets.beside(__file__, "common.py")
PRESETS = {
  "tiny": _COMMON["TUNE"],
  "gpu": _COMMON["TUNE_GPU"],
  "smoke": _COMMON["TUNE_SMOKE"],
}
CHANGES = {"lora": {"optim": {
  "lora_rank": 16, "lora_alpha": 32.0, "learning_rate": 2e-3,
}}}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change][,import=RUN][,section.key=value...]`."""
  sections = config_lib.make("looped", "text")
  return presets.apply(sections, arg, PRESETS, CHANGES, source="zoo:novels")


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: all parameters or pairs; the rate."""
  return {
    "methods": [{}, flatten(CHANGES["lora"])],
    "learning_rates": _COMMON["learning_rates"](config),
  }
