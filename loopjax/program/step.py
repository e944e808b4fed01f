"""The train state, and the pure functions of a training and evaluation step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from loopjax.loop import starts as starts_lib
from loopjax.losses import tokens as token_losses
from loopjax.nn import lora
from loopjax.program import gradients
from loopjax.types import Array, Batch, Carried, Metrics


class BadSteps(NamedTuple):
  """Steps with non-finite numbers, which did not change the parameters.

  Attributes:
    streak: consecutive bad steps so far, i32; stops at the limit.
    first: step of the first bad step in the streak, i32.
    hit: bool [parameters, in the order of jax.tree.leaves]: whether the
      gradient was non-finite in any of them.
  """

  streak: Any
  first: Any
  hit: Any


class TrainState(NamedTuple):
  """Everything that training updates.

  Attributes:
    step: optimizer steps taken, bad ones included, i32.
    params: parameters, nested dict.
    ema: moving average of the parameters; {} if the run keeps none.
    opt_state: state of the optimizer.
    key: base random key; folded with the step.
    bad: the bad steps so far.
    carried: state that the family carries from step to step.
    base: the frozen parameters beside `params`, which then has pairs (see
      `nn.lora`); {} if `params` has all.
  """

  step: Any
  params: Any
  ema: Any
  opt_state: Any
  key: Any
  bad: BadSteps
  carried: Carried
  base: Any


def scored_params(state: TrainState, alpha: float = 1.0) -> Any:
  """The parameters to evaluate: their average if the run keeps one."""
  trained = state.ema or state.params
  return lora.merge(state.base, trained, alpha) if state.base else trained


def learned(state: TrainState) -> dict[str, Any]:
  """Everything that a digest of the state covers, by name."""
  return {
    "params": state.params,
    "ema": state.ema,
    "opt": state.opt_state,
    "carried": state.carried,
    "base": state.base,
  }


def init_state(
  params: Any,
  tx: optax.GradientTransformation,
  key: Array,
  use_ema: bool,
  carried: Carried = Carried(),
  adaptation: lora.Adaptation | None = None,
) -> TrainState:
  """The state before the first step; the EMA starts at the parameters."""
  base: Any = {}
  if adaptation:
    base, params = lora.split(params, adaptation, jax.random.fold_in(key, 0))
  ema = jax.tree.map(jnp.copy, params) if use_ema else {}
  zero = jnp.zeros((), jnp.int32)
  bad = BadSteps(zero, zero, jnp.zeros(len(jax.tree.leaves(params)), bool))
  return TrainState(zero, params, ema, tx.init(params), key, bad, carried, base)


def train_step(
  state: TrainState,
  batch: Batch,
  teacher_params: Any,
  *,
  graphdef: nnx.GraphDef,
  teacher_graphdef: nnx.GraphDef | None,
  loss_fn: Any,
  tx: optax.GradientTransformation,
  ema_decay: float,
  num_microbatches: int,
  max_bad_steps: int,
  layout: gradients.Layout = gradients.Layout(),
  alpha: float = 1.0,
) -> tuple[TrainState, Metrics]:
  """One optimizer step.

  A step with a non-finite loss, gradient or carried state (a bad step) changes
  only the step counts; so does every step after `max_bad_steps` consecutive bad
  ones.

  Args:
    state: the train state; consumed if the caller donates it.
    batch: one global batch.
    teacher_params: the teacher's parameters; {} without a teacher.
    graphdef: the model without its parameters.
    teacher_graphdef: the teacher without its parameters, or None.
    loss_fn: the family's `loss`.
    tx: the optimizer.
    ema_decay: maximum decay of the parameters' moving average; the decay at
      step t is at most (1 + t) / (10 + t). 0 for no average.
    num_microbatches: number of microbatches over which gradients are
      accumulated.
    max_bad_steps: number of consecutive bad steps after which updates stop.
    layout: how parameters are gathered and cast.
    alpha: `optim.lora_alpha`, of pairs.

  Returns:
    (new state, metrics of this step: scalars and per-loop vectors). Gradient
    norms are taken before clipping, overall and by top-level module;
    "accepted" is 0 for a bad step and 1 for all others.
  """
  key = jax.random.fold_in(state.key, state.step)
  params, base, pull_back = _adapted(state, alpha)
  metrics, carried, grads = gradients.gradients(
    _objective(loss_fn, graphdef, teacher_graphdef),
    (params, (teacher_params, base)),
    batch,
    state.carried,
    (key, state.step),
    num_microbatches,
    layout,
  )
  grads = pull_back(grads)
  norms = jax.tree.map(optax.tree.norm, grads)
  norm = optax.tree.norm(norms)
  finite = _all_finite((metrics["loss"], norm, carried))
  with jax.named_scope("optimizer"):
    new = (*_updated(state, grads, tx, ema_decay), carried)
    old = (state.params, state.ema, state.opt_state, state.carried)
    accept = finite & (state.bad.streak < max_bad_steps)
    params, ema, opt_state, carried = jax.tree.map(
      lambda new, old: jnp.where(accept, new, old), new, old
    )
  bad = _count(state, finite, norms, max_bad_steps)
  metrics |= {"grad_norm": norm, "accepted": accept.astype(jnp.float32)}
  metrics |= {
    f"grad_norm/{name}": optax.tree.norm(part) for name, part in norms.items()
  }
  state = TrainState(
    state.step + 1, params, ema, opt_state, state.key, bad, carried, state.base
  )
  return state, metrics


def _objective(
  loss_fn: Any, graphdef: nnx.GraphDef, teacher_graphdef: nnx.GraphDef | None
) -> Any:
  """The family's `loss` as a function of parameters, for `gradients`."""

  def loss_of(params, batch, key, step, frozen):
    teacher_params, base = frozen
    model = nnx.merge(graphdef, lora.joined(base, params))
    teacher = None
    if teacher_graphdef is not None:
      teacher = nnx.merge(teacher_graphdef, teacher_params)
    loss, metrics = loss_fn(model, batch, key, step, teacher)
    return loss, {"loss": loss, **metrics}

  return loss_of


