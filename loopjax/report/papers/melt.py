"""Numbers of MELT: arXiv 2605.07721.

Every number here is the paper's, for MELT-1.6B from Ouro-1.4B-Thinking:
accuracy in percent, the mean of 16 completions except for MATH-500, from one
run each.
"""

from loopjax.report.paper import (
  BITS,
  BITS_IN_TRAINING,
  STEPS,
  Column,
  Metric,
  Paper,
  Row,
  Scale,
  Sweep,
  not_scored,
  numbers,
)

_ACCURACY = ("aime24", "aime25", "amc23", "math500")
_LABELS = ("AIME24, %", "AIME25, %", "AMC23, %", "MATH-500, %")


def _cache_bytes(config, summary):
  """Cache bytes of a token over all layers, and over loops if not shared."""
  del summary
  model = config["model"]
  heads = model["num_key_value_heads"] or model["num_heads"]
  width = model["head_width"] or model["width"] // model["num_heads"]
  size = 4 if model["precision"] == "float32" else 2
  loops = model["num_loops"] if model["name"] == "looped" else 1
  return 2 * size * heads * width * model["num_layers"] * loops


_AGREES = Column(
  "agrees",
  "greedy continuation equal to the teacher's, %",
  Metric("teacher/agreement", 100.0),
)
CACHE = Column("cache", "cache, bytes per token", _cache_bytes, 0)
_BENCHMARKS = tuple(
  Column(key, label, not_scored)
  for key, label in zip(_ACCURACY, _LABELS, strict=True)
)


def _row(label: str, settings, *means: float) -> Row:
  return Row(label, settings, numbers(dict(zip(_ACCURACY, means, strict=True))))


def _gate(name: str) -> dict:
  return {"model.name": "melt", "model.gate": name}


