"""Numbers of DiscoLoop's language models: H. Fu et al., arXiv 2607.00341.

Every number here is the paper's, from one run each.
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
)

_BENCHMARKS = ("ARC-C", "ARC-E", "HellaSwag", "LAMBADA", "PIQA", "RACE", "SciQ")
_BITS = Column("bits", "bits per byte", Metric("test/bits_per_byte"), 3)
_NATS = Column("loss", "loss, nats per token", Metric("test/loss"), 3)
_EXACT = Column("exact", "exact match, %", Metric("test/exact_match", 100.0))


def _not_in_the_summary(config, summary):
  """Unknown: scores come from `python -m loopjax.eval`, not from the run."""
  del config, summary


def _row(label: str, model: str, loss: str, *scores: float) -> Row:
  """Zero-shot scores in percent, in the order of the paper's columns."""
  names = (*_BENCHMARKS, "average")
  cells = {k: Number(v) for k, v in zip(names, scores, strict=True)}
  return Row(label, {"model.name": model}, {**cells, "loss": Number(text=loss)})


def _ours(title: str, *caveats: str) -> Sweep:
  """A comparison of language models that the paper does not have."""
  return Sweep(title, "ours", (_BITS, _NATS, _EXACT), caveats=caveats)


_LOSSES = Panel("validation loss, nats", ("validation/loss",), factor=1.0)
_SWEEPS = {
  "language_models": Sweep(
    title="Language models of 440 M parameters",
    source="Table 2 and Figure 7",
    columns=(
      _BITS, _NATS, _EXACT,
      *(Column(name, f"{name}, %", _not_in_the_summary)
        for name in (*_BENCHMARKS, "average")),
    ),
    rows=(
      _row(
        "vanilla loop", "looped", "lowest early in training",
        30.5, 57.2, 44.2, 35.1, 67.4, 31.0, 79.5, 49.3),
      _row(
        "PonderLM", "ponderlm", "above DiscoLoop from 10 to 17 B tokens",
        31.7, 55.6, 43.9, 38.0, 67.7, 31.2, 80.5, 49.8),
      _row(
        "DiscoLoop", "disco",
        "below the vanilla loop from about 13 of 20 B tokens, by at most about"
        " 0.01",
        32.6, 57.6, 44.2, 37.6, 68.4, 31.3, 81.5, 50.5),
    ),
    caveats=(
      "The paper's scores are zero-shot, of lm-evaluation-harness: normalised"
      " accuracy except for LAMBADA and RACE. Ours come from"
      " `python -m loopjax.eval` and are not in this table.",
      "The paper only plots smoothed training losses; these are quotes from"
      " section 5.3 and appendix B.",
    ),
    panels=(_LOSSES,),
  ),
  "equal_parameters": _ours(
    "Equal parameters",
    "The transformer applies the same stack once, with a quarter of the FLOPs.",
  ),
  "equal_flops": _ours(
    "Equal FLOPs",
    "The vanilla loop and the K untied copies have wider MLPs, to match the"
    " cost of Phi in DiscoLoop and PonderLM; the copies have K stacks of"
    " parameters.",
  ),
  "loops": _ours("Fewer and more loops"),
  "decoding": _ours("Details of the discrete channel"),
  "learning_rates": _ours("Learning rates of Muon"),
}  # fmt: skip
_SCALE = (
  Scale("parameters", lambda _, s: s["parameters"], "440 M"),
  Scale("task", lambda c, _: c["task"]["name"],
        "60 % FineWeb-Edu, 40 % FineMath-4plus"),
  Scale(
    "steps x batch",
    lambda c, _: "{num_steps:,} x {batch_size}".format(**c["run"]),
    "19,074 x 128 sequences of 8,192 tokens",
  ),
  Scale("loops", lambda c, _: c["model"]["num_loops"], "4"),
  Scale("width", lambda c, _: c["model"]["width"], "1,024"),
  Scale("layers of a loop", lambda c, _: c["model"]["num_layers"], "24"),
  Scale("learning rate", lambda c, _: c["optim"]["learning_rate"], "3e-3"),
  Scale("weight decay", lambda c, _: c["optim"]["weight_decay"], "not stated"),
  Scale("hardware", lambda _, s: s["devices"], "2 x 8 GPUs"),
)  # fmt: skip

PAPER = Paper(
  name="DiscoLoop, Fu et al., arXiv 2607.00341",
  about="The same as language models, compared with a transformer, K untied"
  " copies of its stack, and PonderLM, which passes on only the token.",
  size={"model.width": 1024, "run.num_steps": 19_074},
  sweeps=_SWEEPS,
  columns=(_BITS, _NATS, _EXACT),
  scale=_SCALE,
  caveats=("Each of the paper's numbers is from one run.",),
)
