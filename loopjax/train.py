"""Training, as one protocol for every family.

Read `run` from top to bottom: mesh, data, model, restore, loop, evaluation,
summary. Families differ only in the module that `settings.family` names.
"""

import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from loopjax import checkpoint as checkpoint_lib
from loopjax import config as config_lib
from loopjax import evaluate, metrics, optim, provenance, sharding, step
from loopjax import program as program_lib
from loopjax import workdir as workdir_lib
from loopjax.analysis import figures
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.types import Dataset


class Work(NamedTuple):
  """What a start works with.

  Attributes:
    settings: the checked config.
    program: compiled functions and the layout of the state.
    datasets: by split.
    checkpoints: of the run.
    evaluator: (params, num_examples) -> scores of the evaluation split.
    workdir: of the run.
  """

  settings: config_lib.Settings
  program: program_lib.Program
  datasets: dict[str, Dataset]
  checkpoints: checkpoint_lib.Checkpoints
  evaluator: evaluate.Evaluator
  workdir: pathlib.Path


def make_datasets(
  settings: config_lib.Settings, splits: Sequence[str] = ("train", "eval")
) -> dict[str, Dataset]:
  """Datasets by split; raises UserError on missing or malformed files."""
  sizes = {"train": settings.run.batch_size, "eval": settings.eval.batch_size}
  return {
    split: settings.task_module.make_dataset(
      settings.task, split, batch_size=sizes[split], seed=settings.run.seed
    )
    for split in splits
  }


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path, mode: str
) -> dict[str, Any]:
  """Trains, evaluates or both; returns the summary that it writes.

  Args:
    config: from a config file.
    workdir: everything the run makes is written there; a run that is there
      already goes on where it stopped.
    mode: "train", "eval" (any checkpoint, any number of loops) or
      "train_and_eval".

  Raises:
    UserError: a mistake in the config, the data or the directory.
  """
  settings = config_lib.resolve(config)
  plain = config_lib.to_dict(config)
  workdir_lib.check_config(workdir, plain, mode)
  if mode == "eval" and not (workdir / "config.json").exists():
    raise UserError(f"--workdir={workdir} holds no run to evaluate")
  if mode != "eval" and settings.eval.checkpoint_step != -1:
    raise UserError("eval.checkpoint_step has no effect without --mode=eval")
  if mode != "eval" and (done := _completed(workdir, mode)):
    print(f"{workdir} is complete already")
    return done
  # At the start: the checkout may change while the run goes on.
  environment = provenance.environment()
  program = program_lib.make_program(settings)
  splits = ("eval",) if mode == "eval" else ("train", "eval")
  datasets = make_datasets(settings, splits)
  with workdir_lib.locked(workdir):
    workdir_lib.check_config(workdir, plain, mode)  # Nobody came in between.
    checkpoints = checkpoint_lib.Checkpoints(
      workdir / "checkpoints", settings.run.keep_checkpoints
    )
    evaluator = evaluate.make_evaluator(
      settings, program.graphdef, datasets["eval"], program.mesh
    )
    work = Work(settings, program, datasets, checkpoints, evaluator, workdir)
    if mode == "eval":
      summary, directory = _evaluate(work), workdir / "evaluation"
    else:
      if jax.process_index() == 0:
        workdir_lib.write_json(workdir / "config.json", plain)
        # Written last: none is there while the run goes on.
        (workdir / "summary.json").unlink(missing_ok=True)
      summary, directory = _train_and_evaluate(work, mode), workdir
    checkpoints.close()
    summary |= environment
    if jax.process_index() == 0:
      directory.mkdir(exist_ok=True)
      workdir_lib.write_json(directory / "config.json", plain)
      workdir_lib.write_json(directory / "summary.json", summary)
  return summary


def _train_and_evaluate(work: Work, mode: str) -> dict[str, Any]:
  """Trains from where the run stands, scores the result, draws figures."""
  settings, started = work.settings, time.monotonic()
  if work.checkpoints.steps():
    state, meta = work.checkpoints.restore(work.program.abstract_state)
    started -= meta["wall_seconds"]
    assert meta["batches"] == int(state.step)
  else:
    state = work.program.init(jax.random.key(settings.run.seed))
  writer = metrics.Writer(work.workdir, settings.run.num_steps, int(state.step))
  state, status = _train(work, state, writer, started, mode)
  if mode == "train_and_eval" and status == "completed":
    params, at = state.ema or state.params, int(state.step)
    writer.write(at, "eval", work.evaluator(params))
    pictures = _figures(work, params, work.workdir / "figures")
    if pictures["depth"]:
      writer.write(at, "depth", pictures["depth"])
    writer.images(at, pictures["files"])
  writer.close()
  return _summary(work, state, status, writer.last, started)


