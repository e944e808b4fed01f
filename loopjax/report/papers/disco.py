"""Numbers of DiscoLoop: H. Fu et al., arXiv 2607.00341.

`PAPER` has its multi-hop questions, `LANGUAGE` its language models. Every
number here is the paper's, from one run each. Accuracy is in percent. Figures
print no numbers; entries for them quote the text.
"""

from loopjax.report.paper import (
  BITS,
  EXACT,
  LOSS,
  STEPS,
  Column,
  Metric,
  Panel,
  Paper,
  Row,
  Scale,
  Sweep,
  not_scored,
  numbers,
)

_NAME, _FORMAT = "model.name", "task.format"


def _accuracy(split: str, label: str, score: str = "accuracy") -> Column:
  """A column of the accuracy on a split, in percent."""
  key = split if score == "accuracy" else f"{split}/{score}"
  return Column(key, f"{label}, %", Metric(f"{split}/{score}", 100.0))


def _by_depth(hops: int) -> Column:
  """Accuracy out of distribution at the depth selected by validation."""
  chosen_by = f"depth/validation_ood_{hops}/accuracy/loop="

  def value(config, summary):
    del config
    scores = summary.get("metrics", {})
    found = {
      v: name for name, v in scores.items() if name.startswith(chosen_by)
    }
    if not found:
      return None
    return 100.0 * scores[found[max(found)].replace("validation", "test", 1)]

  return Column(f"ood_{hops}", f"OOD, {hops} hops, best depth, %", value)


_IN = _accuracy("test_id_2", "in distribution (ID)")
_OUT = _accuracy("test_ood_2", "out of distribution (OOD)")
_TRAIN = _accuracy("train_2", "training chains")
_ATOMS = _accuracy("train_atom", "single facts")
_STAGE = _accuracy(
  "train_2", "training chains, read after loop 1", "stage1_accuracy"
)
_ATOM_STAGE = _accuracy(
  "train_atom", "single facts, read after loop 1", "stage1_accuracy"
)
_TEST_STAGES = tuple(
  _accuracy(f"test_{split}_2", f"{label}, read after loop 1", "stage1_accuracy")
  for split, label in (("id", "ID"), ("ood", "OOD"))
)
_LOSS = Column(
  "loss", "OOD loss, nats per answer", Metric("test_ood_2/loss"), 3
)

_NEAR = "near-perfect"


def _row(label: str, format_: str, model: str, **values) -> Row:
  """A row of numbers; `id` and `ood` are the two-hop test splits."""
  keys = {"id": "test_id_2", "ood": "test_ood_2", "id_3": "test_id_3"}
  keys |= {"ood_3": "test_ood_3", "train": "train_2", "atoms": "train_atom"}
  keys |= {"stage": "train_2/stage1_accuracy"}
  keys |= {"atom_stage": "train_atom/stage1_accuracy"}
  keys |= {f"{x}_stage": f"test_{x}_2/stage1_accuracy" for x in ("id", "ood")}
  cells = numbers({keys[name]: value for name, value in values.items()})
  return Row(label, {_FORMAT: format_, _NAME: model}, cells)


def _tests(hops: int, format_: str) -> Panel:
  """Accuracy in (solid) and out of distribution (dashed) over training."""
  return Panel(
    f"validation: ID, OOD (dashed), {hops} hops, {format_}, %",
    (f"validation_id_{hops}/accuracy", f"validation_ood_{hops}/accuracy"),
    settings={_FORMAT: format_},
  )


def _stages(format_: str) -> Panel:
  """Accuracy on the training chains after loop 1, over training."""
  return Panel(
    f"training chains after loop 1, {format_}, %",
    ("train_2/stage1_accuracy",),
    settings={_FORMAT: format_},
  )


