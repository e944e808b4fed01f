"""Blocks of other models against NumPy, and what blocks cost."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_layers import gelu, silu

from loopjax.errors import UserError
from loopjax.nn import attention, block, hybrid, norm, rope
from loopjax.nn.attention.cache import KeyValues
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.fast_weights import shape as shape_lib
from loopjax.nn.shape import Shape
from loopjax.types import Precision

WIDTH, TOKENS = 16, 5
FAST = {"xla_backend_optimization_level": 0}
RMS_NORM = functools.partial(norm.rms_norm, epsilon=0.1)
LAYER_NORM = functools.partial(norm.layer_norm, epsilon=0.1)
SHAPES = {
  "ouro": Shape(
    WIDTH, 4, num_key_value_heads=4, head_width=4, mlp_width=44,
    norm=RMS_NORM, post_norm=RMS_NORM, causal=True,
  ),
  "gemma": Shape(
    WIDTH, 4, num_key_value_heads=2, head_width=6, mlp_width=20, mlp="geglu",
    norm=RMS_NORM, post_norm=RMS_NORM, qk_norm=RMS_NORM, causal=True,
  ),
  "gpt2": Shape(
    WIDTH, 4, num_key_value_heads=4, head_width=4, mlp_width=64, mlp="gelu",
    norm=LAYER_NORM, qk_bias=True, value_bias=True, causal=True,
  ),
}  # fmt: skip
GROUPED = SHAPES["gemma"]
X = np.asarray(jax.random.normal(jax.random.key(1), (2, TOKENS, WIDTH)))


def drawn(module_type, shape):
  """A module with all parameters random, including norms' gains."""
  graphdef, params = nnx.split(
    nnx.eval_shape(
      lambda: module_type(shape, precision=Precision(), rngs=nnx.Rngs(params=0))
    )
  )
  noise = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(0.5 * noise.normal(size=x.shape), x.dtype), params
  )
  return nnx.merge(graphdef, params)


def run(fn, *args):
  return jax.jit(fn, compiler_options=FAST)(*args)


def tables_of(shape):
  positions = jnp.arange(TOKENS)[:, None]
  return rope.rope_tables(positions, shape.head_width, 100.0)


