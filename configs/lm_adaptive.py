"""Adaptive loops and memory on text: compute more, or know more.

  loopjax train --config=configs/lm_adaptive.py

Source: arXiv 2603.08391. Each layer loops, and queries its own memory bank and
one shared by all layers. Your own text:
--config.task.train_files='books/*.txt'. Add one of the paper's models without
memory after a preset (`:tiny,loop3`): `base`, `loop3`, `loop5`, `loop7`; all
ten are in the sweep `table_1`. Presets:

  tiny    bytes of synthetic arithmetic or your text; two layers of width 128,
          three loops, a variant of equation 5 (docs/families/adaptive.md). On
          novels, 2.13 bits per byte in 5 minutes on 2 CPU cores
          (benchmarks/results).
  gpu     the same with eight layers of width 512. Not measured.
  paper   210 M parameters; set task.train_files to deduplicated FineWeb-Edu and
          task.tokenizer to GPT-2's. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets
from loopjax.program import budget
from loopjax.sections import flatten

_COMMON = presets.beside(__file__, "common.py")
_NO_MEMORY = {"num_local_slots": 0, "num_global_slots": 0, "gate_bias": 0.0}
_ONCE = {  # A transformer without loops.
  "num_loops": 1, "loop_update": "delta", "scale_from_step": 2,
  "loop_scale": -7.0,
}  # fmt: skip
_BYTES = {  # Fast to train: the first iteration is the block itself.
  "task": {"train_files": "made:arithmetic", "vocab_size": 0},
  "model": {"loop_update": "delta", "scale_from_step": 2, "loop_scale": -2.0},
  "optim": {"eps": 1e-8},
  "loop": {"execution": "scan"},
  "run": {"num_microbatches": 1},
}  # fmt: skip
PRESETS = {
  "paper": {
    "task": {"vocab_size": 50_304, "sequence_length": 1024},
    "model": {"precision": "bfloat16"},
    # Residuals of 36 copies of the block need no stacks, of loops and of
    # layers.
    "loop": {"execution": "unroll", "remat": "dots_no_batch"},
    "optim": {
      "learning_rate": 3e-3, "warmup_steps": 1000, "b2": 0.95, "eps": 1e-10,
      "weight_decay": 0.1, "decay": "matrices", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 38_620, "batch_size": 352, "num_microbatches": 8,
      "log_every": 100, "checkpoint_every": 1000,
    },
    "eval": {
      "every": 1000, "batch_size": 32, "num_examples": 1024, "depth_factor": 0,
    },
  },
  "gpu": presets.merged(_BYTES, {
    "model": {
      "width": 512, "num_layers": 8, "num_heads": 8, "num_local_slots": 512,
      "num_global_slots": 256,
    },
    "loop": {"remat": "dots_no_batch"},
    "run": {"num_steps": 5000, "batch_size": 64},
    "eval": {"every": 500},
  }),
  "tiny": presets.merged(_COMMON["LM_TINY"], _BYTES, {
    "model": {"num_local_slots": 64, "num_global_slots": 32},
    "run": {"num_steps": 800, "checkpoint_every": 400},
  }),
  "smoke": presets.merged(_COMMON["LM_SMOKE"], {
    "model": {
      "num_local_slots": 8, "num_global_slots": 4, "precision": "float32",
    },
    "loop": {"execution": "scan", "remat": "auto"},
    "optim": {"warmup_steps": 2},
    "run": {"num_microbatches": 1},
  }),
}  # fmt: skip
CHANGES = {
  "base": {"model": {**_NO_MEMORY, **_ONCE}},
  **{f"loop{n}": {"model": {**_NO_MEMORY, "num_loops": n}} for n in (3, 5, 7)},
}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change...][,section.key=value...]`."""
  sections = config_lib.make("adaptive", "text")
  return presets.apply(sections, arg, PRESETS, CHANGES)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's table, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  model = config.model
  base, *loops = (flatten(change) for change in CHANGES.values())
  mem = {"model.num_loops": 3}
  gates = [{**mem, "model.gate_bias": bias} for bias in (-3.0, 0.0, 3.0)]
  deep = {"model.num_layers": 3 * model.num_layers}

  wide = budget.matched(config, base, mem, budget.parameters, 12)
  length = config.task.get("sequence_length", 8)
  # Sizes at which the smallest model is neither at chance nor saturated.
  sums = {
    "run.num_steps": presets.steps(config, 6, 8),
    "run.batch_size": config.run.batch_size * length // 8,  # Many short rows.
    "eval.every": presets.steps(config, 1, 8), "eval.num_examples": 300,
    "task.name": "arithmetic", "task.modulus": 11, "task.max_operations": 2,
    "task.num_eval_examples": 12_000,
  }  # fmt: skip
  contrasted = [base, loops[0], mem, {**base, **deep}]
  rates = _COMMON["learning_rates"](config)[:4]
  half = product(contrasted, [rates[1]])
  seeds = axis("run.seed", 4, 5, 6)  # Not used in any search.
  applied = model.num_layers * model.num_loops
  return {
    "table_1": [base, *loops, {**base, **deep}, wide, *gates,
                {**wide, **deep}],
    # Figure 3: frequent evaluations, to find the loss at which layers loop.
    "onset": product(loops, axis("run.seed", 0, 1, 2),
                     axis("eval.every", presets.steps(config, 1, 40))),
    "gate_openings": product(gates, axis("run.seed", 0, 1, 2)),
    "lambda": [*axis("model.ponder_weight", 0.0, 1e-3, 1e-2, 1e-1),
               {"model.ponder_weight": 1e-2, "model.ponder_prior": 0.3}],
    "arithmetic_rates": product([sums], contrasted, rates),
    # At the rate that validation chose for each: the preset's, or less.
    "arithmetic": product([sums], [*contrasted[:3], half[3]], seeds),
    # Beyond the paper: loops x slots x depth at equal FLOPs.
    "frontier": [
      budget.matched(config, {
        **(flatten({"model": _ONCE}) if n == 1 else {"model.num_loops": n}),
        "model.num_layers": applied // n,
        "model.num_local_slots": by * model.num_local_slots,
        "model.num_global_slots": by * model.num_global_slots,
      }, {}, budget.flops, 4)
      for n in (1, 2, 3, 6) if applied % n == 0 for by in (0, 1, 2)
    ],
  }  # fmt: skip
