"""MELT against its definition, its identities, and its two phases."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import melt_plain
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from in_float64 import without_rounding
from test_families import SPEC
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.kernels.gated_kv import reference
from loopjax.loop import chunks
from loopjax.models import looped, melt
from loopjax.models.melt import algorithm, training
from loopjax.nn import block
from loopjax.types import TaskSpec

LENGTH, LOOPS = 8, 3
SIZES = {
  "width": 16, "num_heads": 2, "num_layers": 2, "num_loops": LOOPS,
  "mlp": "swiglu", "mlp_ratio": 2.0, "norm_order": "branch", "tied": False,
  "rope_base": 1e4, "init_std": 0.2, "precision": "float32",
}  # fmt: skip
TOKENS = jax.random.randint(jax.random.key(5), (2, LENGTH), 0, 20)
BATCH = {
  "inputs": TOKENS,
  "targets": (TOKENS + 1) % 20,
  "weights": jnp.float32(jnp.arange(16).reshape(2, LENGTH) % 3 > 0),
}
DOCUMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3, 3, 3]])


def config_of(**changes):
  untaught = {"chunk_size": 4, "prefill_chunk": 1, "distill": "none"}
  return melt.Config(**{**SIZES, **untaught, **changes})


def params_of(config):
  """With gates far from 0.5."""
  params = examples.params_of(melt, config, SPEC)
  if "latent_gates" in params:
    gates = jax.tree.map(lambda x: 4 * x, params["latent_gates"])
    own = jnp.linspace(-0.5, 1.0, gates["bias"].size)
    gates["bias"] += own.reshape(gates["bias"].shape)
    params = {**params, "latent_gates": gates}
  return params


@functools.cache
def _pass(config, chunk, keep, with_alpha):
  def run(params, tokens, alpha, documents):
    model = examples.merged(melt, config, SPEC, params)
    options = model.pass_options(keep=keep)._replace(chunk_size=chunk)
    return algorithm.run(
      model.stack(),
      options,
      model.token_embedding(tokens),
      alpha=alpha if with_alpha else None,
      documents=documents,
    )[1]

  return without_rounding(run)


def loops(config, chunk, params=None, *, tokens=TOKENS, alpha=None,
          keep=("hidden",), documents=None):  # fmt: skip
  """Results of the loops by name, in float64."""
  run = _pass(config, chunk, keep, alpha is not None)
  share = jnp.float32(1.0 if alpha is None else alpha)
  return run(params or params_of(config), tokens, share, documents)


def hidden(config, chunk, params=None, **call):
  return loops(config, chunk, params, **call)["hidden"]


TEACHER = looped.Config(**SIZES)


@functools.cache
def taught():
  """A looped model's parameters, and its output after every loop."""
  params = examples.params_of(looped, TEACHER, SPEC)
  output = examples.run(
    looped, TEACHER, SPEC, TOKENS, trace=("hidden",), exact=True
  )
  return params, output.trace["hidden"]


def student(config):
  """The parameters of a MELT model initialised from the looped model."""
  own = params_of(config)
  gates = {k: v for k, v in own.items() if k == "latent_gates"}
  return {**taught()[0], **gates}


@pytest.mark.parametrize(
  ("changes", "chunk", "alpha"),
  [
    ({}, 4, None),
    (
      {"num_key_value_heads": 1, "head_width": 6, "norm_epsilon": 0.1},
      2,
      None,
    ),
    ({"gate": "scalar", "norm_order": "pre"}, 1, None),
    ({}, 2, 0.3),
    ({"gate": "mean"}, 4, None),
    ({"gate": "ema"}, 2, 0.6),
    ({"gate": "first"}, 4, None),
    ({"gate": "last"}, 1, None),
  ],
)
def test_loops_are_those_of_the_definition(changes, chunk, alpha):
  config = config_of(**changes)
  got, params = hidden(config, chunk, alpha=alpha), params_of(config)
  for row, tokens in enumerate(np.asarray(TOKENS)):
    expected = melt_plain.hidden_of_loops(
      params, config, tokens, chunk, 1.0 if alpha is None else alpha
    )
    # Shares and constants are in float32.
    np.testing.assert_allclose(got[:, row], expected, atol=1e-5)


