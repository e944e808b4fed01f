"""Rows that run fewer loops, in families with more than a state between loops.

`test_melt_exits` and `test_recurrent_reading` are of the others.
"""

import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from test_families import SPEC, config_of
from tests_support import crossing

from loopjax.loop import exits
from loopjax.models import MODELS

LOOPS, LENGTH = (1, 2, 3, 4), 6
TOKENS = jax.random.randint(jax.random.key(5), (4, LENGTH), 0, 20)
FORMS = {
  "disco": ("disco", {}),
  "disco, learned gate": ("disco", {"gate": "learned", "gate_value": 1.0}),
  "ponderlm": ("ponderlm", {}),
}


@functools.cache
def model_of(form):
  name, changes = FORMS[form]
  config = config_of(name, num_loops=4, init_std=0.3, **changes)
  return MODELS[name], config


@functools.cache
def reader(form, rule, kept):
  """(tokens, cache, loops [B], threshold) -> (logits, loops, cache)."""
  family, config = model_of(form)

  def read(tokens, cache, loops, threshold):
    model = examples.merged(family, config, SPEC)
    policy = exits.ExitPolicy(
      jnp.full(len(tokens), threshold), loops, rule, kept
    )
    output, cache = family.reading.read(
      model, tokens, cache, exit_policy=policy
    )
    return output.logits, output.stats["loops_run"], cache

  return jax.jit(read, compiler_options=examples.FAST)


def read(form, tokens, cache, loops=LOOPS, threshold=1.0, rule="fixed"):
  loops = jnp.broadcast_to(jnp.asarray(loops), len(tokens))
  return reader(form, rule, "copy")(tokens, cache, loops, threshold)


def empty(form):
  family, config = model_of(form)
  model = examples.merged(family, config, SPEC)
  return family.reading.empty_cache(model, 4, LENGTH)


def whole(form, num_loops):
  """Logits of the full forward pass with so many loops, [B, T, V]."""
  family, config = model_of(form)
  return examples.run(family, config, SPEC, TOKENS, num_loops=num_loops).logits


@crossing("form", FORMS)
def test_a_row_of_k_loops_is_the_model_of_k_loops(form):
  """A prompt, and then token by token; each row with another k."""
  logits, ran, cache = read(form, TOKENS[:, :4], empty(form))
  parts = [logits]
  assert ran.tolist() == [*LOOPS]
  for place in (4, 5):
    logits, ran, cache = read(form, TOKENS[:, place : place + 1], cache)
    assert ran.tolist() == [*LOOPS]
    parts.append(logits)
  found = np.concatenate(parts, axis=1)
  for row, loops in enumerate(LOOPS):
    expected = whole(form, loops)
    np.testing.assert_allclose(found[row], expected[row], atol=2e-5)
    if loops < 4:
      assert np.abs(found[row] - whole(form, 4)[row]).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("form", ["disco", "ponderlm"])
def test_a_token_leaves_by_the_read_out(form):
  """When two loops agree, with the logits of the loop that it left after."""
  _, _, cache = read(form, TOKENS[:, :5], empty(form), 4)
  token = TOKENS[:, 5:]
  by_loop = [read(form, token, cache, loops)[0][:, 0] for loops in LOOPS]
  best = np.argmax(np.stack(by_loop), axis=-1)
  agree = best[1:] == best[:-1]
  agree[-1] = True
  expected = np.argmax(agree, axis=0) + 2
  logits, ran, _ = read(form, token, cache, 4, 0.5, "stable")
  assert ran.tolist() == expected.tolist()
  for row, loops in enumerate(expected):
    np.testing.assert_allclose(
      logits[row, 0], by_loop[loops - 1][row], atol=2e-5
    )
