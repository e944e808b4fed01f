"""What holds for every task in TASKS: its streams, its shapes, its sizes."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_examples import assert_equal, joined, read
from text_examples import jsonl, sentences

from loopjax.data import TASKS, check_scores, pipeline
from loopjax.types import Output

# Words of up to three tokens, more context than needed, K not a power of two.
DEPO = {
  "num_nodes": 9, "max_hops": 6, "num_queries": 4, "word_base": 3,
  "max_word": 3, "context_length": 60, "min_nodes": 2, "num_eval_examples": 40,
}  # fmt: skip
MULTIHOP = {
  "num_entities": 20, "num_relations": 8, "out_degree": 4,
  "num_train_chains": (60, 40), "num_test_chains": (100, 80),
  "num_scored_train": 30,
}  # fmt: skip
# A task with settings that are quick to generate.
CASES = {
  "arithmetic": {"modulus": 11, "max_operations": 5, "num_eval_examples": 200},
  "arithmetic, many": {"modulus": 1009, "num_eval_examples": 100},
  "automaton": {
    "num_states": 3, "state_width": 7, "num_steps": 5, "num_eval_examples": 50,
  },
  "depo": {"num_eval_examples": 50},
  "depo, largest": {"num_eval_examples": 50, "min_nodes": 75},
  "depo, other": DEPO,
  "depo, long": {**DEPO, "min_word": 2, "num_queries": 9},
  "gsm": {
    "train_ops": (1, 3, 8), "eval_ops": (1, 2, 5, 8), "context_length": 140,
    "min_length": 100, "max_length": 140, "num_eval_examples": 40,
  },
  "maze": {
    "size": 12, "min_path": 14, "openness": 0.15, "num_eval_examples": 40,
  },
  "maze, few": {
    "size": 8, "num_train_mazes": 20, "augment": True, "num_eval_examples": 40,
  },
  "multihop": {**MULTIHOP, "format": "symbolic"},
  "multihop, direct": {**MULTIHOP, "format": "direct"},
  "multihop, reverse": {**MULTIHOP, "format": "reverse"},
  "sudoku": {"box_rows": 2, "box_cols": 2},
  "sudoku, augmented": {
    "box_rows": 2, "box_cols": 3, "augment": True, "max_revealed": 0.8,
    "num_revealed_examples": 6400,
  },
  "text": {"sequence_length": 64},
  "text, mixed": {"sequence_length": 64, "mixture": (0.75, 0.25)},
}  # fmt: skip
# Tests use the first of this many examples.
SHORT = {name: {"num_eval_examples": 16} for name in ("gsm",)}
# The first characters of a digest of 16 inputs each of training and the test.
DIGESTS = {
  "automaton": "6958afbcac573452",
  "depo": "7f494ef7734dab0a",
  "gsm": "04205ada77c0be1f",
}
# The padding id of inputs: the first id that is never a target.
PADDED = ("arithmetic", "depo", "gsm", "multihop")


class Case:
  """A task with settings, and its first rows."""

  def __init__(self, name, corpus):
    self.name = name.partition(",")[0]
    self.task = TASKS[self.name]
    files = {"train_files": corpus} if self.name == "text" else {}
    self.config = self.task.Config(**files, **CASES[name])
    self.joined = functools.partial(joined, self.task, self.config)

  @functools.cached_property
  def rows(self):
    """{split: 32 rows}."""
    return {split: self.joined(split, 2) for split in ("train", "test")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """Two sources of documents that all differ."""
  folder, paths = tmp_path_factory.mktemp("corpus"), []
  for name, first, num in (("a", 0, 300), ("b", 1000, 200)):
    paths.append(folder / f"{name}.jsonl")
    rows = jsonl([{"text": text} for text in sentences(num, first)])
    paths[-1].write_bytes(rows)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield ",".join(map(str, paths))


@pytest.fixture(scope="module")
def case(request, corpus):
  return Case(request.param, corpus)


# (vocabulary, padding, tokens, answer tokens) of a task with settings.
SIZES = [
  ("arithmetic", {}, (23 + 3 + 2, 1, 22, 1)),
  ("automaton", {}, (3, 0, 100, 4)),
  ("automaton", {"num_states": 3, "state_width": 7}, (3, 0, 24, 3)),
  # 100 of words, 16 of hops, ANS, padding; 300 + 60 tokens.
  ("depo", {}, (118, 1, 360, 60)),
  # 10 digits, END, ANS, 17 other words, 3 x 105 of the themes, padding.
  ("gsm", {}, (345, 1, 516, 4)),
  ("maze", {"size": 12}, (6, 0, 144, 0)),
  ("multihop", {"vocab_multiple": 64}, (1088, 38, 3, 0)),
  ("multihop", MULTIHOP, (49, 1, 4, 0)),
  ("multihop", {**MULTIHOP, "format": "reverse"}, (57, 1, 15, 0)),
]
every_case = pytest.mark.parametrize("case", CASES, indirect=True)


def test_every_task_has_a_case():
  assert {name.partition(",")[0] for name in CASES} == {*TASKS}


@pytest.mark.parametrize(("name", "changes", "sizes"), SIZES)
def test_sizes_are_those_of_the_papers(name, changes, sizes):
  task = TASKS[name]
  spec = task.spec(task.Config(**changes))
  padding, answer = spec.num_padding_tokens, spec.num_answer_tokens
  assert (spec.vocab_size, padding, spec.sequence_length, answer) == sizes


@every_case
@pytest.mark.parametrize("split", ["train", "test"])
def test_examples_belong_to_their_index(case, split):
  """For any batch size, start and process."""
  whole = case.rows[split]
  assert_equal(case.joined(split, 16, batch_size=2), whole)
  resumed = case.joined(split, 1, start=1)
  assert_equal(resumed, {n: v[16:] for n, v in whole.items()})
  rows = np.array([1, 5, 14])
  places = (16 * np.arange(2)[:, None] + rows).ravel()
  some = case.joined(split, 2, rows=rows)
  assert_equal(some, {n: v[places] for n, v in whole.items()})
  if split == "train":  # In another epoch, if any.
    late = case.joined(split, 4, start=300, batch_size=4)
    assert_equal(case.joined(split, 1, start=75), late)


@every_case
def test_training_has_the_seed_of_the_run_and_evaluation_has_not(case):
  for split, rows in case.rows.items():
    other = case.joined(split, 1, seed=1)["inputs"]
    same = np.array_equal(other, rows["inputs"][:16])
    assert same == (split == "test")


@pytest.mark.parametrize(
  "case",
  ["arithmetic, many", "automaton", "depo, largest", "gsm", "maze"],
  indirect=True,
)
def test_each_stream_has_its_seed(case):
  """No two splits have the same question at the same place."""
  spec = case.task.spec(case.config)
  length = spec.sequence_length - spec.num_answer_tokens
  seen = {}
  for split in ("train", "validation", "test"):
    for seed in (0, 1):
      own = {"seed": seed} if split == "train" else {}
      config = dataclasses.replace(case.config, eval_seed=0 if own else seed)
      inputs = joined(case.task, config, split, 1, **own)["inputs"]
      seen[split, seed] = inputs[:, :length]
  for first, other in itertools.combinations(seen.values(), 2):
    assert not (first == other).all(axis=1).any()
  config = dataclasses.replace(case.config, eval_seed=1)
  inputs = joined(case.task, config, "train", 1)["inputs"][:, :length]
  np.testing.assert_array_equal(seen["train", 0], inputs)


@every_case
def test_no_two_draws_share_a_random_stream(case, monkeypatch):
  """Equal numbers would tie, for example, distractors to problems."""
  draws, draw = collections.defaultdict(set), pipeline.uniforms

  def noticed(seed, *arguments):
    caller = sys._getframe(1)
    draws[seed].add((caller.f_code.co_filename, caller.f_lineno))
    return draw(seed, *arguments)

  monkeypatch.setattr(pipeline, "uniforms", noticed)
  for split in ("train", "test"):
    case.joined(split, 1)
  assert not [places for places in draws.values() if len(places) > 1]


@pytest.mark.parametrize("name", DIGESTS)
def test_the_data_stay(name):
  """A different number means different data: results are not comparable."""
  sha, task = hashlib.sha256(), TASKS[name]
  config = dataclasses.replace(task.Config(), **SHORT.get(name, {}))
  for split in ("train", "test"):
    sha.update(joined(task, config, split, 1)["inputs"].tobytes())
  assert sha.hexdigest().startswith(DIGESTS[name])


@every_case
def test_rows_are_as_announced(case):
  spec = case.task.spec(case.config)
  real = spec.vocab_size - spec.num_padding_tokens
  for split, rows in case.rows.items():
    if split == "train":
      shapes = case.task.abstract_batch(case.config, 32)
      assert shapes == {
        n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in rows.items()
      }
    assert rows["inputs"].shape[1] == spec.sequence_length
    assert len(spec.coordinates) == spec.sequence_length
    if case.name != "sudoku":  # Sudoku adds the box.
      dimensions = len(spec.coordinates[0])
      side = range(round(spec.sequence_length ** (1 / dimensions)))
      places = itertools.product(*[side] * dimensions)
      assert spec.coordinates == tuple(places)
    if case.name == "text":  # The rest of a row is padding.
      assert {rows["inputs"].max(), rows["targets"].max()} <= {real - 1, real}
    else:
      assert rows["targets"].max() < real
      assert (rows["inputs"].max() == real) == (case.name in PADDED)
      assert rows["inputs"].max() <= real
    if spec.num_answer_tokens:
      assert not rows["weights"][:, : -spec.num_answer_tokens].any()
    if hasattr(case.task, "answer_length"):
      assert case.task.answer_length(case.config) == spec.num_answer_tokens


@every_case
def test_targets_among_the_inputs_are_announced(case):
  """A model that attends to later tokens would copy them."""
  rows = case.rows["test"]
  first = (rows["weights"] > 0).argmax(axis=1)
  following = np.append(rows["inputs"], np.full((len(first), 1), -1), axis=1)
  each = np.arange(len(first))
  is_next = rows["targets"][each, first] == following[each, first + 1]
  assert case.task.spec(case.config).predicts_next == is_next.all()


@pytest.mark.parametrize(
  "case",
  [
    name for name in CASES if not name.startswith(("text", "multihop", "maze,"))
  ],
  indirect=True,
)
def test_splits_share_no_question(case):
  """Documents and chains may begin alike; few mazes are drawn again."""
  spec = case.task.spec(case.config)
  length = spec.sequence_length - spec.num_answer_tokens
  asked = [
    {row.tobytes() for row in case.joined(split, 4)["inputs"][:, :length]}
    for split in ("train", "validation", "test")
  ]
  for first, other in itertools.combinations(asked, 2):
    assert not first & other


@every_case
def test_perfect_answers_and_none_have_their_scores(case):
  rows = {name: jnp.asarray(x) for name, x in case.rows["test"].items()}
  spec = case.task.spec(case.config)
  right = jax.nn.one_hot(rows["targets"], spec.vocab_size)

  def means(logits):
    found = case.task.score(Output(logits, {}, {}, {}, {}), rows)
    check_scores(case.task, found, len(rows["valid"]))
    pairs = {n: x if isinstance(x, tuple) else (x, 1) for n, x in found.items()}
    return {
      name: np.average(value, weights=rows["valid"] * weight)
      for name, (value, weight) in pairs.items()
    }

  losses = ("loss", "bits_per_byte")
  perfect, none = means(40 * right), means(-40 * right)
  for name in perfect:
    best = 0 if name in losses else 1
    assert perfect[name] == pytest.approx(best, abs=1e-6), name
    worst = none[name] > 30 if name in losses else none[name] == 0
    assert worst, name
  # Every token is as likely: of text, a target's bytes are not one each.
  even = means(0 * right)["loss"]
  assert even == pytest.approx(math.log(spec.vocab_size), rel=1e-5)


@every_case
def test_evaluation_holds_as_many_as_it_says(case):
  for split in ("validation", "test"):
    dataset, batches = read(case.task, case.config, split)
    num = sum(batch["valid"].sum() for batch in batches)
    assert num == dataset.facts[f"{split}_examples"]
    groups = {name for name in batches[0] if name.startswith("group/")}
    assert groups == {f"group/{name}" for name in dataset.groups}
    for name, names in dataset.groups.items():
      assert max(b[f"group/{name}"].max() for b in batches) < len(names)
