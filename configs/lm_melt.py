"""MELT on text: a trained model's loops share one row of keys and values.

  loopjax train --config=configs/lm_melt.py
  loopjax sweep --config=configs/lm_melt.py --sweep=pipeline

Source: arXiv 2605.07721. The first command trains from scratch without a
teacher. The sweep follows the paper: it trains a looped model, the teacher,
then both phases, each as a separate run; the same command resumes them. With
`:tiny,run.init_from=DIR`, your own looped model or an imported Ouro
(docs/hub.md), it starts with phase 1. Presets:

  tiny    bytes of synthetic arithmetic or your text; two layers of width 128,
          four loops. `pipeline` on novels, 51 minutes on a shared CPU core, one
          seed: 2.181 +- 0.007 bits per byte (its teacher, fewer steps, 2.124):
          benchmarks/results/2026-11-28_cpu_2cores_melt_caches.md
  gpu     the same with eight layers of width 512. Timed, not trained.
  paper   MELT-1.6B from Ouro-1.4B-Thinking: set run.init_from, task.train_files
          and task.tokenizer; Table 6 has two equal sources,
          task.mixture=(0.5,0.5). Not run. Ours: 15 steps of warm-up and a final
          rate of 0 (docs/papers.md). `:paper,2.6b` starts from Ouro-2.6B.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import WorkdirOf, presets

_COMMON = presets.beside(__file__, "common.py")
_TINY = presets.merged(_COMMON["LM_TINY"], {
  "model": {"exit_gate": "none", "chunk_size": 4, "prefill_chunk": 1},
  "optim": {"rates": ("latent_gates=4",)},
  "run": {"num_steps": 800, "num_microbatches": 1, "checkpoint_every": 100},
})  # fmt: skip
_LOOPED = {"model.name": "looped", "optim.rates": ()}  # The teacher.
PRESETS = {
  "paper": {
    "task": {"vocab_size": 49_152, "sequence_length": 10_000},
    "model": {"distill": "none", "exit_gate": "unused"},
    "optim": {
      "learning_rate": 8e-6, "final_learning_rate": 0.0,
      "rates": ("latent_gates=62.5",), "warmup_steps": 15, "b2": 0.95,
      "weight_decay": 1e-4, "decay": "matrices", "ema_decay": 0.0,
    },
    "run": {"num_steps": 500, "batch_size": 32, "num_microbatches": 8,
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
  """Overrides by sweep and item: the paper's tables, then our questions.

  Without `run.init_from`, every sweep first trains a teacher.
  """
  axis, product = config_lib.axis, config_lib.product
  run, chunk = config.run, config.model.chunk_size
  scratch = not run.init_from
  first, teacher = ([_LOOPED], WorkdirOf(0)) if scratch else ([], run.init_from)
  rates = {"optim.learning_rate": config.optim.learning_rate}
  if config.optim.name == "muon":
    rates["optim.muon_learning_rate"] = config.optim.muon_learning_rate
  slower = {name: rate / 4 for name, rate in rates.items()} if scratch else {}
  num_steps = presets.steps(config, 1, 2 if scratch else 1)
  on = {**slower, "run.init_from": teacher, "run.num_steps": num_steps}
  from_teacher = {**on, "run.init_fresh": "latent_gates"}
  taught = {**from_teacher, "run.teacher": teacher, "model.distill": "all"}
  phase_1 = {
    **taught, "model.alpha": 0.0, "model.interpolation_steps": num_steps,
  }  # fmt: skip
  phase_2 = {
    **slower, "run.init_from": WorkdirOf(len(first)), "run.teacher": teacher,
    "model.distill": "all",
    "run.num_steps": presets.steps(config, 3, 10 if scratch else 5),
  }  # fmt: skip
  aligned = {**phase_2, "model.align_weight": 0.1}
  # A run needs at least one step; this one changes nothing.
  untrained = {
    **taught, "model.prefill_chunk": 1, "optim.rates": (),
    **dict.fromkeys(rates, 1e-12), "optim.final_learning_rate": 0.0,
    "optim.warmup_steps": 0, "run.num_steps": run.steps_per_call,
  }  # fmt: skip
  # Exits use the looped model's trained gate.
  exits = {"model.exit_gate": "unused"}
  gates = [
    *axis("model.gate", "element", "scalar"),
    *product([{"optim.rates": ()}], axis("model.gate", "mean", "ema", "last")),
  ]
  windows = {**_LOOPED, **on, "run.init_fresh": "window_gates"}
  windows |= {"model.name": "plt", "model.loop_norm": "per_loop"}
  groups = [g for g in (4, 2, 1) if g <= config.model.num_heads]
  gqa = [
    {**item, "model.num_key_value_heads": groups[i]}
    for i in range(len(groups))
    for item in (_LOOPED, {
      **phase_1, "run.init_from": WorkdirOf(2 * i),
      "run.teacher": WorkdirOf(2 * i),
    })
  ]  # fmt: skip
  return {
    # On the validation split, small models are better without alignment.
    "pipeline": [*first, phase_1, *([phase_2] if scratch else []), aligned],
    "gates": [*first, *product([phase_1], gates)],  # Table 3.
    "components": [  # Table 4: leaves out one more each time.
      *first, phase_1, aligned, phase_2,
      taught, from_teacher, {**from_teacher, "model.chunk_size": 0},
    ],
    "open": [*first, *product(  # What the paper leaves open.
      [phase_1], axis("model.distill_beta", 0.0, 0.5))],
    "chunk_size": [*first, *product(
      [phase_1], axis("model.chunk_size", chunk // 2, chunk, 2 * chunk, 0))],
    "untrained_sharing": [  # Table 5.
      *first, *product([untrained], axis("model.gate", "last", "first")),
    ],
    "adaptive_depth": [  # Distils all loops, or only the last.
      *product(first, [{"model.exit_gate": "joint"}]),
      *product([{**phase_1, **exits}], axis("model.distill", "all", "last")),
    ],
    "gqa": gqa if scratch else [],
    "sharing": [  # The teacher trained on, MELT, one loop's keys, windows.
      *first, {**_LOOPED, **on}, from_teacher, *product(
        [{**from_teacher, "optim.rates": ()}],
        axis("model.gate", "first", "last"),
      ), *product([windows], axis("model.window", 16, 64)),
    ],
  }  # fmt: skip
