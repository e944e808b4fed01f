"""Several sequences of keys, against one softmax over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_examples import (
  Instead,
  differentiated,
  interpret_splash,
)
from tests_support import assert_close

from loopjax.nn.attention import dot_product
from loopjax.nn.attention.attend import attend_to
from loopjax.nn.attention.part import Part


def operands(tokens, num_keys, width, heads=4, groups=2):
  """A query, keys and values of two sequences, and a cotangent."""
  rng = np.random.default_rng(0)

  def some(length, num):
    return jnp.asarray(rng.normal(size=(2, length, num, width)), jnp.float32)

  query, cotangent = some(tokens, heads), some(tokens, heads)
  own, past = ([some(n, groups) for _ in range(2)] for n in (tokens, num_keys))
  # Unwritten keys must have no effect.
  return (query, *own, *past), cotangent


def documents(tokens, num_keys):
  """Ids of a row of two documents and of one, of the past and of the chunk."""
  row = np.ones((2, num_keys + tokens), np.int32)
  row[0, : num_keys // 2] = 0
  row[1, num_keys + tokens // 2 :] = 2
  row = jnp.asarray(row)
  return row[:, :num_keys], row[:, num_keys:]


def parts_of(own, past, written, ids):
  """A chunk and its history, as in MELT."""
  of_past, here = ids or (None, None)
  return (
    Part(*own, first=0, documents=None if ids is None else (here, here)),
    Part(
      *past,
      documents=None if ids is None else (here, of_past),
      length=jnp.asarray(written, jnp.int32),
    ),
  )


def by_softmax(query, *parts):
  """One softmax over all keys."""
  tokens = query.shape[1]
  seen = [
    jnp.broadcast_to(x.mask(tokens), (2, tokens, x.num_keys)) for x in parts
  ]
  key, value = (
    jnp.concatenate([x[i] for x in parts], axis=1) for i in range(2)
  )
  return dot_product.attend(
    query, key, value, visible=jnp.concatenate(seen, axis=2)
  )


def check(implementation, arrays, cotangent, written, ids, atol=1e-5):
  def form(attend, query, key, value, *past):
    return attend(query, *parts_of((key, value), past, written, ids))

  one = functools.partial(attend_to, implementation=implementation)
  actual, expected = (
    differentiated(functools.partial(form, attend), arrays, cotangent)
    for attend in (one, by_softmax)
  )
  assert_close(actual, expected, atol)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("written", [0, 3, 9])
@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_a_chunk_and_its_history_are_one_softmax(
  monkeypatch, implementation, written, packed
):
  """Also with odd numbers of tokens, and widths that cuDNN does not support."""
  given = Instead(monkeypatch).given
  arrays, cotangent = operands(5, 9, width=6)
  ids = documents(5, 9) if packed else None
  check(implementation, arrays, cotangent, written, ids)
  if implementation == "cudnn":
    kinds = {mask_type for *_, mask_type in given}
    assert kinds == {"CAUSAL", "PADDING"}
    extra = int(packed)
    assert {shape[1] for shape, *_ in given} == {5 + extra}
    assert {bias is not None for *_, bias, _ in given} == {packed}


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("written", [0, 130])
def test_splash_attention_merges_them_too(monkeypatch, written, packed):
  interpret_splash(monkeypatch)
  arrays, cotangent = operands(100, 200, width=128, heads=2, groups=1)
  ids = documents(100, 200) if packed else None
  check("splash", arrays, cotangent, written, ids, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "cudnn", "splash"])
def test_a_window_and_its_past(monkeypatch, implementation, masked):
  """Sleep's windows: tokens see a number of earlier tokens, and no padding."""
  Instead(monkeypatch)
  interpret_splash(monkeypatch)
  tokens, before = 6, 5
  arrays, cotangent = operands(tokens, tokens + before, width=128)
  query, key, value = arrays[0], *arrays[3:]
  mask = np.ones((2, before + tokens), bool)
  if masked:
    mask[0, 2:4] = mask[1, 7] = False
  pair = jnp.zeros((2, tokens), jnp.int32), jnp.where(mask, 0, -1)

  def form(query, key, value):
    part = Part(
      key, value, first=before, reach=4, documents=pair if masked else None
    )
    return attend_to(query, part, implementation=implementation)

  distance = before + np.arange(tokens)[:, None] - np.arange(before + tokens)
  seen = jnp.asarray((distance >= 0) & (distance < 4) & mask[:, None])
  actual = differentiated(form, (query, key, value), cotangent)
  expected = differentiated(
    lambda *x: dot_product.attend(*x, visible=seen),
    (query, key, value),
    cotangent,
  )
  assert_close(actual, expected, 1e-4)


def test_the_backward_pass_of_cudnn_is_called_for_every_part():
  """Lowered only, as by `fit` without a GPU; the bias's gradient is unused."""
  x = jax.ShapeDtypeStruct((2, 16, 4, 64), jnp.bfloat16)
  past = jax.ShapeDtypeStruct((2, 48, 4, 64), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((2, 64), jnp.int32)

  def total(query, key, value, old_key, old_value, row):
    ids = row[:, :48], row[:, 48:]
    parts = parts_of((key, value), (old_key, old_value), 32, ids)
    mixed = attend_to(query, *parts, implementation="cudnn")
    return jnp.sum(mixed.astype(jnp.float32))

  form = jax.jit(jax.grad(total, (0, 1, 2, 3, 4)))
  traced = form.trace(x, x, x, past, past, row)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  calls = [line for line in text.splitlines() if "@__cudnn" in line]
  backward = [line for line in calls if "SoftmaxBackward" in line]
  assert len(calls) == 4 and len(backward) == 2
  # Gradients of query, key and value, and a workspace.
  results = [line.split("->")[-1].count("tensor<") for line in backward]
  assert results == [4, 4]
  assert sum("PADDING" in line for line in calls) == 2
  assert sum("CAUSAL" in line for line in calls) == 2


@pytest.mark.long
def test_other_conditions_are_xlas():
  """Caches: any mask, with any implementation."""
  arrays, _ = operands(4, 7, width=8)
  query, key, value = arrays[0], *arrays[3:]
  seen = jnp.asarray(np.random.default_rng(1).random((2, 4, 7)) < 0.7)
  seen = seen.at[..., 0].set(True)
  part = Part(key, value, visible=seen)
  query, key, value = (x.astype(jnp.bfloat16) for x in (query, key, value))
  part = part._replace(key=key, value=value)
  actual = attend_to(query, part, implementation="cudnn")
  expected = dot_product.attend(query, key, value, visible=seen)
  np.testing.assert_array_equal(actual, expected)
