"""Scores trained models: any checkpoint, on any data of its task."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data.text import files
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.data.text.config import split_sources
from loopjax.errors import UserError
from loopjax.optim import chain
from loopjax.run import (
  metrics,
  preemption,
  processes,
  provenance,
  statistics,
  zoo,
)
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import breadth, evaluate, procedure
from loopjax.train import loop as train_loop
from loopjax.types import Dataset, TaskSpec


def score_model(
  config: ml_collections.ConfigDict,
  source: pathlib.Path,
  finish: procedure.Finish = procedure.nothing,
  limit: int = 0,
) -> dict[str, Any]:
  """Scores a checkpoint of a trained model; returns the summary.

  It is written to `evaluation` in the model's work directory, for zoo:NAME in
  runs/NAME. The run itself is unchanged.

  Args:
    config: the model's config; settings of the evaluation and of the data may
      differ.
    source: a work directory, or zoo:NAME.
    finish: as in `train.run`.
    limit: number of examples, rounded up to whole batches; 0 for all.
  """
  settings, workdir = config_lib.resolve(config), zoo.output(source)
  environment, notice = provenance.environment(), preemption.Notice()
  program, dataset = prepare(settings, source, limit)
  split, directory = settings.eval.split, workdir / "evaluation"
  evaluator = evaluate.make_evaluator(program, {split: dataset}, notice.check)
  with workdir_lib.locked(workdir), notice.listening():
    started, folder = time.monotonic(), zoo.located(source)
    rows = processes.from_process_0(lambda: workdir_lib.read_metrics(folder))
    step, params = chosen_params(program, source)
    _compare_data(folder, step, settings, dataset)
    digest = integrity.digest(integrity.record(params))
    checksums = train_loop.checksums({"": dataset})
    of = {"parameters": digest, "data": checksums, "config": settings.plain}
    kept = breadth.Kept(directory / "starts.jsonl", of)
    values: dict[str, float] = {}
    failed: list[str] = []
    try:
      found = evaluator(params, split, kept=kept)
      figures = directory / "figures"
      extras = finish(
        procedure.Scored(program, params, {}, dataset, rows, figures)
      )
      for part, scores in (*found.items(), *extras.scores.items()):
        values |= metrics.named(part, scores)
      failed, status = extras.failed, "completed"
      kept.remove()
    except preemption.Preempted:
      status = "preempted"
    summary = {
      "status": status,
      **({"figures_failed": failed} if failed else {}),
      "metrics": values,
      **procedure.run_facts([dataset], params, step, started),
      "digest": digest,
      **environment,
    }
    if status == "completed":  # Otherwise earlier scores remain.
      procedure.write_summary(directory, settings, summary)
  return summary


class Comparison(NamedTuple):
  """A score of two models.

  Attributes:
    ours, reference: the means over the examples.
    difference: ours - reference, of the same examples.
  """

  ours: float
  reference: float
  difference: statistics.Difference


def compare_models(
  config: ml_collections.ConfigDict,
  source: pathlib.Path,
  reference: pathlib.Path,
  overrides: Mapping[str, Any],
  limit: int = 0,
) -> dict[str, Comparison]:
  """Scores both on the examples of `config.eval.split`; {score: comparison}.

  The comparisons are written to `evaluation/compared.json` in the first model's
  work directory, for zoo:NAME in runs/NAME.

  Args:
    config: the first model's config, as for `score_model`.
    source: its work directory, or zoo:NAME.
    reference: the other model's.
    overrides: settings of the evaluation that hold for both. The other model
      has the first one's data; its other settings are its own.
    limit: as for `score_model`.
  """
  settings = config_lib.resolve(config)
  # The config as resolved: what the user's settings make moot is reset.
  theirs = config_lib.config_of_run(reference, str(reference))
  if theirs.task.name != config.task.name:
    raise UserError(
      f"{reference}: its task.name={theirs.task.name!r}, that of {source}"
      f" {config.task.name!r}: they have no examples in common"
    )
  with theirs.unlocked():
    theirs.task = config.task.copy_and_resolve_references()
  evaluation = {f"eval.{x}": config.eval[x] for x in ("split", "batch_size")}
  config_lib.override(theirs, {**evaluation, **overrides})
  other_settings = config_lib.resolve(theirs)
  with workdir_lib.locked(zoo.output(source)):
    facts, scores = _of_examples(settings, source, limit)
    other_facts, other_scores = _of_examples(other_settings, reference, limit)
    both = {}
    for name in (x for x in scores if x in other_scores):
      values, weights = scores[name]
      others, other_weights = other_scores[name]
      if facts != other_facts or not np.array_equal(weights, other_weights):
        raise UserError(
          f"{reference}: its examples are not those of {source}: their lengths"
          " or tokenizers differ"
        )
      counted = weights > 0
      for model, one in ((source, values), (reference, others)):
        if not np.isfinite(one[counted]).all():
          raise UserError(f"{model}: {name} of an example is not finite")
      if counted.any():
        both[name] = values, others, weights
    found = {}
    for name, difference in statistics.compare(both).items():
      values, others, weights = both[name]
      means = _mean(values, weights), _mean(others, weights)
      found[name] = Comparison(*means, difference)
    directory = zoo.output(source) / "evaluation"
    directory.mkdir(exist_ok=True)
    content = {
      "reference": str(reference),
      "scores": {
        name: {
          "ours": one.ours,
          "reference": one.reference,
          **one.difference._asdict(),
        }
        for name, one in found.items()
      },
    }
    workdir_lib.write_json(directory / "compared.json", content)
  return found


def _mean(values: np.ndarray, weights: np.ndarray) -> float:
  """The mean over the items that have weight."""
  counted = weights > 0
  return float(np.average(values[counted], weights=weights[counted]))


def _of_examples(
  settings: config_lib.Settings, source: pathlib.Path, limit: int
) -> tuple[Mapping[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
  """The facts about a model's data, and its scores of every example."""
  program, dataset = prepare(settings, source, limit)
  _, params = chosen_params(program, source)
  return dataset.facts, evaluate.score_examples(program, dataset, params)