def _evaluate(work: Work) -> dict[str, Any]:
  """Scores a checkpoint and draws it; the run itself stays as it is."""
  started = time.monotonic()
  state, _ = work.checkpoints.restore(
    work.program.abstract_state, work.settings.eval.checkpoint_step
  )
  params = state.ema or state.params
  scores = {"eval": work.evaluator(params)}
  directory = work.workdir / "evaluation" / "figures"
  scores["depth"] = metrics.flat(_figures(work, params, directory)["depth"])
  values = {
    f"{split}/{name}": value
    for split, row in scores.items()
    for name, value in workdir_lib.finite(row).items()
  }
  for name, value in values.items():
    print(f"{name} {value:.6g}")
  return _summary(work, state, "completed", values, started)


def _figures(
  work: Work, params: Any, directory: pathlib.Path
) -> dict[str, Any]:
  return figures.make_figures(
    work.settings,
    work.program.graphdef,
    params,
    work.datasets["eval"],
    workdir_lib.read_metrics(work.workdir),
    directory,
  )


def _summary(
  work: Work,
  state: step.TrainState,
  status: str,
  values: dict[str, float],
  started: float,
) -> dict[str, Any]:
  """What the contract of the work directory asks for, but the environment."""
  facts = [dataset.facts for dataset in work.datasets.values()]
  return {
    "status": status,
    "metrics": values,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    "steps": int(state.step),
    "wall_seconds": round(time.monotonic() - started, 2),
    "digest": workdir_lib.digest(
      {"params": state.params, "ema": state.ema, "opt": state.opt_state}
    ),
    "data": {name: value for fact in facts for name, value in fact.items()},
  }


def _completed(workdir: pathlib.Path, mode: str) -> dict[str, Any] | None:
  """The summary of a run that has nothing left to do in this mode."""
  path = workdir / "summary.json"
  summary = workdir_lib.read_json(path) if path.exists() else {}
  scored = any(name.startswith("eval/") for name in summary.get("metrics", {}))
  done = summary.get("status") == "completed"
  return summary if done and (scored or mode == "train") else None


def _train(
  work: Work,
  state: step.TrainState,
  writer: metrics.Writer,
  started: float,
  mode: str,
) -> tuple[step.TrainState, str]:
  """The loop. Returns the last state and the status."""
  settings, run_config = work.settings, work.settings.run
  schedule = optim.make_schedule(settings.optim, run_config.num_steps)
  at = int(state.step)
  calls = stacked(
    pipeline.iterate(work.datasets["train"].batches, start=at),
    run_config.steps_per_call,
  )
  placed = sharding.batch_sharding(work.program.mesh, stacked=True)
  clock, pending = metrics.Clock(), []
  while at < run_config.num_steps:
    batches = clock.wait(lambda: sharding.put_batch(next(calls), placed))
    state, values = work.program.train(state, batches, {})
    pending.append(values)
    at += run_config.steps_per_call
    clock.count(run_config.steps_per_call)
    last = at == run_config.num_steps
    if last or at % run_config.log_every == 0:
      row = _mean(pending)  # The only read from the device.
      pending = []
      row["learning_rate"] = float(schedule(at - 1))
      writer.write(at, "train", {**row, **clock.rates(run_config.batch_size)})
      if not np.isfinite([row["loss"], row["grad_norm"]]).all():
        return state, "diverged"
    if mode == "train_and_eval" and _due(settings, at):
      params = state.ema or state.params
      scores = work.evaluator(params, settings.eval.num_examples)
      writer.write(at, "eval", scores)
      clock.reset()
    # Last, so that a checkpoint's rows are all in metrics.jsonl before it.
    if last or at % run_config.checkpoint_every == 0:
      seconds = time.monotonic() - started
      work.checkpoints.save(at, state, {"batches": at, "wall_seconds": seconds})
  return state, "completed"


def _due(settings: config_lib.Settings, at: int) -> bool:
  """Whether an evaluation in training is due; the final one comes after."""
  every = settings.eval.every
  return every > 0 and at % every == 0 and at < settings.run.num_steps


def stacked(batches: Iterator[Any], steps: int) -> Iterator[Any]:
  """Groups of `steps` batches with a new leading axis."""
  while group := list(itertools.islice(batches, steps)):
    yield jax.tree.map(lambda *rows: np.stack(rows), *group)


def _mean(pending: list[Any]) -> dict[str, Any]:
  rows = jax.device_get(pending)
  return jax.tree.map(lambda *values: np.mean(values, axis=0), *rows)
