"""Linear maps, embedding tables and read-outs with explicit precision."""

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
  dot_general: Any = None,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Linear:
  """x W, or x W + b with b initially zero, in the compute dtype.

  The product is `merged_dot_general`, or another `dot_general`.
  """
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=use_bias,
    dtype=precision.compute,
    param_dtype=precision.params,
    kernel_init=init,
    dot_general=dot_general or merged_dot_general,
    promote_dtype=_promoted,
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
  """x W + b in the accumulate dtype, for logits of tokens and gates.

  b is initially `bias`, and absent without `use_bias`.
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
    dot_general=merged_dot_general if outputs > 1 else vector_dot_general,
    promote_dtype=_promoted,
    rngs=rngs,
  )


def merged_dot_general(
  x: Array, kernel: Array, dimensions: Any, **options: Any
) -> Array:
  """x [..., inputs] times a kernel [inputs, outputs], as `jax.lax.dot_general`.

  Merges the leading dimensions of x, which makes the kernel's gradient a
  product of two matrices in their memory layout. With several leading
  dimensions, XLA's CPU backend first transposes one operand, which takes an
  eighth of a training step.
  """
  assert dimensions == (((x.ndim - 1,), (0,)), ((), ())), dimensions
  rows = x.reshape(-1, x.shape[-1])
  rows = jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options)
  return rows.reshape(*x.shape[:-1], -1)


def wide_dot_general(
  x: Array, kernel: Array, dimensions: Any, **options: Any
) -> Array:
  """`merged_dot_general`, padded to a multiple of 8 features in 16 bits.

  GPUs need this multiple. XLA would pad too, but would copy the unpadded
  product for the backward pass.
  """
  if kernel.dtype.itemsize == 2 and (missing := -kernel.shape[1] % 8):
    kernel = jnp.pad(kernel, ((0, 0), (0, missing)))
  return merged_dot_general(x, kernel, dimensions, **options)


def narrow_dot_general(
  x: Array, kernel: Array, dimensions: Any, **options: Any
) -> Array:
  """`merged_dot_general` of a padded result of `wide_dot_general`."""
  if missing := x.shape[-1] - kernel.shape[0]:
    kernel = jnp.pad(kernel, ((0, missing), (0, 0)))
  return merged_dot_general(x, kernel, dimensions, **options)


def vector_dot_general(
  x: Array, kernel: Array, dimensions: Any, **options: Any
) -> Array:
  """x [..., inputs] times a kernel [inputs, 1], without merging dimensions.

  A gate takes the states of all loops at once, [K, B, T, D]. If B is split over
  devices, merged rows would be gathered on every device.
  """
  assert dimensions == (((x.ndim - 1,), (0,)), ((), ())), dimensions
  return jnp.einsum("...d,d->...", x, kernel[:, 0], **options)[..., None]


def embedding(
  num_embeddings: int,
  width: int,
  *,
  init: Initializer = UNIT_ROWS,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Embed:
  """Embedding table, initially normal with standard deviation 1/sqrt(width)."""
  return nnx.Embed(
    num_embeddings,
    width,
    dtype=precision.accumulate,
    param_dtype=precision.params,
    embedding_init=init,
    promote_dtype=_promoted,
    rngs=rngs,
  )


def _promoted(arrays: Any, /, *, dtype: Any = None, inexact: Any = None) -> Any:
  """The operands of a product in its dtype."""
  del inexact  # The dtype is explicit.
  return tuple(None if x is None else x.astype(dtype) for x in arrays)


@jax.named_scope("read_out")
def token_logits(
  hidden: Array, table: Array, num_padding_tokens: int = 0
) -> Array:
  """Logits h W^T in float32, or with sums in float32 if both are in bfloat16.

  Args:
    hidden: h [..., D].
    table: W [V, D], one row per token id; may be the embedding table.
    num_padding_tokens: number of ids at the end that are not real tokens. Their
      logits are MASKED_LOGIT and their probability 0.

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


def prediction_and_confidence(logits: Array) -> dict[str, Array]:
  """ "prediction", the argmax of logits [..., V], and "confidence".

  The confidence is the probability of the prediction, f32.
  """
  probabilities = jax.nn.softmax(logits, axis=-1)
  return {
    "prediction": jnp.argmax(probabilities, axis=-1),
    "confidence": jnp.max(probabilities, axis=-1),
  }
