"""A small multi-hop task, and a model that composes its facts exactly."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.analysis.multihop import instrumented, interventions, questions
from loopjax.data.multihop import task
from loopjax.types import Output

CONFIG = task.Config(
  num_entities=12,
  num_relations=5,
  out_degree=3,
  num_train_chains=(30, 20),
  num_test_chains=(25, 15),
  vocab_multiple=4,
)
LOOPS = 3
PADDING = CONFIG.vocabulary.size - CONFIG.vocabulary.padding


def make_questions(config=CONFIG, num=0):
  """The first evaluation questions, or all if num is 0."""
  dataset = task.make_dataset(config, "test", batch_size=32, seed=0)
  return questions.gather(config, dataset, num)


def make_table(config=CONFIG):
  """Tail entities by head and relation, int [2 E, R]."""
  return interventions.fact_table(task.make_graph(config), config.num_relations)


class Composer:
  """Follows one fact per loop, as in section 2 of the paper.

  States are [V for an entity, V for the token itself]; W[x] is (1, 0.05) at x,
  which makes the entity win in the read-out. A loop looks at the previous
  position: if its entity exceeds `threshold`, and a fact leads from there along
  this position's relation, this position becomes the tail with `strength`, and
  then stays.

  Args:
    strength: strength of a loop's writes.
    threshold: minimum strength of a loop's inputs.
  """

  def __init__(self, strength=1.0, threshold=0.5, config=CONFIG):
    self.strength, self.threshold = strength, threshold
    size, num_entities = config.vocabulary.size, 2 * config.num_entities
    facts = np.full((size, size), -1)
    relations = num_entities + np.arange(config.num_relations)
    facts[:num_entities, relations] = make_table(config)
    self.facts = jnp.asarray(facts)
    table = jnp.concatenate([jnp.eye(size), 0.05 * jnp.eye(size)], axis=1)
    self.token_embedding = types.SimpleNamespace(embedding=table)

  def final_norm(self, vectors):
    """Unlike any other norm."""
    return 3 * vectors

  def __call__(self, inputs, *, num_loops, trace=(), kind=None):
    table = self.token_embedding.embedding
    state, hidden = table[inputs], []
    for loop in range(num_loops):
      state = self.step(state)
      hidden.append(state)
      if kind is not None:
        state = kind.edit({"hidden": state}, jnp.asarray(loop))["hidden"]
    logits = jnp.einsum("btd,vd->btv", state, table)
    return Output(
      logits, {}, {}, {}, {name: jnp.stack(hidden) for name in trace}
    )

  def step(self, state):
    size = len(self.facts)
    entity, token = state[..., :size], state[..., size:]
    before = jnp.roll(entity, 1, axis=1)
    own = jnp.argmax(token, -1)
    leads_to = self.facts[jnp.argmax(before, -1), own]
    clear = before.max(-1) >= self.threshold
    fresh = jnp.argmax(entity, -1) == own
    found = (leads_to >= 0) & clear & fresh
    found &= (jnp.arange(state.shape[1]) > 0)[None]
    written = self.strength * jax.nn.one_hot(leads_to, size)
    entity = jnp.where(found[..., None], written, entity)
    return jnp.concatenate([entity, token], axis=-1)


def instrument(num_loops=LOOPS, **options):
  """An instrumented composer; batches do not divide the questions."""
  return instrumented.instrument(
    lambda composer: composer_of(composer, **options),
    {},
    num_padding_tokens=PADDING,
    num_loops=num_loops,
    batch_size=23,
    traces=("hidden",),
  )


def composer_of(params, **options):
  """Without parameters: it knows only the facts."""
  del params
  return Composer(**options)
