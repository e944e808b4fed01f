"""Sizes of LoopFormer, arXiv 2602.11451; none of its scores is of a task here.

Its perplexities and accuracies are of a 3 x 8 model on The Pile.
"""

from loopjax.report.paper import (
  Column,
  Metric,
  Panel,
  Paper,
  Scale,
  Sweep,
  at_depth,
)

_BPB = Column("bpb", "bits per byte", Metric("test/bits_per_byte"), 3)
_LOSS = Column("loss", "nats per token", Metric("test/loss"), 3)
_DEPTHS = tuple(
  Column(name, label, at_depth("depth/bits_per_byte", 1.0, times), 3)
  for name, label, times in (
    ("quarter", "bits per byte with 1/4 of the loops", 1 / 4),
    ("half", "bits per byte with 1/2 of the loops", 1 / 2),
    ("once", "bits per byte with all loops", 1),
    ("twice", "bits per byte with twice the loops", 2),
  )
)
_PANELS = (
  Panel(
    "test, bits per byte", ("depth/bits_per_byte",), over="loops", factor=1.0
  ),
  Panel("validation, bits per byte", ("validation/bits_per_byte",), factor=1.0),
)


def _sweep(title: str) -> Sweep:
  return Sweep(
    title=title,
    source="ours; the paper compares perplexities at its scale",
    columns=(_BPB, _LOSS, *_DEPTHS),
    panels=_PANELS,
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
  Scale("parameters", lambda _, s: s["parameters"], "276 M (our count)"),
  Scale("layers in a loop", lambda c, _: c["model"]["num_layers"], "3"),
  Scale("loops", lambda c, _: c["model"]["num_loops"], "8"),
  Scale("width", lambda c, _: c["model"]["width"], "2,048"),
  Scale(
    "steps x batch",
    lambda c, _: "{num_steps:,} x {batch_size}".format(**c["run"]),
    "50,000 x 480",
  ),
  Scale("learning rate", lambda c, _: c["optim"]["learning_rate"], "6e-4"),
)

PAPER = Paper(
  name="LoopFormer, arXiv 2602.11451",
  about="Each loop is conditioned on its time and step size; training aligns"
  " short trajectories with long ones.",
  size=None,
  sweeps=_SWEEPS,
  columns=(_BPB, _LOSS),
  scale=_SCALE,
  caveats=(),
)
