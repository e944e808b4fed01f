"""Scores a trained model: any of its checkpoints, on any data of its task."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.errors import UserError
from loopjax.run import metrics, preemption, processes, provenance, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import evaluate, procedure, scoring
from loopjax.train import loop as train_loop
from loopjax.types import Dataset, TaskSpec


def score_model(
  config: ml_collections.ConfigDict,
  source: pathlib.Path,
  finish: scoring.Finish = scoring.nothing,
  limit: int = 0,
) -> dict[str, Any]:
  """Scores a checkpoint of a trained model; returns the summary.

  It is written to `evaluation` in the model's work directory, for zoo:NAME in
  runs/NAME. The run itself is unchanged.

  Args:
    config: the model's config; settings of the evaluation and of the data may
      differ.
    source: a work directory, or zoo:NAME.
    finish: as in `run`.
    limit: number of examples, rounded up to whole batches; 0 for all.

  Raises:
    UserError: there is no such model, the config is another model's, or the
      data are missing or malformed.
  """
  settings, workdir = config_lib.resolve(config), zoo.output(source)
  environment, notice = provenance.environment(), preemption.Notice()
  program, dataset = prepare(settings, source, limit)
  split = settings.eval.split
  with workdir_lib.locked(workdir), notice.listening():
    evaluator = evaluate.make_evaluator(program, {split: dataset}, notice.check)
    directory = workdir / "evaluation"
    summary = _score_checkpoint(
      program, dataset, evaluator, source, directory, finish
    )
    summary |= environment
    if summary["status"] == "completed":  # Otherwise earlier scores remain.
      scoring.write(directory, settings, summary)
  return summary


def prepare(
  settings: config_lib.Settings, source: pathlib.Path, limit: int
) -> tuple[program_lib.Program, Dataset]:
  """The program of a trained model, and the examples to score."""
  processes.from_process_0(lambda: _check_scoring(settings, source))
  program = program_lib.make_program(settings, _devices(settings))
  split = settings.eval.split
  dataset = procedure.make_datasets(settings, program.mesh, [split])[split]
  if limit:
    num_batches = -(-limit // settings.eval.batch_size)
    batches = dataset.batches[:num_batches]
    dataset = dataclasses.replace(dataset, batches=batches)
  return program, dataset


def chosen_params(
  program: program_lib.Program, source: pathlib.Path
) -> tuple[int, Any]:
  """The step and the parameters that `eval.checkpoint` names."""
  name, step = program.settings.eval.checkpoint, None
  if name == "best":
    folder = zoo.located(source)
    rows = processes.from_process_0(lambda: workdir_lib.read_metrics(folder))
    metric = program.settings.run.best_metric
    step = restore.best(source, metrics.scores(rows, metric))
  elif name != "newest":
    step = int(name)
  return restore.chosen_params(
    source, step, program.abstract_params, f"--workdir={source}"
  )


def _devices(settings: config_lib.Settings) -> list[Any]:
  """The devices to score on: the most that share the run's batches equally.

  A model may be scored on a machine with more devices than it was trained on. A
  mesh with sizes of its own, or of several processes, needs all.
  """
  devices, mesh, run = jax.devices(), settings.mesh, settings.run
  sizes = mesh.data, mesh.fsdp, mesh.tensor
  if jax.process_count() > 1 or sizes != (-1, 1, 1):
    return devices
  rows = math.gcd(
    run.batch_size // run.num_microbatches, settings.eval.batch_size
  )
  num_devices = max(n for n in range(1, len(devices) + 1) if rows % n == 0)
  if num_devices < len(devices):
    print(
      f"scoring on {num_devices} of {len(devices)} devices, the most that"
      f" divide batches of {rows} rows",
      flush=True,
    )
  return devices[:num_devices]


def _check_scoring(settings: config_lib.Settings, source: pathlib.Path) -> None:
  """Raises UserError unless these are settings of the model of a run."""
  folder = zoo.located(source)
  if not (folder / "config.json").exists():
    raise UserError(f"{source} contains no run to score")
  config_lib.check_config(folder, settings.plain, "eval", label=str(source))
  check_tokens(_trained_task(folder), settings)


def _trained_task(folder: pathlib.Path) -> dict[str, Any]:
  """Section task of a run's config.json, whose tokenizer may have moved."""
  task = dict(workdir_lib.read_config(folder)["task"])
  if name := task.get("tokenizer"):
    task["tokenizer"] = workdir_lib.kept_tokenizer(folder, name)
  return task


