"""Checks the inputs of `gated_delta` and chooses the implementation."""

import functools
import importlib
from typing import Any

import jax.numpy as jnp

from loopjax import sharding
from loopjax.kernels.gated_delta import chunked, chunks, reference
from loopjax.types import Array

IMPLEMENTATIONS = ("reference", "chunked", "pallas_tpu", "pallas_gpu")
# With 8 heads of width 64 on a CPU core, token by token takes less than half
# the time of chunks for a forward pass of 1 or 2 tokens, and longer for a
# forward and backward pass of 2 or more (bench_gated_delta.py --part=short).
LONGEST_BY_TOKEN = 2


def gated_delta(
  query: Array,
  key: Array,
  value: Array,
  log_decay: Array,
  write: Array,
  state: Array | None = None,
  *,
  chunk_size: int | None = None,
  mask: Array | None = None,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  """Gated delta rule (arXiv 2412.06464) over T tokens.

  For every token, with q and k scaled to length one (1e-6 is added to the
  squared length) and a = exp(log_decay),

    S <- a S,   S <- S + k (write (v - S^T k))^T,   output = S^T q / sqrt(d_k):

  The error is computed with the decayed state; a token's output includes its
  own write. Arithmetic is in float32 (float64 for float64 inputs); accelerators
  do not round the inputs of products.

  Args:
    query, key: [B, T, H_k, d_k].
    value: [B, T, H_v, d_v]; H_v is a multiple of H_k, and H_v / H_k consecutive
      heads share a query and key.
    log_decay: [B, T, H_v], <= 0; 0 keeps the state, -inf clears it.
    write: [B, T, H_v], from 0 to 1, or to 2 for negative eigenvalues.
    state: S before the first token [B, H_v, d_k, d_v]; zeros if None.
    chunk_size: maximum number of tokens solved together; a multiple of 16; the
      platform's default if None.
    mask: bool [B, T]; a False token leaves the state bit-identical, and its
      output and gradients are zero for any input. None for all True.
    implementation: "reference" computes token by token and supports all
      derivatives; "chunked" supports reverse mode only; None chooses the faster
      of the two. "pallas_tpu" and "pallas_gpu" (Hopper; bfloat16, d_k up to
      128) are "chunked" with a kernel that keeps the state on chip between
      chunks; with bfloat16 inputs, its products have bfloat16 operands and the
      state stays in float32. Not measured yet.

  Returns:
    The outputs [B, T, H_v, d_v], and S after the last token.

  Raises:
    ValueError: shapes or options do not fit.
  """
  inputs = (query, key, value, log_decay, write)
  chunk_size = chunked.default_size() if chunk_size is None else chunk_size
  _check(inputs, state, mask, chunk_size)
  wide = jnp.promote_types(jnp.float32, value.dtype)
  batch, num_tokens, num_heads, value_width = value.shape
  if state is None:
    shape = (batch, num_heads, query.shape[-1], value_width)
    # Zeros that are split over devices like the values.
    zeros = jnp.sum(jnp.zeros_like(value, wide), axis=1)
    state = jnp.broadcast_to(zeros[:, :, None], shape)
  state = state.astype(wide)
  if mask is not None:  # All zeros: no read, write or decay.
    query, key, value = (
      jnp.where(mask[..., None, None], x, 0) for x in (query, key, value)
    )
    log_decay, write = (
      jnp.where(mask[..., None], x, 0) for x in (log_decay, write)
    )
    inputs = (query, key, value, log_decay, write)
  if num_tokens == 0:
    return jnp.zeros(value.shape, wide), state
  if implementation is None:
    short = num_tokens <= LONGEST_BY_TOKEN
    implementation = "reference" if short else "chunked"
  if implementation == "reference":
    return reference.gated_delta(*inputs, state)
  if implementation == "chunked":
    return chunked.gated_delta(*inputs, state, chunk_size=chunk_size)
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
    )
  # Imported lazily: importing Pallas takes half a second.
  backend: Any = importlib.import_module(
    f"loopjax.kernels.gated_delta.{implementation}"
  )
  kernel = backend.gated_delta
  if implementation == "pallas_tpu":
    kernel = functools.partial(kernel, chunk_size=chunk_size)
  by_example = sharding.by_example(lambda split, _: kernel(*split), batch)
  return by_example((*inputs, state), ())


def _check(
  inputs: chunks.Inputs,
  state: Array | None,
  mask: Array | None,
  chunk_size: int,
) -> None:
  """Raises ValueError for the first input that does not fit."""
  query, key, value, log_decay, write = inputs
  if query.ndim != 4 or value.ndim != 4:
    raise ValueError(
      "query and value must be [B, T, H, D], not"
      f" {query.shape} and {value.shape}"
    )
  batch, num_tokens, num_heads, value_width = value.shape
  key_heads, key_width = query.shape[2:]
  if num_heads % key_heads:
    raise ValueError(
      f"{num_heads} heads of value must be a multiple of the {key_heads} of"
      " query and key"
    )
  gate = (batch, num_tokens, num_heads)
  for name, array, shape in (
    ("query", query, (batch, num_tokens, key_heads, key_width)),
    ("key", key, query.shape),
    ("log_decay", log_decay, gate),
    ("write", write, gate),
    ("state", state, (batch, num_heads, key_width, value_width)),
    ("mask", mask, gate[:2]),
  ):
    if array is not None and array.shape != shape:
      raise ValueError(
        f"{name} must be {shape}, not {array.shape}, for query {query.shape}"
        f" and value {value.shape}"
      )
  if chunk_size < chunks.BLOCK or chunk_size % chunks.BLOCK:
    raise ValueError(
      f"chunk_size={chunk_size} must be a multiple of {chunks.BLOCK}"
    )
