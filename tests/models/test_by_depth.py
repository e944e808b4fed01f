"""Rows in different loops, against reading each of them alone."""

import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
from test_families import SPEC, config_of
from tests_support import crossing

from loopjax.loop import exits
from loopjax.models import MODELS

ROWS, LENGTH, LOOPS = 3, 6, 3
TOKENS = np.asarray(
  jax.random.randint(jax.random.key(5), (ROWS, LENGTH), 0, 20)
)
WAITS = np.random.default_rng(0).random((60, ROWS)) < 0.3
KINDS = [
  ("looped", {"rule": "fixed"}, {}),
  ("looped", {"rule": "gate"}, {}),
  ("looped", {"rule": "gate", "kept": "state"}, {}),
  ("looped", {"rule": "stable"}, {"kind": "mean"}),
  ("looped", {"rule": "kl"}, {"kind": "last_loop"}),
  ("melt", {"rule": "gate"}, {}),
  ("melt", {"rule": "change"}, {}),
]


class Reader:
  """A tiny model whose rows have their own thresholds and loops."""

  def __init__(self, name, policy, cache):
    self.family, self.cache = MODELS[name], cache
    self.steps = self.family.reading.exits.by_depth
    self.config = config_of(
      name, num_loops=LOOPS, init_std=0.3, exit_gate="joint"
      if name == "looped" else "unused",
    )  # fmt: skip
    self.params = examples.params_of(self.family, self.config, SPEC)
    self.policy = functools.partial(exits.ExitPolicy, **policy)
    self.threshold = {"kl": 0.9, "stable": 0.5, "change": 0.2}.get(
      policy["rule"], 0.6
    )

  def compiled(self, fn):
    def run(*args):
      model = examples.merged(self.family, self.config, SPEC, self.params)
      return fn(model, *args)

    return jax.jit(run, compiler_options=examples.FAST)

  def policy_of(self, size):
    # The last row may run two loops, the first one never leaves early.
    threshold = jnp.asarray([1.0] + [self.threshold] * (ROWS - 1))
    loops = jnp.asarray([LOOPS] * (ROWS - 1) + [LOOPS - 1])
    return self.policy(threshold[:size], loops[:size])

  def empty(self, size):
    def make(model):
      return self.family.reading.empty_cache(model, size, LENGTH, **self.cache)

    return self.compiled(make)()

  def in_lockstep(self):
    """(loops, hidden) of each token of each row, and the cache."""

    @self.compiled
    def read(model, token, cache):
      output, cache = self.family.reading.read(
        model, token, cache, exit_policy=self.policy_of(ROWS)
      )
      return output.stats["loops_run"], output.hidden[:, 0], cache

    cache, found = self.empty(ROWS), [[] for _ in range(ROWS)]
    for place in range(LENGTH):
      loops, hidden, cache = read(TOKENS[:, place : place + 1], cache)
      for row in range(ROWS):
        found[row].append((int(loops[row]), hidden[row]))
    return found, cache

  def by_depth(self):
    """The same, when rows wait at random and begin tokens when they can."""

    @self.compiled
    def advance(model, tokens, cache, progress, valid):
      output, cache, progress = self.steps.advance(
        model, tokens, cache, progress, num_loops=LOOPS, valid=valid,
        exit_policy=self.policy_of(ROWS),
      )  # fmt: skip
      return output.stats["loops_run"], output.hidden[:, 0], cache, progress

    rule = self.policy(None, None).rule
    cache, found = self.empty(ROWS), [[] for _ in range(ROWS)]
    progress = self.compiled(
      lambda model: self.steps.between_tokens(model, ROWS, rule)
    )()
    apart = False
    for waits in WAITS:
      place = np.asarray([len(row) for row in found])
      live = ~waits & (place < LENGTH)
      tokens = TOKENS[np.arange(ROWS), np.minimum(place, LENGTH - 1)][:, None]
      before = progress
      loops, hidden, cache, progress = advance(
        tokens, cache, progress, live[:, None]
      )
      for row in range(ROWS):
        if not live[row]:
          jax.tree.map(
            lambda x, y, row=row: np.testing.assert_array_equal(x[row], y[row]),
            progress, before,
          )  # fmt: skip
        if loops[row]:
          found[row].append((int(loops[row]), hidden[row]))
      ran = np.asarray(progress.state.loops)[place < LENGTH]
      apart |= len(set(ran.tolist())) == ROWS
    assert apart  # Rows have been in three different loops.
    return found, cache


@crossing(("name", "policy", "cache"), KINDS, ids=str)
def test_a_row_by_depth_is_the_row_in_lockstep(name, policy, cache):
  """The loops and states of every token, and what it leaves in the cache."""
  reader = Reader(name, policy, cache)
  expected, kept = reader.in_lockstep()
  found, left = reader.by_depth()
  for row, same in zip(found, expected, strict=True):
    assert [loops for loops, _ in row] == [loops for loops, _ in same]
    for (_, hidden), (_, other) in zip(row, same, strict=True):
      np.testing.assert_allclose(hidden, other, atol=1e-5)
  ran = {loops for row in expected for loops, _ in row}
  assert len(ran) > 1
  np.testing.assert_array_equal(left.length, kept.length)
  places = slice(0, LENGTH)
  if name == "looped":
    for x, y in ((left.key, kept.key), (left.value, kept.value)):
      of = slice(None) if policy["rule"] != "fixed" else slice(0, 4)
      np.testing.assert_allclose(x[of], y[of], atol=1e-5)
  else:
    np.testing.assert_allclose(
      left.key[:, places], kept.key[:, places], atol=1e-5
    )
