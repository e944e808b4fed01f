"""Loops that share the first one's keys, against an independent module."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import plt_plain
import pytest
from in_float64 import without_rounding
from numpy_layers import in_float64
from tests_support import load_config, namespace

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.models import looped, plt
from loopjax.nn import attention, rope
from loopjax.nn.attention.window import WindowCache
from loopjax.run.checkpoints import integrity
from loopjax.sweep import items as items_lib
from loopjax.types import TaskSpec

LENGTH, VOCABULARY = 9, 23
SPEC = TaskSpec(VOCABULARY, LENGTH, tuple((i,) for i in range(LENGTH)))
SMALL = plt.Config(
  width=16, num_heads=4, num_key_value_heads=2, num_layers=2, num_loops=3,
  mlp="swiglu", mlp_ratio=2.0, init_std=0.3, window=4,
)  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(1), (3, LENGTH), 0, VOCABULARY)
CASES = {
  "small window": {},
  "window of one": {"window": 1},
  "window of the text": {"window": LENGTH},
  "large window": {"window": 64},
  "qwen": {"qk_norm": True, "qk_bias": True, "value_bias": True},
  "one head each": {"num_key_value_heads": 0, "head_width": 6, "tied": False},
  "a norm after every loop": {"loop_norm": "per_loop"},
}

OURS = ("window", "gate_bias")  # Settings that `looped` lacks.


@functools.cache
def params_of(**changes):
  """The family's, whose gates and biases are not all alike."""
  config = dataclasses.replace(SMALL, **changes)
  params = examples.params_of(plt, config, SPEC)
  keys = iter(jax.random.split(jax.random.key(7), 99))

  def moved(path, x):
    small = path[-1].key in ("bias", "scale")
    return x + 0.5 * jax.random.normal(next(keys), x.shape) if small else x

  return config, jax.tree_util.tree_map_with_path(moved, params)


def expected(changes, num_loops, rows=TOKENS):
  config, params = params_of(**changes)
  return np.stack(
    [
      plt_plain.logits_of_loops(params, config, row, num_loops)
      for row in np.asarray(rows)
    ],
    axis=1,
  )


def trained(changes, num_loops):
  """Logits after every loop of the full forward pass, in float64."""
  config, params = params_of(**changes)

  def run(params):
    model = examples.merged(plt, config, SPEC, params)
    output = model(TOKENS, num_loops=num_loops, trace=("hidden",))
    return jax.vmap(model.logits)(output.trace["hidden"]), output.logits

  return without_rounding(run)(params)


@pytest.mark.parametrize("case", CASES)
def test_numpy_agrees(case):
  """After 1, 2 and 3 loops, as read token by token."""
  by_loop, last = trained(CASES[case], 3)
  plain = expected(CASES[case], 3)
  np.testing.assert_allclose(by_loop, plain, atol=1e-9)
  np.testing.assert_allclose(last, plain[-1], atol=1e-9)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_another_number_of_loops_agrees(num_loops):
  by_loop, last = trained({}, num_loops)
  assert len(by_loop) == num_loops
  plain = expected({}, num_loops)
  np.testing.assert_allclose(by_loop, plain, atol=1e-9)
  np.testing.assert_allclose(last, plain[-1], atol=1e-9)


