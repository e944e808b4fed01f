"""Recurrent depth token by token: exits by read-outs, and chains of states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from test_families import SPEC, config_of
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.loop import exits
from loopjax.models import causal, recurrent

BATCH, LENGTH, ROOM, LOOPS = 3, 6, 9, 5
TOKENS = jax.random.randint(jax.random.key(5), (BATCH, LENGTH), 0, 20)
CONFIG = config_of(
  "recurrent", num_loops=LOOPS, state="normal", init_std=0.3, num_layers=1
)
RULES = tuple(rule for rule in exits.RULES if rule not in ("fixed", "gate"))


def compiled(fn):
  def run(*args):
    return fn(examples.merged(recurrent, CONFIG, SPEC), *args)

  return jax.jit(run, compiler_options=examples.FAST)


@functools.cache
def reader(**policy):
  """(tokens, cache, valid, threshold) -> (logits, loops, cache)."""

  def read(model, tokens, cache, valid, threshold):
    given = {}
    if policy:
      most = jnp.full(len(tokens), LOOPS)
      given["exit_policy"] = exits.ExitPolicy(threshold, most, **policy)
    output, cache = recurrent.read(model, tokens, cache, valid=valid, **given)
    return output.logits, output.stats["loops_run"], cache

  return compiled(read)


def read(tokens, cache, threshold=1.0, valid=None, **policy):
  valid = jnp.ones(tokens.shape, bool) if valid is None else valid
  threshold = jnp.full(len(tokens), threshold)
  return reader(**policy)(tokens, cache, valid, threshold)


@functools.cache
def empty(kind="per_loop", batch=BATCH):
  make = compiled(
    lambda model: recurrent.empty_cache(model, batch, ROOM, kind=kind)
  )
  return make()


@compiled
def plain_loops(model, token, cache, state):
  """Logits [K, B, V] and states of one token after each loop, written out."""
  call = causal.begin(model, token, cache=cache.core)
  injected, usual, found = model.start(call, token, cache)
  carry = (usual if state is None else state), found.core
  logits, states = [], [carry[0]]
  for k in range(LOOPS):
    carry = model.loop(call, injected, carry, jnp.asarray(k))
    hidden, _ = model.after_loops(call, carry[0], found)
    logits.append(model.logits(hidden)[:, 0])
    states.append(carry[0])
  return jnp.stack(logits), jnp.stack(states)


def leaves(rule, threshold, logits, states):
  """The loop after which each row leaves, by NumPy, from 1."""
  logits = np.asarray(logits, np.float64)[..., : -SPEC.num_padding_tokens]
  chance = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
  if rule == "stable":
    best = logits.argmax(axis=-1)
    same = [
      [all(best[k - n, b] == best[k, b] for n in range(2)) and k > 0
       for b in range(BATCH)]
      for k in range(LOOPS)
    ]  # fmt: skip
    assert threshold == 0.5  # Two loops in a row.
    found = np.array(same)
  else:
    entropy = -(chance * np.log(chance)).sum(axis=-1)
    kl = (chance[1:] * np.log(chance[1:] / chance[:-1])).sum(axis=-1)
    states = np.asarray(states, np.float64)[:, :, 0]
    change = np.linalg.norm(states[1:] - states[:-1], axis=-1)
    value = {
      "entropy": entropy / np.log(logits.shape[-1]),
      "kl": np.concatenate([np.full((1, BATCH), np.inf), kl]),
      "change": change / np.linalg.norm(states[1:], axis=-1),
    }[rule]
    found = value <= 1 - threshold
  found[-1] = True
  return found.argmax(axis=0) + 1


THRESHOLDS = {"entropy": 0.3, "kl": 0.35, "change": 0.3, "stable": 0.5}


@pytest.mark.long
@crossing("rule", ("kl", "stable", "entropy", "change"))
def test_a_token_leaves_by_the_read_out_of_its_coda(rule):
  """After the loop that the rule says, with the logits of that loop."""
  threshold, seen = THRESHOLDS[rule], []
  cache = read(TOKENS[:, :2], empty())[2]
  for place in range(2, LENGTH):
    token = TOKENS[:, place : place + 1]
    logits, states = plain_loops(token, cache, None)
    expected = leaves(rule, threshold, logits, states)
    found, ran, cache = read(token, cache, threshold, rule=rule)
    assert ran.tolist() == expected.tolist()
    rows = np.arange(BATCH)
    np.testing.assert_allclose(
      found[:, 0], logits[expected - 1, rows], atol=2e-5
    )
    seen += expected.tolist()
  assert len({*seen}) > 1, seen  # The threshold tells tokens apart.


@pytest.mark.long
@crossing("rule", RULES)
def test_rows_leave_as_they_do_alone(rule):
  """Whatever the neighbours, the padding, and the parts of the prompt."""
  threshold = THRESHOLDS[rule]
  sizes = {"together": (4,), "parts": (2, 2)}
  found = {}
  for name, parts in sizes.items():
    cache, at = empty(), 0
    for size in parts:
      cache = read(TOKENS[:, at : at + size], cache)[2]
      at += size
    logits, ran = [], []
    for place in (4, 5):
      token = TOKENS[:, place : place + 1]
      x, loops, cache = read(token, cache, threshold, rule=rule)
      logits.append(x)
      ran.append(loops.tolist())
    found[name] = np.concatenate(logits, axis=1), ran
  np.testing.assert_allclose(*(x for x, _ in found.values()), atol=2e-5)
  assert found["together"][1] == found["parts"][1]
  row = slice(1, 2)
  cache = read(TOKENS[row, :4], empty(batch=1))[2]
  for n, place in enumerate((4, 5)):
    token = TOKENS[row, place : place + 1]
    x, loops, cache = read(token, cache, threshold, rule=rule)
    np.testing.assert_allclose(x[0, 0], found["together"][0][1, n], atol=2e-5)
    assert loops.tolist() == [found["together"][1][n][1]]


@pytest.mark.parametrize("rule", RULES)
def test_no_loop_is_skipped_at_a_threshold_of_one(rule):
  cache = read(TOKENS[:, :3], empty())[2]
  expected, _, _ = read(TOKENS[:, 3:4], cache)
  found, ran, _ = read(TOKENS[:, 3:4], cache, rule=rule)
  assert (ran == LOOPS).all()
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_document_is_read_alike_in_a_packed_row_and_token_by_token():
  """Its states are those of its positions, wherever it stands in a row."""
  documents = jnp.array([[1, 1, 2, 2, 2, 2]] * BATCH)
  packed = compiled(
    lambda model, tokens: model(tokens, documents=documents).logits
  )(TOKENS)
  alone, cache = [], empty()
  for place in range(2, LENGTH):
    logits, _, cache = read(TOKENS[:, place : place + 1], cache)
    alone.append(logits)
  alone = np.concatenate(alone, axis=1)
  np.testing.assert_allclose(packed[:, 2:], alone, atol=2e-5)
  # In training the documents of a row draw states of their own.
  keys = jax.random.split(jax.random.key(0), BATCH)
  tokens = jnp.tile(TOKENS[:, :3], 2)
  documents = jnp.array([[1, 1, 1, 2, 2, 2]] * BATCH)
  drawn = compiled(
    lambda model, tokens: model(tokens, documents=documents, keys=keys).logits
  )(tokens)
  assert np.abs(drawn[:, 3:] - drawn[:, :3]).max() > 1e-3


def test_exits_that_there_are_not():
  with pytest.raises(UserError, match="'gate' needs an exit gate"):
    recurrent.check_exits(CONFIG, "gate", "copy", "per_loop")
  with pytest.raises(UserError, match="uses more than the last state"):
    recurrent.check_exits(CONFIG, "kl", "state", "per_loop")
  recurrent.check_exits(CONFIG, "stable", "copy", "continuous")
  damped = dataclasses.replace(CONFIG, update="damped")
  with pytest.raises(UserError, match="a loop depends on how many follow"):
    recurrent.check_exits(damped, "kl", "copy", "per_loop")
  recurrent.check_exits(damped, "fixed", "copy", "per_loop")


@pytest.mark.long
def test_a_damped_loop_is_divided_by_the_loops_of_its_row():
  config = dataclasses.replace(CONFIG, update="damped")
  model = examples.merged(recurrent, config, SPEC)
  limits = jnp.array([1, 3, LOOPS])

  def rows(model):
    cache = recurrent.empty_cache(model, BATCH, ROOM)
    policy = exits.ExitPolicy(jnp.ones(BATCH), limits)
    return recurrent.read(model, TOKENS, cache, exit_policy=policy)[0].logits

  found = jax.jit(rows)(model)
  for row, loops in enumerate(limits.tolist()):
    expected = model(TOKENS[row : row + 1], num_loops=loops).logits
    np.testing.assert_allclose(found[row : row + 1], expected, atol=1e-5)


@pytest.mark.long
def test_a_chain_of_states_goes_on_where_the_last_token_ended():
  """Of generated tokens; a prompt draws its states, in any parts."""
  whole = read(TOKENS[:, :4], empty("continuous"))
  usual = read(TOKENS[:, :4], empty())
  np.testing.assert_array_equal(whole[0], usual[0])
  cache = read(TOKENS[:, :2], empty("continuous"))[2]
  cache = read(TOKENS[:, 2:4], cache)[2]
  np.testing.assert_allclose(cache.state, whole[2].state, atol=2e-5)
  for place in (4, 5):
    token = TOKENS[:, place : place + 1]
    logits, states = plain_loops(token, cache, cache.state[:, None])
    found, _, cache = read(token, cache)
    np.testing.assert_allclose(found[:, 0], logits[-1], atol=2e-5)
    np.testing.assert_allclose(cache.state, states[-1, :, 0], atol=2e-5)
    drawn = plain_loops(token, usual[2], None)[0][-1]
    assert np.abs(found[:, 0] - drawn).max() > 1e-3


def test_rows_of_a_chain_wait_and_begin_on_their_own():
  """Padding has no state, and a first token draws one."""
  first = jnp.array([[True], [False], [True]])
  cache = read(TOKENS[:, :1], empty("continuous"), valid=first)[2]
  assert not np.any(cache.state[1]) and np.all(cache.state[::2] != 0)
  second = read(TOKENS[:, :1], cache, valid=~first)[2]
  np.testing.assert_array_equal(second.state[::2], cache.state[::2])
  plain = read(TOKENS[:, :1], empty("continuous"))
  np.testing.assert_allclose(second.state, plain[2].state, atol=2e-5)
  usual = read(TOKENS[:, :1], empty())
  np.testing.assert_allclose(plain[0], usual[0], atol=1e-6)


@pytest.mark.long
def test_one_loop_is_shared_with_no_other():
  """Then a cache of the last loop is one of every loop."""
  made = examples.merged(recurrent, CONFIG, SPEC)
  found = []
  for kind in ("per_loop", "last_loop"):
    cache = recurrent.empty_cache(made, BATCH, ROOM, num_loops=1, kind=kind)
    logits = []
    for part in (slice(0, 3), slice(3, 4)):
      output, cache = recurrent.read(made, TOKENS[:, part], cache, num_loops=1)
      logits.append(output.logits)
    found.append(np.concatenate(logits, axis=1))
  np.testing.assert_allclose(*found, atol=1e-6)
