"""DiscoLoop on multi-hop facts: a discrete channel between loops.

  python -m loopjax.main --config=configs/multihop_disco.py:gpu --workdir=runs/a

Source: arXiv 2607.00341, sections 3 and 5.1. The baselines are other models of
the same config: `:tiny,model.name=looped` (the vanilla loop), `transformer` (K
untied copies), `ponderlm`. Presets:

  (none)  the paper's two-hop task, 500 + 500 entities, 3,000 epochs of 20,000
          sequences; the model is GPT-2's block, 4 layers, which the paper does
          not state. Not run.
  gpu     the same task, width 256. Not measured.
  tiny    100 + 100 entities, one layer of width 384, 19 minutes on a CPU core:
          ID 1.000, OOD 0.966, 0.924 and 0.964 in three seeds; the vanilla loop
          0.222, 0.198 and 0.162. The runs, and what other sizes do:
          benchmarks/results/2026-11-21_cpu_2cores_multihop.md.
  smoke   seconds; what the tests run.
"""

import ml_collections

from loopjax import config as config_lib

PRESETS = {
  "paper": {
    "optim": {
      "learning_rate": 1e-4, "schedule": "constant", "warmup_steps": 2000,
      "weight_decay": 0.1, "decay": "tables", "ema_decay": 0.0,
    },
    "run": {
      "num_steps": 120_000, "batch_size": 500, "steps_per_call": 40,
      "log_every": 400, "checkpoint_every": 12_000,
    },
    "eval": {"every": 4000, "batch_size": 1000, "depth_factor": 0},
  },
  "gpu": {
    "model": {"width": 256, "num_heads": 8},
    "optim": {"learning_rate": 3e-4},
  },
  "tiny": {
    "task": {
      "num_entities": 100, "num_relations": 5, "out_degree": 5,
      "num_train_chains": (2000,), "num_test_chains": (500,),
      "num_fact_repeats": 18, "num_scored_train": 500,
    },
    "model": {
      "width": 384, "num_layers": 1, "num_heads": 6, "dropout": 0.2,
      "init_std": 0.035,
    },
    "optim": {
      "learning_rate": 7e-4, "schedule": "cosine", "warmup_steps": 500,
      "b2": 0.99,
    },
    "run": {
      "num_steps": 10_000, "batch_size": 100, "steps_per_call": 100,
      "log_every": 500, "checkpoint_every": 2500,
    },
    "eval": {"every": 1000, "batch_size": 500},
  },
  "smoke": {
    "task": {
      "num_entities": 12, "num_relations": 5, "out_degree": 3,
      "num_train_chains": (40,), "num_test_chains": (20,), "vocab_multiple": 8,
    },
    "model": {"width": 16, "num_layers": 2, "num_heads": 2},
    "optim": {"warmup_steps": 2},
    "run": {
      "num_steps": 20, "batch_size": 16, "steps_per_call": 5,
      "log_every": 10, "checkpoint_every": 10,
    },
    "eval": {"every": 0, "batch_size": 64},
  },
}  # fmt: skip


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The paper's config, changed by `preset[,section.key=value...]`."""
  config = config_lib.make("disco", "multihop")
  return config_lib.apply_presets(config, f"paper,{arg}", PRESETS)


def sweeps(config: ml_collections.ConfigDict | None = None) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  config = config or get_config()
  train, test = config.task.num_train_chains[0], config.task.num_test_chains[0]
  steps = config.run.num_steps
  seeds = config_lib.axis("run.seed", 0, 1, 2)
  models = config_lib.axis(
    "model.name", "disco", "looped", "transformer", "ponderlm"
  )
  disco, vanilla = models[:2]
  learned = {**disco, "model.gate": "learned"}
  half = (train // 2,) * 2
  three = {
    "model.num_loops": 3,
    "task.num_train_chains": half,
    "task.num_test_chains": (test // 2,) * 2,
  }
  longer = {  # Up to k = 3 hops in training, k + 4 in the test.
    **three,
    "task.num_train_chains": (*half, 0, 0, 0, 0),
    "task.num_test_chains": (test // 2,) * 6,
    "eval.depth_factor": 3,
  }
  decays = config_lib.axis("optim.weight_decay", 0.01, 0.1, 0.3, 1.0)
  rates = [
    {"optim.learning_rate": factor * config.optim.learning_rate}
    for factor in (0.3, 1.0, 3.0)
  ]
  # A gate of 0 is the vanilla loop.
  gates = [*config_lib.axis("model.gate_value", 0.1, 0.3, 1.0, 3.0), learned]
  channels = [
    *config_lib.axis("model.temperature", 0.3, 3.0),
    *config_lib.axis("model.top_k", 1, 8),
    *config_lib.axis("model.decode_gradient", "stop", "straight_through"),
    *config_lib.axis("model.epsilon", 1e-9, 1e-3),
    *config_lib.axis("model.loop_norm", "per_loop", "final_only"),
  ]
  result = {
    "models": config_lib.product(models, seeds),  # Table 1, figures 2 and 3.
    "three_hop": config_lib.product(models[:3], [three], seeds),  # Figure 5.
    "plateau": config_lib.product([vanilla, disco], decays, rates),
    "gate": config_lib.product(gates, seeds),
    "channel": config_lib.product(channels, seeds[:1]),
    "length_generalisation": config_lib.product(
      [vanilla, disco, learned], [longer], seeds
    ),
  }
  if config.run.init_from:  # A trained vanilla loop, and a tenth of its steps.
    call = config.run.steps_per_call
    brief = {"run.num_steps": max(steps // 10 // call, 1) * call}
    fresh = {"run.init_fresh": "channel.*"}
    result["retrofit"] = config_lib.product(
      [vanilla, disco, {**learned, **fresh}], [brief], seeds
    )
  return result