def test_positions_begin_again_with_every_document():
  documents = jnp.array([[3, 3, 3, 1, 2, 2], [0, 0, 0, 0, 0, 0]])
  expected = [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
  np.testing.assert_array_equal(attention.places_in(documents), expected)


def test_padding_may_be_in_front():
  config, params = params_of()
  inputs = jnp.pad(TOKENS[:, :5], ((0, 0), (2, 0)))
  valid = jnp.broadcast_to(jnp.arange(7) >= 2, inputs.shape)

  def run(params):
    model = examples.merged(plt, config, SPEC, params)
    cache = plt.empty_cache(model, len(inputs), LENGTH)
    return plt.FAMILY.reading.read(model, inputs, cache, valid=valid)[0].logits

  found = without_rounding(run)(params)[:, 2:]
  plain = expected({}, 3, TOKENS[:, :5])[-1]
  np.testing.assert_allclose(found, plain, atol=1e-9)


def in_parts(changes, sizes):
  """Logits of reading part after part, in float64."""
  config, params = params_of(**changes)

  def run(params):
    model = examples.merged(plt, config, SPEC, params)
    cache, found = plt.empty_cache(model, len(TOKENS), LENGTH), []

    def step(cache, tokens):
      output, cache = plt.FAMILY.reading.read(model, tokens, cache)
      return cache, output.logits

    if sizes == TOKENS_ALONE:  # Traced once.
      _, rows = jax.lax.scan(step, cache, TOKENS.T[..., None])
      return jnp.swapaxes(rows[:, :, 0], 0, 1)
    for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
      cache, logits = step(cache, TOKENS[:, start : start + size])
      found.append(logits)
    return jnp.concatenate(found, axis=1)

  return without_rounding(run)(params)


TOKENS_ALONE, WHOLE = (1,) * LENGTH, (LENGTH,)


# Each window once, and each way to read once; the others are combinations.
@pytest.mark.parametrize(("window", "sizes"), [
  *((window, (5, 1, 3)) for window in (1, 2, 4, 64)),
  (2, TOKENS_ALONE), (4, WHOLE),
  *(pytest.param(window, TOKENS_ALONE, marks=pytest.mark.manual)
    for window in (1, 4, 64)),
])  # fmt: skip
def test_any_reading_is_the_full_forward(window, sizes):
  """Through windows that are full several times over."""
  found = in_parts({"window": window}, sizes)
  plain = expected({"window": window}, 3)[-1]
  np.testing.assert_allclose(found, plain, atol=1e-9)


def test_a_ring_that_is_seen_too_far_is_caught(monkeypatch):
  seen = WindowCache.visible_recent
  monkeypatch.setattr(
    WindowCache, "visible_recent", lambda cache, places: seen(cache, places - 1)
  )
  found = in_parts({"window": 2}, (1,) * LENGTH)
  assert np.abs(found - expected({"window": 2}, 3)[-1]).max() > 1e-3


def turned_back(query):
  """Queries before the rotation."""
  places = -jnp.arange(query.shape[1])[:, None]
  tables = rope.rope_tables(places, query.shape[-1], SMALL.rope_base)
  return rope.rotate(query, tables)


# What is replaced, and by which function of it.
FAULTS = {
  "a window of one token more": (
    (plt, "_causal_part"),
    lambda own: lambda x, ids, reach=None: own(x, ids, reach and reach + 1),
  ),
  "a window of one token less": (
    (plt, "_causal_part"),
    lambda own: lambda x, ids, reach=None: own(x, ids, reach and reach - 1),
  ),
  "a gate of queries that are not rotated": (
    (plt.WindowGates, "__call__"),
    lambda share: lambda gates, query: share(gates, turned_back(query)),
  ),
  "the other share": (
    (plt.WindowGates, "__call__"),
    lambda share: lambda gates, query: 1 - share(gates, query),
  ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault, monkeypatch):
  (place, name), change = FAULTS[fault]
  monkeypatch.setattr(place, name, change(getattr(place, name)))
  _, last = trained({}, 2)
  assert np.abs(last - expected({}, 2)[-1]).max() > 1e-3


def test_gradients_are_finite_differences():
  """Along one direction of each parameter, of the loss in float64."""
  config, params = params_of(num_layers=1)
  batch = {
    "inputs": TOKENS,
    "targets": jnp.roll(TOKENS, -1, axis=1),
    "weights": jnp.ones(TOKENS.shape),
  }

  def loss(params):
    model = examples.merged(plt, config, SPEC, params)
    key, step = jax.random.key(0), jnp.asarray(0)
    return plt.FAMILY.loss(model, batch, key, step, None)[0]

  value = without_rounding(loss)
  grads = without_rounding(jax.grad(loss))(params)
  wide = in_float64(params)
  leaves, treedef = jax.tree.flatten(wide)
  rng, size = np.random.default_rng(0), 1e-4
  for i, grad in enumerate(jax.tree.leaves(grads)):
    way = rng.standard_normal(grad.shape)
    way /= np.linalg.norm(way)

    def moved(by, i=i, way=way):
      return treedef.unflatten(
        [x + by * way if n == i else x for n, x in enumerate(leaves)]
      )

    near, far = (
      value(moved(by)) - value(moved(-by)) for by in (size, 2 * size)
    )
    slope = (8 * near - far) / (12 * size)  # The error is O(size^4).
    np.testing.assert_allclose(np.sum(grad * way), slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_a_closed_gate_is_the_plain_loop_within_the_window(loop_norm):
  """The start of a trained `looped`: equal up to the gate, sigmoid(-30)."""
  config = dataclasses.replace(
    SMALL, window=64, gate_bias=-30.0, loop_norm=loop_norm
  )
  params = examples.params_of(plt, config, SPEC)
  settings = dataclasses.asdict(config)
  settings = {k: settings[k] for k in settings if k not in OURS}
  rest = {k: v for k, v in params.items() if k != "window_gates"}
  plain = looped.Config(**settings)
  expected = examples.run(looped, plain, SPEC, TOKENS, rest).logits
  got = examples.run(plt, config, SPEC, TOKENS, params).logits
  np.testing.assert_allclose(got, expected, atol=1e-5)
  bias = jnp.full_like(params["window_gates"]["bias"], 30.0)
  gates = {**params["window_gates"], "bias": bias}
  opened = {**params, "window_gates": gates}
  other = examples.run(plt, config, SPEC, TOKENS, opened).logits
  assert jnp.abs(other - expected).max() > 1e-2


def test_a_cache_is_one_loop_and_windows():
  """Bytes: 2 L M G d_h of the first loop, 2 (K - 1) L w G d_h of others."""
  config, params = params_of()
  model = examples.merged(plt, config, SPEC, params)
  for loops in (1, 2, 3):
    cache = plt.empty_cache(model, 1, 100, num_loops=loops)
    size = sum(x.size for x in jax.tree.leaves((cache.first.key, cache.recent)))
    size += cache.first.value.size
    assert size == 2 * 2 * 2 * 4 * (100 + (loops - 1) * 4)
    assert cache.num_slots == loops * 2


def test_one_loop_trains_no_gate():
  once = dataclasses.replace(SMALL, num_loops=1)
  assert plt.untrained(once) == "^window_gates/"
  assert not plt.untrained(SMALL)


def test_a_sweep_compares_what_starts_from_one_looped_model(tmp_path):
  """All parameters but the gates are there."""
  config = load_config("lm_melt", "smoke")
  sweeps = namespace("lm_melt")["sweeps"]
  items = items_lib.make_items(config, sweeps, "sharing", {}, tmp_path)
  first, *others = (resolved(config, item.overrides) for item in items)
  theirs = parameters_of(first)
  assert [x.model_name for x in others] == [
    "looped", "melt", "melt", "melt", "plt", "plt",
  ]  # fmt: skip
  assert [x.model.window for x in others[-2:]] == [16, 64]
  for one in others:
    ours = parameters_of(one)
    assert {name: ours[name] for name in theirs} == theirs
    fresh = ours.keys() - theirs.keys()
    assert all(re.search(one.run.init_fresh, name) for name in fresh)
    assert one.run.num_steps == others[0].run.num_steps
    assert one.optim.learning_rate == others[0].optim.learning_rate


def resolved(config, overrides):
  one = config.copy_and_resolve_references()
  config_lib.override(one, overrides)
  return config_lib.resolve(one)


def parameters_of(settings):
  return integrity.describe(program_lib.abstract_model(settings)[1])