def _updated(
  state: TrainState,
  grads: Any,
  tx: optax.GradientTransformation,
  ema_decay: float,
) -> tuple[Any, Any, Any]:
  """(parameters, their average, the optimizer's state) after an update."""
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  if not ema_decay:
    return params, state.ema, opt_state
  # Warmed up: otherwise a short run's average is mostly its initial values.
  decay = jnp.minimum(ema_decay, (1 + state.step) / (10 + state.step))
  ema = optax.incremental_update(params, state.ema, 1.0 - decay)
  return params, ema, opt_state


def _adapted(state: TrainState, alpha: float) -> tuple[Any, Any, Any]:
  """(parameters with gradients, others, from their gradients to the state's).

  Sums of matrices and pairs exist once a step: their gradients are accumulated
  over loops and microbatches, and then become those of the pairs.
  """
  if not state.base:
    return state.params, {}, lambda grads: grads
  params, pull_back = jax.vjp(
    lambda trained: lora.adapted(state.base, trained, alpha), state.params
  )
  rest = lora.rest(state.base, params)
  return params, rest, lambda grads: pull_back(grads)[0]


def _all_finite(tree: Any) -> Array:
  """Whether every number in a pytree is finite, bool scalar."""
  finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
  return functools.reduce(jnp.logical_and, finite, jnp.bool_(True))


def _count(state, finite, norms, max_bad_steps) -> BadSteps:
  """The record of bad steps, updated after a step."""
  bad = state.bad
  hit = ~jnp.isfinite(jnp.stack(jax.tree.leaves(norms)))
  after = BadSteps(
    streak=jnp.where(finite, 0, bad.streak + 1),
    first=jnp.where(bad.streak == 0, state.step, bad.first),
    hit=jnp.where(finite, False, bad.hit | hit),
  )
  stopped = bad.streak >= max_bad_steps
  return jax.tree.map(lambda x, y: jnp.where(stopped, x, y), bad, after)


def train_steps(
  state: TrainState, batches: Batch, teacher_params: Any, **static: Any
) -> tuple[TrainState, Metrics]:
  """Several steps in one call; batches are stacked, [steps, B, ...].

  Returns the new state and the metrics of every step, [steps, ...].
  """

  def body(state, batch):
    return train_step(state, batch, teacher_params, **static)

  return jax.lax.scan(body, state, batches)


def model_inputs(batch: Batch) -> dict[str, Any]:
  """The entries of a batch that are arguments of the model's `__call__`.

  Models that cannot separate documents reject tasks with "documents".
  """
  names = ("inputs", "documents")
  return {name: batch[name] for name in names if name in batch}


def eval_step(
  params: Any,
  batch: Batch,
  *,
  graphdef: nnx.GraphDef,
  score: Any,
  num_loops: int,
  execution: str,
  trace: tuple[str, ...] = (),
  starts: starts_lib.Starts | None = None,
) -> dict[str, Any]:
  """Every score of every example of the batch.

  Args:
    params: parameters or their average.
    batch: has "valid" bool [B] and "group/<grouping>" i32 [B] per grouping; and
      with starts "start" and "example", i32 [B], the numbers of each row's
      start and of its example.
    graphdef: the model without its parameters.
    score: the task's `score`.
    num_loops: number of loops to run.
    execution: how the loop runs, see `loop.driver.run_loop`.
    trace: per-loop records that the score uses.
    starts: how rows start; None for a forward pass.

  Returns:
    "scores": f32 [B], or (values, weights) f32 [B] each, by name; the batch's
    "valid" and groups; and with starts its numbers, and "answers", see
    `loop.starts.measured`.
  """
  model, read = nnx.merge(graphdef, params), model_inputs(batch)
  if starts:
    keys = starts_lib.keys_of(starts.seed, batch["inputs"], batch["start"])
    read |= starts_lib.begin(model, keys, starts)
  output = model(**read, num_loops=num_loops, kind=execution, trace=trace)
  if output.hidden is not None:  # No logits needed.
    tokens = token_losses.read_out(model, output.hidden, batch["targets"])
    output = output._replace(tokens=tokens)
  result: dict[str, Any] = {
    name: array
    for name, array in batch.items()
    if name in ("valid", "start", "example") or name.startswith("group/")
  }
  if starts:
    result["answers"] = starts_lib.measured(model, output, batch, starts)
  return {**result, "scores": {**score(output, batch), **output.stats}}
