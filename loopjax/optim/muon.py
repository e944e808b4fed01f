"""Muon: updates of matrices with all singular values near one.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (kellerjordan.github.io/posts/muon, 2024), and its reference code.
Muon is for hidden matrices. All other parameters are trained by AdamW; the
table of `loopjax.optim.parameters` says which.

`optax.contrib.muon` is not used: it combines Muon with NAdamW; its bias
correction of momentum and gradient differs, which changes Nesterov's look-ahead
in the first steps; it holds all Newton-Schulz steps in memory at once; and by
default it identifies matrices by their rank.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from loopjax import sharding
from loopjax.types import Array

# a x + b x^3 + c x^5 is so steep at 0 that five steps bring singular values of
# 0.002 near 1; in exchange none converges to 1 exactly.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
_EPSILON = 1e-7  # Added to the norm in the denominator.


class State(NamedTuple):
  """Muon's state.

  Attributes:
    momentum: running mean of the gradients, a tree like the parameters.
  """

  momentum: Any


def orthogonalise(x: Array) -> Array:
  """Approximates U V^T of every matrix U S V^T by Newton-Schulz steps.

  Each step is X <- a X + (b X X^T + c (X X^T)^2) X: it keeps U and V, and maps
  every singular value by the polynomial of COEFFICIENTS. Where a mesh splits
  the matrices themselves, every step communicates.

  Args:
    x: [..., rows, columns], a batch of matrices.

  Returns:
    The same shape and dtype. Computes in this dtype (the reference code rounds
    to bfloat16), at the device's default precision of products. Singular values
    become 0.68 to 1.21 if they are at least 0.002 of the Frobenius norm, and
    smaller otherwise; zero matrices stay zero.
  """
  tall = x.shape[-2] > x.shape[-1]
  x = x.mT if tall else x  # Makes X X^T the smaller product.
  square = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
  x = x / (jnp.sqrt(square) + _EPSILON)
  a, b, c = COEFFICIENTS

  def step(x: Array, _: None) -> tuple[Array, None]:
    gram = x @ x.mT
    return a * x + (b * gram + c * (gram @ gram)) @ x, None

  x, _ = jax.lax.scan(step, x, length=NUM_STEPS)
  return x.mT if tall else x


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
  """Turns gradients into Muon's updates, for parameters [..., inputs, outputs].

  M <- m M + (1 - m) G, and the update is sqrt(max(1, outputs / inputs)) times
  `orthogonalise` of Nesterov's m M + (1 - m) G. With mesh.fsdp, each device
  does this for some of a stack's matrices, none of which is split.

  Args:
    momentum: m, in [0, 1).
  """

  def mean(old: Array, new: Array) -> Array:
    return momentum * old + (1 - momentum) * new

  def direction(x: Array) -> Array:
    inputs, outputs = x.shape[-2:]
    scale = math.sqrt(max(1.0, outputs / inputs))
    return scale * sharding.by_matrix(orthogonalise, x)

  def init(params: Any) -> State:
    return State(jax.tree.map(jnp.zeros_like, params))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, State]:
    del params  # The update depends only on gradients.
    means = jax.tree.map(mean, state.momentum, updates)
    ahead = jax.tree.map(mean, means, updates)
    return jax.tree.map(direction, ahead), State(means)

  return optax.GradientTransformation(init, update)
