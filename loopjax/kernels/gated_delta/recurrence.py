"""What goes from chunk to chunk: the state of `gated_delta`, and its gradient.

Both are one recurrence. With a chunk's base X, left L, right R, matrix A (A^T
for the gradient, which goes from the last chunk to the first) and a factor t,

  Y = A (X + L S),   S <- t S + U + R^T Y.

The state has L = -diag(b exp c) K, R = diag(exp(c_C - c)) K, X = diag(b) V and
no U, in the notation of `chunked`; Y is what the tokens write. Its gradient has
L and R exchanged, and as X and U what outputs give; Y is that of the errors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels.gated_delta.reference import product
from loopjax.types import Array


class Steps(NamedTuple):
  """Of n chunks of C tokens, in B examples and H heads.

  Attributes:
    base: X [n, B, H, C, d_v]. left, right: L and R [n, B, H, C, d_k].
    matrix: A [n, B, H, C, C].
    through: t [n, B, H, 1, 1].
    extra: U [n, B, H, d_k, d_v]; None for none.
  """

  base: Array
  left: Array
  right: Array
  matrix: Array
  through: Array
  extra: Any = None


def narrow_product(equation: str, *operands: Array) -> Array:
  """einsum of operands in bfloat16 that accumulates and returns float32."""
  narrow = (x.astype(jnp.bfloat16) for x in operands)
  return jnp.einsum(equation, *narrow, preferred_element_type=jnp.float32)


def scan(
  steps: Steps, state: Array, *, adjoint: bool
) -> tuple[Array, Array, Array]:
  """In plain JAX; a step reads the state from memory and writes it back.

  Args:
    steps: the affine steps of the chunks. If their matrices are in bfloat16,
      products have operands in bfloat16.
    state: S before the first of them, of the last with `adjoint` [B, H, d_k,
      d_v].
    adjoint: from the last chunk to the first, with A^T.

  Returns:
    S before each chunk's step [n, B, H, d_k, d_v], Y of each [n, B, H, C, d_v],
    and S after all.
  """

  is_narrow = steps.left.dtype == jnp.bfloat16
  multiply = narrow_product if is_narrow else product

  def step(state: Array, one: Steps) -> tuple[Array, tuple[Array, Array]]:
    inner = one.base + multiply("...ik,...kv->...iv", one.left, state)
    equation = "...ji,...jv->...iv" if adjoint else "...ij,...jv->...iv"
    result = multiply(equation, one.matrix, inner)
    after = one.through * state
    if one.extra is not None:
      after += one.extra
    after += multiply("...ik,...iv->...kv", one.right, result)
    return after, (state, result)

  if len(steps.base) == 1:  # Without a loop, which would copy the state.
    after, found = step(state, jax.tree.map(lambda x: x[0], steps))
    before, results = jax.tree.map(lambda x: x[None], found)
    return before, results, after
  after, (before, results) = jax.lax.scan(step, state, steps, reverse=adjoint)
  return before, results, after
