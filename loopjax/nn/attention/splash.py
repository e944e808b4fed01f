"""Splash attention to a part, for TPUs: it skips blocks that no query sees.

JAX's kernel has no derivative with the sums of exponentials as a result. Here
its backward pass is called with those of all parts.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from loopjax.nn.attention.part import Part
from loopjax.types import Array

_LANES = 128  # TPU lanes; tokens are multiples of them.
_MOST_TOKENS = 512  # Maximum tokens of blocks; a multiple of the lanes.
_PADDING = -1  # The document of tokens that are not there.


class _Call(NamedTuple):
  """The kernel, its operands by head, and the documents, all [B, ...]."""

  kernel: Any
  query: Array
  key: Array
  value: Array
  ids: Any


def forward(query: Array, part: Part) -> tuple[Array, Array]:
  """The output [B, T, H, d_h], and the logs of the sums f32 [B, T, H]."""
  call = _call(query, part, save_residuals=True)
  output, (sums,) = jax.vmap(call.kernel)(
    call.query, call.key, call.value, segment_ids=call.ids
  )
  length = query.shape[1]
  output = jnp.swapaxes(output, 1, 2)[:, :length].astype(part.value.dtype)
  return output, jnp.swapaxes(sums, 1, 2)[:, :length].astype(jnp.float32)


def backward(
  query: Array, part: Part, output: Array, sums: Array, cotangent: Array
) -> tuple[Array, Array, Array]:
  """Cotangents of query, key and value, given the sums of all parts."""
  call = _call(query, part, save_residuals=False)
  options = call.kernel.kwargs

  def one(query, key, value, ids, output, sums, cotangent):
    residuals = (
      query, key, value, ids, None, output, sums,
      call.kernel.dq_mask_info, call.kernel.dkv_mask_info,
    )  # fmt: skip
    return splash._splash_attention_bwd(
      False,
      options["mask_value"],
      options["is_mqa"],
      options["block_sizes"],
      None,
      options["mask_function"],
      options["attn_logits_soft_cap"],
      options["interpret"],
      residuals,
      cotangent,
    )[3:6]

  found = jax.vmap(one)(
    call.query,
    call.key,
    call.value,
    call.ids,
    _by_head(output),
    _by_head(sums[..., None])[..., 0],
    _by_head(cotangent),
  )
  d_query, d_key, d_value = (jnp.swapaxes(x, 1, 2) for x in found)
  d_query = d_query[:, : query.shape[1]] * _scale(query)
  num_keys = part.num_keys
  return (
    d_query.astype(query.dtype),
    d_key[:, :num_keys].astype(part.key.dtype),
    d_value[:, :num_keys].astype(part.value.dtype),
  )


def _call(query: Array, part: Part, *, save_residuals: bool) -> _Call:
  heads = query.shape[2]
  ids = _ids(query, part)
  query, key, value = (
    _by_head(x) for x in (query * _scale(query), part.key, part.value)
  )
  lengths = query.shape[2], key.shape[2]
  of_queries, of_keys = (math.gcd(x, _MOST_TOKENS) for x in lengths)
  blocks = splash.BlockSizes(
    block_q=of_queries, block_kv=of_keys,
    block_q_dkv=of_queries, block_kv_dkv=of_keys,
    block_q_dq=of_queries, block_kv_dq=of_keys,
  )  # fmt: skip
  kernel = splash.make_splash_mha_single_device(
    mask=masks.MultiHeadMask([_mask(lengths, part)] * heads),
    block_sizes=blocks,
    save_residuals=save_residuals,
  )
  return _Call(kernel, query, key, value, ids)


def _scale(query: Array) -> Array:
  return jnp.asarray(query.shape[3] ** -0.5, query.dtype)


def _by_head(x: Array) -> Array:
  """[B, T, H, d] as [B, H, T, d], with zeros up to a multiple of the lanes."""
  missing = -x.shape[1] % _LANES
  x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
  return jnp.swapaxes(x, 1, 2)


def _mask(lengths: tuple[int, int], part: Part) -> Any:
  if part.first is None:
    return masks.FullMask(lengths)
  if part.reach is None:
    return masks.CausalMask(lengths, offset=part.first)
  window = part.reach - 1, 0
  return masks.LocalMask(lengths, window, offset=part.first)


def _ids(query: Array, part: Part) -> Any:
  """Documents of queries and keys, or None; absent keys are of no document."""
  (batch, length), num_keys = query.shape[:2], part.num_keys
  sees_padding = num_keys % _LANES and (
    part.first is None or part.first + length > num_keys
  )
  if part.documents is None and part.length is None and not sees_padding:
    return None
  of_queries, of_keys = part.documents or (
    jnp.zeros((batch, length), jnp.int32),
    jnp.zeros((batch, num_keys), jnp.int32),
  )
  if part.length is not None:
    there = jnp.arange(num_keys)[None] < part.length
    of_keys = jnp.where(there, of_keys, _PADDING - 1)
  return splash.SegmentIds(q=_padded_ids(of_queries), kv=_padded_ids(of_keys))


def _padded_ids(documents: Array) -> Array:
  added = [(0, 0), (0, -documents.shape[1] % _LANES)]
  return jnp.pad(documents, added, constant_values=_PADDING)
