"""LoopLM (Ouro) on text: one looped stack, and a gate for early exits.

  loopjax train --config=configs/lm_looped.py

Source: arXiv 2510.25741; MELT (arXiv 2605.07721) and other models start from
it. Training covers all exits; `:second_stage,run.init_from=runs/lm_looped` then
trains only the gate (section 3.4). `:tiny,plt` trains loops that share the
first one's keys and values (arXiv 2510.24824). Your own text:
--config.task.train_files='books/*.txt'. Presets:

  tiny    bytes of synthetic arithmetic or your text; two layers of width 128,
          four loops. On novels, 2.26 bits per byte after its 500 steps
          (benchmarks/results). Sizes and rates are not tuned.
  gpu     the same with twelve layers of width 512. Not measured.
  paper   1,434,652,673 parameters, stage 1b: 3 trillion tokens. Set
          task.train_files, and task.tokenizer to SmolLM2's. Not run.
  looplm_1_4b  the paper's 1.4 B model, as `paper`.
  looplm_2_6b  2,667,974,657 parameters, twice the layers. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets
from loopjax.sections import flatten

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["LM_TINY"], {
  "run": {"num_steps": 500, "checkpoint_every": 250},
})  # fmt: skip
PRESETS = {
  "paper": {
    "task": {"vocab_size": 49_152, "sequence_length": 4096},
    "model": {
      "width": 2048, "num_layers": 24, "num_heads": 16, "mlp": "swiglu",
      "mlp_ratio": 2.75, "norm_order": "branch", "num_loops": 4, "tied": False,
      "exit_gate": "joint", "entropy_weight": 0.05, "rope_base": 1e4,
      "precision": "bfloat16",
    },
    "loop": {"remat": "dots_no_batch"},
    "optim": {
      "learning_rate": 3e-4, "schedule": "constant", "warmup_steps": 0,
      "b2": 0.95, "weight_decay": 0.1, "decay": "tables", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 715_000, "batch_size": 1024, "steps_per_call": 1,
      "log_every": 100, "checkpoint_every": 1000,
    },
    "eval": {"every": 1000, "batch_size": 128, "num_examples": 1024,
             "depth_factor": 0},
  },
  "looplm_1_4b": {},
  "looplm_2_6b": {
    "model": {"num_layers": 48}, "loop": {"remat": "outputs"},
  },
  "gpu": presets.merged(
    _TINY, _COMMON["LM_GPU"], {"model": {"num_layers": 12}}
  ),
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, _COMMON["LM_SMOKE"]),
}  # fmt: skip
CHANGES = {
  "second_stage": {"model": {"exit_gate": "alone"}},
  "plt": {"model": {
    "name": "plt", "norm_order": "pre", "loop_norm": "final_only",
  }},
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change...][,section.key=value...]`."""
  sections = config_lib.make("looped", "text")
  return presets.apply(sections, arg, PRESETS, CHANGES)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: loops, and how exits are trained."""
  axis, product = config_lib.axis, config_lib.product
  once = {"model.num_loops": 1, "model.exit_gate": "none"}
  no_exits = {"model.exit_gate": "none"}
  deep = {"model.num_layers": config.model.num_layers * config.model.num_loops}
  gate_alone = {
    **flatten(CHANGES["second_stage"]), "run.init_from": WorkdirOf(1),
    "run.num_steps": presets.steps(config, 1, 4),
  }  # fmt: skip
  return {
    # exit_curve of each run has the losses of fixed loops, gate and change.
    "exit_policies": [no_exits, {}, gate_alone],
    # The last one has the FLOPs of the others' default, without weight sharing.
    "loops": [once, *axis("model.num_loops", 2, 4, 8), {**once, **deep}],
    "exits": product(
      [no_exits, *axis("model.entropy_weight", 0.0, 0.05, 0.1)],
      axis("run.seed", 0, 1, 2),
    ),
    "learning_rates": _COMMON["learning_rates"](config),
  }
