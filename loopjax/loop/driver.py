"""The loop of every family: `scan` for training, `while` for early stopping.

What passes from loop to loop can be watched and edited, of every family, with
the kind `Watched`.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.nn import remat as remat_lib
from loopjax.types import Array

Carry = TypeVar("Carry")
KINDS = ("scan", "while", "unroll")
STATE = "state"  # What a `Watched` loop records.


class Part(NamedTuple):
  """The part of a loop's carry that is its state, arrays [B, ...] by name.

  The rest, such as a cache or the sum of weighted outputs, is not shown.

  Attributes:
    read: carry -> state.
    write: (carry, state) -> the carry with this state.
  """

  read: Callable[[Any], Any]
  write: Callable[[Any, Any], Any]


WHOLE = Part(lambda carry: carry, lambda carry, state: state)


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
  """A kind of loop: a scan that records its state, and may edit it.

  The records, and so the trace of a model that is called with this `kind`, have
  "state", the state after each loop, after its edit: a pytree of arrays
  [K, B, ...].

  A model that loops anew for each layer, window or chunk runs P K loops: k
  counts them in the order in which they run, and the records are [P K, B, ...].

  Attributes:
    edit: (state, k, i32 scalar from 0) -> the state that loop k passes on
      instead, or that is read out if it is the last; None for no edit.
    loops: the loops that run (of each layer, window or chunk), consecutive ones
      of the K; None for all. If they begin later than with loop 0, `edit` gives
      the state after the loop before them.
    before: number of loops that have run in earlier layers, windows or chunks.
  """

  edit: Callable[[Any, Array], Any] | None = None
  loops: range | None = None
  before: Array | int = 0

  def after(self, before: Array | int) -> "Watched":
    """The same, of the next layer, window or chunk."""
    return dataclasses.replace(self, before=before)

  def within(self, start: int, stop: int) -> range:
    """Those of the loops start .. stop - 1 that run."""
    if self.loops is None:
      return range(start, stop)
    first, end = max(start, self.loops.start), min(stop, self.loops.stop)
    return range(first, max(first, end))

  def begin(self, carry: Any, loops: range, part: Part) -> Any:
    """The carry before `loops`, some of `within`."""
    if loops and self.loops and loops.start == self.loops.start > 0:
      return self._edited(carry, loops.start - 1, part)
    return carry

  def step(
    self, step_fn: Callable[..., tuple[Any, Any]], part: Part
  ) -> Callable[..., tuple[Any, Any]]:
    """The step (carry, k, ...) of a loop, with the edit and the record."""

    def step(carry: Any, k: Array, *items: Any) -> tuple[Any, Any]:
      carry, record = step_fn(carry, k, *items)
      carry = self._edited(carry, k, part)
      return carry, _with_state(record, part.read(carry))

    return step

  def _edited(self, carry: Any, k: Array | int, part: Part) -> Any:
    if self.edit is None:
      return carry
    state = part.read(carry)
    new = self.edit(state, jnp.asarray(self.before + k, jnp.int32))
    if _abstract(new) != _abstract(state):
      raise UserError(
        "edit(state, k) must return the arrays of the state, of the same"
        f" shapes and dtypes: {_abstract(state)}, not {_abstract(new)}"
      )
    return part.write(carry, new)


Kind = str | Watched


def _abstract(state: Any) -> Any:
  """What two states must have in common, as text."""
  return str(jax.tree.map(jax.typeof, state))


def _with_state(record: Any, state: Any) -> Any:
  """A record with the state in its last dict."""
  if isinstance(record, tuple):
    return (*record[:-1], _with_state(record[-1], state))
  return {**record, STATE: state}


def later(kind: Kind, num_before: Array | int) -> Kind:
  """The kind of loops before which others have run, see `Watched`."""
  return kind.after(num_before) if isinstance(kind, Watched) else kind


def in_order(states: Any) -> dict[str, Any]:
  """The trace of P layers, windows or chunks, of states [P, K, B, ...]."""
  return {STATE: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)}


def run_loop(
  step_fn: Callable[[Carry, Array], tuple[Carry, Any]],
  carry: Carry,
  num_steps: int,
  *,
  kind: Kind = "scan",
  remat: str = "none",
  done_fn: Callable[[Carry], Array] | None = None,
  first: int = 0,
  part: Part = WHOLE,
) -> tuple[Carry, Any, Array]:
  """Applies `step_fn` up to `num_steps` times.

  Args:
    step_fn: (carry, step index, i32 scalar) -> (carry, record). The carry keeps
      its structure, shapes and dtypes.
    num_steps: K, static; 0 steps of any kind are a scan.
    kind: "scan" compiles one step and is differentiable in reverse mode;
      "unroll" compiles K copies and is differentiable; residuals are not
      stacked; "while" exits as soon as `done_fn` holds and has no reverse mode
      (JAX raises an error). `Watched` is a scan.
    remat: what a step stores for the backward pass: "none" (no
      rematerialisation) stores everything, "full" recomputes the step, "dots"
      stores the matrix products, "dots_no_batch" only products with parameters
      (no attention weights), and "outputs" the outputs that attention and MLP
      add to the residual stream.
    done_fn: carry -> bool scalar, true when further steps cannot change the
      result. Only "while" calls it; if it is correct, all kinds agree exactly.
    first: index of the first step.
    part: what of the carry is the state of a `Watched` loop. Its records are a
      dict, or a tuple that ends with one.

  Returns:
    (carry, records stacked along a leading axis [K, ...], i32 number of steps
    executed). Records of steps that "while" skipped are zeros.
  """
  if isinstance(kind, Watched):
    return _run_watched(
      remat_lib.rematerialised(step_fn, remat, prevent_cse=False),
      carry,
      (),
      range(first, first + num_steps),
      kind,
      part,
    )
  if first:
    from_first = step_fn

    def step_fn(carry: Carry, k: Array) -> tuple[Carry, Any]:
      return from_first(carry, k + first)

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


def run_over(
  step_fn: Callable[..., tuple[Carry, Any]],
  carry: Carry,
  items: Any,
  num_steps: int,
  *,
  kind: Kind = "scan",
  part: Part = WHOLE,
) -> tuple[Carry, Any]:
  """`run_loop` of steps that differ: step_fn(carry, k, *items of step k).

  Args:
    step_fn, carry, num_steps, kind, part: as in `run_loop`.
    items: a tuple of pytrees of arrays [K, ...].

  Returns:
    (carry, records [K, ...]).
  """
  if isinstance(kind, Watched):
    steps = range(num_steps)
    return _run_watched(step_fn, carry, items, steps, kind, part)[:2]
  return jax.lax.scan(
    lambda carry, x: step_fn(carry, *x),
    carry,
    (jnp.arange(num_steps), *items),
    unroll=kind == "unroll",
  )


def run_once(
  step_fn: Callable[[Any, Any], tuple[Any, Any]],
  carry: Any,
  k: int,
  *,
  kind: Kind,
  part: Part = WHOLE,
) -> tuple[Any, Any]:
  """A step that is unlike the others of its loop.

  Args:
    step_fn, kind, part: as in `run_loop`; the step may change the structure of
      the carry.
    k: index of the step.

  Returns:
    (carry, records [1, ...]).
  """
  num_records = 1
  if isinstance(kind, Watched):
    loops = kind.within(k, k + 1)
    carry, num_records = kind.begin(carry, loops, part), len(loops)
    step_fn = kind.step(step_fn, part)
  carry, record = step_fn(carry, k)
  return carry, jax.tree.map(lambda x: x[None][:num_records], record)


def _run_watched(step_fn, carry, items, steps: range, kind: Watched, part):
  """`run_loop` and `run_over` of this kind."""
  loops = kind.within(steps.start, steps.stop)
  chosen = slice(loops.start - steps.start, loops.stop - steps.start)
  step_fn = kind.step(step_fn, part)
  carry, records = jax.lax.scan(
    lambda carry, x: step_fn(carry, *x),
    kind.begin(carry, loops, part),
    (
      jnp.arange(loops.start, loops.stop),
      *jax.tree.map(lambda x: x[chosen], items),
    ),
  )
  return carry, records, jnp.asarray(len(loops))


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
  kind: Kind = "scan",
  part: Part = WHOLE,
) -> tuple[Carry | None, Carry, Any]:
  """`run_loop` with back-propagation through the last steps only.

  Args:
    step_fn, carry, num_steps, kind, part: as in `run_loop`.
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
  if isinstance(kind, Watched):  # Its state has a Jacobian.
    cut = 0
  bounds = sorted({0, cut, num_steps} | ({1} if want_first else set()))
  first, records = None, []
  for start, end in itertools.pairwise(bounds):
    if cut and start == cut:
      carry = cut_fn(carry)

    def segment_step(
      carry: Carry, n: Array, end: int = end
    ) -> tuple[Carry, Any]:
      if end <= cut:
        not_first = n > 0
        carry = jax.tree.map(
          lambda x, y: jnp.where(not_first, x, y), cut_fn(carry), carry
        )
      return step_fn(carry, n)

    carry, segment, _ = run_loop(
      segment_step, carry, end - start, kind=kind, first=start, part=part
    )
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
