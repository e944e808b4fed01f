"""Attention of T tokens to one or several sequences, by any implementation.

Callers describe what a token attends to by numbers instead of a mask, which
every implementation can apply efficiently. The results of several sequences are
averaged with weights proportional to their sums of exponentials, which gives
the softmax over all of them. The kernels are `nn.attention.cudnn.attend` and
`nn.attention.splash.attend`; attention to a cache is
`nn.attention.dot_product.attend_by_head`, except MELT's (`Part.visible`).
"""

import importlib
from typing import Any

import jax.numpy as jnp

from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn.attention import dot_product
from loopjax.nn.attention.part import Part
from loopjax.types import Array

IMPLEMENTATIONS = ("xla", "cudnn", "splash")
_CUDNN_WIDTH = 256  # Maximum head width of cuDNN.


def attend(
  query: Array,
  key: Array,
  value: Array,
  *,
  causal: bool = False,
  documents: Array | None = None,
  implementation: str = "xla",
) -> Array:
  """`attend_to` the tokens themselves.

  Args:
    query: [B, T, H, d_h].
    key, value: [B, T, G, d_h].
    causal: whether token t attends to tokens 0 .. t only.
    documents: i32 [B, T]; tokens attend to tokens with the same number. None if
      every row is one document.
    implementation: as in `attend_to`.
  """
  pair = None if documents is None else (documents, documents)
  part = Part(key, value, first=0 if causal else None, documents=pair)
  return attend_to(query, part, implementation=implementation)


def attend_to(query: Array, *parts: Part, implementation: str = "xla") -> Array:
  """softmax(q k^T / sqrt(d_h)) v per head, over the keys of all parts.

  Args:
    query: [B, T, H, d_h].
    parts: keys and values, with what a query attends to.
    implementation: "xla": any dtype; if T is large and there is one part,
      queries are processed in blocks. "cudnn" (Hopper GPUs, 16-bit dtypes) and
      "splash" (TPUs): kernels that do not write attention weights to memory.
      They are chosen by loop.kernels. Unsupported numbers of tokens and widths
      are padded, which only costs time. XLA computes parts that have a
      `visible`.

  Returns:
    [B, T, H, d_h] in the values' dtype.
  """
  if reason := unsupported(implementation, query):
    raise UserError(f"{implementation} attention {reason}")
  if implementation == "xla" or any(x.visible is not None for x in parts):
    return _by_xla(query, *parts)
  arrays = [(x.key, x.value, x.documents) for x in parts]
  lengths = [part.length for part in parts]
  backend = importlib.import_module(f"loopjax.nn.attention.{implementation}")

  def kernel(by_example: Any, lengths: Any) -> Array:
    query, arrays = by_example
    local = [
      part._replace(key=key, value=value, documents=documents, length=length)
      for part, (key, value, documents), length in zip(
        parts, arrays, lengths, strict=True
      )
    ]
    return backend.attend(query, *local)

  by_example = sharding.by_example(kernel, len(query))
  return by_example((query, arrays), lengths)


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


def _by_xla(query: Array, *parts: Part) -> Array:
  num_queries = query.shape[1]
  if len(parts) > 1:
    return dot_product.attend_to_parts(
      query, *((x.key, x.value, x.mask(num_queries)) for x in parts)
    )
  (part,) = parts
  if part.is_of_queries(num_queries):
    causal, ids = part.first == 0, part.documents
    return dot_product.attend(
      query,
      part.key,
      part.value,
      causal=causal,
      documents=None if ids is None else ids[0],
    )
  visible = part.mask(num_queries)
  return dot_product.attend(query, part.key, part.value, visible=visible)