_ALL = {"model.distill": "all"}
_BEGUN = {"run.init_fresh": "latent_gates"}  # Goes on from the looped model.
_PLAIN = {**_ALL, "model.align_weight": 0.0}
_UNALIGNED = Row(
  "both phases without alignment (ours)", {**_PLAIN, "run.init_fresh": ""}, {}
)
_OURO = _row(
  "Ouro-1.4B-Thinking", {"model.name": "looped"}, 50.2, 36.7, 81.2, 94.4
)
_MELT = _row(
  "MELT-1.6B", {**_ALL, "model.align_weight": 0.1}, 46.7, 33.3, 80.2, 93.4
)
_CHUNKS = frozenset((2, 3, 4, 16, 128, 500))  # Chunk sizes of the presets.
_TABLE_4 = (
  _MELT,
  _row("- Att-aligned dist.",
       {**_PLAIN, **_BEGUN, "model.alpha": 0.0},
       44.8, 32.9, 77.7, 92.8),
  _row("- Interpolated trans.",
       {**_PLAIN, **_BEGUN, "model.alpha": 1.0},
       35.4, 26.9, 73.0, 86.6),
  _row("- GKD-allLoops",
       {"model.distill": "none", "model.chunk_size": _CHUNKS},
       35.8, 24.4, 67.2, 85.2),
  _row("- Chunk-wise train",
       {"model.distill": "none", "model.chunk_size": 0}, 0.0, 0.0, 0.0, 0.0),
  _UNALIGNED,
)  # fmt: skip
_SWEEPS = {
  "pipeline": Sweep(
    title="A looped model, and MELT after each phase",
    source="Tables 1 and 2",
    columns=(BITS, _AGREES, CACHE, *_BENCHMARKS),
    rows=(
      _OURO,
      _row("MELT-1.6B, phase 1", {**_PLAIN, **_BEGUN}, 44.8, 32.9, 77.7, 92.8),
      _MELT,
      _UNALIGNED,
    ),
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "The cache of MELT-1.6B has 196,608 bytes per token, its teacher's"
      " 786,432 (Table 2).",
    ),
  ),
  "gates": Sweep(
    title="How much of the latent a loop retains, after phase 1",
    source="Table 3",
    columns=(BITS, *_BENCHMARKS),
    rows=(
      _row("MELT-1.6B-P1", _gate("element"), 44.8, 32.9, 77.7, 92.8),
      _row("Mean", _gate("mean"), 29.0, 23.3, 68.8, 83.2),
      _row("EMA-0.2", _gate("ema"), 30.2, 21.5, 68.6, 84.6),
      _row("Last", _gate("last"), 33.7, 24.0, 69.7, 84.0),
      _row("Single-gated", _gate("scalar"), 34.4, 23.1, 66.9, 85.6),
    ),
    panels=(BITS_IN_TRAINING,),
  ),
  "components": Sweep(
    title="Training with fewer and fewer components",
    source="Table 4",
    columns=(BITS, _AGREES, *_BENCHMARKS),
    rows=_TABLE_4,
    panels=(BITS_IN_TRAINING,),
    caveats=("All runs are evaluated token by token, regardless of their"
             " training.",),
  ),
  "untrained_sharing": Sweep(
    title="One loop's keys and values for all, without training",
    source="Table 5",
    columns=(BITS, _AGREES, CACHE, *_BENCHMARKS),
    rows=(
      _OURO,
      _row("Last loop", _gate("last"), 0.0, 0.0, 0.0, 0.0),
      _row("First loop", _gate("first"), 0.0, 0.0, 0.0, 0.0),
    ),
    caveats=(
      "The paper's rows that cache all loops of the prompt are omitted: bits"
      " per byte have no prompt.",
    ),
  ),
  "adaptive_depth": Sweep(
    title="Tokens that exit early and skip the remaining loops",
    source="ours; left open by the paper (appendix F.2)",
    columns=(
      BITS,
      Column("gate", "loops per token at 1 % more loss, by the gate",
             Metric("exits/loops_by_gate"), 2),
      Column("change", "the same by the change of the state",
             Metric("exits/loops_by_change"), 2),
    ),
  ),
  "open": Sweep(
    title="Divergences, and gradients between chunks",
    source="ours; left open by the paper (section 3.3)",
    columns=(BITS,),
    panels=(BITS_IN_TRAINING,),
  ),
  "chunk_size": Sweep(
    title="Number of tokens trained in parallel",
    source="ours; the paper uses 500",
    columns=(BITS,),
    panels=(BITS_IN_TRAINING,),
  ),
  "decoding": Sweep(
    title="Training by chunks, decoding token by token",
    source="ours; the paper trains by chunks of 500, and decodes by token",
    columns=(BITS, _AGREES),
    panels=(BITS_IN_TRAINING,),
    caveats=(
      "All runs are evaluated token by token. Parallel sweeps after the chunks"
      " process a row in training as decoding does. The looped model is the"
      " teacher.",
    ),
  ),
  "gqa": Sweep(
    title="Fewer heads of keys and values, teacher and MELT",
    source="ours; left open by the paper (section 5)",
    columns=(BITS, CACHE),
  ),
  "sharing": Sweep(
    title="What loops can share: MELT's gate, one loop's keys, windows",
    source="ours; windows are of arXiv 2510.24824",
    columns=(BITS, CACHE),
  ),
}  # fmt: skip

_SCALE = (
  Scale("parameters", "parameters", "1.636 G (our count)"),
  Scale("layers", "model.num_layers", "24"),
  Scale("width", "model.width", "2048"),
  Scale(
    "steps x batch",
    STEPS,
    "500 (phase 1), 300 (phase 2) x 320,000 tokens",
  ),
  Scale("tokens of a row", "task.sequence_length", "10,000"),
  Scale("loops", "model.num_loops", "4"),
  Scale("learning rate", "optim.learning_rate", "8e-6, of gates 5e-4"),
  Scale("hardware", "devices", "8 x H100"),
)  # fmt: skip

PAPER = Paper(
  name="MELT, arXiv 2605.07721",
  about="A looped model whose loops share one cache: a gate blends what each"
  " loop would cache. It learns from a looped model, its teacher, by chunks of"
  " tokens, and in phase 2 to agree with it.",
  size=None,
  sweeps=_SWEEPS,
  columns=(BITS, _AGREES, CACHE),
  scale=_SCALE,
  caveats=(
    "The paper post-trains Ouro on reasoning traces and scores benchmarks;"
    " runs here have bits per byte on their own held-out text. The two are not"
    " comparable.",
  ),
)
