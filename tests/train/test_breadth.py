"""Examples with several starts each: who runs when, and what is kept."""

import json

import grain
import jax
import numpy as np
import pytest
from tests_support import make_datasets, refused, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.run import preemption
from loopjax.train import breadth, evaluate

NUM = 5


class Evaluation:
  """An evaluation of 5 starts, which stops before a call."""

  def __init__(self, **settings):
    how = {"eval__num_starts": NUM, "eval__start_noise": 1.0, **settings}
    how = {"eval__batch_size": 32, "run__seed": 3, **how}
    resolved = config_lib.resolve(smoke(**how))
    self.program = program_lib.make_program(resolved, jax.devices()[:1])
    self.dataset = make_datasets(resolved)["test"]
    self.params = self.program.init(jax.random.key(0)).params
    self.calls, self.stop = 0, None
    self.evaluator = evaluate.make_evaluator(
      self.program, {"test": self.dataset}, self.between
    )

  def between(self):
    if self.calls == self.stop:
      raise preemption.Preempted
    self.calls += 1

  def __call__(self, stop=None, **how):
    self.calls, self.stop = 0, stop
    return self.evaluator(self.params, "test", 96, **how)["test"]


def test_an_interrupted_evaluation_continues(tmp_path):
  """It runs what is left, with the same scores to the last bit."""
  path, of = tmp_path / "kept" / "starts.jsonl", {"digest": "abc"}
  evaluation = Evaluation()
  whole = evaluation()
  assert whole["count"] == 96 and evaluation.calls == 3 * NUM + 1
  with pytest.raises(preemption.Preempted):
    evaluation(2 * NUM + 2, kept=breadth.Kept(path, of))
  lines = path.read_text().splitlines()
  assert json.loads(lines[0]) == {"of": of} and len(lines) == 1 + 64
  with path.open("a") as file:
    file.write('[64, {"valid"')  # The machine stopped.
  assert evaluation(kept=breadth.Kept(path, of)) == whole
  assert evaluation.calls == NUM + 1
  assert len(path.read_text().splitlines()) == 1 + 96
  kept = breadth.Kept(path, {"digest": "of other parameters"})
  assert kept.read() == {}


def test_examples_without_further_starts_make_room():
  """Every call is full until the last; a certain answer is the last of its own.

  The untrained model is hardly sure of any.
  """
  evaluation = Evaluation()
  step, dataset = evaluate._step(evaluation.program), evaluation.dataset
  seen, confidence = [], {}

  def watched(params, batch):
    result = step(params, batch)
    rows = np.flatnonzero(result["valid"])
    numbers = [np.asarray(result[x])[rows] for x in ("example", "start")]
    sure = np.asarray(result["answers"].confidence)[rows]
    seen.append(len(rows))
    keys = zip(*map(np.ndarray.tolist, numbers), strict=True)
    confidence.update(zip(keys, sure, strict=True))
    return result

  def run(certain):
    seen.clear()
    confidence.clear()
    starts = evaluate.starts_lib.of(evaluation.program.settings)
    return breadth.scored(
      evaluation.program,
      watched,
      dataset.batches[:3],
      evaluation.params,
      starts._replace(certain=certain),
      lambda: None,
    )

  every = run(np.inf)
  assert seen == [32] * 15 and len(confidence) == 96 * NUM
  limit = float(np.quantile(list(confidence.values()), 0.8))
  found = run(limit)
  used = found["scores"]["starts"]
  assert 1 < used.mean() < 4
  assert seen[:-2] == [32] * (len(seen) - 2)
  for number in range(96):
    ran = [confidence[number, i] for i in range(int(used[number]))]
    assert all(x < limit for x in ran[:-1])
    assert len(ran) == NUM or ran[-1] >= limit
  first = "blank_accuracy/starts=1"
  np.testing.assert_array_equal(found["scores"][first], every["scores"][first])


def test_one_example_fills_a_call_with_its_starts():
  """And no call has more rows than there is to do."""
  evaluation = Evaluation(eval__batch_size=4)
  batch = dict(evaluation.dataset.batches[0])
  batch["valid"] = np.arange(4) == 0
  step, sizes = evaluate._step(evaluation.program), []

  def watched(params, batch):
    sizes.append(len(batch["start"]))
    return step(params, batch)

  def run(num):
    starts = evaluate.starts_lib.of(evaluation.program.settings)
    sizes.clear()
    return breadth.scored(
      evaluation.program,
      watched,
      grain.MapDataset.source([batch]),
      evaluation.params,
      starts._replace(num=num),
      lambda: None,
    )

  run(5)
  assert sizes == [4, 4]
  run(3)
  assert sizes == [3]


def test_the_best_checkpoint_may_be_that_of_a_rule():
  """Names are known without a call."""
  evaluation = Evaluation(eval__certain=0.5)
  validation = make_datasets(evaluation.program.settings)["validation"]
  for name in ("exact_match/by=any", "exact_match/starts=4", "starts"):
    evaluate.check(evaluation.program, validation, f"validation/{name}")
  with refused("is not an evaluation score"):
    evaluate.check(evaluation.program, validation, "validation/starts=5")
