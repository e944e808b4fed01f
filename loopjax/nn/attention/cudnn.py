"""cuDNN's attention for Hopper GPUs, as XLA's custom call.

`jax.nn.dot_product_attention` makes the same call, but two limitations rule it
out. It rounds the logs of the sums of exponentials to 16 bits and does not
differentiate them, which prevents merging parts. It can only be traced on a
machine with a GPU, which prevents `loopjax.fit` from compiling for an absent
one. The operands, results and configuration of the call are XLA's
`CudnnfMHABackendConfig` (xla/service/gpu/backend_configs.proto). See
docs/adr/0011.

Parts are merged by their sums of exponentials. The backward pass of a part
takes the output and the sums of all parts, because an attention weight is
exp(logit - log of the sum) (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from loopjax.nn.attention.part import Part
from loopjax.types import Array

# The log of the sum that makes every attention weight of an empty part zero.
_EMPTY = 1e30
_TOKENS = 2  # Multiple required of token counts with a mask.
_WIDTH = 8  # Multiple required of head widths.
_TARGET = "__cudnn$fmha{bias}Softmax{backward}"
_LEGACY = 2  # Version of XLA's custom-call interface.
_HEADS_FIRST = (0, 2, 1, 3)  # Memory layout of [B, T, H, d]: [B, H, T, d].
_ELEMENTS = {"bfloat16": "BF16", "float16": "F16"}
# Dimension numbers of the products: contracted axes of both operands, then
# batch and head axes. Logits and weights are [B, H, T, S], other arrays [B, T,
# H, d].
_TOKENS_FIRST = (("0", "2"), ("0", "2"))
_WEIGHTS_FIRST = (("0", "1"), ("0", "2"))
_FORWARD = {
  "bmm1": ("3", "3", _TOKENS_FIRST),
  "bmm2": ("3", "1", _WEIGHTS_FIRST),
}
_BACKWARD = {
  "bmm1_grad_gemm1": ("2", "1", _WEIGHTS_FIRST),
  "bmm1_grad_gemm2": ("3", "1", _WEIGHTS_FIRST),
  "bmm2_grad_gemm1": ("2", "1", _WEIGHTS_FIRST),
  "bmm2_grad_gemm2": ("3", "3", _TOKENS_FIRST),
}


class _Mask(NamedTuple):
  """Which keys queries attend to, in cuDNN's terms.

  Attributes:
    mask_type: NO_MASK, CAUSAL, or PADDING, which limits keys to `lengths`.
    bias: added to the logits, [B or 1, 1, T, S]; a tuple of zero or one arrays.
    lengths: numbers of queries and of keys, i32 [B] each; zero or two arrays.
  """

  mask_type: str
  bias: tuple[Array, ...]
  lengths: tuple[Array, ...]


def attend(query: Array, *parts: Part) -> Array:
  """Attention to all parts, see `attend_to`; no part has a `visible`."""
  limits = tuple((part.first, part.reach) for part in parts)
  pairs = [(part.key, part.value) for part in parts]
  masks = [(part.documents, part.length) for part in parts]
  return _merged(limits, query, pairs, masks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged(limits: Any, query: Array, pairs: Any, masks: Any) -> Array:
  """Attention to several parts.

  Args:
    limits: `first` and `reach` of every part.
    query: [B, T, H, d_h].
    pairs: keys and values of every part.
    masks: documents and length of every part; not differentiated.
  """
  return _forward_of_all(limits, query, pairs, masks)[0]


def _forward_of_all(
  limits: Any, query: Array, pairs: Any, masks: Any
) -> tuple[Array, Any]:
  parts = _parts(limits, pairs, masks)
  results = [_forward(query, part) for part in parts]
  output, total = results[0]
  if len(parts) > 1:
    # A part that is still empty gets no weight.
    sums = [
      log_sum
      if x.length is None
      else jnp.where(x.length > 0, log_sum, -jnp.inf)
      for (_, log_sum), x in zip(results, parts, strict=True)
    ]
    total = jax.nn.logsumexp(jnp.stack(sums), axis=0)
    mixed = sum(
      jnp.exp(log_sum - total)[..., None] * x.astype(total.dtype)
      for log_sum, (x, _) in zip(sums, results, strict=True)
    )
    output = jnp.asarray(mixed).astype(output.dtype)
  # Names for rematerialisation policies.
  output, total = checkpoint_name((output, total), "flash")
  return output, (query, pairs, masks, output, total)


def _backward_of_all(
  limits: Any, residuals: Any, cotangent: Array
) -> tuple[Array, Any, None]:
  query, pairs, masks, output, total = residuals
  d_query, d_pairs = None, []
  for part in _parts(limits, pairs, masks):
    sums = total
    if part.length is not None:
      sums = jnp.where(part.length > 0, total, _EMPTY)
    d_query_part, *d_pair = _backward(
      query, part, output, sums, cotangent.astype(output.dtype)
    )
    d_query = d_query_part if d_query is None else d_query + d_query_part
    d_pairs.append(tuple(d_pair))
  assert d_query is not None
  return d_query, d_pairs, None


_merged.defvjp(_forward_of_all, _backward_of_all)


def _parts(limits: Any, pairs: Any, masks: Any) -> list[Part]:
  return [
    Part(key, value, first, reach, documents, length)
    for (first, reach), (key, value), (documents, length) in zip(
      limits, pairs, masks, strict=True
    )
  ]


def _forward(query: Array, part: Part) -> tuple[Array, Array]:
  """The output [B, T, H, d_h], and the logs of the sums f32 [B, T, H]."""
  (batch, length, heads, width), mask = query.shape, _mask(query, part)
  query, key, value = _padded(mask, query, part.key, part.value)
  by_head = jax.ShapeDtypeStruct((batch, heads, query.shape[1]), jnp.float32)
  operands = (query, key, value, *mask.bias, *mask.lengths)
  scale = width**-0.5
  output, sums = _call(operands, (query,), (by_head,), mask, scale, _FORWARD)
  return output[:, :length, :, :width], jnp.swapaxes(sums, 1, 2)[:, :length]


def _backward(
  query: Array, part: Part, output: Array, sums: Array, cotangent: Array
) -> tuple[Array, Array, Array]:
  """Cotangents of query, key and value, given the sums of all parts."""
  (_, length, _, width), mask = query.shape, _mask(query, part)
  query, key, value, output, cotangent = _padded(
    mask, query, part.key, part.value, output, cotangent
  )
  sums = jnp.pad(sums, ((0, 0), (0, query.shape[1] - length), (0, 0)))
  inputs = (query, key, value, jnp.swapaxes(sums, 1, 2), cotangent)
  operands = (*inputs, *mask.bias, output, *mask.lengths)
  results = (query, key, value)
  cotangents = _call(operands, results, (), mask, width**-0.5, _BACKWARD)
  d_query, d_key, d_value = (x[..., :width] for x in cotangents)
  num_keys = part.num_keys
  return d_query[:, :length], d_key[:, :num_keys], d_value[:, :num_keys]


def _call(
  operands: tuple[Array, ...],
  by_token: tuple[Array, ...],
  others: tuple[jax.ShapeDtypeStruct, ...],
  mask: _Mask,
  scale: float,
  products: dict[str, Any],
) -> list[Array]:
  """Results of cuDNN: arrays like `by_token`, [B, T, H, d], and `others`."""
  batch, length, heads, _ = operands[0].shape
  logits = batch, heads, length, operands[1].shape[1]
  target = _TARGET.format(
    bias="ScaleBias" if mask.bias else "",
    backward="" if products is _FORWARD else "Backward",
  )
  config = {
    "algorithm": {
      "algo_id": "0",
      "math_type": "TENSOR_OP_MATH",
      "tuning_knobs": {"17": "1", "24": "0"},
      "is_cudnn_frontend": True,
      "workspace_size": "0",
    },
    "fmha_scale": scale,
    "intermediate_tensor_shape": {
      "element_type": _ELEMENTS[operands[0].dtype.name],
      "dimensions": [str(x) for x in logits],
      "layout": {"minor_to_major": ["3", "2", "1", "0"]},
      "is_dynamic_dimension": [False] * 4,
    },
    "is_flash_attention": True,
    "mask_type": mask.mask_type,
    "dropout_rate": 0.0,
    "seed": 42,
    "sliding_window_length": 0,
    "max_seg_per_batch": 1,
    "is_paged_attention": False,
  } | {
    f"{name}_dot_dimension_numbers": {
      "lhs_contracting_dimensions": [left],
      "rhs_contracting_dimensions": [right],
      "lhs_batch_dimensions": rest[0],
      "rhs_batch_dimensions": rest[1],
    }
    for name, (left, right, rest) in products.items()
  }
  swapped = [
    jax.ShapeDtypeStruct(tuple(x.shape[i] for i in _HEADS_FIRST), x.dtype)
    for x in by_token
  ]
  workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
  call = jax.ffi.ffi_call(
    target,
    (*swapped, *others, workspace),
    output_layouts=(
      *[_HEADS_FIRST] * len(swapped),
      *[None] * len(others),
      None,
    ),
    vmap_method="sequential",
    custom_call_api_version=_LEGACY,
    legacy_backend_config=json.dumps(
      {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}
    ),
  )
  *outputs, _ = call(*operands)
  return [
    jnp.swapaxes(x, 1, 2) if i < len(swapped) else x
    for i, x in enumerate(outputs)
  ]


def _mask(query: Array, part: Part) -> _Mask:
  """Splits what queries attend to into cuDNN's own masks and a bias.

  cuDNN does not read the keys after those that its own masks allow.
  """
  (batch, length), mask_type = query.shape[:2], "NO_MASK"
  remaining = part
  lengths: tuple[Array, ...] = ()
  bias: tuple[Array, ...] = ()
  if part.length is not None:
    # Some versions may not support zero keys.
    num_read = jnp.maximum(part.length, 1).astype(jnp.int32)
    mask_type = "PADDING"
    lengths = (
      jnp.full(batch, length, jnp.int32),
      jnp.broadcast_to(num_read, batch),
    )
    remaining = part._replace(length=None)
  elif part.is_causal(length) and part.num_keys == length:
    mask_type = "CAUSAL"
    remaining = part._replace(first=None, reach=None)
  allowed = remaining.mask(length)
  if allowed is not None:
    padding = (0, -length % _TOKENS), (0, -part.num_keys % _TOKENS)
    allowed = jnp.pad(allowed, ((0, 0), *padding))
    added = jnp.where(allowed, 0.0, jnp.finfo(query.dtype).min / 2)
    bias = (added[:, None].astype(query.dtype),)
  return _Mask(mask_type, bias, lengths)


def _padded(mask: _Mask, *arrays: Array) -> list[Array]:
  """[B, T, H, d] padded with zeros to a size that cuDNN supports."""
  tokens = _TOKENS if mask.bias else 1
  return [
    jnp.pad(
      x, ((0, 0), (0, -x.shape[1] % tokens), (0, 0), (0, -x.shape[3] % _WIDTH))
    )
    for x in arrays
  ]
