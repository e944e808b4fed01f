"""Numbers of Ouro, a looped language model: arXiv 2510.25741.

Sizes are Ouro's. Scores are of its published weights, Ouro-1.4B-Thinking,
in MELT's Table 1 (arXiv 2605.07721): in percent, one run, with the standard
error that it prints.
"""

from loopjax.report.paper import (
  BITS,
  BITS_IN_TRAINING,
  NATS,
  STEPS,
  Column,
  Number,
  Paper,
  Row,
  Scale,
  Sweep,
  not_scored,
)
from loopjax.report.papers import melt

# MELT's Table 1, pass@1 or accuracy: key, label, mean, standard error.
_TABLE = (
  ("aime24", "AIME24, %", 50.2, 1.6),
  ("aime25", "AIME25, %", 36.7, 1.5),
  ("aime26", "AIME26, %", 44.0, 1.5),
  ("amc23", "AMC23, %", 81.2, 1.2),
  ("math500", "MATH-500, %", 94.4, 1.0),
  ("olympiad", "OlympiadBench, %", 67.5, 1.9),
  ("gpqa", "GPQA, %", 40.8, 2.3),
  ("hle", "HLE, %", 2.7, 0.9),
  ("mmlu", "MMLU-Redux, %", 74.2, 0.6),
  ("humaneval", "HumanEval, %", 76.8, 3.3),
)
_SCORES = tuple(Column(key, label, not_scored) for key, label, *_ in _TABLE)
_OURO = Row(
  "Ouro-1.4B-Thinking",
  {"model.num_loops": 4, "model.exit_gate": "joint"},
  {
    key: Number(mean, text=f"± {error}, measured by MELT")
    for key, _, mean, error in _TABLE
  },
)
_SWEEPS = {
  "loops": Sweep(
    title="Loops of one stack, and an unshared stack of equal depth",
    source="MELT's Table 1 for the published weights, of four loops",
    columns=(BITS, NATS, melt.CACHE, *_SCORES),
    rows=(_OURO,),
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "The paper's row used 7.7 trillion tokens and post-training; its"
      " benchmarks are not run here.",
    ),
  ),
  "exit_policies": Sweep(
    title="Exits without a gate, with one, and with one trained separately",
    source="Ouro, sections 3.3 and 3.4; it has no table of this",
    columns=(BITS, NATS),
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "Bits per byte use all loops. The loss after a fixed number of loops,"
      " and with exits by the gate or by the change of the state, is in each"
      " run's figures/exit_curve.",
    ),
  ),
  "exits": Sweep(
    title="How exits are trained: the entropy of the gate",
    source="ours; Ouro uses 0.1 at first and 0.05 later",
    columns=(BITS, NATS),
    panels=(BITS_IN_TRAINING,),
  ),
  "learning_rates": Sweep(
    title="Learning rates of Muon",
    source="ours",
    columns=(BITS, NATS),
    panels=(BITS_IN_TRAINING,),
  ),
}
_SCALE = (
  Scale("parameters", "parameters", "1.435 G (our count)"),
  Scale("layers", "model.num_layers", "24"),
  Scale("width", "model.width", "2048"),
  Scale(
    "steps x batch",
    STEPS,
    "3 trillion tokens in stage 1b, 7.7 trillion in all",
  ),
  Scale("tokens of a row", "task.sequence_length", "4,096 (stage 1b)"),
  Scale("loops", "model.num_loops", "4"),
  Scale("entropy of the exits", "model.entropy_weight", "0.1, then 0.05"),
  Scale("learning rate", "optim.learning_rate", "3e-4"),
)  # fmt: skip

PAPER = Paper(
  name="Ouro, arXiv 2510.25741",
  about="One stack of layers runs several times; a gate decides after which"
  " loop a token exits.",
  size=None,
  sweeps=_SWEEPS,
  columns=(BITS, NATS),
  scale=_SCALE,
  caveats=(
    "Ouro's scores are for its published weights, from MELT's Table 1 (arXiv"
    " 2605.07721). Runs here have bits per byte on their own held-out text; the"
    " two are not comparable.",
  ),
)
