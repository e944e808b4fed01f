"""Muon: steps of matrices whose singular values are all near one.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (kellerjordan.github.io/posts/muon, 2024), and its reference code.
Muon is for the matrices of the body. All other parameters are AdamW's; the
table of `loopjax.optim.parameters` says which are which.

`optax.contrib.muon` is not used: its other half is NAdamW, it corrects the
bias of momentum and gradient differently, so that Nesterov's look-ahead is
another one in the first steps, it holds all Newton-Schulz steps in memory at
once, and by default it decides by rank what a matrix is.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from loopjax.types import Array

# a x + b x^3 + c x^5 is so steep at 0 that five steps bring singular values of
# 0.002 near 1, and for that they bring none to 1 itself.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
_EPSILON = 1e-7  # Of the norm that is divided by.


class State(NamedTuple):
  """What Muon remembers.

  Attributes:
    momentum: running mean of the gradients, like the parameters.
  """

  momentum: Any


def orthogonalise(x: Array) -> Array:
  """About U V^T of every matrix U S V^T, by Newton-Schulz steps.

  Each step is X <- a X + (b X X^T + c (X X^T)^2) X: it keeps U and V, and maps
  every singular value by the polynomial of COEFFICIENTS. Where a mesh splits
  the matrices, every step exchanges parts of them.

  Args:
    x: [..., M, N]; each of the last two dimensions' matrices by itself.

  Returns:
    The same shape and dtype, in which it is computed (the reference code rounds
    to bfloat16), with the device's own precision of products. Singular values
    become 0.68 to 1.21 where they are at least 0.002 of the Frobenius norm,
    and stay smaller where they are less; a zero matrix stays one.
  """
  tall = x.shape[-2] > x.shape[-1]
  x = x.mT if tall else x  # X X^T is the smaller square.
  square = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
  x = x / (jnp.sqrt(square) + _EPSILON)
  a, b, c = COEFFICIENTS

  def step(x: Array, _: None) -> tuple[Array, None]:
    gram = x @ x.mT
    return a * x + (b * gram + c * (gram @ gram)) @ x, None

  x, _ = jax.lax.scan(step, x, length=NUM_STEPS)
  return x.mT if tall else x


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
  """Gradients to Muon's directions, of parameters [..., inputs, outputs].

  M <- m M + (1 - m) G, and the direction is sqrt(max(1, outputs / inputs))
  times `orthogonalise` of Nesterov's m M + (1 - m) G.

  Args:
    momentum: m, in [0, 1).
  """

  def mean(old: Array, new: Array) -> Array:
    return momentum * old + (1 - momentum) * new

  def direction(x: Array) -> Array:
    inputs, outputs = x.shape[-2:]
    return math.sqrt(max(1.0, outputs / inputs)) * orthogonalise(x)

  def init(params: Any) -> State:
    return State(jax.tree.map(jnp.zeros_like, params))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, State]:
    del params  # The direction depends on gradients alone.
    means = jax.tree.map(mean, state.momentum, updates)
    ahead = jax.tree.map(mean, means, updates)
    return jax.tree.map(direction, ahead), State(means)

  return optax.GradientTransformation(init, update)
