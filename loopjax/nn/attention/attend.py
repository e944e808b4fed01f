"""Self-attention of T tokens, by one of several implementations.

Callers specify causality and documents instead of a mask, so that every
implementation can apply them efficiently. Attention to a cache is
`nn.dot_product.attend_by_head`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn.attention import dot_product
from loopjax.types import Array

IMPLEMENTATIONS = ("xla", "cudnn", "splash")
# cuDNN's limits: an even number of tokens with a mask, widths of heads.
_CUDNN_TOKENS = 2
_CUDNN_HEADS = 8
_CUDNN_WIDTH = 256
_LANES = 128  # TPU lanes; splash attention needs a multiple of them.
_MOST_TOKENS = 512  # Maximum tokens of its blocks; a multiple of the lanes.


def attend(
  query: Array,
  key: Array,
  value: Array,
  *,
  causal: bool = False,
  documents: Array | None = None,
  implementation: str = "xla",
) -> Array:
  """softmax(q k^T / sqrt(d_h)) v per head.

  Args:
    query: [B, T, H, d_h].
    key, value: [B, T, G, d_h]; each is shared by H / G consecutive query heads.
    causal: whether token t attends to tokens 0 .. t only.
    documents: i32 [B, T]; tokens attend to tokens with the same number. None if
      every row is one document.
    implementation: "xla": any dtype; if T is large, queries are processed in
      parts. "cudnn" (Hopper GPUs, 16-bit dtypes) and "splash" (TPUs): kernels
      that do not write attention weights to memory. They are chosen by
      loop.kernels. Tokens and widths that a kernel does not take are padded,
      which changes nothing but the time. Documents are a mask [B, 1, T, T] in
      the inputs' dtype for cuDNN, and numbers of segments for splash.

  Returns:
    [B, T, H, d_h] in the value's dtype.

  Raises:
    UserError: the implementation does not support these arguments.
  """
  if reason := unsupported(implementation, query):
    raise UserError(f"{implementation} attention {reason}")
  if implementation == "xla":
    return dot_product.attend(
      query, key, value, causal=causal, documents=documents
    )
  kernel = functools.partial(
    _cudnn if implementation == "cudnn" else _splash, causal
  )
  by_example = sharding.by_example(lambda x, _: kernel(*x), len(query))
  return by_example((query, key, value, documents), ())


def unsupported(implementation: str, query: Array) -> str | None:
  """Why an implementation does not support a query; None if it does."""
  if implementation not in IMPLEMENTATIONS:
    return f"is not one of {IMPLEMENTATIONS}"
  if implementation == "cudnn":
    if query.dtype not in (jnp.bfloat16, jnp.float16):
      return (
        f"needs 16-bit inputs, not {query.dtype}"
        " (model.precision=bfloat16 has them)"
      )
    if query.shape[3] > _CUDNN_WIDTH:
      return f"needs heads of at most {_CUDNN_WIDTH}, not {query.shape[3]}"
  return None


def _padded(x: Array, tokens: int, width: int = 1) -> Array:
  """[B, T, H, d] with zeros added up to multiples of T and of d."""
  added = [(0, 0), (0, -x.shape[1] % tokens), (0, 0), (0, -x.shape[3] % width)]
  return jnp.pad(x, added)


def _padded_documents(documents: Array, tokens: int) -> Array:
  """Numbers of documents [B, T], up to a multiple of T; padding is one: -1."""
  added = [(0, 0), (0, -documents.shape[1] % tokens)]
  return jnp.pad(documents, added, constant_values=-1)


def _cudnn(
  causal: bool, query: Array, key: Array, value: Array, documents: Array | None
) -> Array:
  """cuDNN's fused attention; it takes an even number of tokens."""
  batch, length, _, width = query.shape
  query, key, value = (
    _padded(x, _CUDNN_TOKENS, _CUDNN_HEADS) for x in (query, key, value)
  )
  options: dict[str, Any] = {}
  if documents is not None:
    ids = _padded_documents(documents, _CUDNN_TOKENS)
    options["mask"] = (ids[:, :, None] == ids[:, None])[:, None]
  elif query.shape[1] != length and not causal:
    # Causal queries do not see what comes after them.
    lengths = jnp.full(batch, length, jnp.int32)
    options["query_seq_lengths"] = options["key_value_seq_lengths"] = lengths
  try:
    mixed = jax.nn.dot_product_attention(
      query,
      key,
      value,
      scale=width**-0.5,  # Of the head without its padding.
      is_causal=causal,
      implementation="cudnn",
      **options,
    )
  except (NotImplementedError, RuntimeError) as error:
    # What this version of cuDNN lacks, or that there is none.
    raise UserError(f"cudnn attention: {error}") from error
  return mixed[:, :length, :, :width]


def _splash(
  causal: bool, query: Array, key: Array, value: Array, documents: Array | None
) -> Array:
  """JAX's splash attention, which skips blocks that are entirely masked."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  batch, num_tokens, num_heads, head_width = query.shape
  if documents is None and num_tokens % _LANES and not causal:
    documents = jnp.zeros((batch, num_tokens), jnp.int32)
  if documents is not None:
    documents = _padded_documents(documents, _LANES)
  query, key, value = (_padded(x, _LANES) for x in (query, key, value))
  length = query.shape[1]
  make = masks.CausalMask if causal else masks.FullMask
  size = math.gcd(length, _MOST_TOKENS)
  blocks = splash.BlockSizes(
    block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size,
    block_q_dq=size, block_kv_dq=size,
  )  # fmt: skip
  kernel = splash.make_splash_mha_single_device(
    mask=masks.MultiHeadMask([make((length, length))] * num_heads),
    block_sizes=blocks,
  )
  scaled = query * jnp.asarray(head_width**-0.5, query.dtype)
  ids = None
  if documents is not None:
    ids = splash.SegmentIds(q=documents, kv=documents)
  by_head = (jnp.swapaxes(x, 1, 2) for x in (scaled, key, value))
  mixed = jax.vmap(kernel)(*by_head, segment_ids=ids)
  return jnp.swapaxes(mixed, 1, 2)[:, :num_tokens].astype(value.dtype)
