"""How the prelude's output enters every loop.

An injection maps the state h and the prelude's output e, [B, T, D] each, to the
input of the core; all are in the accumulate dtype. Sources: "linear", Huginn
(arXiv 2502.05171); "diagonal", Parcae (arXiv 2604.12946); "anchor", the
boundary operator (arXiv 2609.19107), which instead adds after the loop.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.errors import UserError
from loopjax.nn import linear
from loopjax.types import Array, Precision

_STEP = 0.5 * math.log(5)  # Initial dt, for a decay of sqrt(1/5).
_MAX_A_LOG = 80.0  # Maximum of A_log; exp overflows in float32 above.


class Linear(nnx.Module):
  """A [h; e]: a projection without a bias, from 2 D to D (Huginn)."""

  def __init__(
    self, width: int, init: Any, *, precision: Precision, rngs: nnx.Rngs
  ):
    self.adapter = linear.linear(
      2 * width, width, init=init, precision=precision, rngs=rngs
    )
    self.precision = precision

  def __call__(self, hidden: Array, injected: Array) -> Array:
    concatenated = jnp.concatenate([hidden, injected], axis=-1)
    return self.adapter(concatenated).astype(self.precision.accumulate)

  def radius(self) -> Array:
    """The spectral norm of the half of A that acts on h, f32; unbounded."""
    kernel = self.adapter.kernel[...].astype(jnp.float32)
    return jnp.linalg.norm(kernel[: len(kernel) // 2], ord=2)


class Diagonal(nnx.Module):
  """exp(-dt A) h + dt (B e), dt = softplus(dt_bias), A = exp(A_log) (Parcae).

  dt and A are per feature; the decay is always in [0, 1], which bounds the
  state. B is initially the identity.
  """

  def __init__(
    self, width: int, init: Any, *, precision: Precision, rngs: nnx.Rngs
  ):
    del init
    self.A_log = nnx.Param(jnp.zeros(width, precision.params))
    # The inverse of softplus.
    bias = math.log(math.expm1(_STEP))
    self.dt_bias = nnx.Param(jnp.full(width, bias, precision.params))

    def identity(key: Array, shape: Any, dtype: Any, *_: Any) -> Array:
      del key
      return jnp.eye(shape[0], dtype=dtype)

    self.input_map = linear.linear(
      width, width, init=identity, precision=precision, rngs=rngs
    )
    self.precision = precision

  def decay(self) -> Array:
    """exp(-dt A), f32 [D], the factors of the state."""
    step = jax.nn.softplus(self.dt_bias[...].astype(jnp.float32))
    rate = jnp.minimum(self.A_log[...].astype(jnp.float32), _MAX_A_LOG)
    return jnp.exp(-step * jnp.exp(rate))

  def radius(self) -> Array:
    """The largest decay, f32, at most 1: an upper bound on what h retains."""
    return jnp.max(self.decay())

  def __call__(self, hidden: Array, injected: Array) -> Array:
    step = jax.nn.softplus(self.dt_bias[...].astype(jnp.float32))
    added = self.input_map(injected).astype(self.precision.accumulate)
    added = step.astype(added.dtype)[None, None] * added
    decayed = self.decay().astype(hidden.dtype)[None, None] * hidden
    return decayed + added


def _add(hidden: Array, injected: Array) -> Array:
  return hidden + injected


def _unchanged(hidden: Array, injected: Array) -> Array:
  del injected
  return hidden


class Injection(NamedTuple):
  """How the prelude's output e enters each loop of the core.

  Attributes:
    make: (width, init, precision=, rngs=) -> the function (h, e) -> the input
      of the core.
    num_products: number of products with a matrix [D, D] per token and loop.
    radius: upper bound on what h retains, from the result of `make`; None if
      unknown.
  """

  make: Callable[..., Any]
  num_products: int
  radius: Callable[[Any], Array] | None


INJECTIONS: dict[str, Injection] = {
  "none": Injection(lambda *_, **__: _unchanged, 0, None),
  "add": Injection(lambda *_, **__: _add, 0, lambda _: jnp.ones(())),
  "linear": Injection(Linear, 2, Linear.radius),
  "diagonal": Injection(Diagonal, 1, Diagonal.radius),
  "anchor": Injection(lambda *_, **__: _unchanged, 0, None),
}


def check(name: str) -> None:
  """Raises UserError if an entry of INJECTIONS is not an `Injection`."""
  entry = INJECTIONS[name]
  if not isinstance(entry, Injection):
    raise UserError(
      f"model.injection={name}: its entry in INJECTIONS is a"
      f" {type(entry).__name__}, expected Injection(make, num_products,"
      " radius); docs/howto/model.md has an example"
    )
