"""Channels between loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from in_float64 import without_rounding

from loopjax.loop import channel
from loopjax.types import Precision

HIDDEN, READ, WEIGHT = jax.random.normal(jax.random.key(0), (3, 2, 5, 8))
TABLE, HEAD = jax.random.normal(jax.random.key(1), (2, 11, 8))


def mean_embedding(hidden, table, head, temperature=1.0):
  logits = jnp.einsum("btd,vd->btv", hidden, head) / temperature
  return jnp.einsum("btv,vd->btd", jax.nn.softmax(logits), table)


def test_soft_decoding_is_the_mean_embedding():
  tied = channel.SoftDecoder(temperature=0.5)(HIDDEN, TABLE)
  expected = mean_embedding(HIDDEN, TABLE, TABLE, 0.5)
  np.testing.assert_allclose(tied, expected, atol=1e-5)
  untied = channel.SoftDecoder()(HIDDEN, TABLE, HEAD)
  expected = mean_embedding(HIDDEN, TABLE, HEAD)
  np.testing.assert_allclose(untied, expected, atol=1e-5)
  real = channel.SoftDecoder(num_padding_tokens=3)(HIDDEN, TABLE)
  expected = mean_embedding(HIDDEN, TABLE[:-3], TABLE[:-3])
  np.testing.assert_allclose(real, expected, atol=1e-5)


@functools.cache
def gradients(kind):
  """Gradients of a projection with respect to h and W."""
  decode = channel.SoftDecoder(temperature=0.5, gradient=kind)
  run = jax.grad(lambda h, w: jnp.vdot(WEIGHT, decode(h, w)), (0, 1))
  return jax.jit(run)(HIDDEN, TABLE)


def test_stopped_gradients_are_zero():
  assert all((grad == 0).all() for grad in gradients("stop"))


def test_straight_through_is_the_likeliest_row_with_a_soft_gradient():
  decode = channel.SoftDecoder(temperature=0.5, gradient="straight_through")
  likeliest = jnp.argmax(HIDDEN @ TABLE.T, axis=-1)
  assert jnp.array_equal(decode(HIDDEN, TABLE), TABLE[likeliest])
  for hard, soft in zip(
    gradients("straight_through"), gradients("full"), strict=True
  ):
    np.testing.assert_allclose(hard, soft, atol=1e-6)
    assert jnp.abs(soft).max() > 0.1


def test_bfloat16_rounds_the_products_and_nothing_else():
  decode = channel.SoftDecoder(precision=Precision(compute=jnp.bfloat16))
  value = decode(HIDDEN, TABLE)
  exact = channel.SoftDecoder()(HIDDEN, TABLE)
  assert value.dtype == jnp.float32
  assert 0 < jnp.abs(value - exact).max() < 0.1


def test_gates():
  assert (channel.FixedGate(0.3)(READ) == jnp.float32(0.3)).all()
  gate = channel.LearnedGate(8, precision=Precision())
  assert (gate(READ) == 0.5).all()
  gate.weight[...] = jnp.arange(8.0)
  gate.bias[...] = jnp.asarray(-1.0)
  logits = np.asarray(READ, np.float64) @ np.arange(8) - 1
  np.testing.assert_allclose(
    without_rounding(gate)(READ), 1 / (1 + np.exp(-logits)), rtol=1e-9
  )


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_the_mixed_channel_adds_what_the_read_out_decodes(epsilon):
  """Equation 4, with the gate from the decoded vector, not the normed one."""
  gate = channel.LearnedGate(8, precision=Precision())
  gate.weight[...] = jnp.arange(8.0)
  mixed = channel.MixedChannel(channel.SoftDecoder(), gate, epsilon)
  state, alpha = mixed(HIDDEN, READ, TABLE)
  decoded = np.asarray(mean_embedding(READ, TABLE, TABLE))
  opened = 1 / (1 + np.exp(-(decoded @ np.arange(8.0))))
  square = np.mean(decoded**2, -1, keepdims=True)
  injected = decoded / np.sqrt(square + epsilon)
  np.testing.assert_allclose(alpha, opened, rtol=1e-4)
  expected = HIDDEN + opened[..., None] * injected
  np.testing.assert_allclose(state, expected, atol=1e-4)


def test_all_that_a_channel_learns_is_its_gate():
  decode = channel.SoftDecoder()
  fixed = channel.MixedChannel(decode, channel.FixedGate(1.0), 1e-6)
  learned = channel.MixedChannel(
    decode, channel.LearnedGate(8, precision=Precision()), 1e-6
  )
  assert not jax.tree.leaves(nnx.state(fixed))
  assert sum(x.size for x in jax.tree.leaves(nnx.state(learned))) == 8 + 1