_SWEEPS = {
  "models": Sweep(
    title="DiscoLoop, the vanilla loop and untied copies",
    source="Table 1, Figures 2, 3, 4 and 6",
    columns=(
      _IN, _OUT, *_TEST_STAGES, _TRAIN, _STAGE, _ATOMS, _ATOM_STAGE,
    ),
    rows=(
      _row("DiscoLoop", "symbolic", "disco",
           id=_NEAR, ood=_NEAR,
           stage="falls towards 0"),
      _row("vanilla loop", "symbolic", "looped",
           id=71.1, ood=8.3, id_stage=0.9, ood_stage=0.0, train=100.0,
           stage=8.8, atoms=100.0, atom_stage=100.0),
      _row("K untied copies", "symbolic", "transformer",
           id="below 20", ood="about 0"),
      *(
        row
        for format_, copies in (("direct", "about 40"), ("reverse", "about 20"))
        for row in (
          _row(f"DiscoLoop, {format_}", format_, "disco",
               id="near 100", ood="about 95",
               stage="near 0 from about epoch 400"),
          _row(f"vanilla loop, {format_}", format_, "looped",
               id="about 90", ood="fails",
               stage="near 0 after more than 2,000 epochs"),
          _row(f"K untied copies, {format_}", format_, "transformer",
               id=copies, ood="about 0",
               train="about 100"),
        )
      ),
    ),
    panels=tuple(
      panel
      for format_ in ("symbolic", "direct", "reverse")
      for panel in (_tests(2, format_), _stages(format_))
    ),
    caveats=(
      "The paper has no table for the English tasks: these are quotes from"
      " sections 5.2 and A.3.",
      "In only 74 % of the ID test chains were both facts trained at these"
      " positions (our count over 4 graphs of the paper's size); scores by role"
      " exposure are in each run's summary.",
    ),
  ),
  "three_hop": Sweep(
    title="Three hops, three loops",
    source="Figure 5",
    columns=(
      _IN, _OUT, _accuracy("test_id_3", "ID, 3 hops"),
      _accuracy("test_ood_3", "OOD, 3 hops"),
    ),
    rows=(
      _row("DiscoLoop", "symbolic", "disco",
           id=_NEAR, ood="around 90",
           id_3=_NEAR, ood_3="roughly 65"),
      _row("vanilla loop", "symbolic", "looped",
           id="near 40", ood="near 5",
           ood_3="near 0"),
      _row("K untied copies", "symbolic", "transformer",
           id="fails", ood="fails",
           ood_3="near 0"),
    ),
    panels=(_tests(2, "symbolic"), _tests(3, "symbolic")),
  ),
  "plateau": Sweep(
    title="Do weight decay and learning rate cause the vanilla plateau?",
    source="ours",
    columns=(_IN, _OUT, _STAGE),
    caveats=("The paper states neither weight decay nor learning rate.",),
  ),
  "gate": Sweep(
    title="Gate of the discrete channel",
    source="ours; the paper's gate is 1 (symbolic) or learned (English)",
    columns=(_IN, _OUT, _STAGE),
  ),
  "channel": Sweep(
    title="Details of the discrete channel",
    source="ours; the paper only states temperature 1",
    columns=(_IN, _OUT, _STAGE),
  ),
  "length_generalisation": Sweep(
    title="More hops than trained on, with more loops",
    source="ours; future work of the paper",
    columns=(_IN, _OUT, *(_by_depth(hops) for hops in range(3, 8))),
    caveats=("Trained on up to 3 hops with 3 loops, evaluated after up to 9.",),
  ),
  "retrofit": Sweep(
    title="The discrete channel added to a trained vanilla loop",
    source="ours",
    columns=(_IN, _OUT, _STAGE),
    caveats=("A tenth of the steps, starting from run.init_from.",),
  ),
}  # fmt: skip


def _graph(config, summary):
  del summary
  return "2 x {num_entities}, {num_relations} relations, {out_degree}".format(
    **config["task"]
  )


_SCALE = (
  Scale("entities", _graph, "2 x 500, 50 relations, 10 facts each"),
  Scale("width", "model.width", "not stated"),
  Scale("loops", "model.num_loops", "2"),
  Scale(
    "steps x batch",
    STEPS,
    "3,000 epochs of 20,000 sequences; 5,000 in English",
  ),
  Scale("layers of a loop", "model.num_layers", "not stated"),
  Scale("weight decay", "optim.weight_decay", "not stated"),
  Scale("learning rate", "optim.learning_rate", "not stated"),
  Scale("parameters", "parameters", "not stated"),
  Scale("training sequences", lambda _, s: s["data"]["train_examples"],
        "20,000"),
  Scale("format", "task.format", "symbolic; English, direct and reverse"),
  Scale("hardware", "devices", "8 x H200"),
)  # fmt: skip

