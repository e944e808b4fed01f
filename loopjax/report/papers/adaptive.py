"""Numbers of adaptive loops and memory: M. Frey et al., arXiv 2603.08391.

Every number here is the paper's, from one run each. Accuracy is in percent. The
averages at its early and mid checkpoints (Tables 4 and 5) are in small print.
"""

import functools

import numpy as np

from loopjax.analysis import onset
from loopjax.report.paper import (
  BITS,
  BITS_IN_TRAINING,
  LOSS,
  STEPS,
  Column,
  Metric,
  Number,
  Panel,
  Paper,
  Row,
  Scale,
  Sweep,
  not_scored,
)

_LOOPS, _LAYERS = "model.num_loops", "model.num_layers"
_LOCAL, _GLOBAL = "model.num_local_slots", "model.num_global_slots"
# Layers of the presets, smallest first, and of models three times as deep.
_SHALLOW, _DEEP = frozenset((2, 8, 12)), frozenset((6, 24, 36))


def _mean_gate(bank: str) -> Column:
  """The mean over layers of a bank's gate."""

  def value(config, summary):
    gates = [
      Metric(f"test/{bank}_gate/layer={i}")(config, summary)
      for i in range(config["model"]["num_layers"])
    ]
    return None if None in gates else sum(gates) / len(gates)

  return Column(f"{bank}_gate", f"{bank} gate, 0 to 1", value, 2)


def _of_onsets(summary, least: int):
  """A statistic of the losses at which layers begin; NaN if too few do."""

  def read(rows):
    found = onset.losses(rows)
    found = found[~np.isnan(found)]
    return float(summary(found)) if found.size >= least else np.nan

  return read


_STEPS = Column(
  "steps", "loops, mean of layers", Metric("test/ponder_steps"), 2
)
_VALUES = Column(
  "values", "arithmetic, values right, %", Metric("test/exact_match", 100.0)
)
_FACTS = Column(
  "facts",
  "knowledge, statements as trained, right, %",
  Metric("train_statements/exact_match", 100.0),
)
_ANSWERS = Column(
  "answers",
  "knowledge, questions about them, right, %",
  Metric("test_questions/exact_match", 100.0),
)
_SENSE = Column("sense", "eight benchmarks of common sense, %", not_scored)
_SENSEBITS = Column("sense_bpb", "six of them, bits per byte", not_scored, 3)
_MATH = Column("math", "mathematics, bits per byte", not_scored, 3)


def _row(label: str, settings, *averages) -> Row:
  """Averages at steps 5,000, 20,000 and 38,620: accuracy, BPB, BPB."""
  cells = {}
  for key, digits, (early, mid, final) in zip(
    ("sense", "sense_bpb", "math"), (1, 3, 3), averages, strict=True
  ):
    text = f"step 5,000: {early:.{digits}f}; 20,000: {mid:.{digits}f}"
    cells[key] = Number(final, text=text)
  return Row(label, settings, cells)


def _once(layers: frozenset[int], wider: bool = False) -> dict:
  mlp = {} if wider else {"model.mlp_ratio": 4.0}
  return {_LOOPS: 1, _LAYERS: layers, **mlp}


def _loop(number: int) -> dict:
  return {_LOOPS: number, _LOCAL: 0, _GLOBAL: 0}


def _memory(bias: float) -> dict:
  return {_LOOPS: 3, "model.gate_bias": bias}


