"""Sleep: what passes, windows and padding must not change, and what they do."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from in_float64 import without_rounding
from jax.extend import core
from tests_support import crossing, long_case

from loopjax.errors import UserError
from loopjax.loop import windows
from loopjax.models import looped, sleep
from loopjax.models.sleep import model as sleep_model
from loopjax.nn import block, rope
from loopjax.nn.attention.cache import KeyValues
from loopjax.nn.fast_weights import shape as shape_lib
from loopjax.types import LoopOptions, TaskSpec

VOCABULARY, PADDING = 7, 1
SMALL = sleep.Config(
  width=16,
  num_layers=2,
  num_memory_layers=2,
  num_heads=2,
  num_memory_heads=2,
  key_width=8,
  value_width=8,
  window=8,
  num_loops=3,
  rope_base=100.0,
  init_std=0.3,
)
# Gradients take long to compile: with one layer of each kind.
SHALLOW = {"num_layers": 1, "num_memory_layers": 1}


def spec_of(length, answer):
  places = tuple((i,) for i in range(length))
  return TaskSpec(VOCABULARY, length, places, PADDING, answer)


def config_of(**changes):
  return dataclasses.replace(SMALL, **changes)


def tokens(length, seed=0, batch=2):
  real = VOCABULARY - PADDING
  return jax.random.randint(jax.random.key(seed), (batch, length), 0, real)


def run(inputs, answer=4, params=None, call=None, **changes):
  """The output for inputs whose last `answer` tokens are predicted."""
  spec = spec_of(inputs.shape[1], answer)
  config = config_of(**changes)
  return examples.run(sleep, config, spec, inputs, params, **(call or {}))


@pytest.mark.long
def test_answers_are_all_that_is_predicted():
  assert run(tokens(28)).logits.shape == (2, 4, VOCABULARY)
  assert run(tokens(27), answer=0).logits.shape == (2, 27, VOCABULARY)


@pytest.mark.long
@crossing("eviction", ["hard", "sliding"], manual=["sliding"])
def test_one_pass_predicts_every_token_as_the_plain_hybrid(eviction):
  """Answers are read as any other window is if nobody sleeps."""
  inputs = tokens(20)
  every = run(inputs, answer=0, num_loops=1, eviction=eviction).logits
  last = run(inputs, answer=4, num_loops=1, eviction=eviction).logits
  np.testing.assert_allclose(every[:, -4:], last, atol=1e-5)


def test_passes_change_what_is_read_later_and_not_what_was_predicted():
  inputs = tokens(24)
  once = run(inputs, answer=0, num_loops=1).logits
  thrice = run(inputs, answer=0, num_loops=3).logits
  np.testing.assert_allclose(once[:, :8], thrice[:, :8], atol=1e-6)
  assert np.abs(once[:, 8:] - thrice[:, 8:]).max() > 1e-3


@crossing("eviction", ["hard", "sliding"])
def test_no_prediction_reads_of_a_later_token(eviction):
  """Though passes past the first have fast weights that know all of them."""
  inputs = tokens(24)
  changed = inputs.at[:, 13].set((inputs[:, 13] + 1) % (VOCABULARY - PADDING))
  before, after = (
    run(x, answer=0, eviction=eviction, call={"trace": ("hidden",)})
    for x in (inputs, changed)
  )
  difference = np.abs(before.logits - after.logits).max(axis=(0, 2))
  assert np.array_equal(difference > 0, np.arange(24) >= 13)
  hidden, hidden_after = before.trace["hidden"], after.trace["hidden"]
  moved = np.abs(hidden - hidden_after).max(axis=(1, 3))
  assert (moved[0, :13] == 0).all()  # The first pass does not know it,
  assert (moved[1:, 8:13] > 0).all()  # the others do, within the window.
  assert (moved[:, :8] == 0).all()


@pytest.mark.long
@crossing("eviction", ["hard", "sliding"], manual=["sliding"])
def test_windows_of_padding_change_no_bit(eviction):
  inputs = tokens(20)
  padding = jnp.full((2, 16), VOCABULARY - 1)
  padded = jnp.concatenate([padding, inputs], axis=1)
  plain = run(inputs, eviction=eviction).logits
  later = run(padded, eviction=eviction).logits
  np.testing.assert_array_equal(plain, later)


@pytest.mark.long
def test_padding_within_a_window_is_not_there():
  """Tokens see each other at the same distance, wherever the window begins."""
  inputs = tokens(9)
  padding = jnp.full((2, 3), VOCABULARY - 1)
  padded = jnp.concatenate([padding, inputs], axis=1)
  plain = run(inputs, window=5).logits
  np.testing.assert_allclose(run(padded).logits, plain, atol=2e-5)


def depths(jaxpr, primitives, scans=0):
  """Scans around each operation of these names."""
  for equation in jaxpr.eqns:
    if equation.primitive.name in primitives:
      yield scans
    for inner in core.jaxprs_in_params(equation.params):
      within = scans + (equation.primitive.name == "scan")
      yield from depths(inner, primitives, within)


def traced(options=LoopOptions()):
  """The program of a text of two windows and an answer."""
  spec = spec_of(28, 4)

  def logits(params):
    model = examples.merged(sleep, SMALL, spec, params, options)
    return model(tokens(28)).logits

  return jax.make_jaxpr(logits)(examples.params_of(sleep, SMALL, spec)).jaxpr


def program_of(**changes):
  """The text of the program that `gradient_of` differentiates."""
  spec, config = spec_of(20, 4), config_of(**SHALLOW, **changes)

  def logits(params):
    return examples.merged(sleep, config, spec, params)(tokens(20)).logits

  text = str(jax.make_jaxpr(logits)(examples.params_of(sleep, config, spec)))
  return re.sub("0x[0-9a-f]+", "", text)  # Addresses of functions.


def test_padding_is_sorted_out_once_a_window():
  """And not by every layer in every pass."""
  # Of the windows, in their scan, and of the chunk that ends with the answer.
  assert sorted(depths(traced(), ["sort"])) == [0, 1]


def test_groups_are_computed_again_one_at_a_time():
  """What several keep at once would be stacked."""
  program = traced(LoopOptions("scan", "full"))
  # Over windows, passes and groups, and over the groups that read the answer.
  assert sorted(depths(program, ["remat2", "checkpoint"])) == [1, 3]


def test_hard_eviction_leaves_fast_weights_alone():
  """Without their writes the window might as well not have been there."""
  inputs = tokens(20)
  params = examples.params_of(sleep, SMALL, spec_of(20, 4))
  memory = params["memories"]["memory"]["fast_weights"]
  output = memory["output"]["kernel"]
  params = jax.tree.map(lambda x: x, params)
  params["memories"]["memory"]["fast_weights"]["output"]["kernel"] = 0 * output
  blind = run(inputs, params=params).logits
  other = run(inputs.at[:, :16].set(tokens(16, 5)), params=params).logits
  np.testing.assert_array_equal(blind, other)
  assert np.abs(run(inputs).logits - blind).max() > 1e-3
  sliding = run(inputs, params=params, eviction="sliding").logits
  assert np.abs(sliding - blind).max() > 1e-3  # It sees the last 7 tokens.


def test_a_sliding_window_sees_its_last_tokens_and_no_more():
  inputs = tokens(20)
  params = examples.params_of(sleep, SMALL, spec_of(20, 4))
  output = params["memories"]["memory"]["fast_weights"]["output"]["kernel"]
  params = jax.tree.map(lambda x: x, params)
  params["memories"]["memory"]["fast_weights"]["output"]["kernel"] = 0 * output
  # Two attention layers reach 7 tokens each: token 16 sees back to token 2 at
  # the most.
  options = {"params": params, "eviction": "sliding", "num_loops": 1}
  plain = run(inputs, **options).logits
  others = (inputs[:, :2] + 1) % (VOCABULARY - PADDING)
  far = run(inputs.at[:, :2].set(others), **options).logits
  near = run(inputs.at[:, 9].set((inputs[:, 9] + 1) % 6), **options).logits
  np.testing.assert_array_equal(plain, far)
  assert np.abs(plain[:, 0] - near[:, 0]).max() > 1e-4


@pytest.mark.long
def test_one_pass_with_all_carried_is_any_window_length():
  """Nothing is evicted that a window of the whole sequence would have seen,
  and memory layers do not know where windows end."""
  inputs = tokens(16)
  options = {"answer": 0, "num_loops": 1, "eviction": "sliding"}
  options["carry_convolutions"] = True
  params = examples.params_of(
    sleep, config_of(window=16, carry_convolutions=True), spec_of(16, 0)
  )
  whole = run(inputs, params=params, window=16, **options).logits
  parts = run(inputs, params=params, window=8, **options).logits
  # A window of 8 sees 7 tokens back.
  np.testing.assert_allclose(whole[:, :8], parts[:, :8], atol=1e-5)
  output = params["layers"]["attention"]["output"]["kernel"]
  blind = jax.tree.map(lambda x: x, params)
  blind["layers"]["attention"]["output"]["kernel"] = 0 * output
  whole = run(inputs, params=blind, window=16, **options).logits
  parts = run(inputs, params=blind, window=4, **options).logits
  np.testing.assert_allclose(whole, parts, atol=1e-5)


class Shifted:
  """An embedding that adds something to what it looks up."""

  def __init__(self, embed, shift):
    self.embed, self.shift = embed, shift
    self.embedding = embed.embedding

  def __call__(self, inputs):
    return self.embed(inputs) + self.shift


@functools.cache
def gradient_of(**changes):
  """Of all squared logits; (parameters, inputs) -> two gradients.

  For the parameters, and for what is embedded, [B, T, D].
  """
  spec, remat = spec_of(20, 4), changes.pop("remat", "none")
  config = config_of(**SHALLOW, **changes)
  options = LoopOptions("scan", remat)

  def loss(params, shift, inputs):
    model = examples.merged(sleep, config, spec, params, options)
    model.token_embedding = Shifted(model.token_embedding, shift)
    return jnp.sum(model(inputs).logits ** 2)

  run = jax.jit(jax.grad(loss, (0, 1)), compiler_options=examples.FAST)
  return lambda params, inputs: run(
    params, jnp.zeros((*inputs.shape, SMALL.width)), inputs
  )


def both_gradients(inputs=None, **changes):
  inputs = tokens(20) if inputs is None else inputs
  params = examples.params_of(sleep, config_of(**SHALLOW), spec_of(20, 4))
  return gradient_of(**changes)(params, inputs)


def gradients(inputs=None, **changes):
  return both_gradients(inputs, **changes)[0]


def slopes(**changes):
  """The largest gradient for what is embedded at each place, [T]."""
  return np.abs(both_gradients(**changes)[1]).max(axis=(0, 2))


@pytest.mark.parametrize(
  ("cut", "slopes"),
  [("hidden", (0, 1)), ("fast_weights", (1, 0)), ("both", (0, 0))],
)
def test_a_cut_stops_what_it_names(cut, slopes):
  config = config_of(num_with_gradient=1, gradient_cut=cut)
  grad = jax.grad(lambda carry: sum(sleep_model.cut(config, carry)))
  assert grad((1.0, 1.0)) == slopes


@pytest.mark.long
def test_a_cut_is_where_it_says():
  """Through what is not cut, windows that slept still have a gradient."""
  plain = program_of()
  assert plain == program_of(num_with_gradient=3)
  assert plain != program_of(num_with_gradient=2)
  full = slopes()
  some = slopes(num_with_gradient=1)  # The hidden state is cut.
  assert (some > 1e-4).all()
  assert np.abs(some[:16] - full[:16]).max() > 1e-3
  np.testing.assert_allclose(some[16:], full[16:], rtol=1e-4)


@pytest.mark.long
def test_rematerialised_windows_have_the_same_gradients():
  full, again = gradients(), gradients(remat="full")
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3),
    full,
    again,
  )


@pytest.mark.manual
def test_what_is_read_outside_of_any_scan_is_computed_again():
  """An answer, with no window before it, by a single group."""
  spec, inputs = spec_of(8, 4), tokens(8)
  config = config_of(num_layers=1, num_memory_layers=1)

  def lowered(remat):
    def loss(params):
      options = LoopOptions("scan", remat)
      model = examples.merged(sleep, config, spec, params, options)
      return jnp.sum(model(inputs).logits ** 2)

    return jax.jit(jax.grad(loss)).lower(
      examples.params_of(sleep, config, spec)
    )

  plain, again = lowered("none"), lowered("full")
  assert "optimization_barrier" not in plain.as_text()
  assert "optimization_barrier" in again.as_text()
  flops = [
    x.compile(examples.FAST).cost_analysis()["flops"] for x in (plain, again)
  ]
  assert flops[1] > 1.2 * flops[0]


@pytest.mark.long
def test_passes_may_read_the_window_and_what_it_began_with_again():
  """By hand: a window of 8, then an answer of 4, with two passes."""
  options = {"num_loops": 2, "loop_norm": "per_loop", "injection": "add"}
  config = config_of(carry_state=False, **options)
  spec, inputs = spec_of(12, 4), tokens(12)
  params = examples.params_of(sleep, config, spec)

  @jax.jit
  def by_hand(params, inputs):
    model = examples.merged(sleep, config, spec, params)
    kept = model.empty_state(2, num_past=0, carry_convolutions=False)
    window, answer = (model.embed(x) for x in jnp.split(inputs, [8], axis=1))
    once, first = model.awake(kept, window)
    again = model.final_norm(once) + window.hidden
    _, anew = model.awake(kept, window._replace(hidden=again))
    _, on = model.awake(first, window._replace(hidden=again))
    return [model.logits(model.awake(x, answer)[0]) for x in (anew, on)]

  anew, on = by_hand(params, inputs)
  got = run(inputs, carry_state=False, **options).logits
  np.testing.assert_allclose(got, anew, atol=1e-5)
  # By default the second pass goes on from the fast weights of the first.
  np.testing.assert_allclose(run(inputs, **options).logits, on, atol=1e-5)


def at(index, stacked):
  return jax.tree.map(lambda x: x[index], stacked)


def by_hand(config, params, inputs, num_answer, compiled=jax.jit):
  """Algorithm 1 with Python's loops, one block after another.

  With `num_with_gradient` the hidden state is cut, before these and before all
  others but the first.
  """
  spec = spec_of(inputs.shape[1], num_answer)
  model = examples.merged(sleep, config, spec, params)
  num_groups = min(config.num_layers, config.num_memory_layers)
  each = config.num_layers // num_groups
  num_memories = config.num_memory_layers // num_groups
  head_width = config.width // config.num_heads
  first = config.num_prelude // each
  last = (config.num_layers - config.num_coda) // each

  def read_groups(groups, hidden, window, memory):
    tables = rope.rope_tables(window.positions, head_width, config.rope_base)
    memory = list(memory)
    for group in groups:
      states, pasts = map(list, memory[group])
      for n in range(each):
        layer = at(group * each + n, model.layers)
        hidden, pasts[n] = layer.attend_with_past(
          hidden, pasts[n], tables, config.window, window.keys
        )
      for n in range(num_memories):
        layer = at(group * num_memories + n, model.memories)
        hidden, states[n], _ = layer(hidden, states[n], window.packing)
      keep = [
        KeyValues(*(x[:, x.shape[1] - num_past :] for x in past))
        for past in pasts
      ]
      memory[group] = states, keep
    return hidden, memory

  groups = range(num_groups)
  parts = groups[:first], groups[first:last], groups[last:], groups
  # Compiled once for the windows and once for the answer.
  before_passes, in_passes, after_passes, of_the_answer = (
    compiled(functools.partial(read_groups, part)) for part in parts
  )
  embed, logits = compiled(model.embed), compiled(model.logits)
  num_past = config.window - 1 if config.eviction == "sliding" else 0
  none = jnp.zeros((len(inputs), num_past, config.num_heads, head_width))
  state = model.memories.memory.initial_state(
    len(inputs), carry_convolutions=config.carry_convolutions
  )
  past = KeyValues(none, none)
  kept = [([state] * num_memories, [past] * each) for _ in groups]
  seen = jnp.zeros((len(inputs), num_past), bool)
  num_windows = (inputs.shape[1] - 1) // config.window
  edges = config.window * np.arange(1, num_windows + 1)
  *windowed, last_chunk = jnp.split(inputs, edges, axis=1)
  for part in windowed:
    tokens = embed(part)
    window = windows.make_window(seen, tokens.mask, config.window)
    hidden, after = before_passes(tokens.hidden, window, kept)
    for n in range(config.num_loops):
      before = list(after)
      for group in groups[first:last]:  # Only fast weights go on.
        states, pasts = kept[group]
        fast = [state.fast for state in (after if n else kept)[group][0]]
        states = [
          state._replace(fast=x) for state, x in zip(states, fast, strict=True)
        ]
        before[group] = states, pasts
      if config.num_with_gradient and 0 < n <= (
        config.num_loops - config.num_with_gradient
      ):
        hidden = jax.lax.stop_gradient(hidden)
      hidden, after = in_passes(hidden, window, before)
    _, kept = after_passes(hidden, window, after)
    seen = window.mask[:, window.mask.shape[1] - num_past :]
  tokens = embed(last_chunk)
  window = windows.make_window(seen, tokens.mask, last_chunk.shape[1])
  hidden, _ = of_the_answer(tokens.hidden, window, kept)
  return logits(hidden[:, -num_answer:])


@pytest.mark.parametrize(
  ("length", "changes"),
  [
    (28, {}),
    (31, {"eviction": "sliding", "carry_convolutions": True}),
    long_case(32, {"num_layers": 3, "num_memory_layers": 3, "num_coda": 1}),
    long_case(
      28,
      {
        "num_layers": 4,
        "eviction": "sliding",
        "num_prelude": 2,
        "memory": "jet",
        "carry_convolutions": True,
      },
    ),
    pytest.param(
      28, {"num_memory_layers": 6, "num_prelude": 1}, marks=pytest.mark.manual
    ),
  ],
  ids=["plain", "sliding", "coda", "prelude", "memories"],
)
def test_algorithm_1_by_hand(length, changes):
  """Three windows, so that what the second leaves depends on the first's;
  after them 4 tokens of an answer, with none to 4 of the context."""
  inputs = tokens(length).at[0, :11].set(VOCABULARY - 1)  # Padding.
  config = config_of(num_loops=2, **changes)
  params = examples.params_of(sleep, config, spec_of(length, 4))
  expected = by_hand(config, params, inputs, 4, without_rounding)
  got = run(inputs, num_loops=2, call={"exact": True}, **changes).logits
  np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_statistics_are_means_over_rows():
  """Parts of a batch count by their rows, whatever their padding."""
  inputs = tokens(28).at[0, :11].set(VOCABULARY - 1)
  found = run(inputs, num_loops=2).loops
  rows = [run(row[None], num_loops=2).loops for row in inputs]
  for name, value in found.items():
    expected = np.mean([row[name] for row in rows], axis=0)
    np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_retention_is_of_the_memories_that_run_in_every_pass():
  changes = {"num_memory_layers": 6, "num_prelude": 1}
  loops = run(tokens(28), num_loops=2, **changes).loops
  found = {name for name in loops if name.startswith("retention")}
  assert found == {f"retention/memory={n}" for n in (3, 4, 5)}


@pytest.mark.long
def test_cut_gradients_by_hand():
  """Of three passes, the last one's; windows are reached by fast weights."""
  inputs = tokens(20)
  config = config_of(**SHALLOW, num_with_gradient=1)
  params = examples.params_of(sleep, config, spec_of(20, 4))

  def value(params):
    return jnp.sum(by_hand(config, params, inputs, 4) ** 2)

  run = jax.jit(jax.grad(value), compiler_options=examples.FAST)
  expected, got = run(params), gradients(num_with_gradient=1)
  for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_statistics_leave_padding_out():
  inputs = tokens(20)
  padding = jnp.full((2, 16), VOCABULARY - 1)
  padded = run(jnp.concatenate([padding, inputs], axis=1))
  for name, values in run(inputs).loops.items():
    np.testing.assert_allclose(values, padded.loops[name], rtol=1e-5)


