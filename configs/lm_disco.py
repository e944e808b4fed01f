"""DiscoLoop language models, with their baselines at equal cost.

  loopjax train --config=configs/lm_disco.py

Source: arXiv 2607.00341, section 5.3 and appendix B. Baselines are other models
of the same config: `:model.name=looped`, `ponderlm`, `transformer`. Your own
text: --config.task.train_files='books/*.txt'. Presets:

  tiny    bytes of synthetic arithmetic or your text; 0.4 M parameters. On
          novels, 2.25 to 2.27 bits per byte in 5 to 7 minutes on a CPU core, no
          better than the vanilla loop: docs/results.md. Sizes and rates are not
          tuned.
  gpu     the same with 39 M parameters. Not measured.
  paper   440,764,417 parameters on 20 billion tokens; set task.train_files to
          FineWeb-Edu and FineMath-4plus, task.mixture=(0.6,0.4), and
          task.tokenizer to DeepSeek-V3's. Not run; flags for machines on which
          it fits: benchmarks/results/2026-11-28_accelerators.md
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets
from loopjax.program import budget

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["LM_TINY"], {
  "model": {"top_k": 0}, "optim": {"eps": 1e-8},
  "run": {"num_steps": 500, "checkpoint_every": 250},
})  # fmt: skip

PRESETS = {
  "paper": {
    "task": {"vocab_size": 129_280, "sequence_length": 8192},
    "model": {
      "width": 1024, "num_layers": 24, "num_heads": 16, "mlp": "swiglu",
      "mlp_ratio": 2.75, "norm_order": "branch", "num_loops": 4,
      "gate": "learned", "top_k": 128, "rope_base": 1e6,
      "precision": "bfloat16",
    },
    "loop": {"remat": "dots_no_batch"},
    "optim": {
      "name": "muon", "learning_rate": 3e-3, "muon_learning_rate": 3e-3,
      "schedule": "linear", "warmup_steps": 1000, "b2": 0.95, "eps": 1e-15,
      "weight_decay": 0.1, "decay": "tables", "ema_decay": 0.0,
    },
    "run": {"num_steps": 19_074, "batch_size": 128, "steps_per_call": 1},
    "eval": {"every": 1000, "batch_size": 128, "num_examples": 1024,
             "depth_factor": 0},
  },
  "gpu": presets.merged(
    _TINY, _COMMON["LM_GPU"], {"model": {"num_layers": 12}}
  ),
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, _COMMON["LM_SMOKE"]),
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("disco", "text"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's table, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  names = ("disco", "looped", "ponderlm", "transformer")
  disco, loop, ponder, copies = axis("model.name", *names)
  once = {**copies, "model.num_loops": 1}
  seeds = axis("run.seed", 0, 1, 2)
  wide_loop, wide_copies = (  # With DiscoLoop's FLOPs.
    budget.matched(config, item, {}, budget.flops) for item in (loop, copies)
  )
  equal = [disco, wide_loop, ponder, wide_copies]
  fixed = {"model.gate": "fixed"}
  return {
    "language_models": [disco, loop, ponder],  # Table 2 and Figure 7.
    "equal_parameters": product([disco, loop, ponder, once], seeds),
    "equal_flops": product(equal, seeds),
    "loops": product([disco, loop, ponder], axis("model.num_loops", 1, 2, 8)),
    "decoding": [{}, fixed, *axis("model.top_k", 1, 8)],
    "learning_rates": _COMMON["learning_rates"](config),
  }
