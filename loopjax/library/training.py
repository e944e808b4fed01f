"""Training in a Python program, by the train step of `loopjax.main`."""

import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from loopjax import config as config_lib
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.library import checked
from loopjax.models import contract
from loopjax.nn import lora
from loopjax.optim import chain, parameters
from loopjax.program import state as state_lib
from loopjax.program import step
from loopjax.run import durations
from loopjax.types import Array, Carried, Metrics

# (module, batch, key, step, None) -> (loss, metrics), see `protocols.Loss`.
Loss = Callable[..., tuple[Array, Metrics]]
_Model = TypeVar("_Model", bound=Any)  # `library.model.Model`.
_NUMBER = (jax.Array, np.ndarray, np.generic, int, float)  # A metric's types.
_SECONDS = 10  # Between lines of progress.


class Stopped(NamedTuple):
  """Where `fit` stopped, from which another call continues.

  Attributes:
    state: the train state, without its key.
    num_steps: the length of the schedules; 0 if `fit` got the optimizer.
    num_examples: the number that was read of a dataset.
  """

  state: step.TrainState
  num_steps: int
  num_examples: int


def fit(
  model: _Model,
  data: Iterable[checked.Batch],
  *,
  steps: int,
  total_steps: int | None = None,
  tx: optax.GradientTransformation | None = None,
  loss: Loss | None = None,
  seed: int = 0,
  every: int = 100,
  on_log: Callable[[int, dict[str, float], Any], Any] | None = None,
  quiet: bool = False,
  check: bool = True,
) -> _Model:
  """The model, trained on batches by the train step of `loopjax.main`.

  A model that `fit` returned continues: two calls are one, bit for bit, with
  the same `total_steps`, `seed` and optimizer. Every other model begins with
  step 0, also one that was loaded, or changed since by `jax.tree`.

  A step is compiled once for the same settings, `loss`, `tx`, `total_steps` and
  shapes; pass the same objects again to use it again.

  Args:
    data: batches, such as `datasets(...)["train"]`, which continues after the
      examples that were read, rounded up to a whole batch, or any iterator;
      each is (inputs, targets), i32 [B, T], or a task's dict, which may have
      "weights", f32 [B, T], and in text "documents", i32 [B, T].
    steps: number of optimizer steps.
    total_steps: length of the schedule of learning rates, from step 0; as
      before, or at first `steps`, if None.
    tx: the optimizer; from the model's settings if None. Parameters that the
      settings or the family freeze (`optim.frozen`) stay as they are.
    loss: the objective (module, batch, key, step, None) -> (loss, metrics), a
      scalar and a dict, which may be empty; the family's if None.
    seed: seed of the objective's random numbers.
    every: number of steps between calls of `on_log`.
    on_log: called with the number of steps since step 0, the mean of each
      training metric since the last call, and the model; training stops if it
      returns True.
    quiet: whether to print nothing.
    check: whether `check_family` comes first, for a family from outside.
  """
  steps = checked.integer("steps", steps, 1)
  every, seed = checked.integer("every", every, 1), checked.seed(seed)
  settings = model.about.settings
  settings.check_trains()
  doubt = ""
  if check:
    doubt = contract.require(settings, "check=False trains all the same")
  parameters.check_registered(model.params)
  progress = _Progress(steps, quiet)
  stopped, total, optimizer = _continued(model, steps, total_steps, tx)
  begin = int(stopped.state.step) if stopped else 0
  end = begin + steps
  settings.check_schedule(end if tx else max(total, end))
  _check_signature("loss", loss, "module, batch, key, step, teacher")
  _check_signature("on_log", on_log, "step, metrics, model")
  batches = _batches(settings, data, stopped)
  first = checked.batch(settings, _next(batches, 0, steps))
  rows = len(first["inputs"])
  options = {"batch_size": rows, "num_microbatches": 1, "seed": seed}
  state, run = _begun(model, loss, optimizer, options, stopped)
  if doubt:
    progress.say(doubt)
  _say_what_ends(progress, model, stopped, end, 0 if tx else total)
  batch, kept = first, []
  for number in range(begin + 1, end + 1):
    state, metrics = run(state, batch, {})
    kept.append(metrics)
    progress.after(number - begin, metrics)
    if number % every == 0 or number == end:
      _check_finite(state.bad)
      means, kept = _means(kept), []
      params = step.scored_params(state, settings.optim.lora_alpha)
      how = {"steps": model.about.steps + number - begin, "options": options}
      about = dataclasses.replace(model.about, **how)
      now = dataclasses.replace(model, params=params, about=about)
      if on_log and on_log(number, means, _copied(now)):
        break
    if number < end:
      following = _next(batches, number - begin, steps)
      batch = checked.batch(settings, following, first)
  before = _num_batches(stopped, rows)
  num_examples = (before + number - begin) * rows
  at_end = Stopped(state._replace(key=None), 0 if tx else total, num_examples)
  object.__setattr__(now, "stopped", at_end)  # No field of `replace`.
  return now


