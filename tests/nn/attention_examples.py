"""Attention of cuDNN and for TPUs on any machine, and its gradients."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)

from loopjax.nn.attention import attend, cudnn

FAST = {"xla_backend_optimization_level": 0}


def differentiated(form, arrays, cotangent):
  """The output, and a gradient for each array."""

  def run(*arrays):
    output, transpose = jax.vjp(form, *arrays)
    return output, transpose(cotangent)

  run = jax.jit(run, compiler_options=FAST)
  return jax.tree.leaves(run(*arrays))


def interpret_splash(monkeypatch):
  """Splash attention then runs without a TPU."""
  make = functools.partial(splash.make_splash_mha_single_device, interpret=True)
  monkeypatch.setattr(splash, "make_splash_mha_single_device", make)


class Instead:
  """Computes XLA's custom calls of cuDNN, and records their arguments.

  Any dtype and width is supported.

  Attributes:
    given: per call, the shapes of the query, the key and the bias or None, and
      the type of the mask.
  """

  def __init__(self, monkeypatch):
    self.given = []
    monkeypatch.setattr(jax.ffi, "ffi_call", self.ffi_call)
    monkeypatch.setitem(cudnn._ELEMENTS, "float32", "F32")  # Only in tests.
    monkeypatch.setattr(attend, "unsupported", lambda *_: None)

  def ffi_call(
    self,
    target,
    results,
    *,
    output_layouts,
    vmap_method,
    custom_call_api_version,
    legacy_backend_config,
  ):
    assert custom_call_api_version == 2 and vmap_method
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    name = target.removeprefix("__cudnn$fmha")
    has_bias = name.startswith("ScaleBias")
    backward = name.removeprefix("ScaleBias") == "SoftmaxBackward"
    assert backward or name.removeprefix("ScaleBias") == "Softmax"
    heads_first = [layout == (0, 2, 1, 3) for layout in output_layouts]
    assert heads_first == [len(x.shape) == 4 for x in results]
    assert not config["dropout_rate"] and config["is_flash_attention"]
    # A workspace sized by XLA.
    assert results[-1].shape == (0,) and results[-1].dtype == jnp.uint8

    def call(*operands):
      query, key, value, *rest = operands
      if backward:
        sums, cotangent, *rest = rest
      bias = rest.pop(0) if has_bias else None
      if backward:
        output, *rest = rest
      lengths = rest if config["mask_type"] == "PADDING" else (None, None)
      assert len(rest) == (2 if config["mask_type"] == "PADDING" else 0)
      if not backward:
        shapes = [None if x is None else x.shape for x in (query, key, bias)]
        self.given.append((*shapes, config["mask_type"]))
      logits = _logits(query, key, bias, lengths, config)
      dimensions = config["intermediate_tensor_shape"]["dimensions"]
      assert tuple(map(int, dimensions)) == logits.shape
      if backward:
        found = _backward(
          query, key, value, sums, cotangent, output, logits, config
        )
      else:
        sums = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - sums[..., None])
        mixed = jnp.einsum("bnts,bsnd->bntd", weights, _repeated(value, query))
        found = mixed, sums
      found = *found, jnp.zeros(0, jnp.uint8)
      assert [x.shape for x in found] == [x.shape for x in results]
      return found

    return call


def _backward(query, key, value, sums, cotangent, output, logits, config):
  weights = jnp.exp(logits - sums[..., None])
  mean = jnp.swapaxes(jnp.sum(output * cotangent, axis=-1), 1, 2)
  d_weights = jnp.einsum("btnd,bsnd->bnts", cotangent, _repeated(value, query))
  d_logits = config["fmha_scale"] * weights * (d_weights - mean[..., None])
  d_query = jnp.einsum("bnts,bsnd->bntd", d_logits, _repeated(key, query))
  d_key = jnp.einsum("bnts,btnd->bnsd", d_logits, query)
  d_value = jnp.einsum("bnts,btnd->bnsd", weights, cotangent)
  return d_query, _summed(d_key, key), _summed(d_value, value)


def _repeated(x, query):
  return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)


def _summed(x, like):
  batch, length, heads, width = like.shape
  return x.reshape(batch, heads, -1, length, width).sum(2)


def _logits(query, key, bias, lengths, config):
  logits = jnp.einsum("btnd,bsnd->bnts", query, _repeated(key, query))
  logits *= config["fmha_scale"]
  if bias is not None:
    assert not bias.shape[2] % 2 and not bias.shape[3] % 2
    assert bias.shape[2:] == logits.shape[2:]
    logits += bias.astype(logits.dtype)
  if config["mask_type"] == "CAUSAL":
    seen = np.tri(*logits.shape[2:], dtype=bool)
    logits = jnp.where(seen, logits, -jnp.inf)
  if config["mask_type"] == "PADDING":
    real, there = (
      jnp.arange(length)[None] < number[:, None]
      for length, number in zip(logits.shape[2:], lengths, strict=True)
    )
    seen = real[:, None, :, None] & there[:, None, None]
    # cuDNN writes zeros for padding queries; NaN would be noticed.
    logits = jnp.where(seen, logits, -jnp.inf)
  return logits