@pytest.mark.long
def test_gradients_are_finite_after_a_window_of_padding():
  """Fast weights are zero there, where norms have no gradient."""
  inputs = tokens(20).at[:, :9].set(VOCABULARY - 1)
  full = gradients(inputs)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(full))


def test_the_number_of_parameters():
  """The paper's small model by hand, and what an inserted Jet layer adds."""
  mlp = 3 * 256 * 704
  near = 4 * 256**2 + mlp + 2 * 256
  keys, values = 3 * 64, 3 * 128
  rule = 2 * 256 * keys + 3 * 256 * values + 2 * 256 * 3 + 2 * 3 + 128
  far = rule + 4 * (2 * keys + values) + mlp + 2 * 256
  spec = TaskSpec(3, 100, tuple((i,) for i in range(100)), 0, 4)
  count = examples.count(sleep, sleep.Config(), spec)
  assert count == 3 * 256 + 2 * (near + far) + 256
  jet = sleep.Config(memory="jet", memory_mlp=False)
  generator = 256 * 48 + 48 * 4 * values + 4 * values
  assert examples.count(sleep, jet, spec) == (
    3 * 256 + 2 * (near + rule + generator + 256) + 256
  )


@crossing("memory", ["gated_delta", "jet"], manual=["jet"])
def test_the_config_says_how_fast_memories_forget_and_how_far_they_write(
  memory,
):
  changes = {"A_range": (2.0, 2.5), "negative_eigenvalues": True}
  config = config_of(memory=memory, **changes)
  params = examples.params_of(sleep, config, spec_of(12, 4))
  rates = np.exp(params["memories"]["memory"]["fast_weights"]["A_log"])
  assert (rates >= 2.0).all() and (rates <= 2.5).all()
  one, two = (
    run(tokens(12), params=params, memory=memory, negative_eigenvalues=x)
    for x in (False, True)
  )
  assert np.abs(one.logits - two.logits).max() > 1e-3


