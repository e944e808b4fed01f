"""Checks the inputs of `gated_kv` and chooses the implementation."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.kernels.gated_kv import reference
from loopjax.types import Array

IMPLEMENTATIONS = ("reference", "pallas_tpu", "pallas_gpu")


@jax.named_scope("gated_kv")
def gated_kv(
  inputs: Array,
  latent: Array | None,
  weights: reference.Weights,
  tables: tuple[Array, Array],
  cache: tuple[Array, Array] | None = None,
  start: Array | None = None,
  *,
  implementation: str = "reference",
) -> tuple[Array, tuple[Array, Array]]:
  """One loop's update of the latents of S tokens and of their cache rows.

  MELT, section 3.2 (arXiv 2605.07721). With the layer's input x and the latent
  h of the previous loop,

    z = sigmoid(x W_z + h U_z + b_z),   h <- z h + (1 - z) x,

  and the tokens' rows of the cache become RoPE(h W_K) and h W_V; without a
  cache, these are returned. The gate, the blend and the rotation are in
  float32; matrix products accumulate in float32, with the latent in the dtype
  of x.

  Args:
    inputs: x [B, S, D].
    latent: h [B, S, D]; None if `inputs` are the new latents already.
    weights: matrices in the dtype of x.
    tables: cosines and sines of the rotation [B, S, d_h / 2], f32; constants.
    cache: keys and values [B, L, G, d_h] in any dtype. A kernel updates them in
      place if they are not used afterwards (donated arrays, or values inside
      one program). None for no cache.
    start: int32 [B], the row of each example's first token; its tokens occupy
      rows start to start + S - 1. If any of these is outside 0 .. L - 1, none
      is written; -1 thus writes nothing. None without a cache.
    implementation: "reference" supports all derivatives; "pallas_tpu" and
      "pallas_gpu" (Hopper; bfloat16, D and d_h multiples of 64) support reverse
      mode only, store x and h for it, and recompute the gate. They are chosen
      by loop.kernels.

  Returns:
    The latent [B, S, D] in the dtype of x, and the cache; without one, the
    tokens' keys and values [B, S, G, d_h] in that dtype.

  Raises:
    ValueError: shapes or options do not fit.
  """
  tables = jax.lax.stop_gradient(tables)
  arguments = inputs, latent, weights, tables, cache, start
  if cache is None and start is None:  # Kernels need a cache to write to.
    cache, start = _empty(inputs, weights, tables)
  if cache is None or start is None:
    raise ValueError("pass both cache and start, or neither")
  _check(inputs, latent, weights, tables, cache, start)
  if implementation == "reference":
    return reference.gated_kv(*arguments)
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
    )
  # Imported lazily: importing Pallas takes half a second.
  backend: Any = importlib.import_module(
    f"loopjax.kernels.gated_kv.{implementation}"
  )

  def kernel(split: Any, weights: reference.Weights) -> Any:
    inputs, latent, *others = split
    return backend.gated_kv(inputs, latent, weights, *others)

  by_example = sharding.by_example(kernel, len(inputs))
  return by_example((inputs, latent, tables, cache, start), weights)


def _empty(
  inputs: Array, weights: reference.Weights, tables: tuple[Array, Array]
) -> tuple[tuple[Array, Array], Array]:
  """A cache with a row for each token of x, and the rows to write to."""
  head_width = 2 * tables[0].shape[-1]
  heads = weights.key.shape[-1] // head_width, head_width
  none = jnp.zeros((*inputs.shape[:2], *heads), inputs.dtype)
  return (none, none), jnp.zeros(len(inputs), jnp.int32)


def _check(
  inputs: Array,
  latent: Array | None,
  weights: reference.Weights,
  tables: tuple[Array, Array],
  cache: tuple[Array, Array],
  start: Array,
) -> None:
  """Raises ValueError for the first input that does not fit."""
  if inputs.ndim != 3 or cache[0].ndim != 4:
    raise ValueError(
      "inputs must be [B, S, D] and keys [B, L, G, d_h], not"
      f" {inputs.shape} and {cache[0].shape}"
    )
  batch, num_tokens, width = inputs.shape
  length, num_heads, head_width = cache[0].shape[1:]
  square, heads = (width, width), (width, num_heads * head_width)
  angles = (batch, num_tokens, head_width // 2)
  for name, array, shape in (
    ("latent", latent, inputs.shape),
    ("weights.gate_input", weights.gate_input, square),
    ("weights.gate_latent", weights.gate_latent, square),
    ("weights.gate_bias", weights.gate_bias, (width,)),
    ("weights.key", weights.key, heads),
    ("weights.value", weights.value, heads),
    ("cosines", tables[0], angles),
    ("sines", tables[1], angles),
    ("keys", cache[0], (batch, length, num_heads, head_width)),
    ("values", cache[1], cache[0].shape),
    ("start", start, (batch,)),
  ):
    if array is not None and array.shape != shape:
      raise ValueError(
        f"{name} must be {shape}, not {array.shape}, for inputs {inputs.shape}"
        f" and keys {cache[0].shape}"
      )
  if num_tokens > length:
    raise ValueError(f"{num_tokens} tokens do not fit into {length} rows")
