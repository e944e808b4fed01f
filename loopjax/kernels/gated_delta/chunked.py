"""`gated_delta` by chunks of tokens, with its own backward pass.

Within a chunk of C tokens the rule is a triangular system (WY form and UT
transform of arXiv 2406.06484, with the decay of arXiv 2412.06464). Let c be the
running sum of log decays from the chunk's start, D_ij = exp(c_i - c_j) for i >=
j and 0 else, b the write gates, K the unit keys, Q the unit queries over
sqrt(d_k), S the incoming state, and * the element-wise product:

  M = strictly lower part of diag(b) K K^T * D,  A = (I + M)^-1
  R = diag(b) (V - diag(exp c) K S)                 errors before any write
  N = A R                                           the tokens' writes
  O = diag(exp c) Q S + (Q K^T * D) N               their outputs
  S <- exp(c_C) S + (diag(exp(c_C - c)) K)^T N

No exponent is positive: nothing overflows. A is computed by substitution, since
powers of M grow as 2^C where keys are similar. Three products depend on the
previous chunk; the rest is computed for several chunks at once.

The backward pass keeps the inputs, A, and S before each group of chunks. With
dR = A^T dN,

  dM = -strictly lower part of A^T dA A^T = -strictly lower part of dR N^T,

and, since c_i always occurs as a scale of a query or key of token i, dc_i is a
sum of <q_i, dq_i> and <k_i, dk_i>; neither M nor K K^T is recomputed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax import sharding
from loopjax.kernels.gated_delta import chunks, recurrence
from loopjax.kernels.gated_delta.reference import product
from loopjax.types import Array

# For accelerators, not measured: C, and how many chunks x heads x examples are
# computed at once to keep the device busy. On CPUs, chunks of 32 computed one
# at a time stay in cache: all chunks at once took 2.5 times as long, chunks of
# 64 took 1.2 times as long (T = 2048, 8 heads of width 64, value and gradient;
# bench_gated_delta.py --part=groups).
CHUNK_SIZE = 64
_BUSY = 256


class Plan(NamedTuple):
  """Partition of tokens, and the recurrence from chunk to chunk.

  Attributes:
    size: C, tokens per chunk. group: chunks per group.
    recur: as `recurrence.scan`.
    rounded: whether products, except the inverse, have bfloat16 operands.
  """

  size: int
  group: int
  recur: Callable[..., tuple[Array, Array, Array]] = recurrence.scan
  rounded: bool = False


def gated_delta(
  query: Array,
  key: Array,
  value: Array,
  log_decay: Array,
  write: Array,
  state: Array,
  *,
  chunk_size: int,
  chunks_at_once: int | None = None,
  recur: Callable[..., tuple[Array, Array, Array]] = recurrence.scan,
  whole_chunks: bool = False,
  rounded: bool = False,
) -> tuple[Array, Array]:
  """As in `api.gated_delta`, with reverse mode only.

  Args:
    query, key, value, log_decay, write, state: as in `api`; T > 0.
    chunk_size: the maximum of C.
    chunks_at_once: maximum chunks per group; the platform's default if None.
    recur: as `recurrence.scan`.
    whole_chunks: C is always the maximum.
    rounded: whether products of bfloat16 inputs have bfloat16 operands.
  """
  num_tokens = query.shape[1]
  size = chunk_size if whole_chunks else even_size(num_tokens, chunk_size)
  num_chunks = -(-num_tokens // size)
  if chunks_at_once is None:
    heads = value.shape[0] * value.shape[2]
    is_cpu = sharding.platform() == "cpu"
    chunks_at_once = 1 if is_cpu else max(1, _BUSY // heads)
  num_groups = -(-num_chunks // chunks_at_once)
  rounded = rounded and value.dtype == jnp.bfloat16
  plan = Plan(size, -(-num_chunks // num_groups), recur, rounded)
  missing = num_groups * plan.group * size - num_tokens
  inputs: Any = (query, key, value, log_decay, write)
  if missing:  # Padding acts like masked tokens.
    inputs = tuple(
      jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2))
      for x in inputs
    )
  output, state = _gated_delta(inputs, state, plan)
  return output[:, :num_tokens], state


def default_size() -> int:
  """Default C, smaller on CPUs."""
  return 32 if sharding.platform() == "cpu" else CHUNK_SIZE


def even_size(num_tokens: int, chunk_size: int) -> int:
  """C for the smallest number of chunks, rounded up to whole blocks."""
  num_chunks = -(-num_tokens // chunk_size)
  return -(-num_tokens // (num_chunks * chunks.BLOCK)) * chunks.BLOCK


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gated_delta(
  inputs: chunks.Inputs, state: Array, plan: Plan
) -> tuple[Array, Array]:
  """T must be a multiple of the tokens per group."""
  return _forward(inputs, state, plan)[0]


def _forward(inputs, state, plan):
  starts, take = _groups(inputs[0].shape[1], plan)

  def step(state, start):
    output, after, inverse = _group_forward(take(inputs, start), state, plan)
    return after, (output, state, inverse)

  after, (outputs, states, inverses) = jax.lax.scan(step, state, starts)
  return (_join(outputs), after), (inputs, states, inverses)


def _backward(plan, residuals, cotangents):
  inputs, states, inverses = residuals
  d_output, d_after = cotangents
  if plan.rounded:  # Only an operand of products.
    d_output = d_output.astype(jnp.bfloat16)
  starts, take = _groups(inputs[0].shape[1], plan)

  def step(d_after, group):
    start, state, inverse = group
    d_inputs, d_state = _group_backward(
      take(inputs, start), state, inverse, take(d_output, start), d_after, plan
    )
    return d_state, d_inputs

  groups = (starts, states, inverses)
  d_state, d_inputs = jax.lax.scan(step, d_after, groups, reverse=True)
  return jax.tree.map(_join, d_inputs), d_state


_gated_delta.defvjp(_forward, _backward)


def _groups(num_tokens: int, plan: Plan):
  """First tokens of the groups, and a function that slices [B, T, ...]."""
  length = plan.size * plan.group

  def take(arrays, start):
    return jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, start, length, axis=1), arrays
    )

  return jnp.arange(0, num_tokens, length), take


def _join(x: Array) -> Array:
  """Groups [G, B, T / G, ...] -> [B, T, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _group_forward(
  inputs: chunks.Inputs, state: Array, plan: Plan
) -> tuple[Array, Array, Array]:
  """Outputs [B, T, H, d_v], the state after them, and A [n, B, H, C, C]."""
  x, product = chunks.prepare(inputs, plan.size), _product(plan)
  decays = chunks.pair_decays(x)
  gram = product("...ik,...jk->...ij", x.key, x.key)
  inverse = chunks.inverse_of(x.write[..., None] * gram * decays)
  before, written, after = _run(x, inverse, state, plan)
  attention = product("...ik,...jk->...ij", x.query, x.key) * decays
  pairs = (attention, written), (chunks.from_start(x) * x.query, before)
  output = recurrence.sum_of_products(*pairs, rounded=plan.rounded)
  return chunks.unfold(output), after, inverse


def _run(
  x: chunks.Chunks, inverse: Array, state: Array, plan: Plan
) -> tuple[Array, Array, Array]:
  """Runs the chunks one after another.

  Returns:
    S before each chunk [n, B, H, d_k, d_v], N of each [n, B, H, C, d_v], and S
    after the last.
  """
  write = x.write[..., None]
  steps = recurrence.Steps(
    base=write * x.value,
    left=-write * chunks.from_start(x) * x.key,
    right=chunks.to_end(x) * x.key,
    matrix=inverse,
    through=chunks.through(x),
  )
  return plan.recur(_rounded(steps, plan), state, adjoint=False)


def _product(plan: Plan) -> Callable[..., Array]:
  """einsum in float32; its operands are rounded if the plan says so."""
  return recurrence.narrow_product if plan.rounded else product


def _rounded(steps: recurrence.Steps, plan: Plan) -> recurrence.Steps:
  """With the matrices of products in bfloat16, if the plan says so."""
  names = ("left", "right", "matrix") if plan.rounded else ()
  narrow = {n: getattr(steps, n).astype(jnp.bfloat16) for n in names}
  return steps._replace(**narrow)


def _group_backward(
  inputs: chunks.Inputs,
  state: Array,
  inverse: Array,
  d_output: Array,
  d_after: Array,
  plan: Plan,
) -> tuple[chunks.Inputs, Array]:
  """Cotangents of a group's inputs and of the state before it."""
  x, pull_back = jax.vjp(
    lambda inputs: chunks.prepare(inputs, plan.size), inputs
  )
  product = _product(plan)
  d_output = chunks.fold(d_output, plan.size)
  before, written, _ = _run(x, inverse, state, plan)
  decays, write = chunks.pair_decays(x), x.write[..., None]
  start, end = chunks.from_start(x), chunks.to_end(x)
  through = chunks.through(x)
  d_state, d_errors, d_after = _run_backward(
    x, inverse, decays, d_output, d_after, plan
  )
  d_attention = product("...iv,...jv->...ij", d_output, written) * decays
  d_overlap = product("...iv,...jv->...ij", d_errors, written) * decays
  d_overlap = -jnp.tril(d_overlap, -1)
  d_query = product("...ij,...jk->...ik", d_attention, x.key)
  d_query += start * product("...iv,...kv->...ik", d_output, before)
  # Cotangent of a key from its own row of M and of R, before the write gate,
  d_row = product("...ij,...jk->...ik", d_overlap, x.key)
  d_row -= start * product("...iv,...kv->...ik", d_errors, before)
  # in the rows of later tokens, and in the outgoing state.
  pairs = (d_attention.mT, x.query), (d_overlap.mT, write * x.key)
  d_column = recurrence.sum_of_products(*pairs, rounded=plan.rounded)
  d_end = end * product("...iv,...kv->...ik", written, d_after)
  d_sum = x.query * d_query + x.key * (write * d_row - d_column - d_end)
  d_sum = jnp.sum(d_sum, axis=-1)
  d_last = jnp.sum(x.key * d_end, axis=(-2, -1))
  d_last += jnp.sum(through * before * d_after, axis=(-2, -1))
  d_write = jnp.sum(x.value * d_errors, axis=-1)
  d_write += jnp.sum(x.key * d_row, axis=-1)
  (d_inputs,) = pull_back(
    chunks.Chunks(
      query=d_query,
      key=write * d_row + d_column + d_end,
      value=write * d_errors,
      write=d_write,
      coarse=jnp.zeros_like(x.coarse),  # Constant.
      fine=d_sum.at[..., -1].add(d_last),
    )
  )
  return d_inputs, d_state


def _run_backward(
  x: chunks.Chunks,
  inverse: Array,
  decays: Array,
  d_output: Array,
  d_after: Array,
  plan: Plan,
) -> tuple[Array, Array, Array]:
  """Cotangents of S before the group, of R, and of S after each chunk."""
  product = _product(plan)
  attention = product("...ik,...jk->...ij", x.query, x.key) * decays
  query = chunks.from_start(x) * x.query
  steps = recurrence.Steps(
    base=product("...ij,...iv->...jv", attention, d_output),
    left=chunks.to_end(x) * x.key,
    right=-x.write[..., None] * chunks.from_start(x) * x.key,
    matrix=inverse,
    through=chunks.through(x),
    extra=product("...ik,...iv->...kv", query, d_output),
  )
  d_after, d_errors, d_state = plan.recur(
    _rounded(steps, plan), d_after, adjoint=True
  )
  return d_state, d_errors, d_after
