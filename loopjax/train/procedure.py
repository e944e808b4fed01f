"""A training run, the same for every family; `run` reads from top to bottom.

Families differ only in the record `settings.family`, tasks in the module
`settings.task_module`.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.config import sources
from loopjax.data import check_dataset
from loopjax.errors import UserError, local_path, note
from loopjax.models import contract
from loopjax.nn import lora
from loopjax.program import state as state_lib
from loopjax.program import step as step_lib
from loopjax.program import teacher as teacher_lib
from loopjax.run import metrics, preemption, processes, provenance
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import checkpoint as checkpoint_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import evaluate
from loopjax.train import loop as train_loop
from loopjax.types import Dataset

# In order: for training; for evaluation in training and model selection; for
# reported results.
SPLITS = ("train", "validation", "test")


class Scored(NamedTuple):
  """What a `Finish` gets: a model that has its final scores.

  Attributes:
    program: the run's program.
    params: the parameters that were scored.
    teacher_params: the teacher's parameters; {} without one, or if a
      checkpoint of an earlier run was scored.
    dataset: the evaluation split.
    rows: rows of the run's metrics.jsonl.
    directory: where figures go.
  """

  program: program_lib.Program
  params: Any
  teacher_params: Any
  dataset: Dataset
  rows: list[dict[str, Any]]
  directory: pathlib.Path


class Extras(NamedTuple):
  """A run's results besides the scores of its task.

  Attributes:
    scores: further scores by split; a score is a number or one per loop.
    files: files of figures.
    failed: names of the figures that could not be drawn.
  """

  scores: dict[str, dict[str, Any]]
  files: list[pathlib.Path]
  failed: list[str]


# Called with a scored model, by all processes.
Finish = Callable[[Scored], Extras]


def nothing(scored: Scored) -> Extras:
  """A `Finish` without further scores or figures."""
  del scored
  return Extras({}, [], [])


def run(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  mode: str,
  finish: Finish = nothing,
  extend: bool = False,
  check: bool = True,
) -> dict[str, Any]:
  """Trains, and evaluates at the end; returns the summary that it writes.

  Args:
    config: from a config file.
    workdir: where all output of the run is written; an existing run there is
      resumed.
    mode: "train" or "train_and_eval".
    finish: called with the model after its final scores, for further scores and
      figures; commands pass `analysis.figures.finish`.
    extend: whether an existing run may have had fewer steps or another batch
      size; its summary then says where it was extended.
    check: whether a new run checks a family from outside the package first.
  """
  settings = config_lib.resolve(config, workdir)
  if done := processes.from_process_0(
    lambda: _complete(settings, workdir, mode, extend)
  ):
    print(f"{workdir} is already complete")
    return done
  environment = provenance.environment()  # Now: the checkout may change.
  program = program_lib.make_program(
    settings, teacher=teacher_lib.read(settings)
  )
  program_lib.check_step(program)
  processes.from_process_0(lambda: _check_sources(settings, workdir, check))
  datasets = make_datasets(settings, program.mesh)
  if mode == "train_and_eval":
    chooses = settings.run.keep_best or settings.run.stop_after
    best_metric = settings.run.best_metric if chooses else ""
    evaluate.check(program, datasets["validation"], best_metric)
  notice = preemption.Notice()
  evaluator = evaluate.make_evaluator(program, datasets, notice.check)
  with workdir_lib.locked(workdir), notice.listening():
    # Checked again under the lock: another run may have started meanwhile.
    processes.from_process_0(
      lambda: config_lib.check_config(workdir, settings.plain, mode, extend)
    )
    restored = restore.newest(
      workdir,
      lambda step: restore.state(workdir, step, program.abstract_state),
      set_aside=True,
    )
    with _checkpoints(settings, workdir) as checkpoints:
      started = time.monotonic()
      state, meta, teacher = _begin(program, datasets, workdir, restored)
      if not restored and (settings.run.init_from or settings.run.teacher):
        # Saved now: the runs from which it starts may continue meanwhile.
        checkpoints.save(0, state, meta)
      started -= meta["wall_seconds"]
      _write_config(settings, workdir, is_new=not restored)
      with contextlib.closing(
        _writer(settings, workdir, mode, int(state.step), meta["extended"])
      ) as writer:
        parts = train_loop.Parts(
          program, datasets, checkpoints, evaluator, notice, writer, workdir
        )
        state, outcome = train_loop.train(
          parts, state, teacher, meta, started, mode
        )
        if mode == "train_and_eval" and outcome.status == "completed":
          outcome = _final_scores(parts, state, teacher, outcome, finish)
      summary = {
        "status": outcome.status,
        **({"reason": outcome.reason} if outcome.reason else {}),
        **({"figures_failed": outcome.failed} if outcome.failed else {}),
        **({"extended": meta["extended"]} if meta["extended"] else {}),
        "metrics": writer.last,
        **run_facts(
          datasets.values(),
          program.scored_params(state),
          int(state.step),
          started,
        ),
        "digest": integrity.digest(integrity.record(step_lib.learned(state))),
        **outcome.costs,
        **environment,
      }
    write_summary(workdir, settings, summary)
  return summary


def make_datasets(
  settings: config_lib.Settings,
  mesh: jax.sharding.Mesh,
  splits: Sequence[str] = SPLITS,
) -> dict[str, Dataset]:
  """Datasets by split; raises UserError on missing or malformed files."""
  size = settings.eval.batch_size
  sizes = dict.fromkeys(SPLITS, size) | {"train": settings.run.batch_size}
  task, datasets = settings.task_module, {}
  for split in splits:
    rows = sharding.local_rows(mesh, sizes[split])
    dataset = task.make_dataset(
      settings.task,
      split,
      batch_size=sizes[split],
      seed=settings.run.seed,
      rows=rows,
    )
    datasets[split] = check_dataset(
      task, settings.task, split, len(rows), dataset
    )
  return datasets


def _check_sources(
  settings: config_lib.Settings, workdir: pathlib.Path, check: bool
) -> None:
  """Says what changed since a run began; checks the family of a new one."""
  if (workdir / "config.json").exists():
    sources.compare(workdir, settings.plain)
  elif check:
    doubt = contract.require(settings, "--unchecked trains all the same")
    if doubt:
      note(doubt)


def _complete(
  settings: config_lib.Settings, workdir: pathlib.Path, mode: str, extend: bool
) -> dict[str, Any] | None:
  """The summary if the run is complete; UserError if it cannot be run."""
  config_lib.check_config(workdir, settings.plain, mode, extend)
  if extend:
    _check_extension(settings, workdir)
  settings.check_run(mode)
  metrics.check_dashboards(settings.run.wandb_project)
  if settings.run.debug_nans and jax.process_count() > 1:
    raise UserError(
      "run.debug_nans needs a single process; resume from the checkpoint with"
      " one"
    )
  path = workdir / "summary.json"
  summary = workdir_lib.read_json(path) if path.exists() else {}
  scored = any(name.startswith("test") for name in summary.get("metrics", {}))
  done = summary.get("status") == "completed" and (scored or mode == "train")
  if extend and summary.get("steps", 0) < settings.run.num_steps:
    done = False
  if not done:
    settings.check_schedule()
    return None
  if scored:
    config_lib.check_scored(workdir, settings.plain)
  return summary


def _check_extension(
  settings: config_lib.Settings, workdir: pathlib.Path
) -> None:
  """Raises UserError for a run that cannot be extended to these settings."""
  if not (workdir / "config.json").exists():
    raise UserError(
      f"--extend: {workdir} contains no run; --workdir=DIR names it"
    )
  before = workdir_lib.read_config(workdir)["run"]
  if settings.run.num_steps < before["num_steps"]:
    raise UserError(
      f"--extend: run.num_steps={settings.run.num_steps} is less than the"
      f" {before['num_steps']} there"
    )
  resized = settings.run.batch_size != before["batch_size"]
  if resized and settings.family.init_carried:
    raise UserError(
      f"--extend: run.batch_size must remain {before['batch_size']}:"
      f" {settings.model_name!r} carries a state of every example from step to"
      " step"
    )


def _checkpoints(
  settings: config_lib.Settings, workdir: pathlib.Path
) -> checkpoint_lib.Checkpoints:
  """The run's checkpoints, with the scores by which they are kept."""
  scores = processes.from_process_0(
    lambda: list(
      metrics.scores(
        workdir_lib.read_metrics(workdir), settings.run.best_metric
      ).items()
    )
  )
  return checkpoint_lib.Checkpoints(
    workdir,
    keep=settings.run.keep_checkpoints,
    keep_best=settings.run.keep_best,
    scores=dict(scores),
  )