_MEMORY_ROWS = (
  _row("Mem (g = -3)", _memory(-3.0), (45.4, 46.8, 47.2),
       (1.005, 0.875, 0.810), (1.915, 1.761, 1.619)),
  _row("Mem (g = 0)", _memory(0.0), (45.5, 44.3, 48.1),
       (0.983, 0.862, 0.810), (1.932, 1.751, 1.662)),
  _row("Mem (g = 3)", _memory(3.0), (43.2, 47.5, 51.1),
       (0.978, 0.841, 0.794), (1.961, 1.787, 1.616)),
)  # fmt: skip
_SWEEPS = {
  "table_1": Sweep(
    title="Ten models: loops, memory, and controls of equal size or cost",
    source="Tables 1, 3, 4 and 5",
    columns=(BITS, _STEPS, _SENSE, _SENSEBITS, _MATH),
    rows=(
      _row("Base", _once(_SHALLOW), (45.3, 45.9, 47.7),
           (1.034, 0.909, 0.859), (2.306, 2.155, 2.163)),
      _row("Loop-3", _loop(3), (44.6, 49.3, 50.1),
           (1.004, 0.863, 0.813), (2.034, 1.819, 1.687)),
      _row("Loop-5", _loop(5), (44.5, 44.5, 50.3),
           (1.015, 0.877, 0.823), (2.209, 1.956, 1.737)),
      _row("Loop-7", _loop(7), (45.5, 48.6, 49.8),
           (0.989, 0.879, 0.832), (2.198, 1.765, 1.659)),
      _row("IsoFLOP", _once(_DEEP), (46.8, 50.4, 52.3),
           (0.971, 0.838, 0.780), (2.142, 2.021, 1.801)),
      _row("IsoPar-M", _once(_SHALLOW, wider=True), (45.5, 42.8, 45.9),
           (1.030, 0.904, 0.823), (2.257, 2.022, 2.108)),
      *_MEMORY_ROWS,
      _row("IsoFLOP-M", _once(_DEEP, wider=True), (47.0, 48.7, 53.5),
           (0.974, 0.818, 0.749), (2.144, 1.880, 1.761)),
    ),
    panels=(
      BITS_IN_TRAINING,
      Panel("validation: loops, mean of layers",
            ("validation/ponder_steps",), over="validation/loss", factor=1.0),
    ),
    caveats=(
      "Base is a transformer without loops. IsoFLOP has the FLOPs of three"
      " loops, with three times the layers; IsoPar-M the parameters of the"
      " models with memory (Mem), with a wider MLP; IsoFLOP-M both. g is the"
      " initial bias of the memory gates.",
      "The paper scored 128 items per task: all of its 240 accuracies are"
      " multiples of 1/128. Their average over eight tasks has a standard error"
      " of about 1.5 points (our count).",
      "With 12 layers and no memory the paper says about 200 M parameters; its"
      " sizes, and its other counts, give 162.2 M.",
    ),
  ),
  "onset": Sweep(
    title="At which loss layers start to loop",
    source="Figure 3",
    columns=(
      Column("onset", "loss at onset, nats, mean of layers",
             _of_onsets(np.mean, 1), 2, True),
      Column("spread", "standard deviation over layers, nats",
             _of_onsets(functools.partial(np.std, ddof=1), 2), 2, True),
      Column("began", "layers that started",
             _of_onsets(np.size, 0), 1, True),
      _STEPS, BITS,
    ),
    rows=tuple(
      Row(f"Loop-{n}", _loop(n), {"onset": Number(text="3.27 ± 0.59, all")})
      for n in (3, 5, 7)
    ),
    panels=(
      Panel("validation: loops, mean of layers", ("validation/ponder_steps",),
            over="validation/loss", factor=1.0,
            band=(3.27, 0.59, onset.losses)),
      *(
        Panel(f"validation: loops of layer {i + 1}",
              (f"validation/ponder_steps/layer={i}",),
              over="validation/loss", factor=1.0)
        for i in range(2)
      ),
    ),
    caveats=(
      "The onset is the validation loss at which a layer's expected loops,"
      " which first fall, are half-way between their lowest and their last"
      " evaluation; a layer that rises by less than 0.1 loops never starts. The"
      " paper does not say how it determines the onset, nor what ± 0.59 is the"
      " spread of. Shaded: mean ± standard deviation, ours over layers and"
      " runs.",
      "The paper's losses are nats per GPT-2 token, ours nats per byte unless"
      " the command sets a tokenizer: they are not comparable.",
    ),
  ),
  "gate_openings": Sweep(
    title="Initial opening of the gates",
    source="Table 1, Figure 4 and section A.3",
    columns=(BITS, _STEPS, _mean_gate("local"), _mean_gate("global"), _SENSE,
             _SENSEBITS, _MATH),
    rows=_MEMORY_ROWS,
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "After training, the paper's gates are 0.42 +- 0.13 (local) and 0.30 +-"
      " 0.03 (global); it does not say for which model.",
    ),
  ),
  "lambda": Sweep(
    title="A penalty on iterations",
    source="ours; the paper uses 0 in most experiments",
    columns=(BITS, _STEPS),
  ),
  "arithmetic": Sweep(
    title="Loops, memory and depth on arithmetic",
    source="ours, after the paper's discussion (section 4)",
    columns=(_VALUES,),
    panels=(
      Panel("validation: values right, %", ("validation/exact_match",)),
    ),
    caveats=(
      "The paper's claim: loops help the manipulation of knowledge. Here"
      " manipulation is synthetic arithmetic.",
    ),
  ),
  "arithmetic_rates": Sweep(
    title="Learning rates of Muon for arithmetic",
    source="ours",
    columns=(_VALUES,),
  ),
  # Stored runs of a task that left.
  "knowledge": Sweep(
    title="Loops, memory and depth on knowledge",
    source="ours, after the paper's discussion (section 4)",
    columns=(_FACTS, _ANSWERS),
    panels=(
      Panel("validation: questions answered, %",
            ("validation_questions/exact_match",)),
    ),
    caveats=(
      "The paper's claim: memory helps knowledge, and loops do not. Here"
      " knowledge is facts about synthetic people.",
    ),
  ),
  "knowledge_rates": Sweep(
    title="Learning rates of Muon for knowledge",
    source="ours",
    columns=(_ANSWERS,),
  ),
  "frontier": Sweep(
    title="Loops, slots and depth at equal FLOPs",
    source="ours; left open by the paper (section 4)",
    columns=(BITS, _STEPS),
    panels=(
      Panel("bits per byte, by slots per layer", ("test/bits_per_byte",),
            over=_LOOPS, lines=_LOCAL, factor=1.0),
    ),
    caveats=(
      "Depth is the number of applied layers divided by the loops; MLP widths"
      " use the remaining FLOPs.",
    ),
  ),
}  # fmt: skip

