"""Figures of loops, memory and exits, and of the loss by position."""

import dataclasses
import functools
import json
import types

import analysis_examples
import numpy as np
import pytest

from loopjax.analysis import adaptive
from loopjax.analysis import evaluated as evaluated_lib
from loopjax.models import MODELS
from loopjax.types import Output, TaskSpec

pytestmark = pytest.mark.usefixtures("sketches")


evaluate_model = functools.partial(
  analysis_examples.evaluate, family="adaptive", eval__depth_factor=0
)


def rows(num_layers=2, num_loops=3):
  """A run's rows at steps 10 and 20."""
  result = []
  for step in (10, 20):
    by_layer = {
      f"ponder_steps/layer={i}": 1 + step * (i + 1) / 40
      for i in range(num_layers)
    }
    train = {"step": step, "split": "train", **by_layer}
    for i in range(num_layers):
      train |= {f"ponder_steps_std/layer={i}": 0.1}
      train |= {f"local_gate/layer={i}": 0.1 * i + step / 100}
      for t in range(num_loops):
        train[f"loop_scale/layer={i}/loop={t}"] = 0.1 * (t + 1) + i
    validation = {"step": step, "split": "validation", "loss": 50 / step}
    errors = {f"{name}/standard_error": 0.5 for name in by_layer}
    result += [train, {**validation, **by_layer, **errors}]
  return result


def lines(axes):
  return {line.get_label(): line.get_data() for line in axes.get_lines()}


@pytest.mark.long
def test_every_layer_has_its_iterations_and_scales(tmp_path, drawn):
  evaluated = evaluate_model(tmp_path, rows=rows())
  assert adaptive.draw_loops(evaluated) == [tmp_path / "loops.png"]
  over, at_end, onset, scales = drawn["loops.png"].axes
  steps, values = lines(over)["layer 2"]
  assert (list(steps), list(values)) == ([10, 20], [1.5, 2.0])
  heights = [1 + bar.get_height() for bar in at_end.patches]
  assert heights == pytest.approx([1.5, 2.0])
  loss, mean = lines(onset)["mean of layers"]
  assert list(loss) == [5.0, 2.5]
  assert list(mean) == pytest.approx([1.375, 1.75])
  assert [list(line.get_xdata()) for line in onset.lines] == [[5.0, 2.5]] * 3
  low, high = onset.get_xlim()
  assert low > high  # Training runs from left to right.
  layers, values = lines(scales)["iteration 3"]
  assert list(values) == pytest.approx([0.3, 1.3])


@pytest.mark.long
def test_a_run_that_was_never_evaluated_has_its_iterations(tmp_path, drawn):
  trained = [row for row in rows() if row["split"] == "train"]
  adaptive.draw_loops(evaluate_model(tmp_path, rows=trained))
  over, _, onset, _ = drawn["loops.png"].axes
  assert lines(over) and not lines(onset)


@pytest.mark.long
def test_one_iteration_has_no_figure(tmp_path):
  one = {"model__num_loops": 1, "model__loop_update": "delta"}
  evaluated = evaluate_model(tmp_path, rows=rows(num_loops=1), **one)
  assert adaptive.draw_loops(evaluated) == adaptive.draw_exits(evaluated) == []
  assert adaptive.draw_memory(evaluated._replace(rows=[])) == []


@pytest.mark.long
def test_slots_are_drawn_with_the_gates_of_their_bank(tmp_path, drawn):
  evaluated = evaluate_model(tmp_path, rows=rows())
  assert adaptive.draw_memory(evaluated) == [tmp_path / "memory.png"]
  gates, slots = drawn["memory.png"].axes  # Rows have only local gates.
  assert list(lines(gates)["layer 2"][1]) == pytest.approx([0.2, 0.3])
  together, alone = slots.containers
  for bars in (together, alone):
    assert all(1 <= bar.get_height() <= 6 + 1e-4 for bar in bars)
  for one, of_all in zip(alone, together, strict=True):
    assert one.get_height() < of_all.get_height()