OURO = {"norm_order": "branch", "tied": False, "exit_gate": "unused"}
LLAMA = {"num_key_value_heads": 1, "head_width": 6, "norm_epsilon": 0.1}


@crossing("changes", [LLAMA, OURO], ids=["Llama", "Ouro"])
def test_a_memory_without_mlp_starts_as_nothing(changes):
  """So that it can be put into a trained stack (section 6.3)."""
  inputs, spec = tokens(12), spec_of(12, 0)
  looped_config = looped.Config(
    width=16, num_layers=2, num_heads=2, num_loops=1, mlp="swiglu",
    mlp_ratio=SMALL.mlp_ratio, rope_base=SMALL.rope_base, init_std=0.3,
    **changes,
  )  # fmt: skip
  inserted = {"memory": "jet", "memory_mlp": False, **changes}
  params = examples.params_of(sleep, config_of(**inserted), spec)
  del params["memories"]
  plain = examples.run(looped, looped_config, spec, inputs, params)
  slept = run(inputs, answer=0, window=12, **inserted)
  np.testing.assert_allclose(slept.logits, plain.logits, atol=1e-5)


READ = [
  {},
  {"carry_convolutions": True, "memory": "jet", "num_loops": 1, **LLAMA},
  {"num_layers": 4, "num_prelude": 2, "num_coda": 0},
  {"num_memory_layers": 4, "num_coda": 1},
]


