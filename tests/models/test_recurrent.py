"""Recurrent depth: what it shares with other families, and Huginn's numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from in_float64 import without_rounding
from tests_support import crossing, load_config, long_case

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.loop import injection
from loopjax.losses import tokens as token_losses
from loopjax.models import causal, looped, recurrent, transformer
from loopjax.models.recurrent import config as recurrent_config
from loopjax.models.recurrent import training
from loopjax.nn import block
from loopjax.nn import keys as keys_lib
from loopjax.types import PRECISIONS, TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), 2)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
STACK = {"width": 16, "num_heads": 2, "init_std": 0.3}
PLAIN = {  # Nothing but a loop over the core.
  "norm_order": "pre", "injection": "none", "loop_norm": "final_only",
  "state": "input", "depth": "fixed", "num_with_gradient": 0,
}  # fmt: skip
SMALL = recurrent.Config(
  **STACK, num_prelude=1, num_layers=2, num_coda=1, num_loops=3,
  num_with_gradient=2,
)  # fmt: skip


def run(config, params=None, tokens=TOKENS, **call):
  return examples.run(recurrent, config, SPEC, tokens, params, **call)


def changed(**changes):
  return dataclasses.replace(SMALL, **changes)


def batch_of(tokens=TOKENS):
  return {
    "inputs": tokens,
    "targets": jnp.roll(tokens, -1, axis=1),
    "weights": jnp.ones(tokens.shape),
  }


@functools.cache
def compiled_loss(config):
  """Compiled for each config once."""

  def loss(params, batch, key, step):
    made = examples.merged(recurrent, config, SPEC, params)
    return recurrent.loss(made, batch, key, step, None)

  run = jax.value_and_grad(loss, has_aux=True)
  return jax.jit(run, compiler_options=examples.FAST)


def loss_and_gradients(config, batch=None, seed=0, step=0):
  params = examples.params_of(recurrent, config, SPEC)
  key, step = jax.random.key(seed), jnp.asarray(step)
  found = compiled_loss(config)(params, batch or batch_of(), key, step)
  (value, metrics), gradients = found
  return value, metrics, gradients


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_without_prelude_and_coda_it_is_the_vanilla_loop(loop_norm):
  """The same seed, the same parameters, to the bit."""
  config = recurrent.Config(**{
    **STACK, **PLAIN, "loop_norm": loop_norm, "num_prelude": 0, "num_coda": 0,
    "num_layers": 2, "num_loops": 3,
  })  # fmt: skip
  vanilla = looped.Config(
    **STACK, num_layers=2, num_loops=3, loop_norm=loop_norm
  )
  for loops in (1, 3, 5):
    expected = examples.run(looped, vanilla, SPEC, TOKENS, num_loops=loops)
    got = run(config, num_loops=loops)
    np.testing.assert_array_equal(got.logits, expected.logits)
    np.testing.assert_array_equal(got.hidden, expected.hidden)


def test_with_one_loop_it_is_a_transformer():
  """Its layers are prelude, core and coda in turn, to the bit."""
  config = recurrent.Config(**{
    **STACK, **PLAIN, "num_prelude": 1, "num_layers": 2, "num_coda": 1,
    "num_loops": 1,
  })  # fmt: skip
  params = examples.params_of(recurrent, config, SPEC)
  layers = [params[name] for name in ("prelude", "layers", "coda")]
  whole = {
    "layers": jax.tree.map(lambda *x: jnp.concatenate(x), *layers),
    **{name: params[name] for name in ("token_embedding", "final_norm")},
  }
  stack = transformer.Config(
    **STACK, num_layers=4, num_loops=1, loop_norm="final_only"
  )
  expected = examples.run(transformer, stack, SPEC, TOKENS, whole)
  np.testing.assert_array_equal(run(config, params).logits, expected.logits)


def test_loops_are_the_recursion_written_out():
  """Injection before the core, norms of sums, a norm before the coda."""
  config = changed(state="zero")

  @without_rounding
  def by_hand(params):
    made = examples.merged(recurrent, config, SPEC, params)
    call = causal.begin(made, TOKENS)
    injected, state, _ = made.start(call, TOKENS, None)
    adapter = params["injection"]["adapter"]["kernel"]
    states = [state]
    for _ in range(3):
      state = state @ adapter[:16] + injected @ adapter[16:]  # [h; e] A
      for layer in range(2):
        block = jax.tree.map(lambda x, n=layer: x[n], made.layers)
        normed = block.attention_norm(state)
        mixed, _ = block.attention(normed, call.metadata)
        state = block.attention_post_norm(state + mixed)
        state = block.mlp_post_norm(state + block.mlp(block.mlp_norm(state)))
      states.append(state)
    hidden, _ = made.part(call, "coda", made.final_norm(state), None)
    return states, made.logits(hidden)

  states, logits = by_hand(examples.params_of(recurrent, config, SPEC))
  assert not np.any(states[0])
  for k, state in enumerate(states[1:]):
    found = run(config, num_loops=k + 1, trace=("hidden",), exact=True)
    np.testing.assert_allclose(found.trace["hidden"][k], state, atol=1e-9)
  found = run(config, exact=True).logits
  np.testing.assert_allclose(found, logits, atol=1e-9)


@pytest.mark.long
@crossing(
  "changes",
  [{}, {"state": "input", "injection": "diagonal"}],
  manual=[{"state": "input", "injection": "diagonal"}],
)
def test_enough_loops_with_a_gradient_are_all_of_them(changes):
  changes = {"state": "zero", "num_layers": 1, **changes}
  some, none = (
    changed(depth="fixed", num_with_gradient=n, **changes) for n in (3, 0)
  )
  for x, y in zip(
    jax.tree.leaves(loss_and_gradients(some)[2]),
    jax.tree.leaves(loss_and_gradients(none)[2]),
    strict=True,
  ):
    np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-4)


@pytest.mark.long
def test_cut_loops_have_no_gradient_and_the_prelude_has_one():
  """Through the injected input of the last loops, but not through h_0."""
  fixed = {"depth": "fixed", "num_layers": 1, "state": "zero"}
  all_loops = loss_and_gradients(changed(**fixed, num_with_gradient=0))
  cut = loss_and_gradients(changed(**fixed, num_with_gradient=1))
  np.testing.assert_allclose(cut[0], all_loops[0], rtol=1e-6)
  for name in ("prelude", "layers", "token_embedding"):
    one, other = (jax.tree.leaves(x[2][name])[0] for x in (cut, all_loops))
    assert np.any(one != 0) and not np.allclose(one, other, atol=1e-6)
  none = changed(
    **{**fixed, "state": "input"}, num_with_gradient=1, injection="none"
  )
  gradients = loss_and_gradients(none)[2]
  assert not any(np.any(x) for x in jax.tree.leaves(gradients["prelude"]))


def test_a_depth_is_drawn_for_a_step_or_for_each_row():
  step, rows = (changed(depth_per=per) for per in ("step", "row"))
  key = jax.random.key(5)
  keys = keys_lib.by_example(key, batch_of())
  one = training.training_depth(step, key, keys, jnp.asarray(0))
  each = training.training_depth(rows, key, keys, jnp.asarray(0))
  assert one.shape == () and each.shape == (3,)
  # A part of the batch draws the same.
  part = {**batch_of(TOKENS[1:]), "row": jnp.array([1, 2])}
  of_part = training.training_depth(
    rows, key, keys_lib.by_example(key, part), jnp.asarray(0)
  )
  np.testing.assert_array_equal(of_part, each[1:])
  draws = {
    int(training.training_depth(step, jax.random.key(n), keys, jnp.asarray(0)))
    for n in range(30)
  }
  assert len(draws) > 4


def test_parts_of_a_batch_have_the_losses_of_the_whole():
  """Also with a random state and a depth for each row."""
  config = changed(depth_per="row", dropout=0.0)
  key, params = jax.random.key(2), examples.params_of(recurrent, config, SPEC)
  made = examples.merged(recurrent, config, SPEC, params)

  def losses(batch):
    keys = keys_lib.by_example(key, batch)
    depth = training.training_depth(config, key, keys, jnp.asarray(0))
    logits = made(batch["inputs"], keys=keys, depth=depth).logits
    return token_losses.token_cross_entropy(logits, batch["targets"])

  whole = losses(batch_of())
  part = losses({**batch_of(TOKENS[1:]), "row": jnp.array([1, 2])})
  np.testing.assert_allclose(part, whole[1:], atol=1e-5)


# Without an injection, a state that is the input reads the tokens.
KINDS = [
  {"injection": kind} | ({"state": "input"} if kind == "none" else {})
  for kind in injection.INJECTIONS
]


@pytest.mark.long
@crossing(
  "changes",
  [{"update": "damped", "dropout": 0.3}, {"update": "gate"}, *KINDS],
  ids=str,
  # The first two inject as well; only the anchor reads the row's first state.
  manual=[x for x in KINDS if x["injection"] != "anchor"],
)
def test_a_row_is_what_it_is_alone_at_its_depth(changes):
  """Its read-out and all gradients, whatever the other rows run."""
  config, depths = changed(num_layers=1, **changes), [1, 5, 3]
  params = examples.params_of(recurrent, config, SPEC)
  if config.update == "gate":
    params["update_share"] = jnp.linspace(0.2, 0.9, 16)
  keys = jax.random.split(jax.random.key(6), 3)
  made = examples.graph(recurrent, config, SPEC)

  def total(params, tokens, depth, keys):
    logits = nnx.merge(made, params)(tokens, depth=depth, keys=keys).logits
    return jnp.sum(jnp.sin(3 * logits), axis=(1, 2))

  def of_row(params, row):
    return total(params, TOKENS, jnp.array(depths), keys)[row]

  def alone(params, row, depth):
    one = [jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (TOKENS, keys)]
    return total(params, one[0], depth, one[1])[0]

  options = {"compiler_options": examples.FAST}
  together = jax.jit(jax.value_and_grad(of_row), **options)
  apart = jax.jit(jax.value_and_grad(alone), **options)
  for row, own in enumerate(depths):
    got, expected = together(params, row), apart(params, row, jnp.asarray(own))
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
      np.testing.assert_allclose(x, y, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("update", ["replace", "gate", long_case("damped")])
def test_drawn_loops_are_those_of_an_evaluation(update):
  """A depth of the program, a scan and copies of the loop agree."""
  config = changed(update=update, state="input", injection="add", num_layers=1)
  params = examples.params_of(recurrent, config, SPEC)
  made = examples.merged(recurrent, config, SPEC, params)
  drawn = jax.jit(lambda depth: made(TOKENS, depth=depth).logits)
  for loops in (1, 4):
    scanned = run(config, params, num_loops=loops).logits
    unrolled = run(config, params, num_loops=loops, kind="unroll").logits
    np.testing.assert_allclose(drawn(jnp.asarray(loops)), scanned, atol=2e-5)
    np.testing.assert_allclose(unrolled, scanned, atol=2e-5)


def test_loops_grow_during_training():
  config = changed(
    depth="fixed", num_with_gradient=0, growth_steps=(5, 9), growth_loops=(1, 2)
  )
  batch = batch_of()
  keys = keys_lib.by_example(jax.random.key(0), batch)
  found = [
    int(training.training_depth(config, None, keys, jnp.asarray(step)))
    for step in (0, 4, 5, 8, 9, 100)
  ]
  assert found == [1, 1, 2, 2, 3, 3]
  assert loss_and_gradients(config, step=4)[1]["depth"] == 1
  recurrent.check_schedule(config, 10)
  with pytest.raises(UserError, match="must end before run.num_steps=9"):
    recurrent.check_schedule(config, 9)


def test_a_damped_loop_and_a_gated_one_are_the_core_at_first():
  replaced, damped, gated = (
    changed(update=update, state="input", injection="none")
    for update in ("replace", "damped", "gate")
  )
  params = examples.params_of(recurrent, replaced, SPEC)
  once = run(replaced, params, num_loops=1).logits
  np.testing.assert_allclose(
    run(damped, params, num_loops=1).logits, once, atol=1e-5
  )
  # A share of 0 keeps the state of the first loop, one of 1 replaces it.
  for share, loops, expected in (
    (0.0, 1, once),
    (0.0, 5, once),
    (1.0, 3, run(replaced, params).logits),
  ):
    own = {**params, "update_share": jnp.full(16, share)}
    got = run(gated, own, num_loops=loops).logits
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_kind_that_is_only_listed_is_no_other_kind(monkeypatch):
  monkeypatch.setattr(recurrent_config, "STATES", ("input", "zero", "ones"))
  made = examples.merged(recurrent, changed(state="ones"), SPEC)
  with pytest.raises(AssertionError, match="ones"):
    made.start(causal.begin(made, TOKENS), TOKENS, None)


def normed(x, gain=1.0):
  return gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


GAIN, SHARE = np.linspace(0.5, 2, 16), np.linspace(0.1, 0.9, 16)
HIDDEN, INJECTED = np.random.default_rng(0).normal(size=(2, 3, 8, 16))


def of_loop(config, call):
  """What `call` makes of a model whose gains and shares are not their first."""
  params = examples.params_of(recurrent, config, SPEC)
  params["final_norm"]["scale"] = jnp.asarray(GAIN, jnp.float32)
  if config.update == "gate":
    params["update_share"] = jnp.asarray(SHARE, jnp.float32)
  made = examples.merged(recurrent, config, SPEC, params)
  hidden, injected = (jnp.float32(x) for x in (HIDDEN, INJECTED))
  begun = causal.begin(made, TOKENS)
  run = jax.jit(
    lambda: call(made, begun, hidden, injected), compiler_options=examples.FAST
  )
  return run()


@pytest.mark.parametrize("changes", [
  {}, {"injection": "add"}, {"loop_norm": "per_loop", "update": "damped"},
  {"injection": "anchor", "anchor_scale": 0.5, "update": "gate",
   "loop_norm": "plain"},
], ids=str)  # fmt: skip
def test_a_loop_is_its_formula(changes):
  """The update of the core's output, its norm, and then the anchor."""
  plain = changed(injection="none", state="input", loop_norm="final_only")
  config = dataclasses.replace(plain, **changes)
  added = config.injection == "add"

  def loops(made, call, hidden, injected):
    return [
      made.loop(call, injected, (hidden, None), jnp.asarray(k))[0]
      for k in (0, 1)
    ]

  def core(made, call, hidden, injected):
    return made.loop(call, None, (hidden + added * injected, None), 0)[0]

  new = np.asarray(of_loop(plain, core), np.float64)
  for k, found in zip((0, 1), of_loop(config, loops), strict=True):
    by = {"replace": 1.0, "gate": SHARE if k else 1.0, "damped": 1 / 3}
    expected = HIDDEN + by[config.update] * (new - HIDDEN)
    if config.loop_norm != "final_only":
      gain = GAIN if config.loop_norm == "per_loop" else 1.0
      expected = normed(expected, gain)
    if config.injection == "anchor":
      expected += 0.5 * INJECTED
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("num_coda", [0, 1])
@pytest.mark.parametrize("loop_norm", recurrent_config.LOOP_NORMS)
def test_a_read_out_has_the_norms_of_its_formula(loop_norm, num_coda):
  """One before the coda, if any, and one after it or after the last loop."""
  if loop_norm == "coda" and not num_coda:
    return
  config = changed(loop_norm=loop_norm, num_coda=num_coda)

  def finish(made, call, hidden, injected):
    before = made.final_norm(hidden) if loop_norm == "coda" else hidden
    coda = made.part(call, "coda", before, None)[0]
    return coda, made.finish(call, hidden, None)[0].hidden

  coda, found = (np.asarray(x, np.float64) for x in of_loop(config, finish))
  has_norm = loop_norm != "per_loop" or num_coda
  expected = normed(coda, GAIN) if has_norm else coda
  np.testing.assert_allclose(found, expected, atol=2e-5)


