"""Attention of T tokens to one or several sequences, by any implementation.

Callers say what a token sees by numbers instead of a mask, so that every
implementation can apply them efficiently. The results of several sequences are
averaged with weights proportional to their sums of exponentials, which gives
the softmax over all of them. Kernels (`cudnn`, `splash`) are differentiated
here: given the whole's sums and output, a kernel's backward pass for one part
is that of the whole, because attention weights are exp(logit - log of the sum)
(FlashAttention-2, arXiv 2307.08691, algorithm 2). Attention to a cache is
`nn.attention.dot_product.attend_by_head`.
"""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from loopjax import sharding
from loopjax.errors import UserError
from loopjax.nn.attention import dot_product
from loopjax.nn.attention.part import Part
from loopjax.types import Array

IMPLEMENTATIONS = ("xla", "cudnn", "splash")
_CUDNN_WIDTH = 256  # The widest head of cuDNN.


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
    parts: keys and values, and which of them a query attends to.
    implementation: "xla": any dtype; if T is large and there is one part,
      queries are processed in parts. "cudnn" (Hopper GPUs, 16-bit dtypes) and
      "splash" (TPUs): kernels that do not write attention weights to memory.
      They are chosen by loop.kernels. Tokens and widths that a kernel does not
      take are padded, which changes nothing but the time. XLA computes parts
      with a `visible`.

  Returns:
    [B, T, H, d_h] in the values' dtype.

  Raises:
    UserError: the implementation does not support these arguments.
  """
  if reason := unsupported(implementation, query):
    raise UserError(f"{implementation} attention {reason}")
  if implementation == "xla" or any(x.visible is not None for x in parts):
    return _by_xla(query, *parts)
  limits = tuple((part.first, part.reach) for part in parts)
  arrays = [(x.key, x.value, x.documents) for x in parts]
  lengths = [part.length for part in parts]
  backend = importlib.import_module(f"loopjax.nn.attention.{implementation}")

  def kernel(by_example: Any, lengths: Any) -> Array:
    query, arrays = by_example
    pairs = [(key, value) for key, value, _ in arrays]
    known = [(x[2], n) for x, n in zip(arrays, lengths, strict=True)]
    return _merged(backend, limits, query, pairs, known)

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
  number = query.shape[1]
  if len(parts) > 1:
    return dot_product.attend_to_parts(
      query, *((x.key, x.value, x.seen(number)) for x in parts)
    )
  (part,) = parts
  if part.is_of_queries(number):
    causal, ids = part.first == 0, part.documents
    return dot_product.attend(
      query,
      part.key,
      part.value,
      causal=causal,
      documents=None if ids is None else ids[0],
    )
  seen = part.seen(number)
  return dot_product.attend(query, part.key, part.value, visible=seen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _merged(
  backend: Any, limits: Any, query: Array, pairs: Any, known: Any
) -> Array:
  """Attention to several parts by a kernel.

  Args:
    backend: has `forward(query, part)`, which returns the output
      [B, T, H, d_h] and the logs of the sums of exponentials f32 [B, T, H];
      and `backward(query, part, output, sums, cotangent)`, which returns the
      cotangents of query, key and value for the output and sums of all parts.
    limits: `first` and `reach` of every part.
    query: [B, T, H, d_h].
    pairs: keys and values of every part.
    known: documents and length of every part; no gradient.
  """
  return _forward(backend, limits, query, pairs, known)[0]


def _forward(
  backend: Any, limits: Any, query: Array, pairs: Any, known: Any
) -> tuple[Array, Any]:
  parts = _parts(limits, pairs, known)
  found = [backend.forward(query, part) for part in parts]
  output, total = found[0]
  if len(parts) > 1:
    # A part that nothing is written to yet has no share.
    sums = [
      own if x.length is None else jnp.where(x.length > 0, own, -jnp.inf)
      for (_, own), x in zip(found, parts, strict=True)
    ]
    total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
    mixed = sum(
      jnp.exp(own - total)[..., None] * x.astype(total.dtype)
      for own, (x, _) in zip(sums, found, strict=True)
    )
    output = jnp.asarray(mixed).astype(output.dtype)
  # Named, so that policies of rematerialisation may keep them.
  output, total = checkpoint_name((output, total), "flash")
  return output, (query, pairs, known, output, total)


def _backward(
  backend: Any, limits: Any, residuals: Any, cotangent: Array
) -> tuple[Array, Any, None]:
  query, pairs, known, output, total = residuals
  d_query, d_pairs = None, []
  for part in _parts(limits, pairs, known):
    sums = total
    if part.length is not None:
      sums = jnp.where(part.length > 0, total, _EMPTY)
    of_query, *of_pair = backend.backward(
      query, part, output, sums, cotangent.astype(output.dtype)
    )
    d_query = of_query if d_query is None else d_query + of_query
    d_pairs.append(tuple(of_pair))
  assert d_query is not None
  return d_query, d_pairs, None


_merged.defvjp(_forward, _backward)
# The log of the sum that makes every attention weight of an empty part zero.
_EMPTY = 1e30


def _parts(limits: Any, pairs: Any, known: Any) -> list[Part]:
  return [
    Part(key, value, first, reach, documents, length)
    for (first, reach), (key, value), (documents, length) in zip(
      limits, pairs, known, strict=True
    )
  ]