@pytest.mark.parametrize(("eviction", "changes"), [
  ("hard", READ[0]),
  ("sliding", READ[1]),
  pytest.param("hard", READ[2], marks=pytest.mark.manual),
  long_case("sliding", READ[3]),
  pytest.param("sliding", READ[0], marks=pytest.mark.manual),
  pytest.param("hard", READ[1], marks=pytest.mark.manual),
  pytest.param("sliding", READ[2], marks=pytest.mark.manual),
  pytest.param("hard", READ[3], marks=pytest.mark.manual),
])  # fmt: skip
def test_token_by_token_is_the_whole(eviction, changes):
  """Padding stands inside, at a window's end and in the answer's window."""
  # Passes of larger matrices amplify rounding: at 0.3 by a factor of 10,000.
  changes = {**changes, "init_std": 0.1}
  config, spec = config_of(eviction=eviction, **changes), spec_of(27, 0)
  inputs = tokens(27).at[0, jnp.array([3, 4, 15, 17])].set(VOCABULARY - 1)
  params = examples.params_of(sleep, config, spec)

  def read(params, inputs):
    model = examples.merged(sleep, config, spec, params)

    def step(cache, token):
      output, cache = sleep.read(model, token[:, None], cache)
      return cache, output.logits[:, 0]

    cache = sleep.empty_cache(model, len(inputs), 0)
    return jnp.swapaxes(jax.lax.scan(step, cache, inputs.T)[1], 0, 1)

  got = jax.jit(read, compiler_options=examples.FAST)(params, inputs)
  expected = run(inputs, answer=0, eviction=eviction, params=params, **changes)
  there = inputs != VOCABULARY - 1  # Nothing is predicted from padding.
  np.testing.assert_allclose(
    got[there], expected.logits[there], atol=3e-5, rtol=1e-4
  )


