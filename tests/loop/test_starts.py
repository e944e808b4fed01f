"""Several starts of one example, and the rules that choose an answer."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import load_config, refused, smoke

import loopjax
from loopjax import config as config_lib
from loopjax.loop import starts
from loopjax.nn import keys as keys_lib

# Three starts of an example whose last token does not count, and of another.
ANSWERS = starts.Answers(
  predicted=np.array([[5, 1], [4, 2], [4, 3]]),
  counted=np.array([[True, False]] * 3),
  confidence=np.array([-0.5, -3.0, -2.0]),
  residual=np.array([0.2, 0.0, 0.0]),
  margin=np.array([-1.0, -1.0, -9.0]),
  passed=np.array([0.0, 0.0, 0.0]),
)
OTHERS = starts.Answers(
  predicted=np.array([[1, 2], [1, 2], [3, 2]]),
  counted=np.full((3, 2), True),
  confidence=np.array([-2.0, -1.0, -0.1]),
  residual=np.array([0.3, 0.1, 0.1]),
  margin=np.array([0.5, -2.0, -2.0]),
  passed=np.array([0.0, 0.25, 0.2]),
)


@pytest.mark.parametrize(
  ("rule", "wanted"),
  [
    ("confidence", [2, 0]),
    ("residual", [2, 2]),  # Equal ones: the more confident answers.
    ("majority", [1, 2]),
    ("halting", [0, 0]),
    ("check", [1, 0]),  # None passes: the most confident answers.
  ],
)
def test_rules_choose_as_by_hand(rule, wanted):
  assert [starts.chosen(x, rule) for x in (OTHERS, ANSWERS)] == wanted


def test_first_starts_are_chosen_among_themselves():
  assert starts.numbers(1) == () and starts.numbers(6) == (1, 2, 4)
  assert starts.chosen(starts.first(OTHERS, 2), "confidence") == 1


def test_rules_without_their_record_are_not_reported():
  few = ANSWERS._replace(margin=None, passed=None)
  assert starts.supported(few) == ["confidence", "residual", "majority"]


def test_keys_are_those_of_the_tokens():
  tokens = jax.random.randint(jax.random.key(1), (64, 9), 0, 5)
  found = keys_lib.by_content(jax.random.key(0), tokens)
  data = jax.random.key_data(found)
  assert len(np.unique(data, axis=0)) == 64
  alone = keys_lib.by_content(jax.random.key(0), tokens[7:8])
  np.testing.assert_array_equal(jax.random.key_data(alone)[0], data[7])


def test_noise_has_the_size_of_the_embedding():
  tokens = jax.random.randint(jax.random.key(1), (2, 300), 0, 5)
  table = 7.0 * jax.random.normal(jax.random.key(2), (5, 40))
  keys = jax.random.split(jax.random.key(0), 2)
  noisy = starts._Noisy(lambda x: table[x], keys, 0.5)
  noise, plain = noisy(tokens) - table[tokens], table[tokens]
  for row in (0, 1):  # 12,000 draws; a normal cut at 3 deviates by 0.9866.
    size = jnp.std(noise[row]) / jnp.sqrt(jnp.mean(plain[row] ** 2))
    np.testing.assert_allclose(size, 0.5 * 0.9866, rtol=0.05)


def options(num, certain=0.0):
  limit = math.log(certain) if certain else math.inf
  return starts.Starts(
    num, 1.0, "confidence", 0, False, None, ("right",), limit
  )


def values(num, certain=0.0, seed=0):
  """Scores of an example of four tokens whose answers are drawn."""
  rng = np.random.default_rng(seed)
  answers = starts.Answers(
    predicted=rng.integers(0, 2, (5, 4)),
    counted=np.full((5, 4), True),
    confidence=-rng.random(5),
  )
  right = np.mean(answers.predicted == 0, axis=1)
  scores = {"right": right, "weighted": (right, 2 * right)}
  few = starts.first(answers, num)
  return starts.combined(
    {k: jax.tree.map(lambda x: x[:num], v) for k, v in scores.items()},
    few,
    options(num, certain),
  )


def test_every_rule_of_several_starts_is_scored():
  """At most the best start; the first starts are those of fewer starts."""
  below = 0
  for seed in range(20):
    many = values(5, seed=seed)
    best = many["right/by=any"]
    for rule in ("confidence", "majority"):
      assert many[f"right/by={rule}"] <= best
    below += many["right/by=confidence"] < best
    assert many["right"] == many["right/by=confidence"]
    assert many["weighted"] == (many["right"], 2 * many["right"])
    for num in (1, 2, 4):
      few = values(num, seed=seed)["right"]
      assert many[f"right/starts={num}"] == few
  assert below
  assert set(many) - {"right", "weighted"} == {
    "right/by=confidence", "right/by=majority", "right/by=any",
    "right/starts=1", "right/starts=2", "right/starts=4",
  }  # fmt: skip


def test_starts_after_a_certain_one_do_not_count():
  """They may have run, beside it in one call."""
  answers = OTHERS._replace(confidence=np.log([0.5, 0.9, 0.95]))
  scores = {"right": np.array([0.0, 0.25, 1.0])}
  found = starts.combined(scores, answers, options(3, certain=0.9))
  assert found["right"] == 0.25 and found["starts"] == 2
  assert found["right/by=any"] == 0.25
  assert starts.combined(scores, answers, options(3, 0.97))["right"] == 1.0


def test_more_starts_solve_more_puzzles():
  model = loopjax.load("zoo:sudoku_6x6")
  data = loopjax.datasets(model, batch_size=64)["test"][:1]
  many = model.evaluate(data, num_starts=8, start_noise=1.0)
  assert many["exact_match"] > many["exact_match/starts=1"]
  assert many["exact_match/by=any"] == many["exact_match/by=check"]
  assert "exact_match/by=residual" in many
  assert "exact_match/by=halting" not in many  # UTM has no such head.


def test_a_start_gives_the_same_answer_in_any_batch():
  """Of another size, in another order, beside others; the first that are."""
  model = loopjax.load("zoo:sudoku_6x6")
  how = {"num_starts": 3, "start_noise": 1.0}
  names = ("exact_match", "blank_accuracy", "exact_match/starts=2")

  def scores(size, num):
    data = loopjax.datasets(model, batch_size=size)["test"][:num]
    found = model.evaluate(data, **how)
    return [found[name] for name in names]

  assert scores(24, 1) == scores(8, 3)


def test_a_certain_answer_ends_an_examples_starts():
  """As many are right, after a third of the starts, and none is left out."""
  model = loopjax.load("zoo:sudoku_6x6")
  data = loopjax.datasets(model, batch_size=16)["test"][:2]
  how = {"num_starts": 6, "start_noise": 0.5}
  every = model.evaluate(data, **how)
  found = model.evaluate(data, **how, certain=0.5)
  assert found["exact_match"] == every["exact_match"]
  assert found["count"] == every["count"] == 32
  assert 1 <= found["starts"] < 2 and "starts" not in every


def test_an_evaluation_has_the_starts_of_the_models_settings():
  model = loopjax.load("zoo:sudoku_6x6")
  data = loopjax.datasets(model, batch_size=16)["test"][:1]
  how = {"num_starts": 2, "start_noise": 1.0}
  here = model.about.settings
  settings = here._replace(eval=dataclasses.replace(here.eval, **how))
  about = dataclasses.replace(model.about, settings=settings)
  own = dataclasses.replace(model, about=about).evaluate(data)
  assert own == model.evaluate(data, **how)


def test_a_plain_evaluation_draws_nothing():
  assert starts.of(config_lib.resolve(smoke())) is None


def trm(**changes):
  config = load_config("sudoku_trm", "smoke")
  config_lib.override(config, changes)
  return config_lib.resolve(config)


def test_the_halting_head_can_choose():
  found = trm(**{
    "eval.num_starts": 2, "eval.start_noise": 0.5, "eval.answer": "halting",
  })  # fmt: skip
  assert starts.of(found).answer == "halting"


@pytest.mark.parametrize(
  ("settings", "says"),
  [
    ({"eval__num_starts": 0}, "eval.num_starts"),
    ({"eval__num_starts": 4}, "needs eval.start_noise above 0"),
    ({"eval__answer": "majority"}, "no effect while eval.num_starts=1"),
    ({"eval__start_noise": 0.4}, "no effect while eval.num_starts=1"),
    ({"eval__certain": 0.9}, "no effect while eval.num_starts=1"),
    ({"eval__num_starts": 4, "eval__certain": 1.5}, r"must be in \[0, 1\]"),
    (
      {"eval__num_starts": 4, "eval__start_noise": 1.0, "eval__answer": "best"},
      "eval.answer='best' is not one of",
    ),
    (
      {
        "eval__num_starts": 4, "eval__start_noise": 1.0,
        "eval__answer": "halting",
      },
      "'utm' has no halting head",
    ),
  ],
)  # fmt: skip
def test_mistakes_are_one_line(settings, says):
  with refused(says):
    config_lib.resolve(smoke(**settings))


def test_texts_have_no_answers_to_choose_from():
  config = load_config("lm_looped", "smoke,task.name=text")
  changes = {"eval.num_starts": 2, "eval.start_noise": 0.5}
  config_lib.override(config, changes)
  with refused("has no answers to choose from"):
    config_lib.resolve(config)
