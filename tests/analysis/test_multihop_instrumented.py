"""An instrumented model computes what the model itself computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import multihop_examples as examples
import numpy as np
import pytest
from flax import nnx
from multihop_models import PADDING, STATE, TOKENS, model_of
from tests_support import by_size, crossing

from loopjax.analysis.multihop import instrumented, readings
from loopjax.loop import driver
from loopjax.models import MODELS
from loopjax.types import TaskSpec

TARGETS = jnp.array([4, 7, 11])
POSITIONS = jnp.array([1, 2, 1])


def instrumented_model(name):
  build, params, _ = model_of(name)
  return instrumented.instrument(
    build,
    params,
    num_padding_tokens=PADDING,
    num_loops=3,
    batch_size=2,
    traces=MODELS[name].traces,
  )


@pytest.mark.long
@crossing("name", by_size(STATE))
def test_an_instrumented_model_answers_as_the_model_with_that_edit(name):
  """Three questions in batches of two."""
  build, params, table = model_of(name)
  model = build(params)
  probed = instrumented_model(name)
  inputs, positions = np.asarray(TOKENS), np.asarray(POSITIONS)
  last = np.array([3, 3, 2])
  trace = model(TOKENS, trace=(STATE[name],)).trace[STATE[name]]
  states = probed.passed_on(inputs, 2, positions)
  np.testing.assert_allclose(
    states, trace[1][np.arange(3), positions], atol=1e-4
  )
  for kind in instrumented.NORMS:
    vectors = probed.embed(np.asarray(TARGETS), states, kind)
    expected = instrumented.at_scale(
      table[TARGETS], jnp.asarray(states), kind, model.final_norm
    )
    np.testing.assert_allclose(vectors, expected, rtol=1e-5)
  vectors = probed.embed(np.asarray(TARGETS), states, "rms")

  def edit(state, k):
    new = state["hidden"].at[jnp.arange(3), positions].set(vectors)
    return {"hidden": jnp.where(k == 1, new, state["hidden"])}

  edited = model(TOKENS, kind=driver.Watched(edit))
  for alpha, output in ((0.0, model(TOKENS)), (1.0, edited)):
    got = probed.answer(inputs, last, 2, positions, alpha, vectors)
    expected = jnp.argmax(output.logits, -1)[np.arange(3), last]
    assert got.tolist() == expected.tolist()


@pytest.mark.long
@crossing("name", ["looped", "disco", "ponderlm", "transformer"])
def test_stages_and_lens_are_those_of_the_model(name):
  """Padding is never predicted, and each loop is read out as in the family."""
  family = MODELS[name]
  config = dataclasses.replace(
    examples.CONFIG, num_train_chains=(30,), num_test_chains=(25,)
  )
  spec = config.vocabulary
  question_set = examples.make_questions(config, 40)
  model = family.Model(
    family.Config(width=16, num_heads=2, num_layers=1, num_loops=2),
    TaskSpec(spec.size, 3, ((0,), (1,), (2,)), spec.size - spec.padding),
    rngs=nnx.Rngs(params=0),
  )
  graphdef, state = nnx.split(model)
  probed = instrumented.instrument(
    functools.partial(nnx.merge, graphdef),
    nnx.to_pure_dict(state),
    num_padding_tokens=spec.size - spec.padding,
    num_loops=2,
    batch_size=64,
    traces=family.traces,
  )
  observed = probed.observe(question_set)
  output = jax.jit(
    functools.partial(model, trace=("prediction", "confidence"))
  )(question_set.inputs)
  predicted = np.swapaxes(output.trace["prediction"], 0, 1)
  assert np.array_equal(observed.prediction, predicted)
  chances = jax.nn.softmax(output.logits)[:, 2]
  compositions = question_set.hops == 2
  expected = chances[np.arange(40), question_set.answers][compositions]
  np.testing.assert_allclose(
    observed.lens["probability"][compositions, 1, 2, 1], expected, rtol=1e-4
  )
  for row in readings.cosines(question_set, observed):
    passed_on = row["loop"] == 1 and name in ("disco", "ponderlm")
    assert ("mixed_cosine" in row) == passed_on