def test_without_padding_all_tokens_count():
  draw = functools.partial(jax.random.normal, jax.random.key(0))
  fast, stats = draw((1, 2, 2, 2, 8, 8)), {"retention": [draw((2, 2, 2))]}
  memory = types.SimpleNamespace(state=types.SimpleNamespace(fast=fast))
  found, expected = (
    sleep_model._record(SMALL, draw((2, 5, 16)), memory, stats, mask)
    for mask in (None, jnp.ones((2, 5), bool))
  )
  assert found["num_tokens"].tolist() == [5, 5]
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
  ("memory", "has_mlp", "expected"),
  # Products per token: 768 of projections, 152 of the generator, 2 x 776 of the
  # rule in chunks of 32, and 216 of the MLP.
  [
    ("gated_delta", True, 20 * 2 * (768 + 1552 + 216)),
    ("jet", False, 20 * 2 * (768 + 152 + 1552)),
  ],
)
def test_flops_of_a_memory_block_by_hand(memory, has_mlp, expected):
  config = config_of(
    width=12, mlp="swiglu", memory=memory, memory_mlp=has_mlp, key_width=3,
    value_width=8,
  )  # fmt: skip
  shape = dataclasses.replace(config.block_shape(), mlp_width=6)
  assert shape_lib.memory_flops(shape, config.memory_shape(), 20) == expected


