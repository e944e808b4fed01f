"""No token sees anything of another document in its row, in any family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from test_families import CAUSAL, SPEC, VOCABULARY, config_of
from tests_support import by_size, crossing, refused

from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.models import MODELS
from loopjax.program import step as step_lib

PACKED = dataclasses.replace(SPEC, packs_documents=True)
DOCUMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3, 3, 3]])
INPUTS = jax.random.randint(jax.random.key(3), DOCUMENTS.shape, 0, 20)
LOOPS = 3
# Families whose memory carries along a row.
REFUSING = ("hrm", "sleep", "trm", "urm", "utm")
APART = by_size(set(CAUSAL) - set(REFUSING))


@functools.cache
def _logits(name, kind):
  family, config = MODELS[name], config_of(name, num_loops=LOOPS)

  def logits(params, inputs, documents):
    model = examples.merged(family, config, PACKED, params)
    return model(inputs, documents=documents, kind=kind).logits

  return jax.jit(logits, compiler_options=examples.FAST)


def run(name, inputs, documents, kind="scan"):
  params = examples.params_of(
    MODELS[name], config_of(name, num_loops=LOOPS), PACKED
  )
  return _logits(name, kind)(params, inputs, documents)


@crossing("kind", ["scan", "while"], manual=["while"])
@crossing("name", APART)
def test_tokens_of_another_document_change_no_bit(name, kind):
  plain = run(name, INPUTS, DOCUMENTS, kind)
  for document in range(4):
    there = document == DOCUMENTS
    other = jnp.where(there, (INPUTS + 7) % 20, INPUTS)
    changed = jnp.any(run(name, other, DOCUMENTS, kind) != plain, axis=-1)
    assert jnp.array_equal(changed, there)


@crossing("name", APART)
def test_a_packed_row_is_its_documents_alone(name):
  packed = run(name, INPUTS, DOCUMENTS)
  for row, document in ((0, 2), (1, 2), (1, 3)):
    (there,) = np.nonzero(np.asarray(DOCUMENTS[row] == document))
    first = jnp.roll(INPUTS, -there[0], axis=1)  # What follows is not read.
    alone = run(name, first, None)[row, : len(there)]
    np.testing.assert_allclose(packed[row, there], alone, atol=1e-5)
  # A row with one document needs no document numbers.
  one = run(name, INPUTS, jnp.ones_like(DOCUMENTS))
  np.testing.assert_allclose(one, run(name, INPUTS, None), atol=1e-6)


def batch_of(inputs):
  """Only the last document of a row has weights."""
  last = jnp.max(DOCUMENTS, axis=1, keepdims=True)
  return {
    "inputs": inputs,
    "targets": (INPUTS + 1) % 20,
    "weights": jnp.float32(last == DOCUMENTS),
    "documents": DOCUMENTS,
    "valid": jnp.ones(len(inputs), bool),
  }


@crossing("name", APART)
def test_losses_and_scores_keep_documents_apart(name):
  family, config = MODELS[name], config_of(name)
  graphdef = examples.graph(family, config, PACKED)
  params = examples.params_of(family, config, PACKED)

  def score(output, batch):
    losses, _ = token_losses.scores(output, batch["targets"])
    return {"nats": jnp.sum(losses * batch["weights"], axis=1)}

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def numbers(params, batch):
    model = examples.merged(family, config, PACKED, params)
    key, now = jax.random.key(0), jnp.asarray(0)
    loss = family.loss(model, batch, key, now, None)[0]
    scores = step_lib.eval_step(
      params,
      batch,
      graphdef=graphdef,
      score=score,
      num_loops=2,
      execution="scan",
    )
    return loss, scores["scores"]["nats"]

  first = jnp.where(DOCUMENTS == 1, (INPUTS + 7) % 20, INPUTS)
  last = jnp.where(batch_of(INPUTS)["weights"] > 0, first + 3, first) % 20
  plain, same, other = (
    numbers(params, batch_of(inputs)) for inputs in (INPUTS, first, last)
  )
  for a, b, c in zip(plain, same, other, strict=True):
    assert jnp.array_equal(a, b)
    assert not jnp.array_equal(a, c)


@pytest.mark.parametrize("name", REFUSING)
def test_families_that_would_mix_documents_refuse_them(name):
  message = "this model does not support rows of several documents: it"
  with pytest.raises(UserError, match=message) as caught:
    examples.abstract(MODELS[name], config_of(name), PACKED)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_next_tokens_are_for_models_that_do_not_see_them(name):
  """Where rows have one document."""
  spec = dataclasses.replace(SPEC, predicts_next=True)
  if MODELS[name].reading:
    examples.abstract(MODELS[name], config_of(name), spec)
    return
  with refused("cannot predict next tokens: it attends to the whole row"):
    examples.abstract(MODELS[name], config_of(name), spec)


def test_every_family_keeps_documents_apart_or_refuses_them():
  assert {*APART, *REFUSING} == set(MODELS)
  assert VOCABULARY > 20  # The ids have no padding.
