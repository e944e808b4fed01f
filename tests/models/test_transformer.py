"""The baseline without loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest

from loopjax.errors import UserError
from loopjax.models import disco, looped, transformer
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)))
SIZES = {"width": 16, "num_heads": 2, "num_layers": 2}
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 23)


@functools.cache
def run(family, trained_loops, loop_norm=None, **call):
  config = config_of(family, trained_loops, loop_norm)
  return examples.run(family, config, SPEC, TOKENS, **call)


def config_of(family, num_loops, loop_norm=None):
  changes = {"loop_norm": loop_norm} if loop_norm else {}
  return family.Config(**SIZES, num_loops=num_loops, **changes)


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_one_copy_is_one_loop_of_the_looped_families(loop_norm):
  plain = config_of(transformer, 1)
  drawn = examples.params_of(transformer, plain, SPEC)
  logits = run(transformer, 1).logits
  for family in (looped, disco):
    config = config_of(family, 1, loop_norm)
    params = examples.params_of(family, config, SPEC)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, drawn, params))
    np.testing.assert_allclose(
      run(family, 1, loop_norm).logits, logits, atol=1e-6
    )


def test_equal_copies_are_a_loop():
  """K copies of one stack against K loops of it, norm at the end."""
  config = config_of(looped, 3, "final_only")
  params = examples.params_of(looped, config, SPEC)
  layers = jax.tree.map(lambda x: jnp.concatenate([x] * 3), params["layers"])
  copied = examples.run(
    transformer,
    config_of(transformer, 3),
    SPEC,
    TOKENS,
    {**params, "layers": layers},
  )
  logits = run(looped, 3, "final_only").logits
  np.testing.assert_allclose(copied.logits, logits, atol=1e-6)
  assert not jnp.allclose(run(transformer, 3).logits, logits)


def test_copies_are_counted_and_norms_are_not():
  count = examples.count(transformer, transformer.Config(num_loops=3), SPEC)
  block = 12 * 768**2 + 2 * 768
  assert count == 3 * 4 * block + 23 * 768 + 768


def test_the_read_out_behind_the_first_copies():
  trace = run(transformer, 3, trace=("hidden", "prediction")).trace
  for copies in (1, 2, 3):
    early = run(transformer, 3, num_loops=copies)
    assert jnp.array_equal(
      jnp.argmax(early.logits, -1), trace["prediction"][copies - 1]
    )
  assert not jnp.allclose(trace["hidden"][0], trace["hidden"][1])


def test_there_are_no_more_copies_than_trained():
  model = examples.abstract(transformer, config_of(transformer, 2), SPEC)
  with pytest.raises(UserError, match="num_loops=3 must be 1 to 2") as caught:
    model(TOKENS, num_loops=3)
  assert "\n" not in str(caught.value)


def test_its_costs_are_those_of_as_many_loops():
  spec = dataclasses.replace(SPEC, vocab_size=1051)
  sizes = {**SIZES, "num_loops": 3}
  ours = transformer.costs(transformer.Config(**sizes), spec, 3)
  loops = looped.costs(looped.Config(**sizes), spec, 3)
  assert ours == loops
  # By hand: 8 tokens; 12 width^2 and attention of 8 keys in each of 2 layers.
  block = 12 * 16**2 + 2 * 8 * 16
  head = 1051 * 16
  expected = [2 * 8 * (head + 2 * block * copies) for copies in (1, 2, 3)]
  assert ours["flops_per_example"] == expected
