"""Training, the same procedure for every family.

Read `run` from top to bottom: settings, program, data, restore;
`_train_and_evaluate`: state, loop, evaluation, summary. Families differ only in
the module `settings.family`.
"""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data import check_dataset
from loopjax.errors import UserError, local_path
from loopjax.nn import lora
from loopjax.program import step as step_lib
from loopjax.program import teacher as teacher_lib
from loopjax.run import boards, metrics, preemption, processes, provenance
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import checkpoint as checkpoint_lib
from loopjax.run.checkpoints import integrity, restore
from loopjax.train import evaluate, scoring
from loopjax.train import loop as train_loop
from loopjax.types import Dataset

# In order: for training; for evaluation in training and model selection; for
# reported results.
SPLITS = ("train", "validation", "test")


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


def run(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  mode: str,
  finish: scoring.Finish = scoring.nothing,
  extend: bool = False,
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

  Raises:
    UserError: the config, the data or the directory is invalid.
  """
  settings = config_lib.resolve(config, workdir)
  if done := processes.from_process_0(
    lambda: _admit(settings, workdir, mode, extend)
  ):
    print(f"{workdir} is already complete")
    return done
  # Recorded at the start: the checkout may change during the run.
  environment = provenance.environment()
  teacher = teacher_lib.read(settings)
  program = program_lib.make_program(settings, teacher=teacher)
  program_lib.check_step(program)
  datasets = make_datasets(settings, program.mesh)
  if mode == "train_and_eval":
    chooses = settings.run.keep_best or settings.run.stop_after
    best_metric = settings.run.best_metric if chooses else ""
    evaluate.check(program, datasets["validation"], best_metric)
  notice = preemption.Notice()
  with workdir_lib.locked(workdir), notice.listening():
    # Checked again under the lock: another run may have started meanwhile.
    processes.from_process_0(
      lambda: config_lib.check_config(workdir, settings.plain, mode, extend)
    )
    scores = processes.from_process_0(
      lambda: list(
        metrics.scores(
          workdir_lib.read_metrics(workdir), settings.run.best_metric
        ).items()
      )
    )
    restored = restore.newest(
      workdir,
      lambda step: restore.state(workdir, step, program.abstract_state),
      set_aside=True,
    )
    with checkpoint_lib.Checkpoints(
      workdir,
      keep=settings.run.keep_checkpoints,
      keep_best=settings.run.keep_best,
      scores=dict(scores),
    ) as checkpoints:
      evaluator = evaluate.make_evaluator(program, datasets, notice.check)
      context = train_loop.RunContext(
        program, datasets, checkpoints, evaluator, notice, workdir
      )
      summary = _train_and_evaluate(context, restored, mode, finish)
    summary |= environment
    scoring.write(workdir, settings, summary)
  return summary


def _admit(
  settings: config_lib.Settings, workdir: pathlib.Path, mode: str, extend: bool
) -> dict[str, Any] | None:
  """Refuses invalid requests; returns the summary if the run is complete."""
  config_lib.check_config(workdir, settings.plain, mode, extend)
  if extend:
    _check_extension(settings, workdir)
  settings.check_run(mode)
  boards.check(settings.run.wandb_project)
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


def _train_and_evaluate(
  context: train_loop.RunContext,
  restored: tuple[step_lib.TrainState, dict[str, Any]] | None,
  mode: str,
  finish: scoring.Finish,
) -> dict[str, Any]:
  """Trains from the restored state and scores the result."""
  settings, started = context.program.settings, time.monotonic()
  state, meta, teacher = _begin(context, restored)
  start_step, started = int(state.step), started - meta["wall_seconds"]
  num_extensions = len(restored[1].get("extended", ())) if restored else 0
  if jax.process_index() == 0:
    if not restored:
      source = settings.run.init_from
      workdir_lib.keep_hub_files(
        local_path(source) if source else None,
        context.workdir,
        getattr(settings.task, "tokenizer", ""),
      )
    workdir_lib.write_json(context.workdir / "config.json", settings.plain)
    # Written last: an unfinished run has no summary.
    (context.workdir / "summary.json").unlink(missing_ok=True)
  scored_again = mode == "train_and_eval" and (
    start_step == settings.run.num_steps
    or train_loop.evaluation_is_due(settings, start_step)
    or len(meta["extended"]) > num_extensions  # No longer the run's last step.
  )
  headline = (*settings.task_module.HEADLINE, *settings.family.headline)
  writer = metrics.Writer(
    context.workdir,
    settings.run.num_steps,
    start_step,
    scored_again,
    shown=tuple(dict.fromkeys(("loss", *headline, "steps_per_second"))),
    boards=boards.open_all(
      context.workdir, start_step, settings.run.wandb_project, settings.plain
    ),
  )
  failed: list[str] = []
  try:
    state, outcome = train_loop.train(
      context, state, teacher, meta, writer, started, mode
    )
    if mode == "train_and_eval" and outcome.status == "completed":
      try:
        failed = scoring.final_scores(
          context, state, teacher.params, writer, finish
        )
      except preemption.Preempted:
        # The state is saved; a restart scores again.
        outcome = outcome._replace(status="preempted", reason="")
  finally:
    writer.close()
  summary = scoring.run_facts(
    context.datasets.values(),
    context.program.scored_params(state),
    int(state.step),
    started,
  )
  return {
    "status": outcome.status,
    **({"reason": outcome.reason} if outcome.reason else {}),
    **({"figures_failed": failed} if failed else {}),
    **({"extended": meta["extended"]} if meta["extended"] else {}),
    "metrics": writer.last,
    **summary,
    "digest": integrity.digest(integrity.record(step_lib.learned(state))),
    **outcome.costs,
  }


def _begin(
  context: train_loop.RunContext,
  restored: tuple[step_lib.TrainState, dict[str, Any]] | None,
) -> tuple[step_lib.TrainState, dict[str, Any], teacher_lib.TeacherParams]:
  """(the state that training starts from, its metadata, the teacher)."""
  settings = context.program.settings
  if restored:
    state, meta = restored
    _check_data(context, meta.get("data", {}))
  else:
    state = _fresh_state(context)
    meta = {"batches": 0, "wall_seconds": 0.0, "pending": []}
  meta = _continued(context, meta, int(state.step))
  teacher = teacher_lib.load(
    settings, context.program.abstract_teacher, meta.get("teacher_step")
  )
  meta["teacher_step"] = teacher.step
  if not restored and (settings.run.init_from or settings.run.teacher):
    # Saved now: the runs from which it starts may continue meanwhile.
    context.checkpoints.save(0, state, meta)
  return state, meta, teacher


def _continued(
  context: train_loop.RunContext, meta: Mapping[str, Any], current_step: int
) -> dict[str, Any]:
  """The metadata of a state, for this start of the run.

  "batches" is the index of the next batch, counted in this batch size;
  "wall_seconds" the duration of the run up to the state; "pending" the metrics
  of steps not yet logged; "teacher_step" the step of the teacher's checkpoint.

  "extended" has an entry for every change of the number of steps or of the
  batch size: the step, and the values before. Batches of another size continue
  after the examples that were read, rounded up to a whole batch.

  Args:
    context: the run.
    meta: the metadata from the checkpoint.
    current_step: the state's step.
  """
  options = context.program.settings.run
  current = {"num_steps": options.num_steps, "batch_size": options.batch_size}
  before = {name: meta.get(name, value) for name, value in current.items()}
  examples = meta["batches"] * before["batch_size"]
  changes = [] if current == before else [{"step": current_step, **before}]
  return {
    **meta,
    **current,
    "batches": -(-examples // options.batch_size),
    "extended": [*meta.get("extended", []), *changes],
    "data": train_loop.checksums(context.datasets),
  }


def _check_data(
  context: train_loop.RunContext, before: Mapping[str, str]
) -> None:
  """Raises UserError if the data differ from the checkpoint's."""
  current = train_loop.checksums(context.datasets)
  changed = [
    name for name, value in before.items() if current.get(name, value) != value
  ]
  if changed:
    raise UserError(
      f"{context.workdir}: the data changed since the run started"
      f" ({', '.join(changed)}); use another --workdir for other data"
    )


def _fresh_state(context: train_loop.RunContext) -> step_lib.TrainState:
  """The state before the first step, with parameters of run.init_from if set.

  Raises:
    UserError: run.init_from has no matching parameters.
  """
  options = context.program.settings.run
  state = context.program.init(jax.random.key(options.seed))
  if not options.init_from:
    return state
  _, loaded = restore.chosen_params(
    local_path(options.init_from),
    None,
    context.program.abstract_params,
    f"run.init_from={options.init_from}",
    options.init_fresh,
  )
  base, params = (lora.replaced(x, loaded) for x in (state.base, state.params))
  ema = jax.tree.map(jnp.copy, params) if state.ema else {}
  return state._replace(params=params, ema=ema, base=base)