def check_tokens(
  trained: Mapping[str, Any], settings: config_lib.Settings
) -> None:
  """Raises UserError if settings of the task change what the model reads.

  Args:
    trained: section task of the model's config.
    settings: those with which the model is scored.
  """
  record = settings.task
  previous: dict[str, Any] = {}
  for name, value in trained.items():
    current = getattr(record, name, value)
    before = tuple(value) if isinstance(current, tuple) else value
    if current != before:
      previous[name] = before

  def differs(**before: Any) -> bool:
    try:
      task = dataclasses.replace(record, **before)
      if _have_other_tokenizers(task, record):
        return True
      trained_settings = settings._replace(
        task=task, spec=settings.task_module.spec(task)
      )
    except UserError:
      return False  # A tokenizer that has moved: the parameters have its size.
    return _tokens(trained_settings) != _tokens(settings)

  names = [
    name for name, before in previous.items() if differs(**{name: before})
  ]
  if names or differs(**previous):
    names = names[:1] or [*previous]
    changed = ", ".join(
      f"task.{name}={getattr(record, name)!r}" for name in names
    )
    trained_with = ", ".join(repr(previous[name]) for name in names)
    raise UserError(
      f"{changed}: the model was trained with {trained_with}, which its"
      " vocabulary or length depends on"
    )


def _have_other_tokenizers(*tasks: Any) -> bool:
  """Whether tokenizers of two tasks differ in more than their path."""
  paths = {getattr(task, "tokenizer", "") for task in tasks}
  if len(paths) == 1:  # Also of tasks without a tokenizer.
    return False
  return len({tokenizer_lib.Tokenizer(x).key for x in paths}) > 1


def _tokens(settings: config_lib.Settings) -> TaskSpec:
  """What a model reads; a length of 1 if it reads rows of any length."""
  spec = dataclasses.replace(settings.spec, packs_documents=False)
  if settings.reads_whole_rows:
    return spec
  return dataclasses.replace(spec, sequence_length=1, coordinates=())


def _score_checkpoint(
  program: program_lib.Program,
  dataset: Dataset,
  evaluator: evaluate.Evaluator,
  source: pathlib.Path,
  directory: pathlib.Path,
  finish: scoring.Finish,
) -> dict[str, Any]:
  """Scores a checkpoint and draws figures; returns the summary.

  Args:
    program: the run's program.
    dataset, evaluator: the dataset and the evaluator of `eval.split`.
    source: the run's work directory, or zoo:NAME.
    directory: where figures go, in a folder.
    finish: see `train.run`.
  """
  started, options = time.monotonic(), program.settings.eval
  folder = zoo.located(source)
  rows = processes.from_process_0(lambda: workdir_lib.read_metrics(folder))
  step, params = chosen_params(program, source)
  _compare_data(folder, step, program.settings, dataset)
  values: dict[str, float] = {}
  failed: list[str] = []
  try:
    for part, scores in evaluator(params, options.split).items():
      values |= metrics.named(part, scores)
    figures = directory / "figures"
    extras = finish(scoring.Scored(program, params, {}, dataset, rows, figures))
    for part, scores in extras.scores.items():
      values |= metrics.named(part, scores)
    failed = extras.failed
    status = "completed"
  except preemption.Preempted:
    status = "preempted"
  return {
    "status": status,
    **({"figures_failed": failed} if failed else {}),
    "metrics": values,
    **scoring.run_facts([dataset], params, step, started),
    "digest": integrity.digest(integrity.record(params)),
  }


def _compare_data(
  folder: pathlib.Path,
  step: int,
  settings: config_lib.Settings,
  dataset: Dataset,
) -> None:
  """Warns if the data that a run's own settings name have changed.

  Files were replaced, or relative paths name others from another directory.
  There is no warning if the user set other data, or for data without checksums.

  Args:
    folder: the run's work directory, or the folder of zoo:NAME.
    step: step of the checkpoint.
    settings: those with which it is scored.
    dataset: the split that is scored.
  """
  scored = settings.plain["task"]
  trained = _trained_task(folder)
  if any(scored.get(name, value) != value for name, value in trained.items()):
    return
  if restore.steps(folder):
    before = restore.meta(folder, step).get("data", {})
  else:  # Of zoo:NAME.
    before = workdir_lib.read_json(folder / "summary.json").get("data", {})
  for name, checksum in train_loop.checksums({"": dataset}).items():
    if before.get(name, checksum) != checksum and jax.process_index() == 0:
      print(
        f"warning: {name} is not the run's: the files of section task, or its"
        " tokenizer, have changed, or relative paths name others from here",
        flush=True,
      )
