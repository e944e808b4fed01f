"""cuDNN's attention to a part, for Hopper GPUs.

Its own derivative, JAX's, ignores the cotangent of the sums of exponentials and
takes those of the part alone. Here the backward pass is called with those of
all parts; JAX has no public name for that.
"""

from typing import Any

import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused

from loopjax.errors import UserError
from loopjax.nn.attention.part import Part
from loopjax.types import Array

_TOKENS = 2  # With a mask, an even number of tokens.
_WIDTH = 8  # Heads are multiples of it.
_SEED, _DROPOUT = 42, 0.0
Options = dict[str, Any]


def forward(query: Array, part: Part) -> tuple[Array, Array]:
  """The output [B, T, H, d_h], and the logs of the sums f32 [B, T, H]."""
  length, width = query.shape[1], query.shape[3]
  options = _options(query, part)
  query, key, value = _padded(options, query, part.key, part.value)
  try:
    output, sums = fused.dot_product_attention(
      query, key, value, scale=width**-0.5, return_residual=True, **options
    )
  except (NotImplementedError, RuntimeError) as error:
    # What this version of cuDNN lacks, or that there is none.
    raise UserError(f"cudnn attention: {error}") from error
  sums = jnp.swapaxes(sums, 1, 2)
  return output[:, :length, :, :width], sums[:, :length]


def backward(
  query: Array, part: Part, output: Array, sums: Array, cotangent: Array
) -> tuple[Array, Array, Array]:
  """Cotangents of query, key and value, given the sums of all parts."""
  length, width = query.shape[1], query.shape[3]
  options = _options(query, part)
  query, key, value, output, cotangent = _padded(
    options, query, part.key, part.value, output, cotangent
  )
  sums = jnp.pad(sums, ((0, 0), (0, query.shape[1] - length), (0, 0)))
  none = jnp.zeros(0, query.dtype)
  names = ("bias", "q_seqlen", "kv_seqlen")
  bias, *lengths = (options.get(name, none) for name in names)
  residuals = (
    query, key, value, bias, *lengths, *[none] * 4,
    jnp.swapaxes(sums, 1, 2), output,
  )  # fmt: skip
  found = fused._dot_product_attention_bwd_rule(
    width**-0.5,
    _SEED,
    _DROPOUT,
    ("bias" in options, False),  # The gradient of the bias is not read.
    options["mask_type"],
    fused.AttentionLayout.BTNH.value,
    None,
    False,
    False,
    residuals,
    cotangent,
  )
  d_query, d_key, d_value = (x[..., :width] for x in found[:3])
  num_keys = part.num_keys
  return d_query[:, :length], d_key[:, :num_keys], d_value[:, :num_keys]


def _options(query: Array, part: Part) -> Options:
  """How cuDNN is told what queries attend to: the rest is a bias.

  It reads no keys after those that its own masks allow.
  """
  (batch, length), kind = query.shape[:2], fused.MaskType.NO_MASK
  options: Options = {}
  rest = part
  if part.length is not None:
    # Some version may not take zero keys.
    there = jnp.maximum(part.length, 1).astype(jnp.int32)
    kind = fused.MaskType.PADDING
    options["q_seqlen"] = jnp.full(batch, length, jnp.int32)
    options["kv_seqlen"] = jnp.broadcast_to(there, batch)
    rest = part._replace(length=None)
  elif part.is_causal(length) and part.num_keys == length:
    kind = fused.MaskType.CAUSAL
    rest = part._replace(first=None, reach=None)
  options["mask_type"] = kind
  seen = rest.seen(length)
  if seen is not None:
    missing = (0, -length % _TOKENS), (0, -part.num_keys % _TOKENS)
    seen = jnp.pad(seen, ((0, 0), *missing))
    bias = jnp.where(seen, 0.0, jnp.finfo(query.dtype).min / 2)
    options["bias"] = bias[:, None].astype(query.dtype)
  return options


def _padded(options: Options, *arrays: Array) -> list[Array]:
  """[B, T, H, d] with zeros added up to what cuDNN takes."""
  tokens = _TOKENS if "bias" in options else 1
  return [
    jnp.pad(
      x,
      ((0, 0), (0, -x.shape[1] % tokens), (0, 0), (0, -x.shape[3] % _WIDTH)),
    )
    for x in arrays
  ]
