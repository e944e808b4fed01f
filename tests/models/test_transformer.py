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
  plain = config_of(transformer, 1, loop_norm)
  drawn = examples.params_of(transformer, plain, SPEC)
  if loop_norm == "per_loop":  # One norm of one copy.
    drawn["final_norm"] = jax.tree.map(lambda x: x[0], drawn["final_norm"])
  logits = run(transformer, 1, loop_norm).logits
  for family in (looped, disco):
    config = config_of(family, 1, loop_norm)
    params = examples.params_of(family, config, SPEC)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, drawn, params))
    np.testing.assert_allclose(
      run(family, 1, loop_norm).logits, logits, atol=1e-6
    )


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_equal_copies_are_a_loop(loop_norm):
  """K copies of f_theta against K loops of it."""
  config = config_of(looped, 3, loop_norm)
  params = examples.params_of(looped, config, SPEC)
  gain = params["final_norm"]["scale"] * jnp.linspace(0.5, 2.0, 16)
  params["final_norm"]["scale"] = gain
  copied = {
    **params,
    "layers": jax.tree.map(
      lambda x: jnp.concatenate([x] * 3), params["layers"]
    ),
  }
  if loop_norm == "per_loop":
    copied["final_norm"] = {"scale": jnp.stack([gain] * 3)}
  copies = config_of(transformer, 3, loop_norm)
  logits = examples.run(looped, config, SPEC, TOKENS, params).logits
  np.testing.assert_allclose(
    examples.run(transformer, copies, SPEC, TOKENS, copied).logits,
    logits,
    atol=1e-5,
  )
  for wrong in (run(transformer, 3, loop_norm), run(transformer, 3)):
    assert not jnp.allclose(wrong.logits, logits)


@pytest.mark.parametrize(
  ("loop_norm", "norms"), [("per_loop", 3), ("final_only", 1)]
)
def test_every_copy_has_parameters_of_its_own(loop_norm, norms):
  config = transformer.Config(num_loops=3, loop_norm=loop_norm)
  count = examples.count(transformer, config, SPEC)
  block = 12 * 768**2 + 2 * 768
  assert count == 3 * 4 * block + 23 * 768 + norms * 768


def test_without_loops_it_has_as_many_layers_as_it_says():
  sizes = {key: value for key, value in SIZES.items() if key != "num_loops"}
  config = transformer.Config(**sizes | {"num_layers": 4})
  params = examples.params_of(transformer, config, SPEC)
  assert {len(x) for x in jax.tree.leaves(params["layers"])} == {4}


def test_one_copy_of_many_has_the_first_norm():
  config = config_of(transformer, 2)
  params = examples.params_of(transformer, config, SPEC)
  gains = jnp.stack([jnp.full(16, 2.0), jnp.ones(16)])
  params["final_norm"] = {"scale": gains}
  doubled = examples.run(
    transformer, config, SPEC, TOKENS, params, num_loops=1
  ).logits
  plain = run(transformer, 2, num_loops=1).logits
  np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-5, atol=1e-6)


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
  # By hand: 8 tokens; 12 width^2 and attention to 8 keys in each of 2 layers.
  block = 12 * 16**2 + 2 * 8 * 16
  head = 1051 * 16
  expected = [2 * 8 * (head + 2 * block * copies) for copies in (1, 2, 3)]
  assert ours["flops_per_example"] == expected
