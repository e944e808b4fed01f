"""Numbers of Sleep: "Language Models Need Sleep", arXiv 2605.26099, v1.

Every number here is the paper's, from one run each. Accuracy is in percent.
Figures print no numbers; entries for them quote the text.
"""

import functools

from loopjax.report.paper import (
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
  numbers,
)

_PASSES = "model.num_loops"
# Rules whose exact match is in a summary (`data/gsm/task.py`).
FLOORS = ("most_frequent", "lone_constant", "sum_of_constants")


def _floor(config, summary):
  del config
  return 100.0 * summary["data"]["constant_floor"]


def _share(key: str, label: str, score: str) -> Column:
  """In percent, of the test split."""
  return Column(key, f"{label}, %", Metric(f"test/{score}", 100.0))


_MATCH = _share("match", "all labels of an example right", "exact_match")
_CELLS = _share("cells", "labels right", "label_accuracy")
_FLOOR = Column("floor", "all right with the best constant answer, %", _floor)
_ANSWERS = _share("answers", "answers right", "answer_accuracy")
_EXACT = _share("exact", "all answers of an example right", "exact_match")


def _at(hops: int) -> str:
  return f"loss at {hops} hop{'s' * (hops > 1)}, nats"


def _hop_loss(hops: int) -> Column:
  name = f"test/loss/hops={hops}"
  return Column(f"hops={hops}", _at(hops), Metric(name), 3)


def _operations(number: int) -> Column:
  name = f"exact_match/operations={number}"
  return _share(f"op={number}", f"right with {number} operations", name)


def _floors(config, summary, number: int) -> dict[str, float]:
  """Scores of simple rules at this many operations, in percent, by name."""
  del config
  found = {
    rule: summary.get("data", {}).get(f"floor/{rule}/operations={number}")
    for rule in FLOORS
  }
  return {rule: 100 * x for rule, x in found.items() if x is not None}


def _best_floor(number: int) -> Column:
  """The highest of the floors at this many operations, in percent."""

  def value(config, summary):
    return max(_floors(config, summary, number).values(), default=None)

  label = f"{number} operations, best simple rule, %"
  return Column(f"floor={number}", label, value)


def _floor_scale(rule: str) -> Scale:
  """Score of a rule at every number of operations."""

  def value(config, summary):
    return ", ".join(
      f"{number}: {_floors(config, summary, number)[rule]:.1f}"
      for number in config["task"]["eval_ops"]
    )

  label = f"right by a simple rule, %: {rule.replace('_', ' ')}"
  return Scale(label, value, "not stated")


def _curve(name: str, label: str, factor: float = 100.0) -> Panel:
  return Panel(f"validation: {label}", (f"validation/{name}",), factor=factor)


def _row(passes: int, **values) -> Row:
  return Row(f"N = {passes}", {_PASSES: passes}, numbers(values))


def _scale(
  window: str,
  *more: Scale,
  layers: str = "2 + 2; 10 in all on cycles",
  width: str = "256; 512 on cycles",
  parameters: str = "not stated",
) -> tuple[Scale, ...]:
  """The task's own sizes, followed by those that all tasks have."""
  return (
    *more,
    Scale("window, tokens", "model.window", window),
    Scale(
      "attention + memory layers",
      "{model[num_layers]} + {model[num_memory_layers]}",
      layers,
    ),
    Scale("width", "model.width", width),
    Scale(
      "steps x batch",
      STEPS,
      "5 billion tokens, batch 512; batch 128 on cycles, 256 on word problems",
    ),
    Scale("optimizer", "optim.name", "Muon and AdamW"),
    Scale("parameters", "parameters", parameters),
    Scale("hardware", "devices", "A6000, H100"),
  )


_paper = functools.partial(
  Paper,
  name='"Language Models Need Sleep", arXiv 2605.26099',
  about="Attention sees one window of tokens. Before the window is dropped, the"
  " model processes it N times, and memory layers write what a later answer"
  " needs into a state that decays at a learned rate A.",
  caveats=(
    "Each of the paper's numbers is from one run; the data order is the same"
    " for every N, here too.",
  ),
)
_ALL_LABELS = _curve("exact_match", "all labels right, %")


def _rates(*columns: Column) -> Sweep:
  """The search for the learning rate used for all numbers of passes."""
  return Sweep(
    title="Learning rates, with one pass",
    source="ours; the paper chose 2e-3 for Muon, with one pass (section 6)",
    columns=columns,
  )