def _say_what_ends(
  progress: "_Progress",
  model: Any,
  stopped: Stopped | None,
  end: int,
  total: int,
) -> None:
  """Says that training begins with step 0, or lasts longer than `total`."""
  if model.about.steps and not stopped:
    why = "another optimizer" if model.stopped else "not a result of fit"
    progress.say(f"begins with step 0 and the first batch: {why}")
  schedule = model.about.settings.optim.schedule
  stays = schedule == "constant" or ":" in schedule  # Own ones are unknown.
  if total and end > total and not stays:
    progress.say(
      f"the learning rate stays at its end after step {total:,}, the length of"
      f" its schedule; total_steps={end} is all steps"
    )


def _continued(
  model: Any,
  steps: int,
  total_steps: int | None,
  tx: optax.GradientTransformation | None,
) -> tuple[Stopped | None, int, optax.GradientTransformation]:
  """(where to continue, length of the schedules, the optimizer)."""
  stopped = model.stopped
  if stopped and bool(stopped.num_steps) != (tx is None):
    stopped = None
  total = stopped.num_steps if stopped and stopped.num_steps else steps
  if total_steps is not None:
    if tx is not None:
      raise UserError("total_steps has no effect with tx, which has its own")
    total = checked.integer("total_steps", total_steps, 1)
  optimizer = _chosen(model.about, total, tx)
  if stopped and not _fits(optimizer, stopped.state):
    stopped = None
  return stopped, total, optimizer


def _begun(
  model: Any,
  loss: Loss | None,
  tx: optax.GradientTransformation,
  options: Mapping[str, Any],
  stopped: Stopped | None,
) -> tuple[step.TrainState, Any]:
  """(the state before the first step of this call, the train step)."""
  settings = model.about.settings
  how = dataclasses.replace(settings.run, **options)
  carried = state_lib.init_carried(settings._replace(run=how))
  init, run = _kept(
    _jitted,
    model.graphdef,
    loss or objective(settings),
    tx,
    settings.family.init_carried is not None,
    settings.optim.adaptation,
  )
  state = init(model.params, jax.random.key(options["seed"]), carried)
  if stopped is None:
    return state, run
  _check_carried(state.carried, stopped.state.carried)
  before = jax.tree.map(jnp.copy, stopped.state)  # Steps consume it.
  return before._replace(key=state.key), run


def _fits(tx: optax.GradientTransformation, state: step.TrainState) -> bool:
  """Whether the state of an optimizer like this one is in the train state."""
  return _shapes(jax.eval_shape(tx.init, state.params)) == _shapes(
    state.opt_state
  )


def _shapes(tree: Any) -> Any:
  return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]


def _check_carried(carried: Carried, before: Carried) -> None:
  """Raises UserError if a state of examples is of another batch size."""
  if _shapes(carried) != _shapes(before):
    raise UserError(
      "fit: the batch size must remain: this family carries a state of every"
      " example from step to step"
    )


def objective(settings: config_lib.Settings) -> Loss:
  """The family's loss; raises UserError if it learns from a teacher."""
  family = settings.family
  if family.check_teacher:
    try:
      family.check_teacher(settings.model, None)
    except UserError as error:
      raise UserError(f"no teacher: {error}") from error
  return family.loss


def _chosen(
  about: Any, steps: int, tx: optax.GradientTransformation | None
) -> optax.GradientTransformation:
  """`tx`, without effect on what is frozen; the settings' optimizer if None."""
  if tx is None:
    return _optimizer(about, steps)
  if not isinstance(tx, optax.GradientTransformation):
    raise UserError(
      f"tx={tx!r} is not an Optax optimizer, such as optax.adam(1e-3)"
    )
  return _kept(_with_frozen, about.settings.optim, tx)


@functools.lru_cache(maxsize=4)  # The same object, of the same settings.
def _optimizer(about: Any, steps: int) -> optax.GradientTransformation:
  """The settings' optimizer; UserError if its schedule does not fit."""
  try:
    return chain.make_optimizer(about.settings.optim, steps)
  except UserError as error:
    raise UserError(f"{error}; or give tx, an optimizer") from error


