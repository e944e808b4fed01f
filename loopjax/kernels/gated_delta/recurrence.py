"""The recurrence over chunks: the state of `gated_delta`, and its gradient.

Both have the same form. With a chunk's base X, left L, right R, matrix A (A^T
for the gradient, which goes from the last chunk to the first) and a factor t,

  Y = A (X + L S),   S <- t S + U + R^T Y.

The state has L = -diag(b exp c) K, R = diag(exp(c_C - c)) K, X = diag(b) V and
no U, in the notation of `chunked`; Y is what the tokens write. For the
gradient, L and R are exchanged, X and U are the outputs' contributions, and Y
is the gradient of the errors.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels.gated_delta.reference import product
from loopjax.types import Array


class Steps(NamedTuple):
  """The recurrence's arrays for n chunks of C tokens, B examples and H heads.

  Attributes:
    base: X [n, B, H, C, d_v].
    left, right: L and R [n, B, H, C, d_k].
    matrix: A [n, B, H, C, C].
    through: t [n, B, H, 1, 1].
    extra: U [n, B, H, d_k, d_v]; None for zero.
  """

  base: Array
  left: Array
  right: Array
  matrix: Array
  through: Array
  extra: Any = None


def narrow_product(
  equation: str, *operands: Array, dtype: Any = jnp.float32
) -> Array:
  """einsum of operands in bfloat16 that accumulates in float32."""
  narrow = (x.astype(jnp.bfloat16) for x in operands)
  return jnp.einsum(equation, *narrow, preferred_element_type=dtype)


def sum_of_products(*pairs: tuple[Array, Array], rounded: bool) -> Array:
  """The sum of x y over pairs of x [..., i, k] and y [..., k, j], in float32.

  Rounded operands are concatenated along k, because separate products would
  each be written to memory and read back for the sum.
  """
  equation = "...ik,...kj->...ij"
  if not rounded:
    first, *others = (product(equation, *pair) for pair in pairs)
    return sum(others, first)

  def joined(arrays: Iterable[Array], axis: int) -> Array:
    return jnp.concatenate([x.astype(jnp.bfloat16) for x in arrays], axis)

  left, right = zip(*pairs, strict=True)
  return narrow_product(equation, joined(left, -1), joined(right, -2))


def scan(
  steps: Steps, state: Array, *, adjoint: bool
) -> tuple[Array, Array, Array]:
  """The recurrence in plain JAX; each step loads and stores the state.

  Args:
    steps: the affine steps of the chunks. If their matrices are in bfloat16,
      products have operands in bfloat16.
    state: S before the first step (before the last with `adjoint`), [B, H, d_k,
      d_v].
    adjoint: from the last chunk to the first, with A^T.

  Returns:
    S before each chunk's step [n, B, H, d_k, d_v], Y of each [n, B, H, C, d_v],
    and S after all steps.
  """

  multiply, solve = product, product
  if steps.left.dtype == jnp.bfloat16:
    multiply, solve = narrow_product, narrow_product
    if not adjoint:  # Every use of Y rounds it.
      solve = functools.partial(narrow_product, dtype=jnp.bfloat16)

  def step(state: Array, one: Steps) -> tuple[Array, tuple[Array, Array]]:
    inner = one.base + multiply("...ik,...kv->...iv", one.left, state)
    equation = "...ji,...jv->...iv" if adjoint else "...ij,...jv->...iv"
    result = solve(equation, one.matrix, inner)
    after = one.through * state
    if one.extra is not None:
      after += one.extra
    after += multiply("...ik,...iv->...kv", one.right, result)
    return after, (state, result)

  if len(steps.base) == 1:  # A loop would copy the state.
    after, outputs = step(state, jax.tree.map(lambda x: x[0], steps))
    before, results = jax.tree.map(lambda x: x[None], outputs)
    return before, results, after
  after, (before, results) = jax.lax.scan(step, state, steps, reverse=adjoint)
  return before, results, after