PAPER = Paper(
  name="DiscoLoop, Fu et al., arXiv 2607.00341",
  about="Each loop passes on its state and the token it decodes to (the"
  " discrete channel); the vanilla loop passes on only the state."
  " Questions are about chains of two facts: in distribution (ID), facts"
  " that were in other training chains; out of distribution (OOD), facts"
  " that were in none.",
  # In English there are more steps. The paper does not state the model's size;
  # we assume GPT-2's.
  size={
    "task.num_entities": 500,
    "model.width": 768,
    "run.num_steps": frozenset((120_000, 200_000)),
  },
  sweeps=_SWEEPS,
  columns=(_IN, _OUT, _LOSS),
  scale=_SCALE,
  caveats=(
    "The paper states neither the model's size nor the optimizer of its"
    " synthetic experiments; ours are in the config file.",
    "Each of the paper's numbers is from one run.",
  ),
)

_BENCHMARKS = ("ARC-C", "ARC-E", "HellaSwag", "LAMBADA", "PIQA", "RACE", "SciQ")


def _scores(label: str, model: str, loss: str, *scores: float) -> Row:
  """Zero-shot scores in percent, in the order of the paper's columns."""
  names = (*_BENCHMARKS, "average")
  cells = numbers({"loss": loss, **dict(zip(names, scores, strict=True))})
  return Row(label, {_NAME: model}, cells)


def _ours(title: str, *caveats: str) -> Sweep:
  """A comparison of language models that the paper does not have."""
  return Sweep(title, "ours", (BITS, LOSS, EXACT), caveats=caveats)


_LOSSES = Panel("validation loss, nats", ("validation/loss",), factor=1.0)
_LANGUAGE_SWEEPS = {
  "language_models": Sweep(
    title="Language models of 440 M parameters",
    source="Table 2 and Figure 7",
    columns=(
      BITS, LOSS, EXACT,
      *(Column(name, f"{name}, %", not_scored)
        for name in (*_BENCHMARKS, "average")),
    ),
    rows=(
      _scores(
        "vanilla loop", "looped", "lowest early in training",
        30.5, 57.2, 44.2, 35.1, 67.4, 31.0, 79.5, 49.3),
      _scores(
        "PonderLM", "ponderlm", "above DiscoLoop from 10 to 17 B tokens",
        31.7, 55.6, 43.9, 38.0, 67.7, 31.2, 80.5, 49.8),
      _scores(
        "DiscoLoop", "disco",
        "below the vanilla loop from about 13 of 20 B tokens, by at most about"
        " 0.01",
        32.6, 57.6, 44.2, 37.6, 68.4, 31.3, 81.5, 50.5),
    ),
    caveats=(
      "The paper's scores are zero-shot, of lm-evaluation-harness: normalised"
      " accuracy except for LAMBADA and RACE. Ours come from"
      " `loopjax eval` and are not in this table.",
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
_LANGUAGE_SCALE = (
  Scale("parameters", "parameters", "440 M"),
  Scale("task", "task.name", "60 % FineWeb-Edu, 40 % FineMath-4plus"),
  Scale("steps x batch", STEPS, "19,074 x 128 sequences of 8,192 tokens"),
  Scale("loops", "model.num_loops", "4"),
  Scale("width", "model.width", "1,024"),
  Scale("layers of a loop", "model.num_layers", "24"),
  Scale("learning rate", "optim.learning_rate", "3e-3"),
  Scale("weight decay", "optim.weight_decay", "not stated"),
  Scale("hardware", "devices", "2 x 8 GPUs"),
)  # fmt: skip

LANGUAGE = Paper(
  name=PAPER.name,
  about="The same as language models, compared with a transformer, K untied"
  " copies of its stack, and PonderLM, which passes on only the token.",
  size={"model.width": 1024, "run.num_steps": 19_074},
  sweeps=_LANGUAGE_SWEEPS,
  columns=(BITS, LOSS, EXACT),
  scale=_LANGUAGE_SCALE,
  caveats=("Each of the paper's numbers is from one run.",),
)