def test_slots_in_use():
  attention = np.array([[0.25] * 4, [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
  np.testing.assert_allclose(adaptive.slots_in_use(attention), [4, 1, 2])


@pytest.mark.long
def test_a_lower_threshold_runs_fewer_iterations(tmp_path, drawn):
  """A new router halts with probability 1/2: 1/2, 3/4, and the rest."""
  evaluated = evaluate_model(tmp_path)
  files = adaptive.draw_exits(evaluated)
  assert files == [tmp_path / "exits.png", tmp_path / "exits.json"]
  found = json.loads(files[1].read_text())["exits"]
  assert [row["exit_threshold"] for row in found] == [1.0, 0.99, 0.9, 0.7, 0.5]
  for name in ("loops_per_token", "loops_per_row"):
    assert [row[name] for row in found] == [3, 3, 3, 2, 1]
  name = evaluated.settings.task_module.HEADLINE[0]
  score = evaluated.settings.task_module.score(
    evaluated.output, evaluated.batch
  )[name]
  assert found[0][name] == pytest.approx(float(np.mean(score)), abs=1e-6)
  for row in found:
    change = row[name] - found[0][name]
    assert row[f"{name}/change"] == pytest.approx(change, abs=1e-6)
  assert found[0][f"{name}/change_error"] == 0.0


def test_a_row_takes_as_long_as_its_slowest_token(tmp_path, monkeypatch):
  evaluated = evaluate_model(tmp_path)
  num, tokens = len(evaluated.batch["inputs"]), evaluated.spec.sequence_length
  weights = np.zeros((3, num, tokens, 2), np.float32)
  weights[0] = 1.0
  weights[:, 0, 0, 1] = 0.25, 0.25, 0.5  # One token of one row continues.
  output = evaluated.output._replace(trace={"halting": weights})
  evaluated = evaluated._replace(forward=lambda *args, **options: output)
  row = adaptive.exits(evaluated, evaluated.settings.task_module.HEADLINE[0])[0]
  assert row["loops_per_row"] == pytest.approx(1 + 2 / (2 * num))
  assert row["loops_per_token"] == pytest.approx(1 + 2 / (2 * num * tokens))


def stand_in(directory, forward, batch, **settings):
  """The fields of an evaluated model that figures use; computes nothing."""
  model = types.SimpleNamespace(num_loops=3)
  made = types.SimpleNamespace(
    family=MODELS["adaptive"], model=model, **settings
  )
  spec = TaskSpec(8, 4, tuple((i,) for i in range(4)), 2)
  return types.SimpleNamespace(
    settings=made, spec=spec, batch=batch, forward=forward, rows=rows(),
    directory=directory,
  )  # fmt: skip


def test_exits_are_counted_of_real_tokens_and_compared_row_by_row(tmp_path):
  """Ids 6 and 7 are padding, and so is document 0."""
  random = np.random.default_rng(0)
  values = random.uniform(size=(5, 3))  # By threshold and row.
  halting = random.integers(1, 4, (5, 3, 4, 2))
  by_threshold = dict(zip(adaptive.EXIT_THRESHOLDS, range(5), strict=True))

  def forward(traces, *, num_examples, exit_threshold):
    n = by_threshold[exit_threshold]
    loops = np.arange(1, 4).reshape(3, 1, 1, 1)
    weight = (loops == halting[n]).astype(np.float32)
    return Output(values[n], {}, {}, {}, {traces[0]: weight})

  batch = {
    "inputs": np.array([[0, 1, 2, 3], [5, 4, 6, 6], [1, 1, 1, 7]]),
    "documents": np.array([[1, 1, 2, 2], [1, 1, 0, 0], [1, 1, 0, 0]]),
    "weights": np.array([1.0, 3.0, 2.0]),
  }
  task = types.SimpleNamespace(
    HEADLINE=("score",),
    score=lambda output, batch: {"score": (output.logits, batch["weights"])},
  )
  evaluated = stand_in(tmp_path, forward, batch, task_module=task)
  real = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]], bool)
  shares = batch["weights"] / 6
  for n, row in enumerate(adaptive.exits(evaluated, "score")):
    change = values[n] - values[0]
    off = shares * (change - shares @ change)
    slowest = np.where(real[..., None], halting[n], 0).max(axis=1)
    expected = {
      "exit_threshold": adaptive.EXIT_THRESHOLDS[n],
      "rows": 3,
      "loops_per_token": halting[n][real].mean(),
      "loops_per_row": slowest.mean(),
      "score": shares @ values[n],
      "score/change": shares @ change,
      "score/change_error": np.sqrt(3 / 2) * np.linalg.norm(off),
    }
    assert row == pytest.approx(expected)


def test_bars_are_the_slots_that_are_read(tmp_path, drawn):
  """exp(entropy), of all tokens together, and the mean over single tokens."""
  random = np.random.default_rng(0)
  slots = random.dirichlet(np.ones(6), (5, 2))  # [N, L, M].
  entropy = random.uniform(0.2, 1.5, (2, 5))

  def forward(traces, **options):
    stats = {f"local_entropy/layer={i}": entropy[i] for i in range(2)}
    return Output(None, {}, stats, {}, dict.fromkeys(traces, slots))

  batch = {"inputs": np.zeros((5, 4), int)}
  adaptive.draw_memory(stand_in(tmp_path, forward, batch))
  bars = [
    [bar.get_height() for bar in bars]
    for bars in drawn["memory.png"].axes[1].containers
  ]
  mean = slots.mean(axis=0)
  together = np.exp(-np.sum(mean * np.log(mean), axis=-1))
  np.testing.assert_allclose(bars, [together, np.exp(entropy.mean(axis=1))])


def test_many_rows_over_a_large_vocabulary_are_not_looked_at():
  spec = analysis_examples.make_settings().spec
  assert evaluated_lib.max_examples(spec) == evaluated_lib.MAX_EXAMPLES
  large = dataclasses.replace(spec, vocab_size=50_304, sequence_length=1024)
  assert evaluated_lib.max_examples(large) == 5
  larger = dataclasses.replace(spec, vocab_size=2**20, sequence_length=2**20)
  assert evaluated_lib.max_examples(larger) == 1
