"""Numbers of recurrent depth: Huginn, arXiv 2502.05171, and models like it.

The losses of the boundary operator (arXiv 2609.19107) are from its
repository, for the smaller of its two sizes; none of Huginn's scores is of a
task here.
"""

from loopjax.report.paper import (
  Column,
  Metric,
  Number,
  Panel,
  Paper,
  Row,
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
    ("once", "bits per byte with all loops", 1),
    ("eight", "bits per byte with 8 times the loops", 8),
  )
)
_BY_LOOPS = Panel(
  "test, bits per byte", ("depth/bits_per_byte",), over="loops", factor=1.0
)
_LEARNING = Panel(
  "validation, bits per byte", ("validation/bits_per_byte",), factor=1.0
)
_LOOPS = "model.num_loops"
_TOKENS = (
  "The losses of arXiv 2609.19107 are on FineWeb, with 5 to 8 tokens per"
  " parameter depending on the row: they are not at equal compute."
)


def _loss(value: float) -> dict[str, Number]:
  return {"loss": Number(value, text="FineWeb, validation")}


_SWEEPS = {
  "depth_sampling": Sweep(
    title="A fixed or a random number of loops in training",
    source="ours; Huginn uses a random number (section 3.3), without a"
    " comparison",
    columns=(_BPB, _LOSS, *_DEPTHS),
    panels=(_BY_LOOPS, _LEARNING),
  ),
  "injection": Sweep(
    title="How the prelude's output enters every loop",
    source="ours; Parcae (arXiv 2604.12946) compares some of them at scale",
    columns=(_BPB, _LOSS, *_DEPTHS),
    panels=(_BY_LOOPS, _LEARNING),
  ),
  "gradient_loops": Sweep(
    title="Number of last loops with a gradient",
    source="ours; Huginn has 8",
    columns=(_BPB, _LOSS, *_DEPTHS),
    panels=(_LEARNING,),
  ),
  "growth": Sweep(
    title="All loops from the start, or a growing number",
    source="arXiv 2609.19107, its repository",
    columns=(_BPB, _LOSS),
    rows=(
      Row("Loop-2", {"model.growth_loops": []}, _loss(3.232)),
      Row("Loop-Grow", {"model.growth_loops": [2, 4]}, _loss(3.200)),
    ),
    panels=(_LEARNING,),
    caveats=(_TOKENS,),
  ),
  "equal_flops": Sweep(
    title="A loop, a stack with equal FLOPs, and one with equal parameters",
    source="arXiv 2609.19107, its repository",
    columns=(_BPB, _LOSS),
    rows=(
      Row("Loop-2", {"model.injection": "linear"}, _loss(3.232)),
      Row("Deep vanilla", {"model.num_layers": 16, _LOOPS: 1}, _loss(3.212)),
      Row("vanilla", {"model.num_layers": 2, _LOOPS: 1}, _loss(3.330)),
    ),
    panels=(_LEARNING,),
    caveats=(_TOKENS,),
  ),
  "retrofit": Sweep(
    title="Turning layers of a trained transformer into a loop",
    source="ours; arXiv 2511.07384 and 2605.11011 do so at scale",
    columns=(_BPB, _LOSS),
    panels=(_LEARNING,),
    caveats=(
      "Update damped: the transformer's middle layers repeat, without"
      " training. Gate: they become a growing loop that is trained further."
      " Replace: the transformer itself, without a loop, and the same trained"
      " further for as many steps.",
    ),
  ),
}
_SCALE = (
  Scale("parameters", lambda _, s: s["parameters"], "3.56 G (our count)"),
  Scale(
    "layers before, in and after the loop",
    lambda c, _: "{num_prelude}, {num_layers}, {num_coda}".format(**c["model"]),
    "2, 4, 2",
  ),
  Scale("loops", lambda c, _: c["model"]["num_loops"], "32"),
  Scale("width", lambda c, _: c["model"]["width"], "5,280"),
  Scale(
    "steps x batch",
    lambda c, _: "{num_steps:,} x {batch_size}".format(**c["run"]),
    "800 billion tokens",
  ),
  Scale("depth", lambda c, _: c["model"]["depth"], "Poisson log-normal"),
  Scale("learning rate", lambda c, _: c["optim"]["learning_rate"], "4e-4"),
)

PAPER = Paper(
  name="Recurrent depth, Huginn, arXiv 2502.05171",
  about="Layers before and after a loop run once; the loop's layers repeat, and"
  " the output of the first layers is injected into every loop.",
  size=None,
  sweeps=_SWEEPS,
  columns=(_BPB, _LOSS),
  scale=_SCALE,
  caveats=(),
)
