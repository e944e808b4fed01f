"""The most likely token by chunks, against the argmax of all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.kernels import vocabulary


@pytest.mark.parametrize(
  ("vocab", "chunk", "padding"),
  [(37, 8, 0), (37, 64, 0), (32, 8, 9), (5, 1, 0), (37, 8, 36)],
)
def test_chunks_find_the_argmax(vocab, chunk, padding):
  keys = jax.random.split(jax.random.key(0))
  hidden = jax.random.normal(keys[0], (3, 40, 6))
  table = jax.random.normal(keys[1], (vocab, 6))
  found = vocabulary.most_likely(
    hidden, table, num_padding_tokens=padding, chunk_size=chunk
  )
  logits = (hidden @ table.T)[..., : vocab - padding]
  np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))
  assert found.dtype == jnp.int32


def test_of_equal_ones_it_is_the_first():
  hidden = jnp.ones((1, 2))
  table = jnp.zeros((12, 2)).at[jnp.array([10, 5, 7])].set(1.0)
  for chunk in (1, 3, 4, 12):
    found = vocabulary.most_likely(hidden, table, chunk_size=chunk)
    assert found.tolist() == [5]


def test_ids_are_one_row_in_memory():
  """A barrier that all ids pass would have them written beside the logits."""
  hidden, folded = jnp.ones((3, 40, 6)), jnp.ones((8, 5, 6))
  made = jax.make_jaxpr(vocabulary.logits)(hidden, folded, 2)
  passed = [
    x.aval.shape
    for eqn in made.jaxpr.eqns
    if eqn.primitive.name == "optimization_barrier"
    for x in eqn.outvars
  ]
  assert passed == [(3, 40, 6), (), (3, 40, 8), (8,)]
  values, ids = vocabulary.logits(hidden, folded, 2)
  assert values.shape == ids.shape and ids[1, 2].tolist() == [*range(2, 42, 5)]