def test_every_pass_costs_the_same_and_answers_one():
  """Of 3 windows of 8 tokens and 4 answers, by hand but for a layer's cost."""
  spec = spec_of(28, 4)
  shape, memory = SMALL.block_shape(), SMALL.memory_shape()
  layers = [
    block.flops(shape, n) + shape_lib.memory_flops(shape, memory, n)
    for n in (8, 4)
  ]
  flops = sleep.costs(SMALL, spec, 3)["flops_per_example"]
  answer = 2 * layers[1] + 2 * 4 * 16 * VOCABULARY
  assert flops == [3 * 2 * layers[0] * n + answer for n in (1, 2, 3)]
  outside = config_of(num_prelude=1)
  flops = sleep.costs(outside, spec, 3)["flops_per_example"]
  assert flops == [3 * layers[0] * (1 + n) + answer for n in (1, 2, 3)]
  # Three memory layers after each attention layer.
  more = [
    block.flops(shape, n) + 3 * shape_lib.memory_flops(shape, memory, n)
    for n in (8, 4)
  ]
  flops = sleep.costs(config_of(num_memory_layers=6), spec, 3)
  head = 2 * 4 * 16 * VOCABULARY
  assert flops["flops_per_example"] == [
    3 * 2 * more[0] * n + 2 * more[1] + head for n in (1, 2, 3)
  ]
  # Where all is predicted, the coda reads the first pass and the last.
  coda = config_of(num_coda=1)
  flops = sleep.costs(coda, spec_of(20, 0), 3)["flops_per_example"]
  answer = 2 * layers[1] + 2 * 20 * 16 * VOCABULARY
  assert flops == [
    2 * layers[0] * (n + codas) + answer
    for n, codas in ((1, 1), (2, 2), (3, 2))
  ]
  # Two windows and six tokens.
  layer = block.flops(shape, 6) + shape_lib.memory_flops(shape, memory, 6)
  head = 2 * 4 * 16 * VOCABULARY
  merged = sleep.costs(SMALL, spec_of(22, 4), 1)["flops_per_example"]
  assert merged == [2 * 2 * layers[0] + 2 * layer + head]