def prepare(
  settings: config_lib.Settings, source: pathlib.Path, limit: int
) -> tuple[program_lib.Program, Dataset]:
  """The program of a trained model, and the examples to score."""
  processes.from_process_0(lambda: _check_scoring(settings, source))
  program = program_lib.make_program(
    settings._replace(optim=chain.without_own(settings.optim)),
    _devices(settings),
  )
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
    source, step, program.abstract_params, str(source)
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
  trained = _trained_task(folder)
  check_tokens(trained, settings, str(source))
  if str(source).startswith(zoo.PREFIX):
    _check_texts(trained, settings, source)


def _check_texts(
  trained: Mapping[str, Any], settings: config_lib.Settings, source: object
) -> None:
  """Raises UserError unless there are texts for a model of the zoo.

  Its own are not part of the package. If their documents were rows, those of
  plain text, 8 KiB long, are nothing that the model has seen.
  """
  task = settings.task
  if not isinstance(task, TextConfig):
    return
  own = split_sources(trained["train_files"])
  of_rows = any(files.kind_of(path) != "text" for path in own)
  form = (
    'mine.jsonl, which has a document per line, {"text": "..."}'
    if of_rows
    else "mine.txt"
  )
  is_test = settings.eval.split == "test" and task.test_files
  for name in task.test_sources if is_test else task.sources:
    try:
      paths = files.find(name)
    except UserError as error:
      if name not in own:
        raise
      raise UserError(
        f"{source}: its text is not part of the package ({error}); score your"
        f" own by --config.task.test_files={form}"
      ) from None
    plain = [path for path in paths if files.kind_of(path) == "text"]
    if of_rows and plain:
      raise UserError(
        f"{plain[0]}: is plain text, but {source} knows other documents;"
        f" expected {form}"
      )


def _trained_task(folder: pathlib.Path) -> dict[str, Any]:
  """Section task of a run's config.json, whose tokenizer may have moved."""
  task = dict(workdir_lib.read_config(folder)["task"])
  if name := task.get("tokenizer"):
    task["tokenizer"] = workdir_lib.kept_tokenizer(folder, name)
  return task


def check_tokens(
  trained: Mapping[str, Any],
  settings: config_lib.Settings,
  model: str = "the model",
) -> None:
  """Raises UserError if settings of the task change what the model reads.

  Args:
    trained: section task of the model's config.
    settings: those with which the model is scored.
    model: its name for messages.
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
      f"{changed}: {model} was trained with {trained_with}, which its"
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


def _compare_data(
  folder: pathlib.Path,
  step: int,
  settings: config_lib.Settings,
  dataset: Dataset,
) -> None:
  """Warns if the data that a run's own settings name have changed.

  Files were replaced, or relative paths name others from another directory.
  There is no warning if the user set other data, or for data without checksums.
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
