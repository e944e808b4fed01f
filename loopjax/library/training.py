"""Training in a Python program, by the train step of `loopjax.main`."""

import dataclasses
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from loopjax import config as config_lib
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.library import checked
from loopjax.nn import lora
from loopjax.optim import chain, parameters
from loopjax.program import fresh, step
from loopjax.run import durations
from loopjax.types import Array, Carried, Metrics

# (module, batch, key, step, None) -> (loss, metrics), see `protocols.Loss`.
Loss = Callable[..., tuple[Array, Metrics]]
_Model = TypeVar("_Model", bound=Any)  # `library.model.Model`.
_NUMBER = (jax.Array, np.ndarray, np.generic, int, float)  # A metric's types.
_SECONDS = 10  # Between lines of progress.


def fit(
  model: _Model,
  data: Iterable[checked.Batch],
  *,
  steps: int,
  tx: optax.GradientTransformation | None = None,
  loss: Loss | None = None,
  seed: int = 0,
  every: int = 100,
  on_log: Callable[[int, dict[str, float], Any], Any] | None = None,
  quiet: bool = False,
) -> _Model:
  """The model, trained on batches by the train step of `loopjax.main`.

  A step is compiled once for the same settings, `loss`, `tx` and shapes; pass
  the same objects again to use it again. The default optimizer also depends
  on `steps`.

  Args:
    data: batches, such as `datasets(...)["train"]` or any iterator; each is
      (inputs, targets), i32 [B, T], or a task's dict, which may have
      "weights", f32 [B, T], and in text "documents", i32 [B, T].
    steps: number of optimizer steps.
    tx: the optimizer; from the model's settings if None. Parameters that the
      settings or the family freeze (`optim.frozen`) stay as they are.
    loss: the objective (module, batch, key, step, None) -> (loss, metrics), a
      scalar and a dict, which may be empty; the family's if None.
    seed: seed of the objective's random numbers.
    every: number of steps between calls of `on_log`.
    on_log: called with the number of steps, the mean of each training metric
      since the last call, and the model; training stops if it returns True.
    quiet: whether to print no progress to standard error.

  Returns:
    The trained model.

  Raises:
    UserError: the data end before the steps do, a batch is not what the model
      reads or of another shape than the first, the parameters are bfloat16, the
      objective needs a teacher or has another form, it changes for more steps
      than there are, or the loss is not finite.
  """
  steps = checked.integer("steps", steps, 1)
  every = checked.integer("every", every, 1)
  seed = checked.seed(seed)
  settings = model.about.settings
  settings.check_trains()
  settings.check_schedule(steps)
  parameters.check_registered(model.params)
  tx = _chosen(model.about, steps, tx)
  _check_signature("loss", loss, "module, batch, key, step, teacher")
  _check_signature("on_log", on_log, "step, metrics, model")
  batches = _batches(data)
  first = checked.batch(settings, _next(batches, 0, steps))
  options = {"batch_size": len(first["inputs"]), "num_microbatches": 1}
  how = dataclasses.replace(settings.run, **options)
  carried = fresh.init_carried(settings._replace(run=how))
  init, run = _kept(
    _jitted,
    model.graphdef,
    loss or objective(settings),
    tx,
    settings.family.init_carried is not None,
    settings.optim.adaptation,
  )
  state = init(model.params, jax.random.key(seed), carried)
  progress, batch, kept = _Progress(steps), first, []
  for number in range(1, steps + 1):
    state, metrics = run(state, batch, {})
    kept.append(metrics)
    if not quiet:
      progress.after(number, metrics)
    if number % every == 0 or number == steps:
      _check_finite(state.bad)
      means, kept = _means(kept), []
      params = step.scored_params(state, settings.optim.lora_alpha)
      about = dataclasses.replace(
        model.about,
        steps=model.about.steps + number,
        options={**options, "seed": seed},
      )
      now = dataclasses.replace(model, params=params, about=about)
      if on_log and on_log(number, means, _copied(now)):
        break
    if number < steps:
      batch = checked.batch(settings, _next(batches, number, steps), first)
  return now


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

  def __init__(self, steps: int):
    self._steps = steps
    self._start = self._shown = time.monotonic()

  def after(self, number: int, metrics: Metrics) -> None:
    """Prints a line after the first step, and then every `_SECONDS`."""
    if number == 1:
      jax.block_until_ready(metrics)
      began, self._start = self._start, time.monotonic()
      self._shown = self._start
      took = durations.text(self._start - began)
      self._say(f"ready; the first of {self._steps:,} steps took {took}")
    elif number < self._steps and time.monotonic() - self._shown >= _SECONDS:
      loss = float(metrics["loss"])  # Waits for the step.
      self._shown = time.monotonic()
      rate = (self._shown - self._start) / (number - 1)
      left = durations.text((self._steps - number) * rate)
      self._say(
        f"step {number:,} of {self._steps:,}: loss {loss:.4g}; {left} left"
      )

  def _say(self, line: str) -> None:
    print(f"fit: {line}", file=sys.stderr, flush=True)


def _batches(data: Any) -> Any:
  """An iterator over batches; raises UserError if there is none."""
  if hasattr(data, "to_iter_dataset"):
    return pipeline.iterate(data)
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
