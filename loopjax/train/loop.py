"""The training loop: gets batches, steps, logs, evaluates, saves, stops."""

import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import loopjax
from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.config import settings as settings_lib
from loopjax.data import pipeline
from loopjax.errors import NO_READER, UserError
from loopjax.program import step as step_lib
from loopjax.program.step import BadSteps
from loopjax.run import metrics, preemption, profiling
from loopjax.run.checkpoints import checkpoint as checkpoint_lib
from loopjax.run.checkpoints import integrity
from loopjax.train import evaluate
from loopjax.types import Dataset


class Parts(NamedTuple):
  """The parts of a run that stay the same from step to step.

  Attributes:
    program: settings, compiled functions and the layout of the state.
    datasets: the datasets, by split.
    checkpoints: the run's checkpoints.
    evaluator: (params, split, num_examples) -> scores.
    notice: whether the run was asked to stop.
    writer: writer of the metrics.
    workdir: the run's work directory.
  """

  program: program_lib.Program
  datasets: dict[str, Dataset]
  checkpoints: checkpoint_lib.Checkpoints
  evaluator: evaluate.Evaluator
  notice: preemption.Notice
  writer: metrics.Writer
  workdir: pathlib.Path


class Outcome(NamedTuple):
  """How training ended.

  Attributes:
    status: "completed", "preempted" or "diverged".
    reason: one line if it diverged, or ended before its last step; else "".
    costs: "compile_seconds" and "memory_bytes" of this start's training call;
      empty if no step was taken.
    failed: names of the figures that could not be drawn.
  """

  status: str
  reason: str
  costs: dict[str, Any]
  failed: Sequence[str] = ()


@jax.transfer_guard("disallow")  # A transfer would stall every step.
def train(
  parts: Parts,
  state: step_lib.TrainState,
  teacher_params: Any,
  meta: Mapping[str, Any],
  started: float,
  mode: str,
) -> tuple[step_lib.TrainState, Outcome]:
  """Trains until the last step, or until something ends it.

  Args:
    parts: the parts of the run.
    state: the train state; donated to the first step.
    teacher_params: the teacher's parameters; {} without a teacher.
    meta: what a checkpoint stores besides this state, see `procedure`.
    started: `time.monotonic` of a start without interruptions.
    mode: "train" or "train_and_eval".
  """
  program, writer = parts.program, parts.writer
  settings, options = program.settings, program.settings.run
  step, steps_per_call = int(jax.device_get(state.step)), options.steps_per_call
  pending = [_floats(row) for row in meta["pending"]]
  rows = parts.datasets["train"].batches
  groups = pipeline.iterate(rows, meta["batches"], group=steps_per_call)
  clock, ahead = metrics.Clock(), meta["batches"] - step
  compiled, costs = None, dict[str, Any]()
  steps = profiling.step_range(options.profile_steps, options.num_steps)
  tracer = profiling.Tracer(steps, parts.workdir / "profile")

  @jax.transfer_guard("allow")
  def save() -> None:
    if int(state.bad.streak) >= options.max_bad_steps:
      return  # No step would change it; a restart repeats the bad steps.
    entries = {**meta, "batches": step + ahead, "pending": _lists(pending)}
    entries["wall_seconds"] = time.monotonic() - started
    parts.checkpoints.save(step, state, entries)

  def next_batches() -> Any:
    return sharding.put_batch(
      program.mesh, next(groups), options.batch_size, stacked=True
    )

  try:
    while True:
      # A run resumed from a checkpoint of this step evaluates again.
      if mode == "train_and_eval" and evaluation_is_due(settings, step):
        _evaluate(parts, state, step)
        clock.reset()
      reason = no_better(options, parts.checkpoints.scores, step)
      if reason or step == options.num_steps:
        save()  # Unless it is.
        return state, Outcome("completed", reason, costs)
      parts.notice.check()
      arguments = state, clock.wait(next_batches), teacher_params
      if compiled is None:
        compiled, costs = _compile(program, arguments, writer)
        clock.reset()
      call = range(step, step + steps_per_call)
      tracer.before(call)
      with jax.profiler.StepTraceAnnotation("train", step_num=step):
        state, record = compiled(*arguments)
      tracer.after(call, record)
      pending.append(record)
      step += steps_per_call
      clock.count(steps_per_call)
      if options.debug_nans and not np.all(jax.device_get(record["accepted"])):
        reason = find_nan(program.uncompiled, *arguments)
        return state, Outcome("diverged", reason, costs)
      is_last = step == options.num_steps
      # Metrics are logged before an evaluation that may end the run.
      ending = options.stop_after and evaluation_is_due(settings, step)
      if is_last or ending or step % options.log_every == 0:
        reason = _log(parts, step, state, pending, clock)
        pending = []
        if reason:
          return state, Outcome("diverged", reason, costs)
      if is_last or step % options.checkpoint_every == 0:
        save()
  except preemption.Preempted:
    save()
    return state, Outcome("preempted", "", costs)
  except OSError as error:
    if error.errno in NO_READER:  # Ends the process, but no step is lost.
      save()
    raise
  finally:
    tracer.close()


