"""DiscoLoop on multi-hop facts: a discrete channel between loops.

  loopjax train --config=configs/multihop_disco.py

Source: arXiv 2607.00341, sections 3 and 5.1. The baselines are other models of
the same config: `:model.name=looped` (the vanilla loop), `transformer` (K
untied copies), `ponderlm`. Presets, whose values are in `configs/common.py`:

  tiny    100 + 100 entities, one layer of width 384; 20 minutes on a CPU core.
          On facts that were never composed, 0.908, 0.972 and 0.940 in three new
          seeds; the vanilla loop 0.276, 0.104 and 0.184:
          benchmarks/results/2026-11-28_cpu_2cores_two_hops.md. Other sizes:
          benchmarks/results/2026-11-28_cpu_2cores_two_hops.md
  gpu     the paper's task, width 256. On an H200, 400 epochs of three hops,
          six runs in 7 minutes, compose nothing:
          benchmarks/results/2026-11-28_cpu_2cores_three_hops.md
  paper   two hops, 500 + 500 entities, 3,000 epochs of 20,000 sequences; the
          block of GPT-2, 4 layers, which the paper does not state. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_DISCO = presets.beside(__file__, "common.py")["DISCO"]
_PAPER = {"run": {"num_steps": 120_000, "checkpoint_every": 12_000}}

PRESETS = {**_DISCO, "paper": presets.merged(_DISCO["paper"], _PAPER)}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("disco", "multihop"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item: the paper's tables, then our questions."""
  axis, product = config_lib.axis, config_lib.product
  # Every seed has its own graph and chains.
  keys = ("run.seed", "task.graph_seed", "task.split_seed")
  seeds = [dict.fromkeys(keys, seed) for seed in range(3)]
  models = axis("model.name", "disco", "looped", "transformer", "ponderlm")
  disco, vanilla = models[:2]
  learned = {**disco, "model.gate": "learned"}
  train = (config.task.num_train_chains[0] // 2,) * 2
  test = (config.task.num_test_chains[0] // 2,)
  three = {
    "model.num_loops": 3,
    "task.num_train_chains": train, "task.num_test_chains": test * 2,
  }  # fmt: skip
  longer = {  # Up to k = 3 hops in training, k + 4 in the test.
    **three, "eval.depth_factor": 3,
    "task.num_train_chains": (*train, 0, 0, 0, 0),
    "task.num_test_chains": test * 6,
  }  # fmt: skip
  decays = axis("optim.weight_decay", 0.01, 0.1, 0.3, 1.0)
  rate = config.optim.learning_rate
  rates = axis("optim.learning_rate", 0.3 * rate, rate, 3.0 * rate)
  gates = axis("model.gate_value", 0.1, 0.3, 1.0, 3.0)  # 0: the vanilla loop.
  channels = [
    *axis("model.temperature", 0.3, 3.0),
    *axis("model.top_k", 1, 8),
    *axis("model.decode_gradient", "stop", "straight_through"),
    *axis("model.epsilon", 1e-9, 1e-3),
    *axis("model.loop_norm", "per_loop", "final_only"),
  ]
  result = {
    "models": product(models, seeds),  # Table 1, figures 2 and 3.
    "three_hop": product(models[:3], [three], seeds),  # Figure 5.
    "plateau": product([vanilla, disco], decays, rates),
    "gate": product([*gates, learned], seeds),
    "channel": product(channels, seeds[:1]),
    "length_generalisation": product(
      [vanilla, disco, learned], [longer], seeds
    ),
  }
  if config.run.init_from:  # From a trained vanilla loop, a tenth of its steps.
    steps = presets.steps(config, 1, 10)
    fresh = {**learned, "run.init_fresh": "channel.*"}
    brief = product([vanilla, disco, fresh], [{"run.num_steps": steps}])
    # The same graph as the initial run's.
    result["retrofit"] = product(brief, axis("run.seed", 0, 1, 2))
  return result
