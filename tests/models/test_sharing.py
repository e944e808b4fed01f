"""Caches whose loops share keys and values, and exits, against plain loops.

The reference keeps, for one row, a Python list of each layer's keys and values
and runs the stack's layers one by one.
"""

import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from in_float64 import without_rounding
from numpy_layers import attended
from test_families import CAUSAL, SPEC, config_of
from tests_support import crossing

from loopjax.loop import exits
from loopjax.models import MODELS
from loopjax.nn import attention, rope

BATCH, LENGTH, ROOM, LOOPS = 3, 7, 9, 3
TOKENS = jax.random.randint(jax.random.key(5), (BATCH, LENGTH), 0, 20)
SHARED = ("last_loop", "first_loop", "mean")
SHARING = [n for n in CAUSAL if len(MODELS[n].reading.caches) > 1]


@functools.cache
def model_of(name="looped"):
  """(family, config, parameters)."""
  changes = {"exit_gate": "joint"} if name == "looped" else {}
  config = config_of(name, num_loops=LOOPS, init_std=0.3, **changes)
  return MODELS[name], config, examples.params_of(MODELS[name], config, SPEC)


@functools.cache
def reader(name, exact=False, **policy):
  """(tokens, cache, valid, threshold, num_loops) -> (output, cache).

  In float64 if `exact`.
  """
  family, config, params = model_of(name)

  def run(tokens, cache, valid, threshold, num_loops):
    model = examples.merged(family, config, SPEC, params)
    given = {}
    if policy:
      given["exit_policy"] = exits.ExitPolicy(threshold, num_loops, **policy)
    output, cache = family.reading.read(
      model, tokens, cache, valid=valid, **given
    )
    return output.logits, output.stats["loops_run"], cache

  if exact:
    return without_rounding(run)
  return jax.jit(run, compiler_options=examples.FAST)


def in_parts(
  name, kind, sizes, *, valid=None, threshold=1.0, exact=False, **policy,
):  # fmt: skip
  """Logits [B, S, V] and loops [B, parts] of reading part after part."""
  family, config, params = model_of(name)
  model = examples.merged(family, config, SPEC, params)
  cache = family.reading.empty_cache(model, BATCH, ROOM, kind=kind)
  valid = jnp.ones(TOKENS.shape, bool) if valid is None else valid
  logits, loops = [], []
  for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
    part = slice(start, start + size)
    found, run, cache = reader(name, exact, **policy)(
      TOKENS[:, part],
      cache,
      valid[:, part],
      jnp.full(BATCH, threshold),
      jnp.full(BATCH, LOOPS),
    )
    logits.append(np.asarray(found))
    loops.append(np.asarray(run))
  return np.concatenate(logits, axis=1), np.stack(loops, axis=1)


def whole(name):
  family, config, params = model_of(name)
  return np.asarray(examples.run(family, config, SPEC, TOKENS, params).logits)


@crossing("name", SHARING)
def test_one_reading_with_the_last_loops_keys_is_the_full_forward(name):
  """Tokens that are read at once see each other's keys of the same loop."""
  family, config, params = model_of(name)

  @without_rounding
  def both(params):
    model = examples.merged(family, config, SPEC, params)
    cache = family.reading.empty_cache(model, BATCH, ROOM, kind="last_loop")
    output, _ = family.reading.read(model, TOKENS, cache)
    return output.logits, model(TOKENS).logits

  found, expected = both(params)
  np.testing.assert_allclose(found, expected, atol=1e-9)


@crossing("kind", SHARED)
@crossing("name", SHARING)
def test_sharing_is_another_model_and_depends_on_what_is_read_together(
  name, kind
):
  """The documented exception: the first token alone is as it was."""
  alone, _ = in_parts(name, kind, (1,) * LENGTH)
  expected = whole(name)
  assert np.abs(alone[:, 1:] - expected[:, 1:]).max() > 1e-2
  if kind == "last_loop":  # Of the others a token sees less of its own loops.
    np.testing.assert_allclose(alone[:, :1], expected[:, :1], atol=2e-5)


@crossing("kind", SHARED)
@crossing("name", SHARING)
def test_padding_and_neighbours_change_nothing(name, kind):
  """Rows that wait for a token now and then are what they are without."""
  plain, _ = in_parts(name, kind, (3, 1, 1, 1, 1), exact=True)
  family, config, params = model_of(name)
  model = examples.merged(family, config, SPEC, params)
  cache = family.reading.empty_cache(model, BATCH, ROOM, kind=kind)
  step = reader(name, True)
  free = jnp.ones(BATCH), jnp.full(BATCH, LOOPS)
  logits, _, cache = step(
    jnp.pad(TOKENS[:, :3], ((0, 0), (1, 1))),
    cache,
    jnp.ones((BATCH, 5), bool).at[:, [0, 4]].set(False),
    *free,
  )
  np.testing.assert_allclose(logits[:, 1:4], plain[:, :3], atol=1e-9)
  at = np.full(BATCH, 3)
  rng = np.random.default_rng(0)
  while (at < LENGTH).any():
    goes = (rng.random(BATCH) < 0.6) & (at < LENGTH)
    tokens = jnp.asarray(TOKENS)[np.arange(BATCH), np.minimum(at, LENGTH - 1)]
    logits, _, cache = step(
      tokens[:, None], cache, jnp.asarray(goes)[:, None], *free
    )
    for row in np.flatnonzero(goes):
      np.testing.assert_allclose(logits[row, 0], plain[row, at[row]], atol=1e-9)
    at += goes