_SCALE = (
  Scale("parameters", "parameters",
        "200 M to 480 M (our count: 162 M to 476 M)"),
  Scale("layers", "model.num_layers", "12; 36"),
  Scale("width", "model.width", "768"),
  Scale("steps x batch", STEPS, "38,620 x about 360,000 tokens"),
  Scale("tokens of a row", "task.sequence_length", "not stated"),
  Scale("learning rate", "optim.learning_rate", "3e-3"),
  Scale("loop update", "model.loop_update", "as equation 5"),
  Scale("local + global slots",
        "{model[num_local_slots]} + {model[num_global_slots]}", "1024 + 512"),
  Scale("hardware", "devices", "not stated"),
)  # fmt: skip

PAPER = Paper(
  name="Adaptive Loops and Memory, Frey et al., arXiv 2603.08391",
  about="Every layer repeats its block up to N times, a router weighing the"
  " iterations, and may read two banks of learned memory slots: its own, and"
  " one that all layers share.",
  size={"model.width": 768, "run.num_steps": 38_620},
  sweeps=_SWEEPS,
  columns=(BITS, _STEPS, LOSS),
  scale=_SCALE,
  caveats=(
    "The paper trains on FineWeb-Edu and scores benchmarks; runs here have"
    " bits per byte on their own held-out text. The two are not comparable.",
    "Each of the paper's numbers is from one run.",
  ),
)