def checksums(datasets: Mapping[str, Dataset]) -> dict[str, str]:
  """Checksums of the data, by name, in tasks that have them."""
  return {
    name: str(value)
    for dataset in datasets.values()
    for name, value in dataset.facts.items()
    if name.endswith("_sha256")
  }


def _lists(pending: list[Any]) -> list[Any]:
  """Metrics as checkpoints store them, in JSON."""
  return jax.tree.map(lambda x: x.tolist(), jax.device_get(pending))


def _floats(row: Mapping[str, Any]) -> Any:
  """The inverse of `_lists` for the metrics of a call."""
  return jax.tree.map(np.float32, row, is_leaf=lambda x: isinstance(x, list))


def evaluation_is_due(settings: config_lib.Settings, step: int) -> bool:
  """Whether to evaluate after this step, apart from the final evaluation."""
  every = settings.eval.every
  return every > 0 and step % every == 0 and 0 < step < settings.run.num_steps


def no_better(
  options: settings_lib.Run, scores: Mapping[int, float], current_step: int
) -> str:
  """One line if `run.stop_after` ends the run after this step, else ""."""
  if not options.stop_after:
    return ""
  steps = sorted(step for step in scores if step <= current_step)
  best = max(steps, key=lambda step: scores[step], default=current_step)
  since = [step for step in steps if step > best]
  if len(since) < options.stop_after:
    return ""
  name = options.best_metric.removeprefix("-")
  value = scores[best] if name == options.best_metric else -scores[best]
  return (
    f"{name} was not better than {value:.4g}, of step {best}, in"
    f" {len(since)} evaluations (run.stop_after={options.stop_after})"
  )


@jax.transfer_guard("allow")
def _evaluate(parts: Parts, state: step_lib.TrainState, step: int) -> None:
  """Evaluates during training and records the score of the checkpoint."""
  settings = parts.program.settings
  options = settings.run
  scores = parts.evaluator(
    parts.program.scored_params(state),
    "validation",
    settings.eval.num_examples,
  )
  for split, values in scores.items():
    parts.writer.write(step, split, values)
  rows = [
    {"step": step, "split": split, **row} for split, row in scores.items()
  ]
  best = metrics.scores(rows, options.best_metric)
  needs_score = options.keep_best or options.stop_after
  if needs_score and not best:  # `evaluate.check` has checked its name.
    raise UserError(
      f"run.best_metric={options.best_metric!r}: no evaluated example counts"
      f" for it; eval.num_examples={settings.eval.num_examples}"
    )
  parts.checkpoints.scores |= best