@crossing("chunk", [1, 4, 8])
def test_without_latents_every_loop_is_the_looped_models(chunk):
  """B.3, 1: alpha = 0, any chunk size."""
  config = config_of()
  got = hidden(config, chunk, student(config), alpha=0.0)
  np.testing.assert_allclose(got, taught()[1], atol=1e-6)


def test_a_closed_gate_in_one_chunk_is_the_looped_model():
  """B.3, 2: z = 0."""
  config = config_of(gate="last")
  np.testing.assert_allclose(
    hidden(config, 8, student(config)), taught()[1], atol=1e-6
  )
  # A learned gate far below zero also keeps nothing.
  config = config_of()
  params = student(config)
  gates = jax.tree.map(jnp.zeros_like, params["latent_gates"])
  gates["bias"] -= 100.0
  got = hidden(config, 8, {**params, "latent_gates": gates})
  np.testing.assert_allclose(got, taught()[1], atol=1e-6)


def test_one_loop_is_a_transformer():
  """B.3, 6: for any gate and chunk."""
  config = config_of(num_loops=1)
  closed = config_of(num_loops=1, gate="last")
  expected = hidden(closed, 8, student(closed))
  np.testing.assert_allclose(expected[0], taught()[1][0], atol=1e-6)
  for chunk in (1, 4):
    got = hidden(config, chunk, student(config))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_keys_and_values_interpolate_with_their_latent():
  """B.3, 3: a KV_MELT + (1 - a) KV_base = (a h + (1 - a) x) W."""
  config = config_of()
  model = examples.merged(melt, config, SPEC)
  layer = jax.tree.map(lambda x: x[0], model.stack().layers)
  x, latent = jax.random.normal(jax.random.key(0), (2, 2, 3, 16))
  angle = jax.random.normal(jax.random.key(1), (2, 3, 4))
  tables = jnp.cos(angle), jnp.sin(angle)
  alpha = jnp.float32(0.3)
  mixed = reference.interpolate(alpha, latent, x)
  got = algorithm.project(layer, mixed, tables)
  ends = [algorithm.project(layer, y, tables) for y in (latent, x)]
  for a, of_latent, of_input in zip(got, *ends, strict=True):
    expected = 0.3 * of_latent + 0.7 * of_input
    np.testing.assert_allclose(a, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_later_tokens_change_no_bit(chunk):
  """B.3, 4."""
  config = config_of()
  other = TOKENS.at[:, 5].add(1)
  same = hidden(config, chunk) == hidden(config, chunk, tokens=other)
  same = same.all(axis=(0, 1, 3))
  assert same[:5].all()
  assert not same[5:].any()


def test_documents_of_a_chunk_do_not_see_each_other():
  """Nor those of earlier chunks."""
  config, other = config_of(), TOKENS.at[:, 0].add(1)
  got, changed = (
    hidden(config, 4, tokens=tokens, documents=DOCUMENTS)
    for tokens in (TOKENS, other)
  )
  differs = (got != changed).any(axis=(0, 3))
  np.testing.assert_array_equal(differs, DOCUMENTS[:, :1] == DOCUMENTS)


def test_outputs_depend_on_where_chunks_end():
  """B.3, 5: chunks of one token are exact, others differ."""
  config = config_of()
  one, two, four = (hidden(config, chunk)[-1] for chunk in (1, 2, 4))
  np.testing.assert_allclose(one[:, 0], four[:, 0], atol=1e-5)
  assert np.abs(one - two)[:, 1:].max() > 1e-2
  assert np.abs(two - four).max() > 1e-2


def test_inputs_are_recorded_across_chunks():
  """Of the first layer: the norm of the state after the loop before."""
  config = config_of()
  model = examples.merged(melt, config, SPEC, params_of(config))
  layer = jax.tree.map(lambda x: x[0], model.stack().layers)
  found = loops(config, 4, keep=("hidden", "inputs"))
  norms = layer.block.attention_norm(jnp.float32(found["hidden"][:-1]))
  np.testing.assert_allclose(found["inputs"][1:, 0], norms, atol=1e-5)


@pytest.mark.parametrize(
  ("mode", "shares"),
  [
    ("mean", (0.25, 0.25, 0.25, 0.25)),
    ("ema", (0.008, 0.032, 0.16, 0.8)),
    ("last", (0, 0, 0, 1)),
    ("first", (1, 0, 0, 0)),
  ],
)
def test_fixed_gates_are_the_papers_variants(mode, shares):
  """B.3, 7: the weights of the inputs of four loops in the latent."""
  model = examples.merged(melt, config_of(gate=mode), SPEC)
  layer = jax.tree.map(lambda x: x[0], model.stack().layers)
  inputs = jax.random.normal(jax.random.key(0), (4, 1, 1, 16))
  none = jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4))
  latent = jnp.full_like(inputs[0], jnp.nan)  # Unused in the first loop.
  for loop, x in enumerate(inputs):
    latent, (_, value) = algorithm.update(
      layer, mode, jnp.asarray(loop), x, latent, none
    )
  expected = jnp.tensordot(jnp.float32(shares), inputs, 1)
  np.testing.assert_allclose(latent, expected, atol=1e-5)
  kernel = layer.block.attention.value.kernel[...]
  np.testing.assert_allclose(
    value.reshape(1, 1, -1), expected @ kernel, atol=1e-5
  )


