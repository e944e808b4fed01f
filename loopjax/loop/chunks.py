"""Processes a sequence in chunks that attend to earlier chunks' rows.

This is how MELT trains (arXiv 2605.07721, section 3.3): all tokens of a chunk
are computed in parallel, and attend to earlier chunks through the rows that
these chunks wrote into a buffer. Differentiating a scan that carries the buffer
would store a copy of it per chunk. But written rows never change: each chunk
can be recomputed from the final buffer, with later rows masked. The backward
pass is exact, and stores only the buffer, its gradient, and one chunk's
activations.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

EVERY = -1  # Used instead of an axis, see `split`.
Step = Callable[..., tuple[Any, Any]]  # Of one chunk, see `run`.
_AXIS = -3  # Axis of a buffer's rows.
# Sequential chunks are grouped into stages, and get only the rows that precede
# their stage's last chunk: most rows are not written yet.
_MAX_STAGES = 4
_MIN_ROWS = 1024  # Per stage.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
  step: Step, params: Any, inputs: Any, constants: Any, history: Any
) -> tuple[Any, Any]:
  """Computes one chunk after another.

  Args:
    step: (params, inputs, constants, history, first) -> (outputs, rows) of one
      chunk. Its history is the first rows of the buffers; rows from `first` on
      must have no effect. `rows` [..., C, G, d] are what the chunk's tokens
      write into each buffer.
    params: pytree of floating-point arrays.
    inputs: pytree of floating-point arrays by chunk, [n, ...].
    constants: pytree of arrays by chunk [n, ...] that get no gradient.
    history: pytree of buffers [..., n C, G, d]; every row is replaced.

  Returns:
    The outputs by chunk, [n, ...], and the buffers after the last chunk. The
    backward pass supports reverse mode only.
  """
  results, _ = _forward(step, params, inputs, constants, history)
  return results


def _forward(step, params, inputs, constants, history):
  num_chunks, size = _num_chunks(inputs), _chunk_size(inputs, history)
  by_chunk = jnp.arange(num_chunks), inputs, constants
  parts = []
  for stage in _stages(num_chunks, size):

    def write(history, chunk, stage=stage):
      index, inputs, constants = chunk
      first, visible = index * size, stage.visible_rows(history, size)
      outputs, rows = step(params, inputs, constants, visible, first)
      return _write_rows(history, rows, first), outputs

    history, outputs = jax.lax.scan(write, history, stage.select(by_chunk))
    parts.append(outputs)
  outputs = _joined(parts)
  return (outputs, history), (params, inputs, constants, history)


def _backward(step, residuals, cotangents):
  params, inputs, constants, history = residuals
  d_outputs, d_history = cotangents
  num_chunks, size = _num_chunks(inputs), _chunk_size(inputs, history)

  def pull_back(stage, carry, chunk):
    d_params, d_history = carry
    index, inputs, constants, d_outputs = chunk
    first, visible = index * size, stage.visible_rows(history, size)

    def recompute(params, inputs, history):
      return step(params, inputs, constants, history, first)

    # All later chunks have added their gradients to these rows by now.
    d_rows = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, x.ndim + _AXIS),
      d_history,
    )
    _, gradients = jax.vjp(recompute, params, inputs, visible)
    d_chunk, d_inputs, d_before = gradients((d_outputs, d_rows))
    d_history = jax.tree.map(_add_to_first, d_history, d_before)
    return (jax.tree.map(jnp.add, d_params, d_chunk), d_history), d_inputs

  carry = jax.tree.map(jnp.zeros_like, params), d_history
  by_chunk = jnp.arange(num_chunks), inputs, constants, d_outputs
  parts = []
  for stage in reversed(_stages(num_chunks, size)):
    carry, d_inputs = jax.lax.scan(
      functools.partial(pull_back, stage),
      carry,
      stage.select(by_chunk),
      reverse=True,
    )
    parts.insert(0, d_inputs)
  no_gradient = jax.tree.map(jnp.zeros_like, history)
  return carry[0], _joined(parts), None, no_gradient


run.defvjp(_forward, _backward)


def run_plainly(
  step: Step, params: Any, inputs: Any, constants: Any, history: Any
) -> tuple[Any, Any]:
  """`run`, differentiated by JAX: in all modes, also with respect to closures.

  The backward pass stores a buffer of each chunk.
  """
  return _forward(step, params, inputs, constants, history)[0]


def split(num_chunks: int, axis: int, whole: Any) -> Any:
  """Arrays by chunk: [..., n C, ...] to [n, ..., C, ...].

  Args:
    num_chunks: n.
    axis: the tokens' axis; EVERY gives each chunk the whole array, [n, ...].
    whole: pytree of arrays.
  """

  def split_array(x: Array) -> Array:
    if axis == EVERY:
      return jnp.broadcast_to(x, (num_chunks, *x.shape))
    shape = (*x.shape[:axis], num_chunks, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  return jax.tree.map(split_array, whole)


def join(axis: int, by_chunk: Array) -> Array:
  """The inverse of `split` for an axis of tokens."""
  x = jnp.moveaxis(by_chunk, 0, axis)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


class _Stage(NamedTuple):
  """Chunks `start` to `stop` - 1 out of n."""

  start: int
  stop: int
  num_chunks: int

  def select(self, by_chunk: Any) -> Any:
    """The stage's chunks of arrays [n, ...]."""
    return jax.tree.map(lambda x: x[self.start : self.stop], by_chunk)

  def visible_rows(self, history: Any, size: int) -> Any:
    """The rows of buffers [..., n C, G, d] before the stage's last chunk."""
    if self == (0, self.num_chunks, self.num_chunks):
      return history
    num_rows = max(self.stop - 1, 1) * size
    return jax.tree.map(
      lambda x: jax.lax.slice_in_dim(x, 0, num_rows, axis=x.ndim + _AXIS),
      history,
    )


def _stages(num_chunks: int, size: int) -> list[_Stage]:
  num_stages = max(min(_MAX_STAGES, num_chunks * size // _MIN_ROWS), 1)
  edges = [num_chunks * i // num_stages for i in range(num_stages + 1)]
  return [
    _Stage(start, stop, num_chunks)
    for start, stop in itertools.pairwise(edges)
    if start < stop
  ]


def _joined(parts: list[Any]) -> Any:
  """Concatenates the stages' results, arrays by chunk."""
  if len(parts) == 1:
    return parts[0]
  return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _add_to_first(whole: Array, part: Array) -> Array:
  """Adds an array of its first rows to a buffer."""
  axis = whole.ndim + _AXIS
  if part.shape == whole.shape:
    return whole + part
  first = jax.lax.slice_in_dim(whole, 0, part.shape[axis], axis=axis)
  return jax.lax.dynamic_update_slice_in_dim(whole, first + part, 0, axis)


def _num_chunks(inputs: Any) -> int:
  return len(jax.tree.leaves(inputs)[0])


def _chunk_size(inputs: Any, history: Any) -> int:
  num_rows = jax.tree.leaves(history)[0].shape[_AXIS]
  size, remainder = divmod(num_rows, _num_chunks(inputs))
  assert remainder == 0, (num_rows, _num_chunks(inputs))
  return size


def _write_rows(history: Any, rows: Any, first: Array) -> Any:
  return jax.tree.map(
    lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
      whole, part.astype(whole.dtype), first, whole.ndim + _AXIS
    ),
    history,
    rows,
  )
