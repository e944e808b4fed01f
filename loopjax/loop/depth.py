"""The number of loops in training: fixed, or random per step or per row.

Samples depend only on random keys (inverse transform sampling): they are the
same on every mesh, for every number of microbatches and after a restore. One
program serves all depths.

Sources: Huginn (arXiv 2502.05171: Poisson log-normal, one draw per step),
Parcae (arXiv 2604.12946: Poisson, one draw per row).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.loop import driver
from loopjax.types import Array

Carry = TypeVar("Carry")
_SIGMA = 0.5  # Standard deviation of log(rate), as in Huginn, section 3.3.
_FAR = 7.0  # Standard deviations of log(rate) to both sides: 3e-12 is beyond.
_STEP = 0.7  # Of the integral over rates, in widths of the narrowest integrand.
_AT_A_TIME = 64  # Rates.
_TAIL = 1e-9  # Probability cut off without a maximum.
_LEAST = 1e-3  # Of a calibrated mean: every depth is at least one loop.


@functools.lru_cache(maxsize=64)
def probabilities(kind: str, mean: float, max_loops: int = 0) -> np.ndarray:
  """The distribution of depths 1, 2, ..., f64 [N]; sums to 1.

  Args:
    kind: "fixed": `mean`. "poisson": max(1, Poisson(mean)), as in Parcae.
      "poisson_lognormal": 1 + Poisson(rate), where log(rate) is normal with
      mean log(mean) - 1/8 and standard deviation 1/2, as in Huginn; its
      expectation is 1 + mean.
    mean: expected number of loops; less by 1 for "poisson_lognormal", and by
      exp(-mean) for "poisson".
    max_loops: larger depths are reduced to this; 0 for no maximum.
  """
  pmf = DEPTHS[kind](mean, max_loops)
  if max_loops and len(pmf) > max_loops:
    pmf = np.append(pmf[: max_loops - 1], pmf[max_loops - 1 :].sum())
  return pmf / pmf.sum()


def _fixed(mean: float, max_loops: int) -> np.ndarray:
  del max_loops
  return np.eye(round(mean))[-1]


def _poisson(mean: float, max_loops: int) -> np.ndarray:
  pmf = _mixture(np.array([mean]), np.ones(1), max_loops)
  # A depth of 0 is replaced by 1.
  return np.append(pmf[0] + pmf[1], pmf[2:])


def _poisson_lognormal(mean: float, max_loops: int) -> np.ndarray:
  # A count n has the mass of an integral over the normal z = log(rate). Its
  # integrand is close to a normal density of variance 1 / (1 + sigma^2 n), for
  # which the trapezoidal rule with a step of h widths has a relative error of 2
  # exp(-2 pi^2 / h^2), here 6e-18 (Trefethen and Weideman, SIAM Review, 2014).
  shift = math.log(mean) - _SIGMA**2 / 2
  largest = math.exp(shift + _SIGMA * _FAR)
  step = _STEP / math.sqrt(1 + _SIGMA**2 * largest)
  z = np.arange(-_FAR, _FAR, step)
  weights = np.exp(-(z**2) / 2)
  rates = np.exp(shift + _SIGMA * z)
  return _mixture(rates, weights / weights.sum(), max_loops)


# Unnormalised `probabilities`, from mean and max_loops.
DEPTHS: Mapping[str, Callable[[float, int], np.ndarray]] = {
  "fixed": _fixed,
  "poisson": _poisson,
  "poisson_lognormal": _poisson_lognormal,
}


def _mixture(
  rates: np.ndarray, weights: np.ndarray, max_loops: int
) -> np.ndarray:
  """A mixture of Poisson distributions, truncated at a tail of `_TAIL`."""
  num = 64
  while (pmf := _masses(rates, weights, num)).sum() < 1 - _TAIL:
    if max_loops and num > max_loops:  # The whole tail goes here.
      pmf[-1] += 1 - pmf.sum()
      break
    num *= 2
  return pmf[: 1 + np.searchsorted(np.cumsum(pmf), 1 - _TAIL)]


def _masses(rates: np.ndarray, weights: np.ndarray, num: int) -> np.ndarray:
  """The probabilities of 0 to num - 1 in a mixture, [num]."""
  counts = np.arange(num)
  log_factorials = np.array([math.lgamma(n + 1) for n in counts])
  pmf = np.zeros(num)
  for start in range(0, len(rates), _AT_A_TIME):
    here = slice(start, start + _AT_A_TIME)
    some = rates[here, None]
    pmf += weights[here] @ np.exp(counts * np.log(some) - some - log_factorials)
  return pmf


@functools.lru_cache(maxsize=64)
def calibrated(kind: str, mean: float, max_loops: int) -> float:
  """The `mean` setting that gives this expected depth under the maximum.

  The maximum must be 0 or more than the mean: the depth would be fixed.
  """
  assert not 0 < max_loops <= mean, (max_loops, mean)
  if kind == "poisson_lognormal" and not max_loops:
    return max(mean - 1, _LEAST)
  from scipy import optimize  # Takes long.

  def excess(setting: float) -> float:
    return expected(probabilities(kind, setting, max_loops)) - mean

  if excess(_LEAST) >= 0:
    return _LEAST
  return float(optimize.brentq(excess, _LEAST, 8 * mean))


def expected(pmf: np.ndarray, at_most: int | None = None) -> float:
  """The expectation of the depth, or of min(depth, at_most)."""
  depths = np.arange(1, len(pmf) + 1)
  return float(
    pmf @ (depths if at_most is None else np.minimum(depths, at_most))
  )


def draw(key: Array, pmf: np.ndarray) -> Array:
  """A depth from `probabilities`, i32 scalar."""
  cdf = jnp.asarray(np.cumsum(pmf)[:-1], jnp.float32)
  return 1 + jnp.sum(jax.random.uniform(key) >= cdf, dtype=jnp.int32)


def check_growth(steps: Sequence[int], loops: Sequence[int]) -> None:
  """Raises UserError unless the values are valid for `grown`."""
  positive = all(type(n) is int and n > 0 for n in (*steps, *loops))
  if len(steps) != len(loops) or not positive or [*steps] != sorted(set(steps)):
    raise UserError(
      f"model.growth_steps={steps!r} and model.growth_loops={loops!r} must be"
      " equally many positive integers, and the steps must increase"
    )


def grown(
  step: Array, until: Sequence[int], loops: Sequence[int], last: int
) -> Array:
  """The number of loops at a step, growing during training; i32 scalar.

  Args:
    step: optimizer steps taken.
    until, loops: loops[i] loops before step until[i].
    last: number of loops after the last of these steps.
  """
  depth = jnp.asarray(last)
  for end, count in reversed(list(zip(until, loops, strict=True))):
    depth = jnp.where(step < end, count, depth)
  return depth.astype(jnp.int32)


def run(
  step_fn: Callable[[Any, Carry, Array], Carry],
  shared: Any,
  carry: Carry,
  depth: Array,
  num_with_gradient: int,
) -> Carry:
  """Runs a number of loops that is only known at run time, with truncated BPTT.

  The last loops, at most `num_with_gradient`, have gradients through the carry
  and to `shared`. Earlier loops have none, not even to the initial carry.

  Args:
    step_fn: (shared, carry, loop index like `depth`) -> carry. Each row counts
      its loops separately: with a depth per row, rows may be in different
      loops.
    shared: inputs of all loops: the parameters, the injected input.
    carry: arrays [B, ...].
    depth: i32 scalar, or [B] for a depth per row; at least 1.
    num_with_gradient: b, static, at least 1.

  Returns:
    The carry, of each row after its own depth.
  """
  assert num_with_gradient > 0
  cut = jnp.maximum(depth - num_with_gradient, 0)  # Loops without a gradient.
  num_cut = jnp.max(cut)
  fixed = jax.lax.stop_gradient(shared)

  def cut_loop(n: Array, carry: Carry) -> Carry:
    index = jnp.broadcast_to(n, depth.shape)
    return driver.tree_where(n < cut, step_fn(fixed, carry, index), carry)

  after = jax.lax.fori_loop(0, num_cut, cut_loop, jax.lax.stop_gradient(carry))
  # Rows without earlier loops keep the gradient to their initial carry.
  carry = driver.tree_where(cut > 0, after, carry)

  # Steps that no row needs run too: with a `cond`, the backward pass would
  # store the weights for every loop.
  def loop(carry: Carry, n: Array) -> tuple[Carry, None]:
    new = step_fn(shared, carry, cut + n)
    return driver.tree_where(n < depth, new, carry), None

  return jax.lax.scan(loop, carry, jnp.arange(num_with_gradient))[0]


def run_all(
  step_fn: Callable[[Any, Carry, Array], Carry],
  shared: Any,
  carry: Carry,
  depth: Array,
  max_loops: int,
  *,
  remat: bool,
) -> Carry:
  """`run` where all loops have a gradient.

  Args:
    step_fn, shared, carry, depth: as in `run`.
    max_loops: maximum depth, static. Loops that no row needs are skipped.
    remat: whether the backward pass recomputes each loop. It then stores one
      loop and N carries, instead of N loops, where N is `max_loops`.
  """

  def loop(shared: Any, carry: Carry, n: Array) -> Carry:
    def run_loop(carry: Carry) -> Carry:
      index = jnp.broadcast_to(n, depth.shape)
      return driver.tree_where(n < depth, step_fn(shared, carry, index), carry)

    return jax.lax.cond(
      n < jnp.max(depth), run_loop, lambda carry: carry, carry
    )

  step = jax.checkpoint(loop, prevent_cse=False) if remat else loop
  return jax.lax.scan(
    lambda carry, n: (step(shared, carry, n), None),
    carry,
    jnp.arange(max_loops),
  )[0]