AUTOMATON = _paper(
  size={"model.width": 256, "run.num_steps": 98_000},
  sweeps={
    "passes": Sweep(
      title="Passes over a window before it is dropped",
      source="Figure 2, right",
      columns=(_MATCH, _CELLS, _FLOOR),
      rows=(
        _row(1, match="about 10"),
        _row(2, match="about 20"),
        *(_row(n, match="above 30") for n in (3, 4)),
      ),
      panels=(_ALL_LABELS,),
      caveats=(
        "A label is the first cell of a state after t steps. The paper's rows"
        " are for t = 32 after about 5 billion tokens; 10 % is what the best"
        " constant answer gets there.",
        "The paper does not specify the boundary of a state; here the ends are"
        " neighbours.",
      ),
    ),
    "depth": Sweep(
      title="Steps of the automaton, with one pass",
      source="Figure 2, left",
      columns=(_MATCH, _CELLS, _FLOOR),
      panels=(_ALL_LABELS,),
    ),
    "learning_rate": _rates(_MATCH, _CELLS, LOSS),
    "gradients": Sweep(
      title="Gradients through all passes, the last ones, or a fixed point",
      source="ours; named by the paper as open (section 7)",
      columns=(_MATCH, _CELLS),
    ),
    "states": Sweep(
      title="Initial state of a pass, and how far a token writes",
      source="ours; algorithm 1 is the first row",
      columns=(_MATCH, _CELLS),
    ),
  },
  columns=(_MATCH, _CELLS, _FLOOR, LOSS),
  panels=(
    Panel(
      "test: all labels right, %",
      ("test/exact_match",),
      over=_PASSES,
      lines="task.num_steps",
    ),
  ),
  scale=_scale(
    "24",
    Scale("steps of the rule", "task.num_steps", "32"),
    Scale(
      "states x cells", "{task[num_states]} x {task[state_width]}", "4 x 24"
    ),
  ),
)

_NUM_HOPS = (1, 2, 4, 8, 16)
_HOPS = tuple(_hop_loss(hops) for hops in _NUM_HOPS)
DEPO = _paper(
  # The paper does not state the steps; these are ours.
  size={"model.width": 512, "task.num_nodes": 75, "run.num_steps": 100_000},
  sweeps={
    "passes": Sweep(
      title="Passes over a window before it is dropped",
      source="Figure 3",
      columns=(*_HOPS, _ANSWERS),
      rows=(
        _row(1, **{"hops=4": "little progress"}),
        _row(2, **{"hops=8": "stalls"}),
        _row(4, **{"hops=16": "starts to improve"}),
      ),
      panels=tuple(
        _curve(f"loss/hops={hops}", _at(hops), 1.0) for hops in _NUM_HOPS
      ),
    ),
    "learning_rate": _rates(_ANSWERS, LOSS),
    "memory": Sweep(
      title="Gated delta net and Jet block",
      source="ours; Jet in the paper's text, the other in Figure 3's caption",
      columns=(*_HOPS, _ANSWERS),
    ),
    "eviction": Sweep(
      title="Dropping whole windows, or all but the last tokens",
      source="ours; on this task the paper drops whole windows",
      columns=(*_HOPS, _ANSWERS),
    ),
  },
  columns=(_ANSWERS, _EXACT, LOSS),
  scale=_scale(
    "75",
    Scale("nodes", "task.num_nodes", "75"),
    Scale("hops, at most", "task.max_hops", "16"),
  ),
)

_NUM_OPERATIONS = (2, 4, 6, 8)
_OPERATIONS = tuple(
  column
  for number in _NUM_OPERATIONS
  for column in (_operations(number), _best_floor(number))
)
_BY_OPERATIONS = tuple(
  _curve(f"exact_match/operations={number}", f"{number} operations, %")
  for number in _NUM_OPERATIONS
)
_PRETRAINED = (
  "The paper fine-tunes pre-trained models with 1.4 and 2 billion parameters"
  " on a different generator; ours start from random parameters, or from a"
  " `looped` model trained on the same task.",
)
GSM = _paper(
  size=None,  # The paper fine-tunes models of billions of parameters.
  sweeps={
    "passes": Sweep(
      title="Passes over a window before it is dropped",
      source="Figure 4",
      columns=(*_OPERATIONS, _EXACT),
      rows=(
        _row(1, **{"op=6": Number(74.2, text="Ouro 41.9"),
                   "op=8": Number(35.1, text="Ouro 21.0")}),
        _row(2),
        _row(4, **{"op=6": "Ouro 61.5", "op=8": "Ouro 27.2"}),
        _row(6, **{"op=6": 81.2, "op=8": 38.8}),
      ),
      panels=_BY_OPERATIONS,
      caveats=_PRETRAINED,
    ),
    "sliding": Sweep(
      title="The same, with the last L - 1 tokens visible",
      source="Figure 5",
      columns=(*_OPERATIONS, _EXACT),
      rows=(
        _row(1, **{"op=2": 59.6}),
        _row(2),
        _row(4, **{"op=2": Number(90.5, text="N is not stated")}),
      ),
      panels=_BY_OPERATIONS,
      caveats=_PRETRAINED,
    ),
    "stages": Sweep(
      title="Memory inserted into a LoopLM: the LoopLM, a warm-up, and joint"
        " training",
      source="section 6.4; the paper has no numbers for its stages",
      columns=(*_OPERATIONS, _EXACT),
      panels=_BY_OPERATIONS,
      caveats=_PRETRAINED,
    ),
  },
  columns=(_EXACT, LOSS),
  scale=(
    *_scale(
      "2,000; 512 if sliding",
      Scale(
        "tokens per problem",
        "{task[min_length]:,} to {task[max_length]:,}",
        "2,000 to 3,300",
      ),
      layers="28 in all, or Ouro's and 6",
      width="not stated",
      parameters="pre-trained: Jet-Nemotron 2 billion, Ouro 1.4 billion",
    ),
    *map(_floor_scale, FLOORS),
  ),
)  # fmt: skip