def detached(run):
  """`chunks.run` without gradients through the history."""

  def run_detached(step, *operands):
    def detached_step(params, inputs, constants, history, first):
      history = jax.lax.stop_gradient(history)
      return step(params, inputs, constants, history, first)

    return run(detached_step, *operands)

  return run_detached


@pytest.mark.long
@crossing("alpha", [None, 0.4], manual=[0.4])
def test_gradients_are_those_of_plain_autodiff(alpha, monkeypatch):
  """Through all earlier chunks, with documents."""
  config = config_of()

  def gradients():
    def total(params):
      model = examples.merged(melt, config, SPEC, params)
      options = model.pass_options(keep=("hidden",))
      _, records = algorithm.run(
        model.stack(),
        options._replace(chunk_size=2),
        model.token_embedding(TOKENS),
        alpha=None if alpha is None else jnp.float32(alpha),
        documents=DOCUMENTS,
      )
      weights = jax.random.normal(jax.random.key(7), records["hidden"].shape)
      return jnp.sum(weights * records["hidden"])

    return jax.jit(jax.grad(total), compiler_options=examples.FAST)(
      params_of(config)
    )

  ours = gradients()
  monkeypatch.setattr(chunks, "run", detached(chunks.run))
  without_history = gradients()
  monkeypatch.setattr(chunks, "run", lambda *x: chunks._forward(*x)[0])
  plain = gradients()
  for name in ("latent_gates", "layers", "token_embedding"):
    trees = (tree[name] for tree in (ours, plain, without_history))
    for got, want, without in zip(*map(jax.tree.leaves, trees), strict=True):
      scale = np.abs(want).max()
      np.testing.assert_allclose(got, want, atol=2e-4 * scale)
      assert np.abs(without - want).max() > 1e-3 * scale


@functools.cache
def _loss(config, with_gradients):
  def run(params, taught_params, step, batch):
    model = examples.merged(melt, config, SPEC, params)
    teacher = examples.merged(looped, TEACHER, SPEC, taught_params)
    return melt.loss(model, batch, jax.random.key(0), step, teacher)

  if with_gradients:
    run = jax.value_and_grad(run, has_aux=True)
  return jax.jit(run, compiler_options=examples.FAST)


def loss_of(config, params, step=0, batch=BATCH):
  """The loss, its metrics and its gradients."""
  (value, metrics), grads = _loss(config, True)(
    params, taught()[0], jnp.asarray(step), batch
  )
  return value, metrics, grads


