"""What a cache is for: reading in parts is reading at once, in any family."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from test_families import (
  ALIKE,
  CAUSAL,
  MATTER,
  SPEC,
  VOCABULARY,
  batch_of,
  config_of,
)
from tests_support import crossing, load_config

from loopjax.commands.describe import describe
from loopjax.loop import exits
from loopjax.models import MODELS
from loopjax.types import TaskSpec

BATCH, LENGTH, ROOM = 3, 15, 17
TOKENS = jax.random.randint(jax.random.key(5), (BATCH, LENGTH), 0, 20)
LENGTHS = (15, 4, 6)
PARTS = (7, 7, 1)  # Of sleep's windows, the second part reads in three.
# Changes of a family's small model that change what has to be kept; sleep reads
# windows of four tokens.
KEPT = [
  ("looped", {"num_loops": 3}),
  ("adaptive", {}),
  ("adaptive", {"loop_update": "delta", "num_loops": 3}),
  ("disco", {"num_loops": 3, "loop_norm": "final_only"}),
  ("loopformer", {"num_loops": 3}),
  ("melt", {"num_loops": 3}),
  ("melt", {"gate": "scalar", "num_key_value_heads": 1}),
  ("plt", {"num_loops": 3, "qk_norm": True, "qk_bias": True,
           "value_bias": True, "rope_scaling": (8.0, 1.0, 4.0, 8.0)}),
  ("plt", {"num_loops": 3, "window": 1, "num_key_value_heads": 1}),
  ("ponderlm", {"num_loops": 3}),
  ("recurrent", {"num_loops": 3, "state": "normal", "update": "gate",
                 "value_bias": True, "norm_order": "branch"}),
  ("recurrent", {"num_prelude": 0, "num_coda": 0, "loop_norm": "per_loop"}),
  ("sleep", {"eviction": "sliding", "num_loops": 3}),
  ("sleep", {"num_loops": 2, "carry_convolutions": True, "num_layers": 4,
             "num_memory_layers": 4, "num_prelude": 1,
             "num_coda": 1, "injection": "add"}),
  ("sleep", {"num_loops": 3, "carry_state": False, "loop_norm": "per_loop"}),
  ("sleep", {"num_loops": 1, "eviction": "sliding", "memory": "jet"}),
  ("transformer", {"num_loops": 3}),
]  # fmt: skip
kept = crossing(
  ("name", "changes"),
  KEPT,
  ids=[f"{n}-{'-'.join(c)}" for n, c in KEPT],
  # Long to compile; test_sleep.py and test_plt.py read such models token by
  # token. Without prelude and coda, and in ALIKE, it is the loop of looped.
  manual=[
    (name, changes)
    for name, changes in KEPT
    if name in ALIKE
    or {"carry_state", "carry_convolutions", "memory", "window"} & {*changes}
    or changes.get("loop_update")
    or changes.get("num_prelude") == 0
  ],
)


class Reader:
  """A tiny model of a family, at once and in parts."""

  def __init__(self, name, changes):
    self.family, self.config = MODELS[name], config_of(name, **changes)
    self.plain = examples.params_of(self.family, self.config, SPEC)
    self.params = varied(self.plain)
    self._whole = self._compiled(lambda model, x: model(x).logits)
    self._read = self._compiled(self._logits)
    self.cache = self._compiled(
      lambda model: self.family.reading.empty_cache(model, BATCH, ROOM)
    )

  def _compiled(self, fn):
    def run(params, *args):
      merged = examples.merged(self.family, self.config, SPEC, params)
      return fn(merged, *args)

    return jax.jit(run, compiler_options=examples.FAST)

  def _logits(self, model, tokens, cache, valid):
    output, cache = self.family.reading.read(model, tokens, cache, valid=valid)
    return output.logits, cache

  def whole(self, tokens):
    """Logits of the full forward pass."""
    return np.asarray(self._whole(self.params, tokens))

  def parts(self, tokens, valid, sizes, params=None):
    """Logits of reading one part after another."""
    params = params or self.params
    cache, found = self.cache(params), []
    for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
      part = slice(start, start + size)
      logits, cache = self._read(params, tokens[:, part], cache, valid[:, part])
      found.append(np.asarray(logits))
    return np.concatenate(found, axis=1)


def varied(params):
  """The parameters; those that start at one value have different ones.

  Biases, gates and shares that are zero would have no effect.
  """
  random = np.random.default_rng(0)

  def vary(x):
    x = np.asarray(x)
    noise = 0.2 * random.normal(size=x.shape).astype(np.float32)
    return x + noise if (x == x.flat[0]).all() else x

  return jax.tree.map(vary, params)


@functools.cache
def reader(name, changes):
  return Reader(name, dict(changes))


def make(name, changes):
  return reader(name, tuple(changes.items()))


@kept
@crossing("sizes", [PARTS, (1,) * LENGTH], ids=["parts", "tokens"])
def test_reading_in_parts_is_reading_at_once(name, changes, sizes):
  model, valid = make(name, changes), jnp.ones(TOKENS.shape, bool)
  got = model.parts(TOKENS, valid, sizes)
  np.testing.assert_allclose(got, model.whole(TOKENS), atol=2e-5, rtol=1e-5)


def padded(shift, lengths=LENGTHS):
  """Rows of several lengths with padding before `shift`, the rest after."""
  most = max(lengths)
  places, shape = np.arange(most), (BATCH, most)
  tokens, valid = np.full(shape, 20), np.zeros(shape, bool)
  for row, length in enumerate(lengths):
    start = shift * (most - length)
    valid[row] = (places >= start) & (places < start + length)
    tokens[row, valid[row]] = TOKENS[row, :length]
  return jnp.asarray(tokens), jnp.asarray(valid)


@kept
def test_rows_of_a_batch_are_as_they_are_alone(name, changes):
  model = make(name, changes)
  plain = model.whole(TOKENS)
  for shift in (0, 1):
    tokens, valid = padded(shift)
    got = model.parts(tokens, valid, PARTS)
    for row, length in enumerate(LENGTHS):
      np.testing.assert_allclose(
        got[row, valid[row]], plain[row, :length], atol=2e-5, rtol=1e-5
      )


@kept
def test_padding_changes_no_bit(name, changes):
  model, found = make(name, changes), []
  for shift, filler in ((0, 20), (1, 20), (1, 3)):
    tokens, valid = padded(shift, (7, 4, 1))
    tokens = jnp.where(valid, tokens, filler)
    # Products with a vector are rounded by their places in the batch.
    logits = model.parts(tokens, valid, PARTS[:1], model.plain)
    found.append(logits[np.asarray(valid)])
  np.testing.assert_array_equal(found[0], found[1])  # In order of the rows.
  np.testing.assert_array_equal(found[1], found[2])


@kept
def test_rows_that_wait_stay_as_they_are(name, changes):
  """As in a batch where some are done, or are yet to come."""
  model, valid = make(name, changes), jnp.ones(TOKENS.shape, bool)
  read = functools.partial(model._read, model.params)
  first = read(TOKENS[:, :7], model.cache(model.params), valid[:, :7])[1]
  token, waits = TOKENS[:, 7:8], jnp.zeros((BATCH, 1), bool)
  second = read(token, first, waits)[1]
  got = read(token, second, ~waits)[0]
  expected = read(token, first, ~waits)[0]
  np.testing.assert_array_equal(got, expected)


@crossing("name", CAUSAL, manual=ALIKE)
def test_decoding_updates_the_cache_in_place(name):
  """A step makes no second cache: at most what attention reads of a slot."""
  family, config = MODELS[name], config_of(name, **LARGE.get(name, {}))
  params = examples.params_of(family, config, SPEC)

  def decode(params, tokens, cache):
    model = examples.merged(family, config, SPEC, params)
    output, cache = family.reading.read(model, tokens, cache)
    return jnp.argmax(output.logits[:, -1], axis=-1), cache

  model = examples.merged(family, config, SPEC)
  cache = jax.eval_shape(lambda: family.reading.empty_cache(model, BATCH, 1000))
  tokens = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32)
  step = jax.jit(decode, donate_argnums=2).lower(params, tokens, cache)
  compiled = step.compile()
  memory = compiled.memory_analysis()
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
  assert memory.alias_size_in_bytes >= num_bytes
  parts = ("recent", "core", "first")
  caches = [getattr(cache, name) for name in parts if hasattr(cache, name)]
  text = compiled.as_text()
  for shape in [x.key.shape for x in caches or [cache]]:
    shape = re.escape(f"f32[{','.join(map(str, shape))}]")
    assert re.search(rf"= {shape}", text)
    assert not re.findall(rf"= {shape}\S* (?:copy|transpose|select)\(.*", text)
  if name != "sleep":  # Which falls asleep over a whole window at once.
    assert memory.temp_size_in_bytes < 0.8 * num_bytes


WITH_EXITS = [name for name in CAUSAL if MODELS[name].reading.exits]


# The read-outs of disco and ponderlm are those of looped.
@crossing("name", WITH_EXITS, manual=("disco", "ponderlm"))
def test_ids_that_pad_the_vocabulary_change_no_exit(name):
  """A token leaves where it does without them, whatever the threshold."""
  family, config = MODELS[name], config_of(name, num_loops=3, init_std=0.3)
  plain = TaskSpec(20, 4, tuple((i,) for i in range(4)))
  wide = dataclasses.replace(plain, vocab_size=99, num_padding_tokens=79)
  params, threshold = examples.params_of(family, config, plain), np.arange(64)
  threshold = jnp.asarray(threshold / 64 + 1 / 128, jnp.float32)

  found = []
  for spec in (plain, wide):

    @functools.partial(jax.jit, static_argnums=1)
    def loops(params, rule, spec=spec):
      model = examples.merged(family, config, spec, params)
      cache = family.reading.empty_cache(model, 64, 4)
      most = jnp.full(64, 3)
      output, _ = family.reading.read(
        model, jnp.full((64, 1), 7), cache,
        exit_policy=exits.ExitPolicy(threshold, most, rule),
      )  # fmt: skip
      return output.stats["loops_run"]

    own = jax.tree_util.tree_map_with_path(
      lambda path, x, spec=spec: _padded_rows(path, x, spec), params
    )
    found.append([loops(own, rule).tolist() for rule in ("entropy", "kl")])
  assert found[0] == found[1]
  assert all(len({*loops}) > 1 for loops in found[0])


@crossing("name", CAUSAL, manual=("plt", "recurrent", *ALIKE))
def test_ids_that_pad_the_vocabulary_change_no_metric(name):
  """Nor a trace: all are those of a model without them."""
  family, config = MODELS[name], config_of(name, **MATTER.get(name, {}))
  plain = TaskSpec(20, 8, tuple((i,) for i in range(8)))
  wide = dataclasses.replace(plain, vocab_size=99, num_padding_tokens=79)
  params, found = examples.params_of(family, config, plain), []
  data = {name: x % 20 for name, x in batch_of(name, config).items()}
  traces = tuple({"prediction", "confidence"} & {*family.traces})
  for spec in (plain, wide):

    def run(params, spec=spec):
      model = examples.merged(family, config, spec, params)
      step = jnp.zeros((), jnp.int32)
      _, metrics = family.loss(model, data, jax.random.key(0), step, None)
      return metrics, model(data["inputs"], trace=traces).trace

    own = jax.tree_util.tree_map_with_path(
      lambda path, x, spec=spec: _padded_rows(path, x, spec), params
    )
    found.append(jax.jit(run, compiler_options=examples.FAST)(own))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), *found
  )


def _padded_rows(path, x, spec):
  """The table of tokens, with rows for those that pad it."""
  names = [part.key for part in path]
  axis = 1 if names[0] == "head" else 0
  if names[0] not in ("head", "token_embedding"):
    return x
  added = [(0, 0)] * x.ndim
  added[axis] = (0, spec.vocab_size - x.shape[axis])
  return jnp.pad(x, added, constant_values=1.0)


def test_bytes_of_a_cache_are_those_of_its_buffers():
  config = load_config("multihop_disco", "smoke")
  model = config.model
  bytes_of = describe(config)
  keys_and_values = 2 * model.width * 4
  slots = model.num_loops * model.num_layers
  assert bytes_of["cache_bytes_per_token"] == slots * keys_and_values
  assert bytes_of["cache_bytes_per_row"] == 4  # Its length.
  config = load_config("automaton_sleep", "smoke")
  model, bytes_of = config.model, describe(config)
  assert bytes_of["cache_bytes_per_token"] == 0
  window = model.num_layers * 2 * model.width * 4 * model.window
  fast = model.num_memory_heads * model.key_width * model.value_width * 4
  least = window + 2 * fast * model.num_memory_layers
  assert least < bytes_of["cache_bytes_per_row"] < 3 * least


LARGE = {
  "melt": {"num_layers": 4},
  "plt": {"num_layers": 4},
  "sleep": {"window": 1000, "eviction": "sliding", "num_layers": 4},
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_record_says_what_its_caches_can_do(name):
  """Without it, the engine would read all places, and share no prefix."""
  family, config = MODELS[name], config_of(name)
  params, reading = examples.params_of(family, config, SPEC), family.reading
  for kind in reading.caches:

    def make(params, kind=kind):
      model = examples.merged(family, config, SPEC, params)
      return reading.empty_cache(model, 1, 8, kind=kind)

    cache = jax.eval_shape(make, params)
    assert reading.has_span == hasattr(cache, "within")
    places = {"cut", "of_rows", "with_rows"} & {*dir(cache)}
    assert len(places) == (3 if reading.has_places else 0)


def test_every_causal_family_is_read():
  assert {name for name, _ in KEPT} == set(CAUSAL)
  assert VOCABULARY > 20