def diagonal(precision="float32"):
  return injection.Diagonal(
    16, None, precision=PRECISIONS[precision], rngs=nnx.Rngs(params=0)
  )


def test_a_diagonal_injection_contracts_towards_its_fixed_point():
  """From Parcae's start: decay sqrt(1/5), and dt B e / (1 - decay)."""
  made = diagonal()
  decay = float(made.decay()[0])
  np.testing.assert_allclose(decay, 5**-0.5, rtol=1e-5)
  hidden, injected = jax.random.normal(jax.random.key(0), (2, 1, 3, 16))
  fixed = 0.5 * np.log(5) * injected / (1 - decay)
  for _ in range(4):
    after = made(hidden, injected)
    np.testing.assert_allclose(
      after - fixed, decay * (hidden - fixed), atol=1e-5
    )
    hidden = after


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_decay_stays_below_one_whatever_it_learns(precision):
  made = diagonal(precision=precision)
  for value in (-1e4, -20.0, 0.0, 20.0, 1e4):
    made.A_log[...] = jnp.full(16, value)
    made.dt_bias[...] = jnp.full(16, -value)
    decay = made.decay()
    assert jnp.all((decay >= 0) & (decay <= 1)) and jnp.all(jnp.isfinite(decay))


@pytest.mark.long
def test_the_radius_of_an_injection_is_what_it_leaves_of_a_state():
  """At most, of the state's norm; where a loop keeps all of it, 1."""
  hidden = jax.random.normal(jax.random.key(0), (1, 400, 16))
  for kind in ("linear", "diagonal"):
    config = changed(injection=kind)
    made = examples.merged(recurrent, config, SPEC)
    if kind != "linear":
      made.injection.A_log[...] = jnp.linspace(-3, 3, 16)
    radius = float(made.measures()["injection_radius"])
    kept = made.injection(hidden, jnp.zeros_like(hidden))
    share = jnp.linalg.norm(kept, axis=-1) / jnp.linalg.norm(hidden, axis=-1)
    assert 0.5 * radius < share.max() <= radius * (1 + 1e-5)
    assert kind == "linear" or radius < 1
  kernel = changed(injection="linear")
  made = examples.merged(recurrent, kernel, SPEC)
  half = np.asarray(made.injection.adapter.kernel[...])[:16]
  np.testing.assert_allclose(
    made.measures()["injection_radius"],
    np.linalg.svd(half, compute_uv=False)[0],
    rtol=1e-5,
  )
  for config, expected in (
    (changed(injection="add"), {"injection_radius": 1.0}),
    (changed(injection="none", state="input"), {}),
  ):
    assert examples.merged(recurrent, config, SPEC).measures() == expected