class ByHand:
  """A block in NumPy, one head after another.

  Args:
    params: nested dict; only used where the model has them.
    name: a key of SHAPES.
  """

  def __init__(self, params, name):
    self.params, self.name, self.shape = params, name, SHAPES[name]

  def linear(self, x, p):
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y

  def norm(self, x, p):
    if self.name == "gpt2":
      x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * p["scale"]
    return x + p["bias"] if self.name == "gpt2" else x

  def rotated(self, x):
    first, second = np.split(x, 2, axis=-1)
    num_pairs = first.shape[-1]
    frequencies = 100.0 ** (-np.arange(num_pairs) / num_pairs)
    angles = np.arange(TOKENS)[:, None] * frequencies
    turned = (first + 1j * second) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)

  def attention(self, x, p):
    size = self.shape.head_width
    group = self.shape.num_heads // self.shape.num_key_value_heads
    later = np.triu(np.ones((TOKENS, TOKENS), bool), 1)
    mixed = []
    for head in range(self.shape.num_heads):
      query, key, value = (
        self.linear(x, p[part])[..., index * size : (index + 1) * size]
        for part, index in (
          ("query", head),
          ("key", head // group),
          ("value", head // group),
        )
      )
      if self.name == "gemma":
        query = self.norm(query, p["query_norm"])
        key = self.norm(key, p["key_norm"])
      logits = self.rotated(query) @ self.rotated(key).swapaxes(1, 2)
      weights = np.exp(np.where(later, -np.inf, logits / math.sqrt(size)))
      mixed.append(weights / weights.sum(-1, keepdims=True) @ value)
    return self.linear(np.concatenate(mixed, axis=-1), p["output"])

  def mlp(self, x, p):
    value = self.linear(x, p["value"])
    if self.name == "gpt2":
      return self.linear(gelu(value), p["output"])
    gate = self.linear(x, p["gate"])
    gate = gelu(gate) if self.name == "gemma" else silu(gate)
    return self.linear(gate * value, p["output"])

  def __call__(self, x):
    for part in ("attention", "mlp"):
      normed = self.norm(x, self.params[f"{part}_norm"])
      added = getattr(self, part)(normed, self.params[part])
      if self.name != "gpt2":
        added = self.norm(added, self.params[f"{part}_post_norm"])
      x = x + added
    return x


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_their_formula(name):
  shape = SHAPES[name]
  layer = drawn(block.Block, shape)
  params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
  got = run(lambda x: layer(x, attention.Metadata(tables_of(shape)))[0], X)
  np.testing.assert_allclose(got, ByHand(params, name)(X), atol=1e-4)


@pytest.mark.parametrize(("name", "expected"), [
  ("ouro", 4 * 16 * 16 + 3 * 16 * 44 + 4 * 16),
  ("gemma", 2 * 16 * (24 + 12) + 3 * 16 * 20 + 4 * 16 + 2 * 6),
  ("gpt2", 16 * (4 * 16 + 3) + 2 * 16 * 64 + 4 * 16),
])  # fmt: skip
def test_blocks_have_these_parameters_and_no_others(name, expected):
  params = nnx.state(drawn(block.Block, SHAPES[name]))
  assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_grouped_heads_are_repeated_ones():
  """Also in attention maps, and with earlier tokens."""
  grouped = drawn(attention.Attention, GROUPED)
  shape = dataclasses.replace(GROUPED, num_key_value_heads=4)
  every = drawn(attention.Attention, shape)
  for name in ("query", "output"):
    getattr(every, name).kernel[...] = getattr(grouped, name).kernel[...]
  for name in ("query_norm", "key_norm"):
    getattr(every, name).scale[...] = getattr(grouped, name).scale[...]
  for name in ("key", "value"):
    heads = getattr(grouped, name).kernel[...].reshape(WIDTH, 2, 6)
    repeated = jnp.repeat(heads, 2, axis=1).reshape(WIDTH, 24)
    getattr(every, name).kernel[...] = repeated
  tables = tables_of(GROUPED)

  def in_two(x):
    none, parts = jnp.zeros((2, 0, 2, 6)), []
    past = KeyValues(none, none)
    for start, stop in ((0, 3), (3, 5)):
      first = tuple(table[:stop] for table in tables)
      mixed, past = grouped.attend_with_past(
        x[:, start:stop], past, first, TOKENS, None
      )
      parts.append(mixed)
    return jnp.concatenate(parts, 1), past

  expected = run(lambda x: every(x, attention.Metadata(tables))[0], X)
  got = run(lambda x: grouped(x, attention.Metadata(tables))[0], X)
  np.testing.assert_allclose(got, expected, atol=1e-4)
  got, past = run(in_two, X)
  np.testing.assert_allclose(got, expected, atol=1e-4)
  assert past.key.shape == past.value.shape == (2, TOKENS, 2, 6)
  weights = run(lambda x: every.weights(x, attention.Metadata(tables)), X)
  got = run(lambda x: grouped.weights(x, attention.Metadata(tables)), X)
  np.testing.assert_allclose(got, weights, atol=1e-5)


def test_memory_blocks_norm_their_inputs_alone():
  """A norm would scale up an output that is initially zero."""
  gates = fast_weights.Gates()
  memory = shape_lib.MemoryShape("gated_delta", 2, 4, 4, gates, has_mlp=True)
  layer = drawn(
    functools.partial(hybrid.MemoryBlock, memory=memory), SHAPES["ouro"]
  )
  params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
  by_hand, state = ByHand(params, "ouro"), layer.memory.initial_state(2)
  normed = by_hand.norm(X, params["memory_norm"])
  mixed = run(lambda x: layer.memory(x, state)[0], normed)
  x = X + np.asarray(mixed)
  added = by_hand.mlp(by_hand.norm(x, params["mlp_norm"]), params["mlp"])
  expected = x + added
  got = run(lambda x: layer(x, state, None)[0], X)
  np.testing.assert_allclose(got, expected, atol=1e-3)


@pytest.mark.parametrize("num", [1, 3])
def test_memory_layers_of_a_group_run_one_after_another(num):
  layers, x = jnp.arange(1.0, 1 + num), jnp.float32(2)
  got, found = hybrid._through(lambda x, y: (x * y, x + y), x, layers, False)
  assert got == 2 * np.prod(layers)
  np.testing.assert_array_equal(found, [3, 4, 7][:num])


def test_costs_by_hand():
  queries, keys, mlp = 16 * 24, 16 * 12, 3 * 16 * 20
  products = 2 * queries + 2 * keys + mlp + 2 * (3 + TOKENS) * 24
  assert block.flops(GROUPED, TOKENS, 3) == 2 * TOKENS * products


def test_costs_are_those_of_the_compiled_block():
  shape = Shape(
    128, 8, num_key_value_heads=2, head_width=24, mlp_width=256, qk_bias=True
  )
  layer = nnx.eval_shape(
    lambda: block.Block(shape, precision=Precision(), rngs=nnx.Rngs(params=0))
  )
  graphdef, params = nnx.split(layer)
  tables = rope.rope_tables(jnp.arange(16)[:, None], 24, 100.0)

  def run(params, x):
    return nnx.merge(graphdef, params)(x, attention.Metadata(tables))[0]

  x = jnp.zeros((1, 16, 128))
  counted = jax.jit(run).lower(params, x).compile(FAST).cost_analysis()["flops"]
  assert 0.95 * counted < block.flops(shape, 16) < counted


@pytest.mark.parametrize(("changes", "message"), [
  ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of .*=3"),
  ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
  ({"head_width": 5}, "head_width=5 must be even"),
  ({"mlp": "relu"}, "mlp='relu' is not one of"),
  ({"mlp_width": 0}, "mlp_width=0 must be at least 1"),
  ({"dropout": 1.0}, "dropout=1.0 must be in"),
])  # fmt: skip
def test_impossible_shapes_are_named(changes, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(GROUPED, **changes)
