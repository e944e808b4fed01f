"""MELT on text: the loops of a trained model share one row of keys and values.

  python -m loopjax.main --config=configs/lm_melt.py
  python -m loopjax.sweep --config=configs/lm_melt.py --sweep=pipeline

Source: arXiv 2605.07721. The first trains without a teacher, from the start;
the sweep is the paper's way: it trains a looped model, the teacher, then both
phases; each is a run of its own, and the same command resumes them. It
begins with phase 1 after `:tiny,run.init_from=DIR`, a looped model of yours,
also an imported Ouro (docs/hub.md). Presets:

  tiny    bytes of made-up arithmetic, or of your text; two layers of width 128,
          four loops.
  gpu     the same with eight layers of width 512. Not measured.
  paper   MELT-1.6B from Ouro-1.4B-Thinking: give it by run.init_from, its text
          by task.train_files and its tokenizer by task.tokenizer. Not run.
          `:paper,2.6b` is from Ouro-2.6B.
  smoke   what the tests run.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax import presets
from loopjax.config import WorkdirOf

_COMMON = presets.beside(__file__, "common.py")
_TINY = {
  "task": {
    "train_files": "made:arithmetic", "vocab_size": 0, "sequence_length": 128,
    "validation_share": 0.02, "test_share": 0.02,
  },
  "model": {
    "width": 128, "num_layers": 2, "num_heads": 4, "exit_gate": "none",
    "chunk_size": 4, "prefill_chunk": 1, "rope_base": 1e4, "init_std": 0.05,
    "precision": "float32",
  },
  "optim": {
    "name": "muon", "learning_rate": 4e-3, "muon_learning_rate": 0.02,
    "final_learning_rate": 1e-4, "b2": 0.98, "warmup_steps": 50,
    "gate_rate": 4.0, "frozen": "",
  },
  "loop": {"remat": "auto"},
  "run": {
    "num_steps": 800, "batch_size": 16, "num_microbatches": 1,
    "steps_per_call": 10, "log_every": 50, "checkpoint_every": 100,
  },
  "eval": {"every": 100, "batch_size": 64, "num_examples": 128},
}  # fmt: skip
PRESETS = {
  "paper": {
    "task": {"vocab_size": 49_152, "sequence_length": 10_000},
    "model": {"distill": "none", "exit_gate": "unused"},
    "optim": {
      "learning_rate": 8e-6, "final_learning_rate": 0.0, "gate_rate": 62.5,
      "warmup_steps": 15, "b2": 0.95, "weight_decay": 1e-4,
      "decay": "matrices", "ema_decay": 0.0, "frozen": "exit_gate",
    },
    "loop": {"remat": "full"},
    "run": {"num_steps": 500, "batch_size": 32, "num_microbatches": 32,
            "steps_per_call": 1, "log_every": 10, "checkpoint_every": 100},
    "eval": {"batch_size": 8, "depth_factor": 0},
  },
  "gpu": presets.merged(_TINY, {
    "task": {"sequence_length": 1024},
    "model": {"width": 512, "num_layers": 8, "num_heads": 8,
              "chunk_size": 128, "prefill_chunk": 0, "precision": "bfloat16"},
    "run": {"num_steps": 4000, "batch_size": 64}, "eval": {"every": 500},
  }),
  "tiny": _TINY,
  "smoke": presets.merged(_TINY, _COMMON["LM_SMOKE"], {
    "model": {"chunk_size": 3},
  }),
}  # fmt: skip
CHANGES = {"2.6b": {"model": {"num_layers": 48}}}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,change...][,section.key=value...]`."""
  sections = config_lib.make("melt", "text")
  return presets.apply(sections, arg, PRESETS, CHANGES)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  run, optim, chunk = config.run, config.optim, config.model.chunk_size
  first = [] if run.init_from else [
    {"model.name": "looped", "optim.gate_rate": 1.0}
  ]  # fmt: skip
  teacher = run.init_from or WorkdirOf(0)
  slower = {}  # Than what begins from nothing; and for fewer steps.
  if first:
    slower["optim.learning_rate"] = optim.learning_rate / 4
    if optim.name == "muon":
      slower["optim.muon_learning_rate"] = optim.muon_learning_rate / 4

  def steps(share: float) -> int:
    calls = max(1, round(share * run.num_steps / run.steps_per_call))
    return calls * run.steps_per_call

  num_steps = steps(0.5 if first else 1.0)
  begun = {**slower, "run.init_from": teacher, "run.num_steps": num_steps,
           "run.init_fresh": "latent_gates"}  # fmt: skip
  taught = {**begun, "run.teacher": teacher, "model.distill": "all"}
  phase_1 = {**taught, "model.alpha": 0.0,
             "model.interpolation_steps": num_steps}  # fmt: skip
  phase_2 = {**slower, "run.init_from": WorkdirOf(len(first)),
             "run.teacher": teacher, "model.distill": "all",
             "run.num_steps": steps(0.3 if first else 0.6),
             "model.align_weight": 0.1}  # fmt: skip
  # Nothing is learned: a run has at least a step, here of no size.
  untrained = {**taught, "model.prefill_chunk": 1, "optim.gate_rate": 1.0,
               "optim.learning_rate": 1e-12, "optim.final_learning_rate": 0.0,
               "optim.warmup_steps": 0,
               "run.num_steps": run.steps_per_call}  # fmt: skip
  if optim.name == "muon":
    untrained["optim.muon_learning_rate"] = 1e-12
  # Exits by a gate: that of a looped model which was trained with one.
  leaves = {"model.exit_gate": "unused", "optim.frozen": "exit_gate"}
  gated = [{**item, "model.exit_gate": "joint"} for item in first]
  learned = axis("model.gate", "element", "scalar")
  fixed = axis("model.gate", "mean", "ema", "last")
  fixed = product([{"optim.gate_rate": 1.0}], fixed)
  groups = [g for g in (4, 2, 1) if g <= config.model.num_heads]
  gqa = [{**item, "model.num_key_value_heads": g}
         for i, g in enumerate(groups)
         for item in ({"model.name": "looped", "optim.gate_rate": 1.0},
                      {**phase_1, "run.init_from": WorkdirOf(2 * i),
                       "run.teacher": WorkdirOf(2 * i)})]  # fmt: skip
  return {
    "pipeline": [*first, phase_1, phase_2],
    "gates": [*first, *product([phase_1], [*learned, *fixed])],  # Table 3.
    "components": [  # Table 4: one after another is left out.
      *first, phase_1, phase_2, taught, begun, {**begun, "model.chunk_size": 0},
    ],
    "chunk_size": [*first, *product(
      [phase_1], axis("model.chunk_size", chunk // 2, chunk, 2 * chunk, 0))],
    "untrained_sharing": [  # Table 5.
      *first, *product([untrained], axis("model.gate", "last", "first")),
    ],
    "adaptive_depth": [  # Read-outs of every loop learn, or the last alone.
      *gated, *product([{**phase_1, **leaves}],
                       axis("model.distill", "all", "last")),
    ],
    "gqa": [] if run.init_from else gqa,
  }  # fmt: skip