def test_a_random_state_is_of_its_row_and_position():
  """Neither of the batch nor of the part of a text that is read."""
  config = changed(state="normal")
  made = examples.merged(recurrent, config, SPEC)
  keys = jax.random.split(jax.random.key(4), 3)

  def state(tokens, keys):
    call = causal.begin(made, tokens, keys=keys)
    return made.start(call, tokens, None)[1]

  whole = state(TOKENS, keys)
  np.testing.assert_array_equal(state(TOKENS[1:, :5], keys[1:]), whole[1:, :5])
  assert not np.allclose(whole[0], whole[1])
  assert np.abs(whole).max() <= 3 * config.state_std
  np.testing.assert_allclose(np.std(whole), config.state_std, rtol=0.1)
  evaluated = state(TOKENS, None)
  np.testing.assert_array_equal(evaluated[0], evaluated[1])


def test_slots_outside_the_core_do_not_depend_on_the_loops():
  made = examples.merged(recurrent, changed(state="zero"), SPEC)
  caches = {}
  for loops in (2, 4):
    cache = recurrent.empty_cache(made, 3, 8, num_loops=loops)
    assert len(cache.core.key) == 2 * loops
    _, caches[loops] = recurrent.read(made, TOKENS, cache, num_loops=loops)
  np.testing.assert_array_equal(caches[2].prelude.key, caches[4].prelude.key)
  np.testing.assert_array_equal(caches[2].core.key, caches[4].core.key[: 2 * 2])