def _begin(
  program: program_lib.Program,
  datasets: Mapping[str, Dataset],
  workdir: pathlib.Path,
  restored: tuple[step_lib.TrainState, dict[str, Any]] | None,
) -> tuple[step_lib.TrainState, dict[str, Any], Any]:
  """(the state that training starts from, its metadata, teacher's parameters).

  The metadata: "batches" is the index of the next batch, counted in this batch
  size; "wall_seconds" the duration of the run up to the state; "pending" the
  metrics of steps not yet logged; "teacher_step" the step of the teacher's
  checkpoint; "data" the checksums of the data.

  "extended" has an entry for every change of the number of steps or of the
  batch size: the step, and the values before. Batches of another size continue
  after the examples that were read, rounded up to a whole batch.
  """
  settings, data = program.settings, train_loop.checksums(datasets)
  options = settings.run
  if restored:
    state, meta = restored
  else:
    state = _initial_state(program)
    meta = {"batches": 0, "wall_seconds": 0.0, "pending": []}
  before = meta.get("data", {})
  if changed := [x for x in before if data.get(x, before[x]) != before[x]]:
    raise UserError(
      f"{workdir}: the data changed since the run started"
      f" ({', '.join(changed)}); use another --workdir for other data"
    )
  current = {"num_steps": options.num_steps, "batch_size": options.batch_size}
  earlier = {name: meta.get(name, value) for name, value in current.items()}
  examples = meta["batches"] * earlier["batch_size"]
  changes = [] if current == earlier else [{"step": int(state.step), **earlier}]
  teacher_step, teacher = teacher_lib.load(
    settings, program.abstract_teacher, meta.get("teacher_step")
  )
  meta = {
    **meta,
    **current,
    "batches": -(-examples // options.batch_size),
    "extended": [*meta.get("extended", []), *changes],
    "data": data,
    "teacher_step": teacher_step,
  }
  return state, meta, teacher


def _initial_state(program: program_lib.Program) -> step_lib.TrainState:
  """The state before the first step, with the parameters of run.init_from."""
  options = program.settings.run
  state = program.init(jax.random.key(options.seed))
  if not options.init_from:
    return state
  _, loaded = restore.chosen_params(
    local_path(options.init_from),
    None,
    program.abstract_params,
    f"run.init_from={options.init_from}",
    options.init_fresh,
  )
  base, params = (lora.replaced(x, loaded) for x in (state.base, state.params))
  ema = jax.tree.map(jnp.copy, params) if state.ema else {}
  return state._replace(params=params, ema=ema, base=base)


def _write_config(
  settings: config_lib.Settings, workdir: pathlib.Path, is_new: bool
) -> None:
  """Writes config.json; an unfinished run has no summary."""
  if jax.process_index():
    return
  if is_new:
    source = settings.run.init_from
    workdir_lib.keep_hub_files(
      local_path(source) if source else None,
      workdir,
      getattr(settings.task, "tokenizer", ""),
    )
    sources.keep(workdir, sources.files(settings.plain))
  workdir_lib.write_json(workdir / "config.json", settings.plain)
  (workdir / "summary.json").unlink(missing_ok=True)


def _writer(
  settings: config_lib.Settings,
  workdir: pathlib.Path,
  mode: str,
  start_step: int,
  extended: Sequence[Mapping[str, int]],
) -> metrics.Writer:
  """The writer of the metrics after a step, and of the dashboards."""
  was_last = any(change["step"] == start_step for change in extended)
  headline = (*settings.task_module.HEADLINE, *settings.family.headline)
  return metrics.Writer(
    workdir,
    settings.run.num_steps,
    start_step,
    scored_again=mode == "train_and_eval"
    and (
      start_step == settings.run.num_steps
      or train_loop.evaluation_is_due(settings, start_step)
      or was_last
    ),
    shown=tuple(dict.fromkeys(("loss", *headline, "steps_per_second"))),
    dashboards=metrics.dashboards(
      workdir, start_step, settings.run.wandb_project, settings.plain
    ),
  )


def _final_scores(
  parts: train_loop.Parts,
  state: step_lib.TrainState,
  teacher_params: Any,
  outcome: train_loop.Outcome,
  finish: Finish,
) -> train_loop.Outcome:
  """Writes final scores and draws figures; returns the outcome after it."""
  params, step = parts.program.scored_params(state), int(state.step)
  try:
    # Both may score the same training examples, with the same result.
    validation = parts.evaluator(params, "validation")
    test = parts.evaluator(params, "test")
  except preemption.Preempted:  # The state is saved; a restart scores again.
    return outcome._replace(status="preempted", reason="")
  for split, scores in (validation | test).items():
    parts.writer.write(step, split, scores, once=split not in validation)
  scored = Scored(
    parts.program,
    params,
    teacher_params,
    parts.datasets["test"],
    workdir_lib.read_metrics(parts.workdir),
    parts.workdir / "figures",
  )
  extras = finish(scored)
  for split, scores in extras.scores.items():
    parts.writer.write(step, split, scores, once=True)
  parts.writer.images(step, extras.files)
  return outcome._replace(failed=extras.failed)


def run_facts(
  datasets: Iterable[Dataset], params: Any, num_steps: int, started: float
) -> dict[str, Any]:
  """The entries of a summary that training and evaluation share."""
  return {
    "parameters": state_lib.num_elements(params),
    "steps": num_steps,
    "wall_seconds": round(time.monotonic() - started, 2),
    "data": {k: v for dataset in datasets for k, v in dataset.facts.items()},
  }


def write_summary(
  directory: pathlib.Path,
  settings: config_lib.Settings,
  summary: Mapping[str, Any],
) -> None:
  """Writes config.json and summary.json, by process 0."""
  if jax.process_index() == 0:
    directory.mkdir(exist_ok=True)
    workdir_lib.write_json(directory / "config.json", settings.plain)
    workdir_lib.write_json(directory / "summary.json", summary)
  processes.wait_for_all()  # Process 0 draws; others must wait.