@jax.transfer_guard("allow")
def _compile(
  program: program_lib.Program,
  arguments: tuple[Any, ...],
  writer: metrics.Writer,
) -> tuple[Any, dict[str, Any]]:
  """(the compiled training call, its costs)."""
  writer.say("compiling the training step")  # Minutes, for large models.
  start = time.perf_counter()
  compiled = program.train.lower(*arguments).compile()
  program.schedule(0)  # Compiled here, not between timed steps.
  costs: dict[str, Any] = {
    "compile_seconds": round(time.perf_counter() - start, 2),
    "memory_bytes": profiling.memory(compiled),
  }
  total = sum(costs["memory_bytes"].values())
  writer.say(
    f"compiled the training step in {costs['compile_seconds']:.1f} s;"
    f" {total / 2**20:.0f} MiB per device"
  )
  return compiled, costs


@jax.transfer_guard("allow")
def _log(
  parts: Parts,
  step: int,
  state: step_lib.TrainState,
  pending: list[Mapping[str, Any]],
  clock: metrics.Clock,
) -> str:
  """Writes means over the good steps since the last row of the log.

  Returns one line if training has diverged, else "".
  """
  program = parts.program
  # The only read from the device.
  count = optax.tree.get_all_with_path(state.opt_state, "count")[0][1]
  rows, bad, taken = jax.device_get((pending, state.bad, count))
  flops = profiling.training_flops(program.costs)
  rates = clock.rates(program.settings.run.batch_size)
  parts.writer.write(
    step,
    "train",
    {
      **mean_of_good_steps(rows),
      "learning_rate": float(program.schedule(max(int(taken) - 1, 0))),
      **rates,
      **profiling.rates(flops, rates["examples_per_second"]),
      **profiling.peak_memory(),
    },
  )
  diverged = bad.streak >= program.settings.run.max_bad_steps
  return explain(bad, state.params) if diverged else ""


def mean_of_good_steps(pending: list[Any]) -> dict[str, Any]:
  """Means over accepted steps, and "skipped_steps", the number of bad steps.

  Args:
    pending: one entry per call: metrics of every step, [steps, ...] by name.
  """
  rows = {
    name: np.concatenate([part[name] for part in pending])
    for name in pending[0]
  }
  good = rows.pop("accepted") == 1
  means = {
    name: np.mean(values[good], axis=0) if good.any() else np.nan
    for name, values in rows.items()
  }
  return {**means, "skipped_steps": float(np.sum(~good))}


_PACKAGE = pathlib.Path(loopjax.__file__).parent


def explain(bad: BadSteps, params: Any) -> str:
  """One line that describes the bad steps that stopped a run."""
  names = integrity.names(params)
  hit_names = [name for name, was in zip(names, bad.hit, strict=True) if was]
  location = (
    integrity.abbreviate(hit_names)
    or "no parameter (only the loss or carried state)"
  )
  return (
    f"{int(bad.streak)} consecutive steps from step {int(bad.first)} had"
    f" non-finite numbers; gradients of {location}; the parameters are"
    " those from before that step"
  )


@jax.transfer_guard("allow")
def find_nan(function: Callable[..., Any], *arguments: Any) -> str:
  """Reruns a call operation by operation to find the first non-finite number.

  Args:
    function: the function, not compiled.
    *arguments: arguments for which it produced a non-finite number.

  Returns:
    One line naming the operation and the line of code.
  """
  # NaN first: masks may contain infinities on purpose.
  for watch in (jax.debug_nans, jax.debug_infs):
    try:
      with jax.disable_jit(), watch(True):
        function(*arguments)
    except FloatingPointError as error:
      return str(error).strip().splitlines()[0] + origin(error)
  return (
    "non-finite in the compiled step, but not when run operation by operation"
  )


def origin(error: BaseException, package: pathlib.Path = _PACKAGE) -> str:
  """ " at PATH:NUMBER", the package's innermost line; "" if there is none."""
  line, trace = "", error.__traceback__
  while trace:
    path = trace.tb_frame.f_code.co_filename
    if path != __file__ and pathlib.Path(path).is_relative_to(package):
      line = f" at {path}:{trace.tb_lineno}"
    trace = trace.tb_next
  return line
