"""Self-attention of T tokens, by one of several implementations.

Callers specify causality and documents instead of a mask, so that every
implementation can apply them efficiently. Attention to a cache is
`nn.dot_product.attend_by_head`.
"""

import functools
import math

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn.attention import dot_product
from loopjax.types import Array

IMPLEMENTATIONS = ("xla", "cudnn", "splash")
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
      parts. "cudnn" (Hopper GPUs, 16-bit dtypes, no documents) and "splash"
      (TPUs): kernels that do not write attention weights to memory. They are
      chosen by loop.kernels.

  Returns:
    [B, T, H, d_h] in the value's dtype.

  Raises:
    UserError: the implementation does not support these arguments.
  """
  if reason := unsupported(implementation, query, documents):
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


def unsupported(
  implementation: str, query: Array, documents: Array | None
) -> str | None:
  """Why an implementation does not support the arguments; None if it does."""
  length, head_width = query.shape[1], query.shape[3]
  if implementation not in IMPLEMENTATIONS:
    return f"is not one of {IMPLEMENTATIONS}"
  if implementation == "cudnn":
    if query.dtype not in (jnp.bfloat16, jnp.float16):
      return f"needs 16-bit inputs, not {query.dtype}"
    if documents is not None:
      return "does not support packed documents (loop.kernels=xla does)"
    if head_width % 8 or head_width > 256:
      return f"needs heads of a multiple of 8 up to 256, not {head_width}"
  if implementation == "splash" and length % _LANES:
    return f"needs a multiple of {_LANES} tokens, not {length}"
  return None


def _cudnn(
  causal: bool, query: Array, key: Array, value: Array, documents: None
) -> Array:
  """cuDNN's fused attention."""
  del documents  # See `unsupported`.
  return jax.nn.dot_product_attention(
    query, key, value, is_causal=causal, implementation="cudnn"
  )


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

  length, num_heads, head_width = query.shape[1:]
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
  return jnp.swapaxes(mixed, 1, 2).astype(value.dtype)
