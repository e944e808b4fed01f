"""Linear maps and embedding tables with an explicit precision."""

from flax import nnx

from loopjax.types import Precision


def linear(
  inputs: int, outputs: int, *, precision: Precision, rngs: nnx.Rngs
) -> nnx.Linear:
  """x W without bias, multiplied in the compute dtype; LeCun-normal W."""
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=False,
    dtype=precision.compute,
    param_dtype=precision.params,
    rngs=rngs,
  )


def readout(
  inputs: int,
  outputs: int,
  *,
  bias: float = 0.0,
  precision: Precision,
  rngs: nnx.Rngs,
) -> nnx.Linear:
  """x W + b in the accumulate dtype: for logits, and for gates' logits.

  b starts at `bias`.
  """
  return nnx.Linear(
    inputs,
    outputs,
    bias_init=nnx.initializers.constant(bias),
    dtype=precision.accumulate,
    param_dtype=precision.params,
    precision="highest",  # Accelerators would round float32 inputs.
    rngs=rngs,
  )


def embedding(
  num_embeddings: int, width: int, *, precision: Precision, rngs: nnx.Rngs
) -> nnx.Embed:
  """Table of vectors, normal with standard deviation 1 / sqrt(width)."""
  return nnx.Embed(
    num_embeddings,
    width,
    dtype=precision.accumulate,
    param_dtype=precision.params,
    rngs=rngs,
  )
