"""DiscoLoop on multi-hop facts in English: figures 4 and 6 of the paper.

  loopjax train --config=configs/language_disco.py

Source: arXiv 2607.00341, section 5.2 and appendix A.3. Facts have the form
"Finley's teacher is Anya"; questions are direct ("Finley's teacher's wife is")
or reverse ("Who is the wife of the teacher of Finley? Answer:"), in a closed
vocabulary of words. The gate is learned. Presets, in `configs/common.py`:

  tiny    100 + 100 entities, one layer of width 384. After a quarter of its
          steps, 4 to 8 minutes on a CPU core, on facts that were never
          composed, 0.860 to 0.932 direct and 0.964 to 0.980 reverse; the
          vanilla loop 0.104 to 0.256:
          benchmarks/results/2026-11-28_cpu_2cores_two_hops.md
  gpu     the paper's task, width 256. Not measured.
  paper   500 + 500 entities, 5,000 epochs of 20,000 sequences. Not run.
  smoke   used by tests.
"""

import ml_collections

from loopjax import config as config_lib
from loopjax.config import presets

_DISCO = presets.beside(__file__, "common.py")["DISCO"]
_PAPER = {
  "task": {"format": "direct"},
  "model": {"gate": "learned"},
  "run": {"num_steps": 200_000, "checkpoint_every": 20_000},
}

PRESETS = {**_DISCO, "paper": presets.merged(_DISCO["paper"], _PAPER)}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  """The config of `[preset][,section.key=value...]`."""
  return presets.apply(config_lib.make("disco", "multihop"), arg, PRESETS)


def sweeps(config: ml_collections.ConfigDict) -> dict[str, list]:
  """Overrides by sweep and item."""
  del config
  formats = config_lib.axis("task.format", "direct", "reverse")
  models = config_lib.axis("model.name", "disco", "looped", "transformer")
  gates = config_lib.axis("model.gate", "learned", "fixed")
  # Every seed has its own graph and chains.
  keys = ("run.seed", "task.graph_seed", "task.split_seed")
  seeds = [dict.fromkeys(keys, seed) for seed in range(3)]
  return {
    "models": config_lib.product(formats, models, seeds),  # Figures 4 and 6.
    "gate": config_lib.product(formats, gates, seeds),
  }