def test_huginn_has_its_published_number_of_parameters():
  settings = config_lib.resolve(load_config("lm_recurrent", "paper"))
  spec = TaskSpec(65_536, 4096, tuple((i,) for i in range(4096)))
  count = examples.count(recurrent, settings.model, spec)
  assert count == 3_564_976_800
  assert settings.model.block_shape().head_width == 96
  assert settings.model.block_shape().mlp_width == 17_920


def test_costs_are_those_of_the_loops_and_of_the_drawn_depths():
  config = changed(depth="poisson", num_loops=4, num_with_gradient=2)
  found = recurrent.costs(config, SPEC, 4)
  once, loop = (
    found["flops_per_example"][0],
    np.diff(found["flops_per_example"]),
  )
  assert len({*loop}) == 1
  # The state and the input are each multiplied by a matrix.
  layer = block.flops(config.block_shape(), 8)
  assert loop[0] == 2 * layer + 2 * (2 * 8 * 16 * 16)
  assert once - loop[0] == 2 * layer + 2 * 8 * 16 * 23
  # 0 becomes 1; at most two loops have a gradient.
  none, one = np.exp(-4), 4 * np.exp(-4)
  mean, with_gradient = 4 + none, 2 - none - one
  expected = 3 * (once - loop[0]) + loop[0] * (mean + 2 * with_gradient)
  np.testing.assert_allclose(
    found["training_flops_per_example"], expected, rtol=1e-6
  )


@pytest.mark.long
def test_loops_that_shrink_have_all_their_gradients():
  """`num_with_gradient=0` is all loops, also where there are more than K."""
  growth = {"growth_steps": (5,), "growth_loops": (4,)}
  fixed = {"depth": "fixed", "num_with_gradient": 0, "num_layers": 1}
  many = loss_and_gradients(changed(**fixed, **growth, num_loops=2))
  expected = loss_and_gradients(changed(**fixed, num_loops=4))
  np.testing.assert_allclose(many[0], expected[0], rtol=1e-6)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
    many[2],
    expected[2],
  )
