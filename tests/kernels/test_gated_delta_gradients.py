"""Gradients of gated_delta, another implementation's results, and a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta_examples import (
  EXAMPLES,
  FAST,
  NUM_HEADS,
  SHAPES,
  arrays,
  assert_close,
  assert_rounded,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests_support import ROOT

from loopjax import program, sharding
from loopjax.kernels.gated_delta import chunked, gated_delta, reference

NAMES = ("query", "key", "value", "log_decay", "write", "state")


def project(form, *operands):
  """A scalar that depends on every output and every entry of the state."""
  output, state = form(*operands)
  first, second = (
    np.random.default_rng(i).normal(size=x.shape).astype(x.dtype)
    for i, x in enumerate((output, state))
  )
  return jnp.sum(first * output) + jnp.sum(second * state)


def gradients(form, operands):
  run = jax.grad(functools.partial(project, form), argnums=range(6))
  return jax.jit(run, compiler_options=FAST)(*operands)


@pytest.mark.parametrize(
  ("num_tokens", "chunk_size", "at_once"),
  [(7, 16, 1), (64, 64, 1), (75, 32, 1), (130, 16, 4), (130, 64, 3)],
)
def test_backward_pass_is_autodiff_of_the_reference(
  num_tokens, chunk_size, at_once
):
  with jax.enable_x64(True):
    operands = [jnp.asarray(x) for x in arrays(num_tokens)]
    expected = gradients(reference.gated_delta, operands)
    form = functools.partial(
      chunked.gated_delta, chunk_size=chunk_size, chunks_at_once=at_once
    )
    actual = gradients(form, operands)
  for name, want in zip(NAMES, expected, strict=True):
    assert np.abs(want).max() > 0.1, name
  assert_close(actual, expected, 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name):
  place = NAMES.index(name)
  random = np.random.default_rng(5)
  with jax.enable_x64(True):
    operands = [jnp.asarray(x[:1]) for x in arrays(40)]  # A smooth example.
    form = functools.partial(gated_delta, chunk_size=16)
    value = jax.jit(functools.partial(project, form), compiler_options=FAST)
    way = random.normal(size=operands[place].shape)

    def at(distance):
      moved = list(operands)
      moved[place] = moved[place] + distance * way
      return float(value(*moved))

    slope = float(jnp.vdot(gradients(form, operands)[place], way))
    assert abs(slope) > 0.1
    difference = (at(1e-5) - at(-1e-5)) / 2e-5
    np.testing.assert_allclose(slope, difference, rtol=1e-6)


@pytest.mark.long
def test_float32_gradients_are_those_of_float64():
  narrow = arrays(130, np.float32)
  with jax.enable_x64(True):
    wide = [jnp.asarray(x, jnp.float64) for x in narrow]
    expected = gradients(gated_delta, wide)
  actual = gradients(gated_delta, narrow)
  assert all(x.dtype == jnp.float32 for x in actual)
  assert_close(actual, expected, 2e-5)


@pytest.mark.long
def test_bfloat16_inputs_get_bfloat16_gradients():
  *inputs, state = arrays(20, np.float32)
  narrow = [jnp.asarray(x, jnp.bfloat16) for x in inputs]
  actual = gradients(gated_delta, (*narrow, state))
  assert all(x.dtype == jnp.bfloat16 for x in actual[:5])
  assert actual[5].dtype == jnp.float32
  rounded = [x.astype(jnp.float32) for x in narrow]
  expected = gradients(gated_delta, (*rounded, state))
  # Once at the end, and of a cotangent if heads share a query and a key.
  assert_rounded(actual[:5], expected[:5], roundings=2)
  assert_close(actual[5], expected[5], 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_masked_tokens_get_no_gradient_and_give_none(form):
  """Not even NaN, for any values."""
  *inputs, state = arrays(40, np.float32)
  mask = np.broadcast_to(np.arange(40) % 4 > 0, (len(EXAMPLES), 40))
  run = functools.partial(gated_delta, mask=mask, implementation=form)
  clean = gradients(run, (*inputs, state))
  dirty = []
  for x in inputs:
    hidden = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
    dirty.append(np.where(hidden, x, np.float32(np.nan)))
  again = gradients(run, (*dirty, state))
  for first, second in zip(clean, again, strict=True):
    assert np.isfinite(second).all()
    assert np.array_equal(first, second)
  for gradient in again[:5]:
    assert (np.asarray(gradient)[~mask] == 0).all()
    assert np.abs(np.asarray(gradient)[mask]).max() > 0.01


@pytest.mark.parametrize("log_decay", [0.0, -1e3, -np.inf])
@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_gradients_at_the_ends_of_the_decay_gate(form, log_decay):
  operands = arrays(40, np.float32)
  operands[3] = np.full_like(operands[3], log_decay)
  run = functools.partial(gated_delta, implementation=form)
  grads = gradients(run, operands)
  assert all(np.isfinite(x).all() for x in grads)
  assert (np.abs(grads[5]).max() > 0.01) == (log_decay == 0)  # Into the state.


@pytest.mark.long
def test_values_and_gradients_are_those_of_transformers():
  """Qwen3-Next's rule in torch, in float32, by fixtures/make_oracles.py."""
  stored = np.load(ROOT / "tests" / "fixtures" / "qwen3_next_rule.npz")
  operands = [stored[name] for name in NAMES]

  def value(*operands):
    output, after = gated_delta(*operands)
    total = jnp.sum(stored["weights/output"] * output)
    return total + jnp.sum(stored["weights/after"] * after), (output, after)

  run = jax.grad(value, argnums=range(6), has_aux=True)
  grads, values = jax.jit(run, compiler_options=FAST)(*operands)
  assert_close(values, (stored["output"], stored["after"]), 1e-5)
  wanted = [stored[f"gradient/{name}"] for name in NAMES]
  assert_close(grads, wanted, 5e-5)


@pytest.mark.long
def test_a_mesh_changes_nothing_and_gathers_nothing():
  """Examples over 2 x 2 devices, heads over 2."""
  mesh = sharding.make_mesh(
    sharding.Config(data=2, fsdp=2, tensor=2), jax.devices()
  )
  operands = [np.repeat(x[:1], 4, axis=0) for x in arrays(100, np.float32)]
  run = jax.value_and_grad(
    functools.partial(project, gated_delta), argnums=range(6)
  )
  expected = jax.jit(run, compiler_options=FAST)(*operands)
  examples, heads = ("data", "fsdp"), "tensor"
  splits = [P(examples, None, heads) for _ in SHAPES] + [P(examples, heads)]
  splits = [NamedSharding(mesh, split) for split in splits]
  compiled = (
    jax.jit(
      program.on_mesh(mesh, run),
      in_shardings=splits,
      out_shardings=(None, tuple(splits)),
    )
    .lower(*operands)
    .compile(FAST)
  )
  assert NUM_HEADS % 2 == 0
  actual = compiled(*jax.device_put(operands, splits))
  assert_close(actual[1], expected[1], 1e-5)
  text = compiled.as_text()
  for name in ("all-gather", "all-to-all", "collective-permute"):
    assert f" {name}(" not in text, name