def metrics_of(config, params):
  """Compiled in half the time."""
  run = _loss(config, False)
  return run(params, taught()[0], jnp.asarray(0), BATCH)[1]


PHASE_1 = {"distill": "all", "alpha": 0.0, "interpolation_steps": 5}


@pytest.mark.long
def test_phase_1_begins_as_its_teacher():
  """Zero loss for any chunks and documents; then latents take effect."""
  for batch in (BATCH, {**BATCH, "documents": DOCUMENTS}):
    config = config_of(**PHASE_1, align_weight=1.0)
    value, metrics, grads = loss_of(config, student(config), batch=batch)
    assert metrics["alpha"] == 0.0
    np.testing.assert_allclose(metrics["distill"], np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(value, 0.0, atol=1e-6)
    assert not any(jnp.any(x) for x in jax.tree.leaves(grads["latent_gates"]))
  config = config_of(**PHASE_1, align_weight=1.0)
  shares = []
  for step in (1, 4, 9):
    value, metrics, _ = loss_of(config, student(config), step=step)
    shares.append(metrics["alpha"])
    assert value > 1e-3
    np.testing.assert_allclose(
      value, jnp.mean(metrics["distill"]) + metrics["align"], rtol=1e-5
    )
  np.testing.assert_allclose(shares, [0.25, 1.0, 1.0])


@pytest.mark.long
def test_the_last_loop_learns_the_teachers_last():
  config = config_of(distill="all")
  params = student(config)
  of_all = metrics_of(config, params)
  of_last = metrics_of(config_of(distill="last"), params)
  found, expected = of_last["distill"], of_all["distill"]
  np.testing.assert_allclose(found, expected[-1:], rtol=1e-5)
  assert np.abs(expected[:-1] - found).min() > 1e-3 * found


@pytest.mark.long
def test_alignment_is_the_distance_of_attention_outputs():
  config = config_of(distill="last", align_weight=0.5)
  params = student(config)
  metrics = metrics_of(config, params)
  own = loops(config, 4, params, keep=("attention",))["attention"]
  closed = config_of(gate="last")
  theirs = loops(closed, 8, taught()[0], keep=("attention",))["attention"]
  apart = np.mean((np.asarray(own) - np.asarray(theirs)) ** 2, axis=(0, 1, 4))
  expected = np.sum(apart * BATCH["weights"]) / np.sum(BATCH["weights"])
  np.testing.assert_allclose(metrics["align"], expected, rtol=1e-4)
  assert metrics["distill"].shape == (1,)


def test_the_teachers_loops_are_run_as_its_own_family_runs_them():
  teacher = examples.merged(looped, TEACHER, SPEC, taught()[0])
  config = config_of(distill="all", align_weight=0.5)
  records = training.teacher_outputs(teacher, config, BATCH)
  np.testing.assert_allclose(records["hidden"], taught()[1], atol=2e-4)
  assert records["attention"].shape == (LOOPS, 2, 2, LENGTH, 16)
  model = examples.merged(melt, config, SPEC, student(config))

  def loss(batch):
    return melt.loss(model, batch, jax.random.key(0), jnp.asarray(0), teacher)

  _, metrics = jax.eval_shape(loss, BATCH)
  assert metrics["align"].shape == ()


# MELT's own settings, and what each needs to have an effect.
SETTINGS = {
  "gate": ("mean", {}),
  "gate_bias": (1.0, {}),
  "exit_gate": ("unused", {}),
  "chunk_size": (2, {}),
  "alpha": (0.5, {"alpha": 0.25, "interpolation_steps": 9}),
  "interpolation_steps": (9, {"alpha": 0.5, "interpolation_steps": 5}),
  "distill": ("last", {}),
  "distill_beta": (0.25, {}),
  "align_weight": (0.5, {}),
}


@crossing("name", SETTINGS)
def test_no_setting_is_ignored(name):
  value, needs = SETTINGS[name]
  plain = config_of(**{"distill": "all", **needs})

  def programs(config):
    """Most settings show in the first two, and gradients are not traced."""

    def draw(key):
      return nnx.split(melt.Model(config, SPEC, rngs=nnx.Rngs(params=key)))

    def run(params):
      model = examples.merged(melt, config, SPEC, params)
      teacher = examples.merged(looped, TEACHER, SPEC)
      key, step = jax.random.key(0), jnp.asarray(0)
      return melt.loss(model, BATCH, key, step, teacher)[0]

    params = examples.params_of(melt, config, SPEC)
    for function, given in (
      (draw, jax.random.key(0)), (run, params), (jax.grad(run), params),
    ):  # fmt: skip
      # Function addresses always differ.
      text = str(jax.make_jaxpr(function)(given))
      yield re.sub("0x[0-9a-f]+", "", text)

  changed = dataclasses.replace(plain, **{name: value})
  pairs = zip(programs(plain), programs(changed), strict=True)
  assert any(old != new for old, new in pairs)


@dataclasses.dataclass
class Run:
  """Loss with a teacher."""

  model: object


@pytest.mark.parametrize(
  ("changes", "theirs", "message"),
  [
    ({"distill": "all"}, None, "model.distill='all' needs run.teacher"),
    ({}, TEACHER, "it has no effect with model.distill='none'"),
    ({"distill": "all"}, melt.Config(), "not of the family 'looped'"),
    (
      {"distill": "all"},
      dataclasses.replace(TEACHER, num_loops=2),
      "its num_loops is 2, model.num_loops is 3",
    ),
    (
      {"distill": "last", "align_weight": 0.1},
      dataclasses.replace(TEACHER, width=32),
      "its width is 32, model.width is 16",
    ),
    (
      {"distill": "last"},
      dataclasses.replace(TEACHER, qk_norm=True),
      "its qk_norm is True, expected False",
    ),
    (
      {"distill": "last"},
      dataclasses.replace(TEACHER, loop_norm="final_only"),
      "its loop_norm is 'final_only', expected 'per_loop'",
    ),
    (
      {"distill": "last"},
      dataclasses.replace(TEACHER, value_bias=True),
      "its value_bias is True, expected False",
    ),
  ],
)
def test_unsuitable_teachers_are_named(changes, theirs, message):
  teacher = None if theirs is None else Run(theirs)
  with pytest.raises(UserError, match=message) as caught:
    melt.check_teacher(config_of(**changes), teacher)
  assert "\n" not in str(caught.value)
  fits = Run(dataclasses.replace(TEACHER, width=32))
  melt.check_teacher(config_of(distill="all"), fits)


@functools.cache
def test_flops_are_of_a_rows_own_tokens():
  """Ten tokens in chunks of four: the two that fill the last do not count."""
  config, tokens = config_of(prefill_chunk=4), 10
  spec = TaskSpec(SPEC.vocab_size, tokens)
  width, shape = config.width, config.block_shape()
  gates = 2 * 2 * tokens * width * width
  layer = block.flops(shape, tokens, num_past=4) + gates
  head = 2 * tokens * width * spec.vocab_size
  assert melt.costs(config, spec, 2)["flops_per_example"] == [
    head + config.num_layers * layer * loops for loops in (1, 2)
  ]


def _reader(config):
  def run(params, tokens, cache, valid):
    model = examples.merged(melt, config, SPEC, params)
    output, cache = melt.read(model, tokens, cache, valid=valid)
    return output.logits, cache

  return jax.jit(run, compiler_options=examples.FAST)


def test_parts_of_whole_chunks_are_read_as_they_are_trained():
  """Chunks follow the text: padding before or within it does not move them."""
  config = config_of(prefill_chunk=4)
  params = params_of(config)
  expected = examples.run(melt, config, SPEC, TOKENS, params).logits
  model = examples.merged(melt, config, SPEC, params)
  np.testing.assert_allclose(
    expected, model.logits(hidden(config, 4)[-1]), atol=2e-4
  )
  whole, read = jnp.ones((2, LENGTH), bool), _reader(config)
  cache, got = melt.empty_cache(model, 2, LENGTH), []
  for part in (slice(0, 4), slice(4, 8)):
    logits, cache = read(params, TOKENS[:, part], cache, whole[:, part])
    got.append(logits)
  np.testing.assert_allclose(jnp.concatenate(got, 1), expected, atol=2e-4)
  padded = jnp.insert(TOKENS, jnp.array([0, 3, 3]), 7, axis=1)
  there = jnp.insert(whole, jnp.array([0, 3, 3]), False, axis=1)
  cache = melt.empty_cache(model, 2, LENGTH + 3)
  logits, cache = read(params, padded, cache, there)
  got = logits[there].reshape(expected.shape)
  np.testing.assert_allclose(got, expected, atol=2e-4)
  assert cache.length.tolist() == [LENGTH, LENGTH]
  with pytest.raises(UserError, match="9 tokens do not fit into a cache of 8"):
    melt.read(model, padded[:, :9], melt.empty_cache(model, 2, LENGTH))


def test_rows_of_unequal_lengths_read_their_own_entries():
  """In every layer, within a span that fits all of them."""
  config = config_of()
  params, read = params_of(config), _reader(config)
  expected = examples.run(melt, config, SPEC, TOKENS, params).logits
  model = examples.merged(melt, config, SPEC, params)
  cache = melt.empty_cache(model, 2, LENGTH + 4).within(7)
  lengths = np.array([6, 2])
  valid = jnp.arange(6)[None] < lengths[:, None]
  logits, cache = read(params, TOKENS[:, :6], cache, valid)
  after = TOKENS[jnp.arange(2), lengths][:, None]
  last, cache = read(params, after, cache, jnp.ones((2, 1), bool))
  assert cache.span == 7 and cache.length.tolist() == [7, 3]
  for row, length in enumerate(lengths):
    got = np.concatenate([logits[row, :length], last[row]])
    np.testing.assert_allclose(got, expected[row, : length + 1], atol=2e-4)


def test_a_full_cache_stays_as_it_is():
  """A token past the last row is lost, and changes no other layer's rows."""
  config = config_of()
  params, read = params_of(config), _reader(config)
  model = examples.merged(melt, config, SPEC, params)
  cache, one = melt.empty_cache(model, 2, 4), jnp.ones((2, 1), bool)
  for place in range(5):
    _, cache = read(params, TOKENS[:, place : place + 1], cache, one)
  full = dataclasses.replace(cache, length=cache.length + 1)
  _, after = read(params, TOKENS[:, :1], full, one)
  np.testing.assert_array_equal(after.key, full.key)
  np.testing.assert_array_equal(after.value, full.value)


@pytest.mark.long
def test_training_keeps_one_buffer():
  """With 16 chunks; autodiff of the scan stores the buffer of each."""
  count, size = 16, 8
  spec = dataclasses.replace(SPEC, sequence_length=count * size)
  config = config_of(chunk_size=size, width=16, num_loops=2)
  shapes = jax.eval_shape(lambda: examples.params_of(melt, config, SPEC))
  tokens = jax.ShapeDtypeStruct((2, count * size), jnp.int32)

  def temporary(run):
    def total(params, tokens):
      model = examples.merged(melt, config, spec, params)
      options = model.pass_options()._replace(chunk_size=size)
      embedded = model.token_embedding(tokens)
      with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "run", run)
        return jnp.sum(algorithm.run(model.stack(), options, embedded)[0])

    lowered = jax.jit(jax.grad(total)).lower(shapes, tokens)
    memory = lowered.compile(examples.FAST).memory_analysis()
    return memory.temp_size_in_bytes

  ours = temporary(chunks.run)
  plain = temporary(lambda *x: chunks._forward(*x)[0])
  without_history = temporary(detached(chunks.run))
  buffer = 2 * 4 * 2 * (2 * count * size * 16)  # Keys and values, f32.
  print(ours, plain, without_history, buffer)
  assert ours < plain / 4
  assert ours < 1.3 * (without_history + buffer)
