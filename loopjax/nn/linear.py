"""Linear maps and embedding tables with an explicit precision."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.kernels.vocabulary import MASKED_LOGIT, product
from loopjax.types import Array, Precision

Initializer = nnx.initializers.Initializer

LECUN_NORMAL = nnx.initializers.lecun_normal()
UNIT_ROWS = nnx.initializers.variance_scaling(
  1.0, "fan_in", "normal", out_axis=0
)


def linear(
  inputs: int,
  outputs: int,
  *,
  use_bias: bool = False,
  init: Initializer = LECUN_NORMAL,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Linear:
  """x W, or x W + b with b initially 0, in the compute dtype."""
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=use_bias,
    dtype=precision.compute,
    param_dtype=precision.params,
    kernel_init=init,
    dot_general=by_rows,
    rngs=rngs,
  )


def readout(
  inputs: int,
  outputs: int,
  *,
  use_bias: bool = True,
  bias: float = 0.0,
  init: Initializer = LECUN_NORMAL,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Linear:
  """x W + b in the accumulate dtype: for logits of tokens and gates.

  b starts at `bias`; there is none without `use_bias`.
  """
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=use_bias,
    kernel_init=init,
    bias_init=nnx.initializers.constant(bias),
    dtype=precision.accumulate,
    param_dtype=precision.params,
    precision="highest",  # Accelerators would round float32 inputs.
    dot_general=by_rows,
    rngs=rngs,
  )


def by_rows(x: Array, kernel: Array, dimensions: Any, **options: Any) -> Array:
  """`jax.lax.dot_general` of x [..., inputs] and a kernel [inputs, outputs].

  x's leading dimensions are merged for the product: the kernel's gradient is
  then a product of two matrices in their memory layout. With several, XLA's CPU
  backend first transposes one of them, an eighth of a training step.
  """
  assert dimensions == (((x.ndim - 1,), (0,)), ((), ())), dimensions
  rows = x.reshape(-1, x.shape[-1])
  rows = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
  return rows.reshape(*x.shape[:-1], -1)


def embedding(
  num_embeddings: int,
  width: int,
  *,
  init: Initializer = UNIT_ROWS,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Embed:
  """Embedding table; normal with standard deviation 1 / sqrt(width)."""
  return nnx.Embed(
    num_embeddings,
    width,
    dtype=precision.accumulate,
    param_dtype=precision.params,
    embedding_init=init,
    rngs=rngs,
  )


def token_logits(
  hidden: Array, table: Array, num_padding_tokens: int = 0
) -> Array:
  """Logits h W^T, W having one row per token; in float32 like `readout`, or
  with a sum in float32 if both are in bfloat16.

  Args:
    hidden: [..., D].
    table: W [V, D]; the embedding table if they are tied.
    num_padding_tokens: the last ids are not real tokens; their logits are
      MASKED_LOGIT, so they are never predicted and get no probability.

  Returns:
    f32 [..., V].
  """
  if not hidden.dtype == table.dtype == jnp.bfloat16:
    hidden, table = (x.astype(jnp.float32) for x in (hidden, table))
  logits = product("...d,vd->...v", hidden, table)
  if not num_padding_tokens:
    return logits
  token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  is_real = token < logits.shape[-1] - num_padding_tokens
  return jnp.where(is_real, logits, MASKED_LOGIT)


def most_likely(logits: Array) -> dict[str, Array]:
  """The "prediction", i32 [B, S], and its probability, the "confidence"."""
  chances = jax.nn.softmax(logits, axis=-1)
  return {
    "prediction": jnp.argmax(chances, axis=-1),
    "confidence": jnp.max(chances, axis=-1),
  }