@pytest.mark.parametrize(
  ("changes", "answer", "backward"),
  [
    ({}, 4, 3),
    ({"num_with_gradient": 1}, 4, 3),  # All have written.
    ({"num_with_gradient": 1, "gradient_cut": "fast_weights"}, 4, 3),
    ({"num_with_gradient": 1, "gradient_cut": "both"}, 4, 1),
    # The first pass predicts.
    ({"num_with_gradient": 1, "gradient_cut": "both"}, 0, 2),
    ({"num_with_gradient": 1, "injection": "add", "carry_state": False}, 4, 1),
    ({"num_with_gradient": 3}, 0, 3),
  ],
)
def test_training_counts_the_passes_that_have_a_gradient(
  changes, answer, backward
):
  spec = spec_of(28, answer)
  found = sleep.costs(config_of(**changes), spec, 3)
  one, two, three = found["flops_per_example"]
  once = one - (two - one)
  expected = 3 * once + (two - one) * (3 + 2 * backward)
  assert found["training_flops_per_example"] == expected
  assert three - two == two - one


@pytest.mark.long
def test_what_is_left_after_whole_windows_is_read_once():
  """With the answer at its end, as where every token is predicted."""
  inputs = tokens(22)
  every = run(inputs, answer=0).logits
  np.testing.assert_allclose(every[:, -4:], run(inputs).logits, atol=1e-5)


def test_an_answer_longer_than_a_window_is_refused():
  with pytest.raises(UserError, match="window=8 is less than the 9 tokens"):
    examples.abstract(sleep, SMALL, spec_of(25, 9))


def test_a_loss_in_two_windows_is_refused():
  with pytest.raises(
    UserError, match="window=8 leaves 3 of 19 tokens"
  ) as caught:
    examples.abstract(sleep, SMALL, spec_of(19, 4))
  assert "\n" not in str(caught.value)
