"""Command line: `loopjax analysis RUN`.

Runs all analyses in order and reports those that do not apply.
"""

import os
import pathlib
from typing import Any

from loopjax import config as config_lib
from loopjax.analysis.multihop import (
  figures,
  instrumented,
  interventions,
  questions,
  readings,
  rows,
  tables,
)
from loopjax.data.multihop import task as task_lib
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.models import disco, looped
from loopjax.run import user_cache, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.saved import trained

_TABLES = (
  tables.stages,
  tables.role_exposure,
  tables.logit_lens,
  tables.cosines,
  tables.intervention,
  tables.patching,
)
_PICTURES = (
  "stages.png",
  "lens.png",
  "cosines.png",
  "intervention_loop*.png",
  "patching.png",
  "role_exposure.png",
)
# Per-loop traces that a family must have.
_TRACES = ("hidden", "prediction")


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Analyses a run, prints tables and file paths; returns the exit status."""
  parser = Parser(
    prog="loopjax analysis",
    description=(
      "Analyses the states between the loops of a multi-hop run at its newest "
      "checkpoint. Loops are numbered from 1, positions from 0. Other tasks "
      "have their figures in loopjax report."
    ),
  )
  parser.add_argument("workdir", type=pathlib.Path, metavar="RUN", help="a run")
  parser.add_argument(
    "--out", type=pathlib.Path, help="where to write [RUN/analysis]"
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="number of questions [all]"
  )
  parser.add_argument(
    "--loop", type=int, help="only intervene and patch after this loop [all]"
  )
  parser.add_argument(
    "--position",
    type=int,
    help="position to intervene at and patch [first position that sees each "
    "bridge]",
  )
  arguments = parser.parse_args(argv)
  user_cache.keep_compiled()
  analyse(
    arguments.workdir,
    arguments.out or zoo.output(arguments.workdir) / "analysis",
    num_examples=arguments.limit,
    loop=arguments.loop,
    position=arguments.position,
  )
  return 0


def analyse(
  workdir: pathlib.Path,
  output: pathlib.Path,
  *,
  num_examples: int = 0,
  loop: int | None = None,
  position: int | None = None,
) -> None:
  """Analyses the newest intact checkpoint of a run, which may be in progress.

  Writes analysis.jsonl and figures, prints tables and the paths of the files.

  Args:
    num_examples: evaluation questions to use; 0 for all.
    loop: intervene and patch after this loop only, from 1.
    position: intervene and patch at this position, from 0; None for the first
      position that determines each bridge.

  Raises:
    UserError: no such run, or no such loop or position.
  """
  settings = read_settings(workdir)
  _check(settings, num_examples, loop, position)
  run = trained.read(workdir)
  dataset = settings.task_module.make_dataset(
    settings.task, "test", batch_size=settings.eval.batch_size, seed=0
  )
  question_set = questions.gather(task_config(settings), dataset, num_examples)
  with writing(f"--out={output}"):
    output.mkdir(parents=True, exist_ok=True)
  if not os.access(output, os.W_OK):
    raise UserError(f"--out={output}: cannot be written")
  print(
    f"{workdir}: {settings.model_name}, step {run.step},"
    f" {settings.eval_loops} loops, {len(question_set.hops):,} questions"
  )
  model = instrumented.from_run(run)
  observed = model.observe(question_set)
  results = [
    *readings.stages(question_set, observed),
    *readings.role_exposure(question_set, observed),
    *readings.logit_lens(question_set, observed),
    *readings.cosines(question_set, observed),
  ]
  notes = [
    f"{split}: skipped intervention and patching: there is no bridge"
    for split, hops, _ in question_set.by_split()
    if hops == 1
  ]
  if reason := _why_unedited(settings):
    notes = [f"skipped intervention and patching: {reason}"]
  else:
    edited, left_out = _edit(run, model, question_set, observed, loop, position)
    results += edited
    notes += left_out
  if not rows.select(results, "role_exposure"):
    notes.append("skipped role exposure: there are no test_id questions")
  for table in _TABLES:
    if text := table(results):
      print(f"\n{text}")
  _write(workdir, output, run, results, notes)


def _check(
  settings: config_lib.Settings,
  num_examples: int,
  loop: int | None,
  position: int | None,
) -> None:
  """Raises UserError for flags that do not apply to this run."""
  if num_examples < 0:
    raise UserError(f"--limit={num_examples} must be at least 0 (0: all)")
  reason = _why_unedited(settings)
  for flag, value in (("loop", loop), ("position", position)):
    if reason and value is not None:
      raise UserError(
        f"--{flag}={value} has no effect on {settings.model_name}: {reason}"
      )
  config = task_config(settings)
  last = min(settings.eval_loops, config.max_hops) - 1
  if loop is not None and not 1 <= loop <= last:
    raise UserError(
      f"--loop={loop} must be 1 to {last}: the run has {settings.eval_loops} "
      f"loops, its questions at most {config.max_hops} hops"
    )
  length = config.sequence_length
  if position is not None and not 0 <= position < length:
    raise UserError(
      f"--position={position} must be 0 to {length - 1}: the longest question"
      f" has {length} tokens"
    )


def _why_unedited(settings: config_lib.Settings) -> str:
  """Why the state between loops cannot be edited; empty if it can be."""
  model_type: Any = settings.family.Model
  if not issubclass(model_type, (looped.Model, disco.Model)):
    return "equation 3 is for models of the families looped and disco"
  return "" if settings.eval_loops > 1 else "one loop has no state to edit"


def _edit(
  run: trained.TrainedModel,
  model: instrumented.InstrumentedModel,
  question_set: questions.Questions,
  observed: instrumented.Observed,
  loop: int | None,
  position: int | None,
) -> tuple[list[rows.Row], list[str]]:
  """Interventions and patching: (rows, a line for each skipped analysis)."""
  config = task_config(run.settings)
  table = interventions.fact_table(
    task_lib.make_graph(config), config.num_relations
  )
  results, notes = [], []
  for place in interventions.places(
    question_set, model.num_loops, loop, position
  ):
    results += interventions.sweep(model, question_set, observed, place)
    patched, left_out = interventions.patch(
      model, question_set, observed, place, table, 2 * config.num_entities
    )
    results += patched
    notes += left_out
  for hop in range(model.num_loops, config.max_hops):
    notes.append(
      f"bridge{hop}: skipped intervention and patching: loop {hop} is the last"
    )
  if position is not None:
    notes += [
      f"{split}: skipped intervention and patching: it ends before position "
      f"{position}"
      for split, hops, members in question_set.by_split()
      if hops > 1 and question_set.last[members[0]] < position
    ]
  return results, notes


def _write(
  workdir: pathlib.Path,
  output: pathlib.Path,
  run: trained.TrainedModel,
  results: list[rows.Row],
  notes: list[str],
) -> None:
  """Writes rows and figures; prints the skipped analyses and the file paths."""
  for pattern in _PICTURES:  # Removes an earlier analysis's figures.
    for old in output.glob(pattern):
      old.unlink()
  path = output / "analysis.jsonl"
  workdir_lib.write_json_lines(path, [{"step": run.step, **x} for x in results])
  stages = figures.draw_stages(
    workdir_lib.read_metrics(workdir),
    rows.values_of(rows.select(results, "stage"), "split"),
    run.settings.eval_loops,
    output,
  )
  if not stages:
    notes.append(
      "skipped stages.png: metrics.jsonl has no accuracy per loop yet"
    )
  pictures = [
    *stages,
    *figures.draw_lens(results, output),
    *figures.draw_cosines(results, output),
    *figures.draw_interventions(results, output),
    *figures.draw_patching(results, output),
    *figures.draw_role_exposure(results, output),
  ]
  print("", *notes, "", path, *pictures, sep="\n")


def read_settings(workdir: pathlib.Path) -> config_lib.Settings:
  """The settings of a run.

  Raises:
    UserError: there is no run, or it has another task or a family without the
      necessary traces.
  """
  settings = config_lib.of_run(workdir, str(workdir))
  if not isinstance(settings.task, task_lib.Config):
    task = settings.plain["task"]["name"]
    raise UserError(
      f"{workdir}: task.name={task!r}, but loopjax analysis is only for"
      " 'multihop'; loopjax report shows the figures of a run of any task"
    )
  if unseen := set(_TRACES).difference(settings.family.traces):
    raise UserError(
      f"{workdir}: model.name={settings.model_name!r} does not record "
      f"{', '.join(sorted(unseen))} after every loop"
    )
  return settings


def task_config(settings: config_lib.Settings) -> task_lib.Config:
  """The task section of settings that `read_settings` has checked."""
  assert isinstance(settings.task, task_lib.Config)
  return settings.task


if __name__ == "__main__":
  leave(main())
