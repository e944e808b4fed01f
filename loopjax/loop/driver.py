"""The loop of every family: `scan` for training, `while` for early stopping."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.nn import remat as remat_lib
from loopjax.types import Array

Carry = TypeVar("Carry")
KINDS = ("scan", "while", "unroll")


def run_loop(
  step_fn: Callable[[Carry, Array], tuple[Carry, Any]],
  carry: Carry,
  num_steps: int,
  *,
  kind: str = "scan",
  remat: str = "none",
  done_fn: Callable[[Carry], Array] | None = None,
) -> tuple[Carry, Any, Array]:
  """Applies `step_fn` up to `num_steps` times.

  Args:
    step_fn: (carry, step index, i32 scalar) -> (carry, record). The carry keeps
      its structure, shapes and dtypes.
    num_steps: K, static; 0 steps of any kind are a scan.
    kind: "scan" compiles one step and is differentiable in reverse mode;
      "unroll" compiles K copies and is differentiable; residuals are not
      stacked; "while" exits as soon as `done_fn` holds and has no reverse mode
      (JAX raises an error).
    remat: what a step stores for the backward pass: "none" (no
      rematerialisation) stores everything, "full" recomputes the step, "dots"
      stores the matrix products, "dots_no_batch" only products with parameters
      (no attention weights), and "outputs" the outputs that attention and MLP
      add to the residual stream.
    done_fn: carry -> bool scalar, true when further steps cannot change the
      result. Only "while" calls it; if it is correct, all kinds agree exactly.

  Returns:
    (carry, records stacked along a leading axis [K, ...], i32 number of steps
    executed). Records of steps that "while" skipped are zeros.
  """
  step_fn = remat_lib.rematerialised(
    step_fn, remat, prevent_cse=kind == "unroll"
  )
  if kind == "while" and num_steps:
    return _while_loop(step_fn, carry, num_steps, done_fn)
  if kind == "scan" or not num_steps:
    carry, records = jax.lax.scan(step_fn, carry, jnp.arange(num_steps))
  elif kind == "unroll":
    rows = []
    for step in range(num_steps):
      # Static, unlike a JAX array.
      carry, record = step_fn(carry, np.asarray(step, np.int32))
      rows.append(record)
    records = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
  else:
    raise ValueError(f"loop kind {kind!r} is not one of {KINDS}")
  return carry, records, jnp.asarray(num_steps)


def repeat(
  fn: Callable[[Carry], Carry],
  carry: Carry,
  num_steps: int,
  *,
  kind: str = "scan",
  remat: str = "none",
) -> Carry:
  """`run_loop` of a function without records; the carry itself for 0 steps."""
  if not num_steps:
    return carry
  carry, _, _ = run_loop(
    lambda carry, _: (fn(carry), None), carry, num_steps, kind=kind, remat=remat
  )
  return carry


def run_truncated(
  step_fn: Callable[[Carry, Array], tuple[Carry, Any]],
  carry: Carry,
  num_steps: int,
  *,
  num_with_gradient: int,
  cut_fn: Callable[[Carry], Carry] = jax.lax.stop_gradient,
  want_first: bool,
  kind: str = "scan",
) -> tuple[Carry | None, Carry, Any]:
  """`run_loop` with back-propagation through the last steps only.

  Args:
    step_fn, carry, num_steps, kind: as in `run_loop`.
    num_with_gradient: number of last steps with a gradient; 0 for all.
    cut_fn: carry -> the carry with gradients stopped in all or part of it. It
      is applied before the first of the last steps and between all earlier
      steps, but not to the initial carry.
    want_first: whether to compile the first step separately, for its carry.

  Returns:
    (carry after the first step or None, carry after the last, records [K,
    ...]). The first carry always has its gradient.
  """
  cut = max(num_steps - num_with_gradient, 0) if num_with_gradient else 0
  bounds = sorted({0, cut, num_steps} | ({1} if want_first else set()))
  first, records = None, []
  for start, end in itertools.pairwise(bounds):
    if cut and start == cut:
      carry = cut_fn(carry)

    def segment_step(
      carry: Carry, n: Array, start: int = start, end: int = end
    ) -> tuple[Carry, Any]:
      if end <= cut:
        not_first = n + start > 0
        carry = jax.tree.map(
          lambda x, y: jnp.where(not_first, x, y), cut_fn(carry), carry
        )
      return step_fn(carry, n + start)

    carry, segment, _ = run_loop(segment_step, carry, end - start, kind=kind)
    records.append(segment)
    first = carry if want_first and end == 1 else first
  return first, carry, jax.tree.map(lambda *x: jnp.concatenate(x), *records)


def tree_where(where: Array, new: Carry, old: Carry) -> Carry:
  """`new` where the condition, a scalar or [B], holds, else `old`.

  Args:
    where: bool.
    new, old: pytrees of arrays [B, ...].
  """

  def choose(x: Array, y: Array) -> Array:
    shape = where.shape + (1,) * (x.ndim - where.ndim if where.ndim else 0)
    return jnp.where(where.reshape(shape), x, y)

  return jax.tree.map(choose, new, old)


def _while_loop(step_fn, carry, num_steps, done_fn):
  """The `while` loop; writes records into buffers of K rows."""
  record = jax.eval_shape(step_fn, carry, jnp.asarray(0))[1]
  buffers = jax.tree.map(
    lambda leaf: jnp.zeros((num_steps, *leaf.shape), leaf.dtype), record
  )

  def keep_going(state):
    step, carry, _ = state
    finished = done_fn(carry) if done_fn else jnp.asarray(False)
    return (step < num_steps) & ~finished

  def body(state):
    step, carry, buffers = state
    carry, record = step_fn(carry, step)
    buffers = jax.tree.map(
      lambda buffer, leaf: buffer.at[step].set(leaf), buffers, record
    )
    return step + 1, carry, buffers

  step, carry, records = jax.lax.while_loop(
    keep_going, body, (jnp.asarray(0), carry, buffers)
  )
  return carry, records, step