@functools.lru_cache(maxsize=4)  # The same object, of the same two.
def _with_frozen(
  optim: chain.Config, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """See `chain.with_frozen`."""
  return chain.with_frozen(optim, tx)


def _kept(function: Any, *arguments: Any) -> Any:
  """A cached function's result, kept if the arguments can be compared."""
  try:
    hash(arguments)
  except TypeError:
    return function.__wrapped__(*arguments)
  return function(*arguments)


@functools.lru_cache(maxsize=4)  # They keep what they have compiled.
def _jitted(
  graphdef: nnx.GraphDef,
  loss: Loss,
  tx: optax.GradientTransformation,
  carries: bool,
  how: lora.Adaptation | None,
) -> tuple[Any, Any]:
  """The functions (params, key, carried) -> state, and the train step."""

  @jax.jit  # So that no two of its arrays share a buffer: steps consume them.
  def init(params: Any, key: Array, carried: Carried) -> step.TrainState:
    params, carried = jax.tree.map(jnp.copy, (params, carried))
    return step.init_state(params, tx, key, False, carried, how)

  run = functools.partial(
    step.train_step,
    graphdef=graphdef,
    teacher_graphdef=None,
    loss_fn=_checked(loss, carries),
    tx=tx,
    ema_decay=0.0,
    num_microbatches=1,
    max_bad_steps=1,
    alpha=how.alpha if how else 1.0,
  )
  return init, jax.jit(run, donate_argnums=0)


def _check_signature(name: str, function: Any, arguments: str) -> None:
  """Raises UserError unless a user's function, if any, takes the arguments."""
  if function is None:
    return
  try:
    inspect.signature(function).bind(*arguments.split(", "))
  except TypeError as error:
    raise UserError(
      f"{name} must be a function ({arguments}): {error}"
    ) from error
  except ValueError:
    pass  # Python cannot tell.


def _checked(loss: Loss, carries: bool) -> Loss:
  """The objective with "loss" in its metrics; UserError for other results."""

  def checked_loss(*arguments: Any) -> tuple[Array, Metrics]:
    result = loss(*arguments)
    if not _is_result(result):
      raise UserError(
        "loss must return (loss, metrics), a floating-point scalar and a dict"
        f" of numbers by name, not {result!r:.80}"
      )
    value, metrics = result
    if carries and "carried" not in metrics:
      raise UserError(
        "loss: this family carries state from step to step; metrics need"
        " 'carried', the state for the next one"
      )
    return value, {"loss": value, **metrics}

  return checked_loss


def _is_result(result: Any) -> bool:
  """Whether an objective returned (loss, metrics)."""
  return (
    isinstance(result, tuple)
    and len(result) == 2
    and isinstance(result[0], jax.Array)
    and result[0].ndim == 0
    and jnp.issubdtype(result[0].dtype, jnp.floating)
    and isinstance(result[1], Mapping)
    and all(isinstance(name, str) for name in result[1])
    and all(isinstance(x, _NUMBER) for x in jax.tree.leaves(result[1]))
  )


class _Progress:
  """Prints to standard error how far training is, and the time left."""

  def __init__(self, steps: int, quiet: bool):
    self._steps, self._quiet = steps, quiet
    self._start = self._shown = time.monotonic()

  def after(self, number: int, metrics: Metrics) -> None:
    """Prints a line after the first step, and then every `_SECONDS`."""
    if self._quiet:
      return
    if number == 1:
      jax.block_until_ready(metrics)
      began, self._start = self._start, time.monotonic()
      self._shown = self._start
      took = durations.text(self._start - began)
      self.say(f"ready; the first of {self._steps:,} steps took {took}")
    elif number < self._steps and time.monotonic() - self._shown >= _SECONDS:
      loss = float(metrics["loss"])  # Waits for the step.
      self._shown = time.monotonic()
      rate = (self._shown - self._start) / (number - 1)
      left = durations.text((self._steps - number) * rate)
      self.say(
        f"step {number:,} of {self._steps:,}: loss {loss:.4g}; {left} left"
      )

  def say(self, line: str) -> None:
    """Prints a line, unless it is to be quiet."""
    if not self._quiet:
      print(f"fit: {line}", file=sys.stderr, flush=True)


def _num_batches(stopped: Stopped | None, rows: int) -> int:
  """Number of batches of so many rows that have the examples read before."""
  return -(-stopped.num_examples // rows) if stopped else 0


def _batches(
  settings: config_lib.Settings, data: Any, stopped: Stopped | None
) -> Any:
  """An iterator over batches; raises UserError if there is none.

  A Grain dataset continues after the examples read, counted in a circle.
  """
  if hasattr(data, "to_iter_dataset"):
    start = 0
    if stopped:
      rows = len(checked.batch(settings, data[0])["inputs"])
      start = _num_batches(stopped, rows)
    return pipeline.iterate(data, start % max(len(data), 1))
  try:
    return iter(data)
  except TypeError:
    raise UserError(
      f"data={data!r:.80} is not an iterator of batches, such as"
      " loopjax.datasets(...)['train']"
    ) from None


def _next(batches: Any, number: int, steps: int) -> checked.Batch:
  try:
    return next(batches)
  except StopIteration:
    raise UserError(f"the data ended after {number} of {steps} steps") from None


def _check_finite(bad: step.BadSteps) -> None:
  """Raises UserError if a step was not finite."""
  if bad.streak:
    raise UserError(
      f"step {int(bad.first) + 1}: the loss or its gradient is not finite;"
      " training stopped"
    )


def _means(kept: list[Metrics]) -> dict[str, float]:
  """Means of the metrics that are scalars."""
  rows = jax.device_get(kept)
  return {
    name: float(np.mean([one[name] for one in rows]))
    for name, value in rows[-1].items()
    if np.ndim(value) == 0
  }


def _copied(model: Any) -> Any:
  """With parameters of its own: the next step consumes the state's."""
  return jax.tree.map(jnp.copy, model)
