"""Normalisation layers, and point-wise functions that replace them."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.types import Array, Precision


class MakeNorm(Protocol):
  """Constructor of a norm over `width` features, x [..., width] to the same."""

  def __call__(
    self, width: int, /, *, precision: Precision, rngs: nnx.Rngs
  ) -> Callable[[Array], Array]: ...


class DerfUTM(nnx.Module):
  """erf(alpha * x + shift), alpha and shift per feature (UTM, section 2.1).

  The variant of UTM's code, without gain and bias. Initially alpha is
  1 + 0.02 N(0, 1) and shift is 0. x: [..., D]; computed in float32.
  """

  def __init__(self, width: int, *, precision: Precision, rngs: nnx.Rngs):
    noise_D = jax.random.normal(rngs.params(), (width,), precision.params)
    self.alpha = nnx.Param(1.0 + 0.02 * noise_D)
    self.shift = nnx.Param(jnp.zeros((width,), precision.params))
    self.precision = precision

  def __call__(self, x: Array) -> Array:
    x = x.astype(self.precision.accumulate)
    alpha, shift = _per_feature(x, self.alpha[...], self.shift[...])
    return jax.scipy.special.erf(alpha * x + shift)


class Derf(nnx.Module):
  """gain * erf(alpha * x + shift) + bias (arXiv 2512.10938).

  alpha (initially 0.5) and shift (0) are scalars; gain (1) and bias (0) are per
  feature. x: [..., D]; computed in float32.
  """

  def __init__(self, width: int, *, precision: Precision, rngs: nnx.Rngs):
    del rngs  # Initial values are constant.
    self.alpha = nnx.Param(jnp.full((), 0.5, precision.params))
    self.shift = nnx.Param(jnp.zeros((), precision.params))
    self.gain = nnx.Param(jnp.ones((width,), precision.params))
    self.bias = nnx.Param(jnp.zeros((width,), precision.params))
    self.precision = precision

  def __call__(self, x: Array) -> Array:
    x = x.astype(self.precision.accumulate)
    gain, bias = _per_feature(x, self.gain[...], self.bias[...])
    squashed = jax.scipy.special.erf(self.alpha[...] * x + self.shift[...])
    return gain * squashed + bias


def _per_feature(x: Array, *vectors: Array) -> list[Array]:
  """Vectors [D], reshaped to broadcast to x [..., D]."""
  return [jnp.expand_dims(v, range(x.ndim - 1)) for v in vectors]


def rms_norm(
  width: int, *, epsilon: float = 1e-6, precision: Precision, rngs: nnx.Rngs
) -> nnx.RMSNorm:
  """RMS norm with a learned gain, in the accumulate dtype."""
  return nnx.RMSNorm(
    width,
    epsilon=epsilon,
    dtype=precision.accumulate,
    param_dtype=precision.params,
    rngs=rngs,
  )


def layer_norm(
  width: int, *, epsilon: float = 1e-6, precision: Precision, rngs: nnx.Rngs
) -> nnx.LayerNorm:
  """Layer norm with a learned gain and bias, in the accumulate dtype."""
  return nnx.LayerNorm(
    width,
    epsilon=epsilon,
    dtype=precision.accumulate,
    param_dtype=precision.params,
    rngs=rngs,
  )


def identity(
  width: int, *, precision: Precision, rngs: nnx.Rngs
) -> Callable[[Array], Array]:
  """No norm: the layer returns x unchanged."""
  del width, precision, rngs
  return _unchanged


def _unchanged(x: Array) -> Array:
  return x


def rms_normalise(x: Array, epsilon: float, axis: int = -1) -> Array:
  """x / sqrt(mean(x^2) + epsilon) over an axis, without a gain; f32."""
  x = x.astype(jnp.float32)
  square = jnp.mean(x * x, axis=axis, keepdims=True)
  return x * jax.lax.rsqrt(square + epsilon)


NORMS: dict[str, MakeNorm] = {
  "derf_utm": DerfUTM,
  "derf": Derf,
  "rmsnorm": rms_norm,
  "layernorm": layer_norm,
}


def mean_norm(x: Array) -> Array:
  """The mean Euclidean norm of vectors [..., D], f32 scalar."""
  return jnp.mean(jnp.linalg.norm(x, axis=-1))
