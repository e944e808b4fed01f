"""Implementations of attention, against dense masks over all pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_examples import (
  FAST,
  Instead,
  differentiated,
  interpret_splash,
)
from tests_support import assert_close

from loopjax.nn.attention import dot_product
from loopjax.nn.attention.attend import attend


def operands(length, heads=4, groups=2, width=4, dtype=jnp.float32):
  """Queries, keys, values, a cotangent, and ids of three documents."""
  rng = np.random.default_rng(0)

  def some(num):
    return jnp.asarray(rng.normal(size=(2, length, num, width)), dtype)

  ids = np.sort(rng.integers(0, 3, (2, length)), axis=1)
  arrays = some(heads), some(groups), some(groups), some(heads)
  return *arrays, jnp.asarray(ids, jnp.int32)


def visible(ids, causal):
  """The mask, bool [B, T, T]."""
  seen = ids[:, :, None] == ids[:, None]
  return seen & np.tri(ids.shape[1], dtype=bool) if causal else seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
  ("part", "stretch"),
  [(512, 128), (4, 128), (5, 128), (512, 5), (1, 3)],
  ids=["whole", "even", "rest", "stretches", "both"],
)
def test_documents_and_parts_of_the_queries(
  monkeypatch, causal, documents, part, stretch
):
  *arrays, cotangent, ids = operands(12)
  ids = ids if documents else jnp.zeros_like(ids)
  mask = jnp.asarray(visible(np.asarray(ids), causal))
  expected = differentiated(
    lambda *x: dot_product.attend(*x, visible=mask), arrays, cotangent
  )
  monkeypatch.setattr(dot_product, "_PART", part)
  monkeypatch.setattr(dot_product, "_MIN_BLOCK", stretch)
  given = ids if documents else None
  actual = differentiated(
    lambda *x: attend(*x, causal=causal, documents=given), arrays, cotangent
  )
  assert_close(actual, expected, 1e-5)


def test_logits_are_of_a_part_of_the_queries():
  """Forward and backward, for any length."""
  x = jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)

  def gradient(query, key, value):
    return jax.grad(lambda *x: jnp.sum(attend(*x, causal=True)), (0, 1, 2))(
      query, key, value
    )

  compiled = jax.jit(gradient).lower(x, x, x).compile(compiler_options=FAST)
  of_pairs = 4096 * 4096 * 4
  assert compiled.memory_analysis().temp_size_in_bytes < of_pairs


def test_causal_attention_leaves_out_most_hidden_pairs(monkeypatch):
  """Forward and backward, for one long row."""
  monkeypatch.setattr(dot_product, "_PART", 512)  # No loops to count.
  x = jax.ShapeDtypeStruct((1, 512, 1, 8), jnp.float32)

  def flops(causal):
    def gradient(*operands):
      return jax.grad(lambda *x: jnp.sum(attend(*x, causal=causal)), (0, 1, 2))(
        *operands
      )

    compiled = jax.jit(gradient).lower(x, x, x)
    return compiled.cost_analysis()["flops"]

  assert flops(True) < 0.7 * flops(False)


def test_the_backward_pass_keeps_keys_once_for_all_parts():
  x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

  def residuals(query, key, value, ids):
    return jax.vjp(
      lambda *x: attend(*x, causal=True, documents=ids), query, key, value
    )[1]

  kept = jax.tree.leaves(jax.eval_shape(residuals, x, x, x, ids))
  # Queries, keys, values and outputs, and some numbers per token.
  assert sum(leaf.size for leaf in kept) < 5 * x.size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
  ("length", "documents"), [(128, True), (97, True), (97, False)]
)
def test_splash_attention_is_the_same(monkeypatch, length, documents, causal):
  *arrays, ids = operands(length, heads=2, groups=1, width=128)
  # A row with only the last document, and one with several.
  ids = ids.at[0].set(1) if documents else jnp.zeros_like(ids)
  given = ids if documents else None

  def form(*x):
    return attend(*x, causal=causal, documents=given, implementation="splash")

  interpret_splash(monkeypatch)
  output = form(*arrays[:3])
  mask = jnp.asarray(visible(np.asarray(ids), causal))
  expected = dot_product.attend(*arrays[:3], visible=mask)
  np.testing.assert_allclose(output, expected, atol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [8, 9])
def test_what_is_padded_for_cudnn_changes_nothing(
  monkeypatch, length, documents, causal
):
  """XLA computes cuDNN's calls: heads of 8, even lengths with a mask."""
  *arrays, cotangent, ids = operands(length, width=6)
  ids = ids if documents else jnp.zeros_like(ids)
  given = Instead(monkeypatch).given
  actual = differentiated(
    lambda *x: attend(
      *x,
      causal=causal,
      documents=ids if documents else None,
      implementation="cudnn",
    ),
    arrays,
    cotangent,
  )
  even = length + length % 2 if documents else length
  assert {shape[1::2] for shape, *_ in given} == {(even, 8)}
  mask = jnp.asarray(visible(np.asarray(ids), causal))
  expected = differentiated(
    lambda *x: dot_product.attend(*x, visible=mask), arrays, cotangent
  )
  assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("length", [16, 97])
@pytest.mark.parametrize("documents", [False, True])
def test_cudnn_is_called_where_it_is_asked_for(length, documents):
  """Lowered alone, as `fit` does without a GPU."""
  x = jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

  def total(*x):
    *x, ids = x
    mixed = attend(
      *x,
      causal=True,
      documents=ids if documents else None,
      implementation="cudnn",
    )
    return jnp.sum(mixed.astype(jnp.float32))

  form = jax.jit(jax.grad(total, (0, 1, 2)))
  lowered = form.trace(x, x, x, ids).lower(lowering_platforms=("cuda",))
  bias = "ScaleBias" if documents else ""
  assert f"__cudnn$fmha{bias}Softmax" in lowered.as_text()
  assert f"__cudnn$fmha{bias}SoftmaxBackward" in lowered.as_text()


@pytest.mark.parametrize(("implementation", "changes", "says"), [
  ("flash", {}, "not one of"),
  ("cudnn", {}, "16-bit inputs, not float32"),
  ("cudnn", {"dtype": jnp.bfloat16, "width": 264}, "at most 256, not 264"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(implementation, changes, says):
  query, key, value, _, ids = operands(8, **changes)
  with pytest.raises(ValueError, match=says):
    attend(query, key, value, documents=ids, implementation=implementation)
