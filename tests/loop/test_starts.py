"""Several starts of one example, and the rules that choose an answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests_support import load_config, refused, smoke

import loopjax
from loopjax import config as config_lib
from loopjax.loop import starts
from loopjax.nn import keys as keys_lib
from loopjax.types import Output

# Three starts of two examples; the last token of the second does not count.
ANSWERS = starts.Answers(
  predicted=jnp.array(
    [[[1, 2], [5, 1]], [[1, 2], [4, 2]], [[3, 2], [4, 3]]], jnp.int32
  ),
  counted=jnp.array([[True, True], [True, False]]),
  confidence=jnp.array([[-2.0, -0.5], [-1.0, -3.0], [-0.1, -2.0]]),
  residual=jnp.array([[0.3, 0.2], [0.1, 0.0], [0.1, 0.0]]),
  margin=jnp.array([[0.5, -1.0], [-2.0, -1.0], [-2.0, -9.0]]),
  passed=jnp.array([[0.0, 0.0], [0.25, 0.0], [0.2, 0.0]]),
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
  np.testing.assert_array_equal(starts.chosen(ANSWERS, rule), wanted)


def test_first_starts_are_chosen_among_themselves():
  assert starts.numbers(1) == () and starts.numbers(6) == (1, 2, 4)
  found = starts.chosen(starts.first(ANSWERS, 2), "confidence")
  np.testing.assert_array_equal(found, [1, 0])


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


def values(num, rows=slice(None), seed=0):
  """Scores of a model that answers four tokens at random, and of each start."""
  tokens = jax.random.randint(jax.random.key(1), (6, 4), 0, 9)[rows]
  batch = {"inputs": tokens, "targets": tokens, "weights": jnp.ones((6, 4))}
  batch["weights"] = batch["weights"][rows]

  def run(keys):
    logits = jax.vmap(lambda key: jax.random.normal(key, (4, 9)))(keys)
    output = Output(logits, {}, {}, {}, {})
    right = jnp.argmax(logits, axis=-1) == tokens
    return None, output, {"right": jnp.mean(right, axis=1)}

  options = starts.Starts(num, 1.0, "confidence", seed, False, None, ("right",))
  return starts.values(run, batch, options)


def test_every_rule_of_several_starts_is_scored():
  """At most the best start; the first starts are those of fewer starts."""
  many = values(5)
  best = many["right/by=any"]
  for rule in ("confidence", "majority"):
    assert (many[f"right/by={rule}"] <= best).all()
  assert (many["right/by=confidence"] < best).any()
  np.testing.assert_array_equal(many["right"], many["right/by=confidence"])
  for num in (1, 2, 4):
    np.testing.assert_array_equal(
      many[f"right/starts={num}"], values(num)["right"]
    )
  assert set(many) - {"right"} == {
    "right/by=confidence", "right/by=majority", "right/by=any",
    "right/starts=1", "right/starts=2", "right/starts=4",
  }  # fmt: skip
  assert set(values(1)) == {"right"}
  alone = values(5, slice(3, 5))  # In another batch.
  np.testing.assert_array_equal(alone["right"], many["right"][3:5])
  assert (values(1, seed=1)["right"] != values(1)["right"]).any()


def test_more_starts_solve_more_puzzles():
  model = loopjax.load("zoo:sudoku_6x6")
  data = loopjax.datasets(model, batch_size=64)["test"][:1]
  one = model.evaluate(data, start_noise=1.0)["exact_match"]
  many = model.evaluate(data, num_starts=8, start_noise=1.0)
  assert many["exact_match/starts=1"] == one
  assert many["exact_match"] > one
  assert many["exact_match/by=any"] == many["exact_match/by=check"]
  assert "exact_match/by=residual" in many
  assert "exact_match/by=halting" not in many  # UTM has no such head.


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
  config_lib.override(config, {"eval.start_noise": 0.5})
  with refused("has no answers to choose from"):
    config_lib.resolve(config)
