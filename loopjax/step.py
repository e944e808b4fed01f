"""The train state, and the pure functions that change and score it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from loopjax.types import Array, Batch, Metrics


class TrainState(NamedTuple):
  """All that training changes.

  Attributes:
    step: optimizer steps taken, i32.
    params: parameters, nested dict.
    ema: their moving average; an empty dict if the run keeps none.
    opt_state: of the optimizer.
    key: base of every random number; folded with the step.
  """

  step: Any
  params: Any
  ema: Any
  opt_state: Any
  key: Any


def init_state(
  params: Any, tx: optax.GradientTransformation, key: Array, use_ema: bool
) -> TrainState:
  """The state before the first step; the EMA starts at the parameters."""
  ema = jax.tree.map(jnp.copy, params) if use_ema else {}
  return TrainState(jnp.zeros((), jnp.int32), params, ema, tx.init(params), key)


def train_step(
  state: TrainState,
  batch: Batch,
  frozen: Any,
  *,
  graphdef: nnx.GraphDef,
  loss_fn: Any,
  tx: optax.GradientTransformation,
  ema_decay: float,
) -> tuple[TrainState, Metrics]:
  """One optimizer step.

  Args:
    state: is consumed if the caller donates it.
    batch: one global batch.
    frozen: what the family trains against and never updates.
    graphdef: the model without its parameters.
    loss_fn: the family's `loss`.
    tx: the optimizer.
    ema_decay: 0 for no average.

  Returns:
    (new state, metrics of this step: scalars and per-loop vectors). Gradient
    norms are those before clipping, over all and by top-level module.
  """
  key = jax.random.fold_in(state.key, state.step)

  def loss_of(params):
    model = nnx.merge(graphdef, params)
    return loss_fn(model, batch, key, state.step, frozen)

  (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema_decay:
    ema = optax.incremental_update(params, ema, 1.0 - ema_decay)
  norms = {
    f"grad_norm/{name}": optax.tree.norm(part) for name, part in grads.items()
  }
  metrics = {**metrics, "grad_norm": optax.tree.norm(grads), **norms}
  return TrainState(state.step + 1, params, ema, opt_state, state.key), metrics


def train_steps(
  state: TrainState, batches: Batch, frozen: Any, **static: Any
) -> tuple[TrainState, Metrics]:
  """Several steps in one call: batches are stacked, [steps, B, ...].

  Returns the new state and the mean of every metric over the steps.
  """

  def body(state, batch):
    return train_step(state, batch, frozen, **static)

  state, metrics = jax.lax.scan(body, state, batches)
  return state, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)


def eval_step(
  params: Any,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  score: Any,
  group_sizes: dict[str, int],
  num_loops: int,
  kind: str,
) -> dict[str, dict[str, Array]]:
  """Sums of every score over the batch's valid examples, by group.

  Args:
    params: parameters or their average.
    batch: has "valid" bool [B] and "group/<grouping>" i32 [B].
    graphdef: the model without its parameters.
    score: the task's `score`.
    group_sizes: number of groups of each grouping.
    num_loops: loops to run.
    kind: how the loop runs.

  Returns:
    {"": ..., "<grouping>": ...}: for each {"count": f32 [G], "<score>": f32
    [G, 2] sum and sum of squares}; G = 1 for "".
  """
  model = nnx.merge(graphdef, params)
  output = model(batch["inputs"], num_loops=num_loops, kind=kind)
  values = {**score(output, batch), **output.stats}
  valid = batch["valid"].astype(jnp.float32)
  groups = {"": (jnp.zeros(valid.shape, jnp.int32), 1)}
  for grouping, size in group_sizes.items():
    groups[grouping] = (batch[f"group/{grouping}"], size)
  sums = {}
  for grouping, (ids, size) in groups.items():
    # Sums, not products of matrices: those may round to fewer bits.
    by_group = functools.partial(
      jax.ops.segment_sum, segment_ids=ids, num_segments=size
    )
    sums[grouping] = {"count": by_group(valid)}
    for name, value in values.items():
      powers = jnp.stack([value, value**2], axis=1)
      sums[grouping][name] = by_group(powers * valid[:, None])
  return sums
