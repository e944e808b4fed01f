"""Trains a trained language model further on your text, whole or with LoRA.

  loopjax train --config=configs/lm_tune.py

With `import=`, model, tokenizer and vocabulary come from a run, zoo:NAME, a
folder of the Hub or a GGUF file; without it, from zoo:novels. `lora` trains
pairs of rank 16 beside the frozen matrices (docs/hub.md):

  loopjax train \
      --config=configs/lm_tune.py:lora,import=SmolLM2-135M,task.train_files=my.txt

The sweep `retrofit`, for a run of `loopjax hub retrofit`, trains loops that
grow, and the same model without loops. Presets:

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
  """Overrides by sweep and item: all parameters or pairs; the rate; loops."""
  result = {
    "methods": [{}, flatten(CHANGES["lora"])],
    "learning_rates": _COMMON["learning_rates"](config),
  }
  if config.model.name == "recurrent":
    seeds = config_lib.axis("run.seed", 0, 1)
    result["retrofit"] = config_lib.product(_retrofit(config), seeds)
  return result


def _retrofit(config) -> list[dict]:
  """Loops that grow, and none for as many steps or layer applications."""
  model, max_loops = config.model, config.model.num_loops
  stages = max(1, max_loops // 4), max(1, max_loops // 2), max_loops
  grows = {
    "model.growth_steps": tuple(presets.steps(config, n, 3) for n in (1, 2)),
    "model.growth_loops": stages[:2], "optim.rates": ("update_share=10",),
  }  # fmt: skip
  # Without loops, the gate never moves: any number of them changes nothing.
  once = {"model.num_loops": 1}
  one_pass = model.num_prelude + model.num_layers + model.num_coda
  applied = sum(one_pass + model.num_layers * (k - 1) for k in stages)
  longer = {
    **once,
    "run.num_steps": presets.steps(config, applied, 3 * one_pass),
  }
  lora = flatten(CHANGES["lora"])
  return [
    grows, once, longer, {**grows, **lora, "optim.lora_whole": "update_share"},
    {**once, **lora}, {**longer, **lora},
  ]  # fmt: skip