@functools.cache
def pieces():
  """One layer's work before and after attention, and the rest of the model.

  In float64, as is all of `reference`.
  """
  family, config, params = model_of()
  model = examples.merged(family, config, SPEC, params)
  head_width = config.block_shape().head_width

  def layer_at(index):
    return jax.tree.map(lambda x: x[index], model.layers)

  def metadata_at(place):
    place = jnp.reshape(place, (1, 1))
    return attention.Metadata(
      rope.rope_tables(place, head_width, config.rope_base)
    )

  def before(index, x, place):
    """Query, key and value, each [H, d_h]."""
    layer, here = layer_at(index), metadata_at(place)
    normed = layer.attention_norm(x)
    found = layer.attention.rotated(normed, here.tables)
    return tuple(one[0, 0] for one in found)

  def after(index, x, mixed):
    layer = layer_at(index)
    return layer.add(x, layer.attention.output(mixed.reshape(1, 1, -1)))

  def ends(x):
    x = model.final_norm(x)
    return x, jax.nn.sigmoid(model.exit_logits(x)[0, 0]), model.logits(x)[0, 0]

  def embed(token):
    return model.token_embedding(token[None, None])

  return [without_rounding(one) for one in (embed, before, after, ends)]


def reference(row, *, kind="per_loop", threshold=1.0, kept="copy"):
  """Logits and loops of a row that is read token by token, written out."""
  embed, before, after, ends = pieces()
  num_layers = model_of()[1].num_layers
  # past[loop][layer] are keys and values of the tokens so far.
  past = [[[] for _ in range(num_layers)] for _ in range(LOOPS)]
  logits, counts = [], []
  for place, token in zip(np.arange(len(row)), np.asarray(row), strict=True):
    x, own, left, stays, chosen, ran = embed(token), [], 1.0, True, None, 0
    for loop in range(LOOPS):
      own.append([])
      for index in np.arange(num_layers):
        query, *now = before(index, x, place)
        if loop and kind == "first_loop":
          now = own[0][index]
        elif loop and kind == "mean":
          kept_so_far = zip(own[-2][index], now, strict=True)
          now = [(a * loop + b) / (loop + 1) for a, b in kept_so_far]
        own[-1].append(now)
        mixed = attended(query, [*past[loop][index], now])
        x = after(index, x, mixed)
      x, chance, read_out = ends(x)
      if stays:
        chosen, ran, found = x, loop + 1, read_out
      left *= 1 - float(chance)
      stays = stays and (threshold == 1 or 1 - left < threshold)
    logits.append(found)
    counts.append(ran)
    for loop in range(LOOPS):
      for index in np.arange(num_layers):
        source = own[loop if kind == "per_loop" else -1][index]
        if loop >= ran and kept == "copy":
          source = own[ran - 1][index]
        elif loop >= ran and kept == "state":
          source = before(index, chosen, place)[1:]
        past[loop][index].append(source)
  return np.stack(logits), counts


@pytest.mark.parametrize("kind", SHARED)
def test_tokens_one_by_one_see_what_is_shared(kind):
  found, _ = in_parts("looped", kind, (1,) * LENGTH, exact=True)
  expected, _ = reference(TOKENS[1], kind=kind)
  # The mean of three loops has a third as a float32 constant.
  np.testing.assert_allclose(found[1], expected, atol=1e-7)


@pytest.mark.parametrize("kept", exits.KEPT)
def test_exits_by_the_gate_leave_what_they_are_said_to(kept):
  found, loops = in_parts(
    "looped", "per_loop", (1,) * LENGTH, threshold=0.6, exact=True,
    rule="gate", kept=kept,
  )  # fmt: skip
  assert len(set(loops.ravel().tolist())) > 1
  for row in range(2):
    expected, ran = reference(TOKENS[row], threshold=0.6, kept=kept)
    assert loops[row].tolist() == ran
    np.testing.assert_allclose(found[row], expected, atol=1e-9)


# Every rule, and every cache.
@crossing(("rule", "kind"), [
  *((rule, "per_loop") for rule in exits.RULES),
  *(("gate", kind) for kind in SHARED),
])  # fmt: skip
def test_no_loop_is_skipped_at_a_threshold_of_one(rule, kind):
  sizes = (3, 1, 1, 1, 1)
  found, loops = in_parts("looped", kind, sizes, rule=rule)
  assert (loops == LOOPS).all()
  expected, _ = in_parts("looped", kind, sizes)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("rule", ["change", "entropy", "kl", "stable"])
def test_lower_thresholds_leave_earlier(rule):
  means = []
  for threshold in (0.999, 0.9, 0.5, 0.2, 1e-6):
    _, loops = in_parts(
      "looped", "per_loop", (1,) * LENGTH, threshold=threshold, rule=rule
    )
    means.append(loops.mean())
  assert means == sorted(means, reverse=True)
  first = rule in ("entropy", "stable")  # The others compare two loops.
  assert means[0] > 1 and (means[-1] == 1 if first else means[-1] < means[0])
