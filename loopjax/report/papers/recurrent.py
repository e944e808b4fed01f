"""Numbers of recurrent depth: Huginn, arXiv 2502.05171, and models like it.

The losses of the boundary operator (arXiv 2609.19107) are from its
repository, for the smaller of its two sizes; none of Huginn's scores is of a
task here.
"""

from loopjax.report.paper import (
  BITS,
  BITS_BY_LOOPS,
  BITS_IN_TRAINING,
  NATS,
  STEPS,
  AtDepth,
  Column,
  Number,
  Paper,
  Row,
  Scale,
  Sweep,
)

_DEPTHS = tuple(
  Column(name, label, AtDepth("depth/bits_per_byte", 1.0, times), 3)
  for name, label, times in (
    ("quarter", "bits per byte with 1/4 of the loops", 1 / 4),
    ("once", "bits per byte with all loops", 1),
    ("eight", "bits per byte with 8 times the loops", 8),
  )
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
    columns=(BITS, NATS, *_DEPTHS),
    panels=(BITS_BY_LOOPS, BITS_IN_TRAINING),
  ),
  "injection": Sweep(
    title="How the prelude's output enters every loop",
    source="ours; Parcae (arXiv 2604.12946) compares some of them at scale",
    columns=(BITS, NATS, *_DEPTHS),
    panels=(BITS_BY_LOOPS, BITS_IN_TRAINING),
  ),
  "gradient_loops": Sweep(
    title="Number of last loops with a gradient",
    source="ours; Huginn has 8",
    columns=(BITS, NATS, *_DEPTHS),
    panels=(BITS_IN_TRAINING,),
  ),
  "growth": Sweep(
    title="All loops from the start, or a growing number",
    source="arXiv 2609.19107, its repository",
    columns=(BITS, NATS),
    rows=(
      Row("Loop-2", {"model.growth_loops": []}, _loss(3.232)),
      Row("Loop-Grow", {"model.growth_loops": [2, 4]}, _loss(3.200)),
    ),
    panels=(BITS_IN_TRAINING,),
    caveats=(_TOKENS,),
  ),
  "equal_flops": Sweep(
    title="A loop, a stack with equal FLOPs, and one with equal parameters",
    source="arXiv 2609.19107, its repository",
    columns=(BITS, NATS),
    rows=(
      Row("Loop-2", {"model.injection": "linear"}, _loss(3.232)),
      Row("Deep vanilla", {"model.num_layers": 16, _LOOPS: 1}, _loss(3.212)),
      Row("vanilla", {"model.num_layers": 2, _LOOPS: 1}, _loss(3.330)),
    ),
    panels=(BITS_IN_TRAINING,),
    caveats=(_TOKENS,),
  ),
  "retrofit": Sweep(
    title="Turning layers of a trained transformer into a loop",
    source="ours; arXiv 2511.07384 and 2605.11011 do so at scale",
    columns=(BITS, NATS),
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "Update damped: the transformer's middle layers repeat, without"
      " training. Gate: they become a growing loop that is trained further."
      " Replace: the transformer itself, without a loop, and the same trained"
      " further for as many steps.",
    ),
  ),
}
_SCALE = (
  Scale("parameters", "parameters", "3.56 G (our count)"),
  Scale(
    "layers before, in and after the loop",
    "{model[num_prelude]}, {model[num_layers]}, {model[num_coda]}",
    "2, 4, 2",
  ),
  Scale("loops", "model.num_loops", "32"),
  Scale("width", "model.width", "5,280"),
  Scale("steps x batch", STEPS, "800 billion tokens"),
  Scale("depth", "model.depth", "Poisson log-normal"),
  Scale("learning rate", "optim.learning_rate", "4e-4"),
)

PAPER = Paper(
  name="Recurrent depth, Huginn, arXiv 2502.05171",
  about="Layers before and after a loop run once; the loop's layers repeat, and"
  " the output of the first layers is injected into every loop.",
  size=None,
  sweeps=_SWEEPS,
  columns=(BITS, NATS),
  scale=_SCALE,
  caveats=(),
)
