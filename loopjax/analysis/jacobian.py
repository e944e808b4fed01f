"""One loop of a model as a map of its state, and how it stretches this.

States are pytrees of arrays [P, B, ...], of P layers, windows or chunks for
which loops run anew; P is 1 of most families.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg

from loopjax.loop import driver
from loopjax.program import step as step_lib
from loopjax.types import Array

_KRYLOV, _ROUNDS = 24, 3  # Products with a Jacobian in a round, and rounds.
_PRECISE = 1e-3  # Relative error at which rounds end.


def watched(
  model: Any,
  batch: Any,
  num_loops: int,
  names: tuple[str, ...] = (),
  edit: Any = None,
  loops: range | None = None,
) -> tuple[Any, Any]:
  """The output, and the state after each loop that runs, [P, K, B, ...].

  P is the number of layers, windows or chunks for which loops run anew, or 1.
  """
  call = step_lib.model_inputs(batch)
  if "loss" in names:
    call["targets"] = batch["targets"]
  output = model.module()(
    **call,
    num_loops=num_loops,
    kind=driver.Watched(edit, loops),
    trace=tuple(name for name in names if name != "loss"),
  )
  num_run = num_loops if loops is None else len(loops)
  return output, jax.tree.map(
    lambda x: x.reshape(-1, num_run, *x.shape[1:]), output.trace[driver.STATE]
  )


def from_state(state: Any, loop: int, num_loops: int) -> Any:
  """The edit with which loops begin with `loop`, from a state [P, B, ...]."""

  def begin(now: Any, k: Array) -> Any:
    first = k % num_loops == loop - 1
    return jax.tree.map(
      lambda x, y: jnp.where(first, x[k // num_loops], y), state, now
    )

  return begin


def flat(state: Any) -> Array:
  """A state [P, B, ...] as f32 [B, n]."""
  return jnp.concatenate(
    [
      jnp.moveaxis(x, 1, 0)
      .reshape(x.shape[1], -1)
      .astype(jnp.promote_types(x.dtype, jnp.float32))
      for x in jax.tree.leaves(state)
    ],
    axis=1,
  )


def shaped(rows: Array, like: Any) -> Any:
  """The inverse of `flat`, of [B, n]."""
  leaves, structure = jax.tree.flatten(like)
  ends = np.cumsum([x.size // len(rows) for x in leaves])
  return jax.tree.unflatten(
    structure,
    [
      jnp.moveaxis(
        part.reshape(len(rows), x.shape[0], *x.shape[2:]), 0, 1
      ).astype(x.dtype)
      for part, x in zip(
        jnp.split(rows, ends[:-1], axis=1), leaves, strict=True
      )
    ],
  )


def one_loop(model: Any, batch: Any, state: Any, loop: tuple[int, int]) -> Any:
  """The state [P, B, ...] after one loop: its index from 0, of so many."""
  index, num_loops = loop
  edit, run = from_state(state, index, num_loops), range(index, index + 1)
  _, states = watched(model, batch, num_loops, (), edit, run)
  return jax.tree.map(lambda x: x[:, 0], states)


def largest(
  krylov: Callable[[Array], tuple[Array, Array]], like: Array, squared: bool
) -> tuple[np.ndarray, np.ndarray]:
  """|largest eigenvalue| of a loop's Jacobian J, f32 [B], and its error.

  Or, if `squared`, its largest singular value, from J^T J. The error is the
  residual of the Ritz pair times the condition of the eigenvalue, |1 / (x y)|
  for left and right eigenvectors, to first order; it does not see an eigenvalue
  that no Krylov space has met.

  Args:
    krylov: `krylov` of a start [B, n].
    like: an array of the shape and dtype of a start.
    squared: as of `krylov`.
  """
  start = jax.random.normal(jax.random.key(0), like.shape, like.dtype)
  best = np.zeros(len(like)), np.full(len(like), np.inf)
  for _ in range(_ROUNDS):
    vectors, matrix = krylov(start)
    pairs = [_ritz(np.asarray(x, np.float64)) for x in jax.device_get(matrix)]
    value, error, right = map(np.array, zip(*pairs, strict=True))
    if squared:
      value = np.sqrt(value)
      error = error / np.maximum(2 * value, np.finfo(np.float32).tiny)
    error = error + 4 * np.finfo(matrix.dtype).eps * value
    better = error < best[1]
    best = np.where(better, value, best[0]), np.where(better, error, best[1])
    if np.all(best[1] <= _PRECISE * best[0]):
      break
    weights = jnp.asarray(right, like.dtype)
    start = jnp.einsum("jbn,bj->bn", vectors[:-1], weights)
  return best


@functools.partial(jax.jit, static_argnames=("loop",))
def krylov(
  model: Any,
  batch: Any,
  state: Any,
  start: Array,
  squared: Array | bool,
  loop: tuple[int, int],
) -> tuple[Array, Array]:
  """Arnoldi's iteration with J^T, or J^T J, of each example.

  J^T has the eigenvalues of J. Products with J are gradients of those with J^T:
  many kernels have no forward mode.

  Args:
    model: a `loopjax.Model`.
    batch: its inputs.
    state: where J is taken, [P, B, ...].
    start: f32 [B, n], see `flat`.
    squared: whether with J^T J; one program serves both.
    loop: as in `one_loop`.

  Returns:
    The orthonormal vectors [m + 1, B, n], and their matrix [B, m + 1, m].
  """
  _, pull = jax.vjp(lambda state: one_loop(model, batch, state, loop), state)
  _, push = jax.vjp(lambda x: pull(x)[0], state)  # Of a linear function.

  def product(rows: Array) -> Array:
    tangent = jax.lax.cond(
      squared, lambda x: push(x)[0], lambda x: x, shaped(rows, state)
    )
    return flat(pull(tangent)[0])

  def normed(x: Array, least: Array | float) -> tuple[Array, Array]:
    norm = jnp.linalg.norm(x, axis=-1)
    norm = jnp.where(norm > least, norm, 0)
    return jnp.where(norm > 0, 1 / norm, 0)[:, None] * x, norm

  size = min(_KRYLOV, start.shape[1])

  def step(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
    vectors, matrix = carry
    new = product(vectors[j])
    least = 8 * jnp.finfo(new.dtype).eps * jnp.linalg.norm(new, axis=-1)
    for _ in range(2):  # Once leaves too much of rounding.
      along = jnp.einsum("jbn,bn->bj", vectors, new, precision="highest")
      new -= jnp.einsum("jbn,bj->bn", vectors, along, precision="highest")
      matrix = matrix.at[:, :, j].add(along)
    new, norm = normed(new, least)
    matrix = matrix.at[:, j + 1, j].set(norm)
    return vectors.at[j + 1].set(new), matrix

  first, _ = normed(start, 0)
  vectors = jnp.zeros((size + 1, *start.shape), start.dtype).at[0].set(first)
  matrix = jnp.zeros((len(start), size + 1, size), start.dtype)
  return jax.lax.fori_loop(0, size, step, (vectors, matrix))


def _ritz(matrix: np.ndarray) -> tuple[float, float, np.ndarray]:
  """Of [m + 1, m]: the largest |eigenvalue|, its error, and a real vector."""
  square = matrix[:-1]
  values, left, right = linalg.eig(square, left=True, right=True)
  i = np.argmax(np.abs(values))
  size = np.linalg.norm(right[:, i]) * np.linalg.norm(left[:, i])
  tiny = np.finfo(np.float64).tiny
  condition = size / max(np.abs(np.vdot(left[:, i], right[:, i])), tiny)
  residual = matrix[-1, -1] * np.abs(right[-1, i])
  return np.abs(values[i]), condition * residual, right[:, i].real
