"""Products of 16-bit arrays with results in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.types import Array


def widened(
  equation: str, left: Array, right: Array, precision: Any = None
) -> Array:
  """einsum that accumulates in, and returns, float32 or a wider dtype.

  The derivatives for 16-bit inputs are products of 16-bit arrays too. JAX alone
  would multiply float32 cotangents, at half the rate or less on accelerators,
  and then round the gradients to 16 bits.
  """
  if jnp.promote_types(left.dtype, right.dtype).itemsize == 2:
    return _of_narrow(equation, left, right)
  return _einsum(equation, left, right, precision)


def _einsum(
  equation: str, left: Array, right: Array, precision: Any = None
) -> Array:
  wide: Any = jnp.promote_types(jnp.float32, right.dtype)
  return jnp.einsum(
    equation, left, right, precision=precision, preferred_element_type=wide
  )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_narrow(equation: str, left: Array, right: Array) -> Array:
  return _einsum(equation, left, right)


def _tangent(
  equation: str, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
  """Rounds the tangent; the transpose then rounds the cotangent."""
  (left, right), result = primals, _of_narrow(equation, *primals)
  total: Any = 0
  for one, other in ((tangents[0], right), (left, tangents[1])):
    if not any(isinstance(x, _Zero) for x in (one, other)):
      total += jnp.einsum(equation, one, other).astype(result.dtype)
  return result, total


_Zero = jax.custom_derivatives.SymbolicZero
_of_narrow.defjvp(_tangent, symbolic_zeros=True)
