"""Logits of a chunk of a vocabulary."""

import jax
import jax.numpy as jnp
import pytest

from loopjax.kernels import vocabulary


@pytest.mark.long
def test_ids_are_one_row_in_memory():
  """If all ids passed the barrier, they would be written beside the logits."""
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
