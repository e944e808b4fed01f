"""Splash attention for TPUs, which skips fully masked blocks of keys.

JAX's kernel does not return differentiable sums of exponentials: several parts
are concatenated into one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as masks,
)

from loopjax.nn.attention.part import Part
from loopjax.types import Array

_LANES = 128  # TPU lanes; token counts are multiples of this.
_MAX_TOKENS = 512  # Maximum tokens per block; a multiple of the lanes.
_PADDING = -1  # Document number of padding.


def attend(query: Array, *parts: Part) -> Array:
  """Attention to all parts, see `attend_to`; no part has a `visible`."""
  part = parts[0] if len(parts) == 1 else _joined(query, parts)
  length, heads = query.shape[1:3]
  ids = _ids(query, part)
  query, key, value = (
    _by_head(x) for x in (query * _scale(query), part.key, part.value)
  )
  lengths = query.shape[2], key.shape[2]
  of_queries, of_keys = (math.gcd(x, _MAX_TOKENS) for x in lengths)
  blocks = splash.BlockSizes(
    block_q=of_queries, block_kv=of_keys,
    block_q_dkv=of_queries, block_kv_dkv=of_keys,
    block_q_dq=of_queries, block_kv_dq=of_keys,
  )  # fmt: skip
  kernel = splash.make_splash_mha_single_device(
    mask=masks.MultiHeadMask([_mask(lengths, part)] * heads),
    block_sizes=blocks,
    # Names its residuals for rematerialisation policies.
    residual_checkpoint_name="flash",
  )
  output = jax.vmap(kernel)(query, key, value, segment_ids=ids)
  return jnp.swapaxes(output, 1, 2)[:, :length].astype(part.value.dtype)


def _joined(query: Array, parts: tuple[Part, ...]) -> Part:
  """All parts as one; those with a `first` have the last keys.

  If the last part alone has a `first`, and no `reach`, the result has a `first`
  too; other limits become `visible`, a NumPy array [1, T, S].
  """
  parts = tuple(sorted(parts, key=lambda part: part.first is not None))
  *rest, last = parts
  first: int | None = None
  visible: Any = None
  if last.reach is not None or any(part.first is not None for part in rest):
    visible = np.concatenate([_allowed(query, part) for part in parts], axis=2)
  elif last.first is not None:
    first = sum(part.num_keys for part in rest) + last.first
  ids = [_documents(query, part) for part in parts]
  return Part(
    jnp.concatenate([part.key for part in parts], axis=1),
    jnp.concatenate([part.value for part in parts], axis=1),
    first=first,
    documents=(ids[-1][0], jnp.concatenate([keys for _, keys in ids], axis=1)),
    visible=visible,
  )


def _allowed(query: Array, part: Part) -> np.ndarray:
  """Keys that `first` and `reach` allow, bool [1, T, S]."""
  num_queries = query.shape[1]
  with jax.ensure_compile_time_eval():
    allowed = part._replace(documents=None, length=None).mask(num_queries)
    if allowed is None:
      return np.ones((1, num_queries, part.num_keys), bool)
    return np.asarray(allowed)


def _scale(query: Array) -> Array:
  return jnp.asarray(query.shape[3] ** -0.5, query.dtype)


def _by_head(x: Array) -> Array:
  """[B, T, H, d] as [B, H, T, d], with zeros up to a multiple of the lanes."""
  missing = -x.shape[1] % _LANES
  x = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)))
  return jnp.swapaxes(x, 1, 2)


def _mask(lengths: tuple[int, int], part: Part) -> Any:
  if part.visible is not None:
    (allowed,) = np.asarray(part.visible)
    padding = [(0, n - m) for n, m in zip(lengths, allowed.shape, strict=True)]
    # Padding queries copy the last one: without keys they would be NaN.
    allowed = np.pad(allowed, (padding[0], (0, 0)), mode="edge")
    return masks.NumpyMask(np.pad(allowed, ((0, 0), padding[1])))
  if part.first is None:
    return masks.FullMask(lengths)
  if part.reach is None:
    return masks.CausalMask(lengths, offset=part.first)
  window = part.reach - 1, 0
  return masks.LocalMask(lengths, window, offset=part.first)


def _ids(query: Array, part: Part) -> Any:
  """Documents of queries and keys, or None; absent keys are in no document."""
  length, num_keys = query.shape[1], part.num_keys
  sees_padding = num_keys % _LANES and (
    part.first is None or part.first + length > num_keys
  )
  if part.documents is None and part.length is None and not sees_padding:
    return None
  of_queries, of_keys = _documents(query, part)
  return splash.SegmentIds(q=_padded_ids(of_queries), kv=_padded_ids(of_keys))


def _documents(query: Array, part: Part) -> tuple[Array, Array]:
  """Documents of queries, i32 [B, T], and keys, [B, S]; -2 for absent keys."""
  (batch, length), num_keys = query.shape[:2], part.num_keys
  of_queries, of_keys = part.documents or (
    jnp.zeros((batch, length), jnp.int32),
    jnp.zeros((batch, num_keys), jnp.int32),
  )
  if part.length is not None:
    is_real = jnp.arange(num_keys)[None] < part.length
    of_keys = jnp.where(is_real, of_keys, _PADDING - 1)
  return of_queries, of_keys


def _padded_ids(documents: Array) -> Array:
  added = [(0, 0), (0, -documents.shape[1] % _LANES)]
  return jnp.pad(documents, added, constant_values=_PADDING)
