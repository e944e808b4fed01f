"""Processes a sequence by chunks that read a buffer of earlier chunks' rows.

This is how MELT trains (arXiv 2605.07721, section 3.3): all tokens of a chunk
are computed in parallel, and attend to earlier chunks through the rows that
these wrote into a buffer. Differentiating a scan that carries the buffer would
store a copy of it per chunk. But written rows never change, so each chunk can
be recomputed from the final buffer, with later rows masked. The backward pass
is exact, and stores only that buffer, its gradient, and one chunk's
activations.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

_AXIS = -3  # Axis of a buffer's rows.


class Options(NamedTuple):
  """Static options.

  Attributes:
    step: (params, inputs, constants, history, first) -> (outputs, rows) of one
      chunk. `history` holds the buffers, whose rows from `first` on must have
      no effect; `rows` are the rows that the chunk's tokens write into each
      buffer, [..., C, G, d].
    reach: how many chunks back a read of the history has a gradient: 0 for
      none, negative for all. The rows of those chunks pass it on to the chunks
      that they read, so it is `hops` that bounds how far a gradient gets.
    hops: negative for gradients chunk by chunk; otherwise all chunks are
      recomputed in parallel, and gradients propagate from rows to earlier ones
      this many times. Exact from n - 1 hops on; stores the activations of all
      chunks.
  """

  step: Callable[..., tuple[Any, Any]]
  reach: int = -1
  hops: int = -1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
  options: Options, params: Any, inputs: Any, constants: Any, history: Any
) -> tuple[Any, Any]:
  """Computes one chunk after another.

  Args:
    options: the function of a chunk, and the reach of gradients.
    params: pytree of floating-point arrays.
    inputs: pytree of floating-point arrays by chunk, [n, ...].
    constants: pytree of arrays by chunk [n, ...] that get no gradient.
    history: pytree of buffers [..., n C, G, d]; every row is replaced.

  Returns:
    The outputs by chunk, [n, ...], and the buffers after the last chunk. The
    backward pass supports reverse mode only.
  """
  results, _ = _forward(options, params, inputs, constants, history)
  return results


def _forward(options, params, inputs, constants, history):
  def step(history, chunk):
    index, inputs, constants = chunk
    first = index * size
    outputs, rows = options.step(params, inputs, constants, history, first)
    return _put(history, rows, first), outputs

  num_chunks, size = _num_chunks(inputs), _chunk_size(inputs, history)
  by_chunk = jnp.arange(num_chunks), inputs, constants
  history, outputs = jax.lax.scan(step, history, by_chunk)
  return (outputs, history), (params, inputs, constants, history)


def sweeps(
  options: Options,
  num_sweeps: int,
  params: Any,
  inputs: Any,
  constants: Any,
  history: Any,
) -> tuple[Any, Any]:
  """Computes all chunks at once, from the previous sweep's history (Jacobi).

  After s sweeps the first s chunks equal those of `run`, whatever the history
  before: n sweeps are exact. All sweeps are differentiated, and their
  activations stored.

  Args:
    num_sweeps: s >= 1. The other arguments are those of `run`; the first sweep
      reads `history`.
  """
  outputs: Any = None
  for _ in range(num_sweeps):
    outputs, history = _together(options, params, inputs, constants, history)
  return outputs, history


def _together(options, params, inputs, constants, history):
  """The outputs of all chunks, and the buffers assembled from their rows."""
  num_chunks, size = _num_chunks(inputs), _chunk_size(inputs, history)
  step = jax.vmap(options.step, (None, 0, 0, None, 0))
  first = size * jnp.arange(num_chunks)
  outputs, rows = step(params, inputs, constants, history, first)

  def joined(rows: Array, whole: Array) -> Array:
    rows = jnp.moveaxis(rows, 0, rows.ndim + _AXIS - 1)
    return rows.reshape(whole.shape).astype(whole.dtype)

  return outputs, jax.tree.map(joined, rows, history)


def _backward_at_once(options, residuals, cotangents):
  params, inputs, constants, history = residuals
  d_outputs, d_history = cotangents

  def recompute(params, inputs, history):
    return _together(options, params, inputs, constants, history)

  _, pull_back = jax.vjp(recompute, params, inputs, history)
  d_rows = d_history
  for _ in range(options.hops):
    *_, d_before = pull_back((d_outputs, d_rows))
    d_rows = jax.tree.map(jnp.add, d_history, d_before)
  d_params, d_inputs, _ = pull_back((d_outputs, d_rows))
  return d_params, d_inputs, None, jax.tree.map(jnp.zeros_like, history)


def _backward(options, residuals, cotangents):
  if options.hops >= 0:
    return _backward_at_once(options, residuals, cotangents)
  params, inputs, constants, history = residuals
  d_outputs, d_history = cotangents
  num_chunks, size = _num_chunks(inputs), _chunk_size(inputs, history)

  def step(carry, chunk):
    d_params, d_history = carry
    index, inputs, constants, d_outputs = chunk
    first = index * size

    def recompute(params, inputs, history):
      return options.step(params, inputs, constants, history, first)

    # All later chunks have added their gradients to these rows by now.
    d_rows = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, x.ndim + _AXIS),
      d_history,
    )
    if options.reach == 0:
      _, pull_back = jax.vjp(
        lambda p, x: recompute(p, x, history), params, inputs
      )
      d_own, d_inputs = pull_back((d_outputs, d_rows))
    else:
      _, pull_back = jax.vjp(recompute, params, inputs, history)
      d_own, d_inputs, d_before = pull_back((d_outputs, d_rows))
      if options.reach > 0:
        least = first - options.reach * size
        d_before = jax.tree.map(lambda x: _without(x, least), d_before)
      d_history = jax.tree.map(jnp.add, d_history, d_before)
    return (jax.tree.map(jnp.add, d_params, d_own), d_history), d_inputs

  start = jax.tree.map(jnp.zeros_like, params), d_history
  by_chunk = jnp.arange(num_chunks), inputs, constants, d_outputs
  (d_params, _), d_inputs = jax.lax.scan(step, start, by_chunk, reverse=True)
  return d_params, d_inputs, None, jax.tree.map(jnp.zeros_like, history)


run.defvjp(_forward, _backward)


def _num_chunks(inputs: Any) -> int:
  return len(jax.tree.leaves(inputs)[0])


def _chunk_size(inputs: Any, history: Any) -> int:
  num_rows = jax.tree.leaves(history)[0].shape[_AXIS]
  size, rest = divmod(num_rows, _num_chunks(inputs))
  assert rest == 0, (num_rows, _num_chunks(inputs))
  return size


def _put(history: Any, rows: Any, first: Array) -> Any:
  return jax.tree.map(
    lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
      whole, part.astype(whole.dtype), first, whole.ndim + _AXIS
    ),
    history,
    rows,
  )


def _without(x: Array, num_rows: Array) -> Array:
  """The array with its first rows set to zero."""
  row = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + _AXIS)
  return jnp.where(row < num_rows, 0, x)
