"""Tokens that leave MELT's loop early, against reading with fewer loops."""

import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from test_families import SPEC, config_of

from loopjax.errors import UserError
from loopjax.loop import exits
from loopjax.models import melt

ROWS, LENGTH, LOOPS = 3, 6, 3
TOKENS = jax.random.randint(jax.random.key(5), (ROWS, LENGTH), 0, 20)
CONFIG = config_of(
  "melt", num_loops=LOOPS, init_std=0.3, exit_gate="unused", prefill_chunk=1
)


EXITS = melt.FAMILY.reading.exits


@functools.cache
def reader(num_loops=LOOPS, **policy):
  """(tokens, cache, threshold [B], loops [B]) -> (output, cache)."""
  params = examples.params_of(melt, CONFIG, SPEC)

  def run(tokens, cache, threshold, loops):
    model = examples.merged(melt, CONFIG, SPEC, params)
    given = (
      {"exit_policy": exits.ExitPolicy(threshold, loops, **policy)}
      if policy
      else {}
    )
    output, cache = melt.read(
      model, tokens, cache, num_loops=num_loops, **given
    )
    gate = model.exit_logits(output.hidden[:, -1])
    return output.hidden[:, -1], output.stats["loops_run"], gate, cache

  return jax.jit(run, compiler_options=examples.FAST)


def read(
  token, cache, *, num_loops=LOOPS, threshold=1.0, loops=LOOPS, **policy
):
  free = jnp.full(ROWS, threshold), jnp.asarray(np.broadcast_to(loops, ROWS))
  return reader(num_loops, **policy)(token, cache, *free)


def empty():
  model = examples.merged(melt, CONFIG, SPEC)
  return melt.empty_cache(model, ROWS, LENGTH)


def some_rows(pick, caches):
  """Each row from the cache that `pick` says."""
  chosen = jnp.asarray(pick)
  each = jnp.arange(ROWS)
  return jax.tree.map(lambda *x: jnp.stack(x)[chosen, each], *caches)


@pytest.mark.parametrize("kept", ["copy", "computed"])
def test_what_a_token_leaves_is_the_latent_of_its_last_loop(kept):
  """To the bit, each row after another loop; or of all, if all are computed."""
  prompt = read(TOKENS[:, :3], empty())[-1]
  fewer = [read(TOKENS[:, 3:4], prompt, num_loops=n) for n in (1, 2, 3)]
  hidden, ran, _, cache = read(
    TOKENS[:, 3:4], prompt, loops=(1, 2, 3), rule="fixed", kept=kept
  )
  assert ran.tolist() == [1, 2, 3]
  for row, one in enumerate(fewer):
    np.testing.assert_array_equal(hidden[row], one[0][row])
  caches = [one[-1] for one in fewer]
  expected = some_rows((0, 1, 2) if kept == "copy" else (2, 2, 2), caches)
  jax.tree.map(np.testing.assert_array_equal, cache, expected)
  assert np.abs(caches[0].key - caches[2].key).max() > 1e-2


def leaves(rule, threshold, states, gates):
  """Loops of each row, from the states and gates after every loop."""
  for t in range(1, LOOPS + 1):
    if rule == "gate":
      chance = 1 - np.prod(1 - 1 / (1 + np.exp(-gates[:t])), axis=0)
      yes = chance >= threshold
    else:
      change = np.linalg.norm(states[t] - states[t - 1], axis=-1)
      yes = change <= (1 - threshold) * np.linalg.norm(states[t], axis=-1)
    yield np.where(yes | (t == LOOPS), t, LOOPS + 1)


@pytest.mark.parametrize(
  ("rule", "threshold"), [("gate", 0.6), ("change", 0.5)]
)
def test_later_tokens_see_what_was_left(rule, threshold):
  """Token by token; the reference reads with 1 .. K loops and takes one."""
  model = examples.merged(melt, CONFIG, SPEC)
  cache, plain, seen = empty(), empty(), []
  for place in range(LENGTH):
    token = TOKENS[:, place : place + 1]
    found = [read(token, plain, num_loops=n) for n in (1, 2, 3)]
    embedded = model.token_embedding(token)[:, 0]
    states = np.stack([embedded, *(one[0] for one in found)])
    gates = np.stack([one[2] for one in found])
    loops = np.min(list(leaves(rule, threshold, states, gates)), axis=0)
    plain = some_rows(loops - 1, [one[-1] for one in found])
    hidden, ran, _, cache = read(token, cache, threshold=threshold, rule=rule)
    assert ran.tolist() == loops.tolist()
    np.testing.assert_allclose(
      hidden, states[loops, np.arange(ROWS)], atol=1e-5
    )
    seen += loops.tolist()
  assert len(set(seen)) > 1


@pytest.mark.long
@pytest.mark.parametrize("rule", exits.RULES)
def test_no_loop_is_skipped_at_a_threshold_of_one(rule):
  cache, plain = empty(), empty()
  for part in (TOKENS[:, :3], TOKENS[:, 3:4]):
    expected, _, _, plain = read(part, plain)
    hidden, ran, _, cache = read(part, cache, rule=rule)
    assert (ran == LOOPS).all()
    np.testing.assert_allclose(hidden, expected, atol=1e-6)


@pytest.mark.long
def test_prompts_run_all_loops_that_they_may():
  hidden, ran, _, _ = read(
    TOKENS, empty(), threshold=1e-6, loops=(1, 2, 3), rule="entropy"
  )
  assert ran.tolist() == [1, 2, 3]
  fewer = read(TOKENS, empty(), num_loops=2)[0]
  np.testing.assert_array_equal(hidden[1], fewer[1])


def test_exits_that_cannot_be():
  assert EXITS.rule(CONFIG) == "gate"
  EXITS.check(CONFIG, "gate", "copy", "latent")
  with pytest.raises(UserError, match="needs cache_kind='per_loop'"):
    EXITS.check(CONFIG, "gate", "state", "latent")
  plain = config_of("melt")
  assert EXITS.rule(plain) == "fixed"
  with pytest.raises(UserError, match="'gate' needs a model with an exit gate"):
    EXITS.check(plain, "gate", "copy", "latent")


@pytest.mark.long
def test_a_short_prompt_has_run_as_many_loops_as_a_long_one():
  """Its later chunks are padding, which runs none."""
  params = examples.params_of(melt, CONFIG, SPEC)
  model = examples.merged(melt, CONFIG, SPEC, params)
  valid = jnp.arange(4)[None] < jnp.array([4, 1, 0])[:, None]
  policy = exits.ExitPolicy(jnp.ones(ROWS), jnp.full(ROWS, LOOPS), "fixed")

  def loops_run(cache):
    output = melt.read(
      model, TOKENS[:, :4], cache, valid=valid, exit_policy=policy
    )[0]
    return output.stats["loops_run"]

  run = jax.jit(loops_run, compiler_options=examples.FAST)
  assert run(empty()).tolist() == [LOOPS, LOOPS, 0]
