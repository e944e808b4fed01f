"""Sizes of LoopFormer, arXiv 2602.11451; none of its scores is of a task here.

Its perplexities and accuracies are of a 3 x 8 model on The Pile.
"""

from loopjax.report.paper import (
  BITS,
  BITS_BY_LOOPS,
  BITS_IN_TRAINING,
  NATS,
  STEPS,
  AtDepth,
  Column,
  Paper,
  Scale,
  Sweep,
)

_DEPTHS = tuple(
  Column(name, label, AtDepth("depth/bits_per_byte", 1.0, times), 3)
  for name, label, times in (
    ("quarter", "bits per byte with 1/4 of the loops", 1 / 4),
    ("half", "bits per byte with 1/2 of the loops", 1 / 2),
    ("once", "bits per byte with all loops", 1),
    ("twice", "bits per byte with twice the loops", 2),
  )
)


def _sweep(title: str) -> Sweep:
  return Sweep(
    title=title,
    source="ours; the paper compares perplexities at its scale",
    columns=(BITS, NATS, *_DEPTHS),
    panels=(BITS_BY_LOOPS, BITS_IN_TRAINING),
  )


_SWEEPS = {
  "loss_against_loops": _sweep(
    "More and fewer loops than in training: LoopFormer, a plain loop, and"
    " recurrent depth"
  ),
  "objectives": _sweep("LoopFormer with parts of its loss"),
  "loops": _sweep("LoopFormer with 2, 4 and 8 loops in training"),
  "learning_rates": _sweep("Learning rates of Muon"),
}
_SCALE = (
  Scale("parameters", "parameters", "276 M (our count)"),
  Scale("layers in a loop", "model.num_layers", "3"),
  Scale("loops", "model.num_loops", "8"),
  Scale("width", "model.width", "2,048"),
  Scale("steps x batch", STEPS, "50,000 x 480"),
  Scale("learning rate", "optim.learning_rate", "6e-4"),
)

PAPER = Paper(
  name="LoopFormer, arXiv 2602.11451",
  about="Each loop is conditioned on its time and step size; training aligns"
  " short trajectories with long ones.",
  size=None,
  sweeps=_SWEEPS,
  columns=(BITS, NATS),
  scale=_SCALE,
  caveats=(),
)
