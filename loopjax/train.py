"""Training, as one protocol for every family.

Read `run` from top to bottom: mesh, data, model, restore, loop, evaluation,
summary. Families differ only in the module that `settings.family` names.
"""

import functools
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from loopjax import checkpoint as checkpoint_lib
from loopjax import config as config_lib
from loopjax import evaluate, metrics, optim, provenance, sharding, step
from loopjax import workdir as workdir_lib
from loopjax.analysis import figures
from loopjax.data import pipeline
from loopjax.errors import UserError
from loopjax.types import Dataset


class Program(NamedTuple):
  """What is compiled for a run, before any array exists.

  Attributes:
    mesh: of devices.
    graphdef: the model without its parameters.
    init: key -> train state, created sharded.
    train: (state, stacked batches, frozen) -> (state, mean metrics); donates.
    abstract_state: shapes, dtypes and shardings of the train state.
  """

  mesh: Mesh
  graphdef: nnx.GraphDef
  init: Any
  train: Any
  abstract_state: step.TrainState


def make_program(
  settings: config_lib.Settings, devices: Sequence[Any] | None = None
) -> Program:
  """Traces the model and lays its state out over all devices, or some."""
  mesh = sharding.make_mesh(settings.mesh, devices or jax.devices())
  sharding.check_batch_size(mesh, settings.run.batch_size, "run.batch_size")
  sharding.check_batch_size(mesh, settings.eval.batch_size, "eval.batch_size")
  spec = settings.task_module.spec(settings.task)

  def build(key):
    return settings.family.Model(
      settings.model, spec, settings.loop, rngs=nnx.Rngs(params=key)
    )

  graphdef, _ = nnx.split(nnx.eval_shape(build, jax.random.key(0)))
  tx = optim.make_optimizer(settings.optim, settings.run.num_steps)

  def init(key):
    params = nnx.to_pure_dict(nnx.state(build(jax.random.fold_in(key, 0))))
    return step.init_state(
      params, tx, jax.random.fold_in(key, 1), settings.optim.ema_decay > 0
    )

  shapes = jax.eval_shape(init, jax.random.key(0))
  shardings = _state_shardings(mesh, shapes, tx)
  abstract_state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )
  train = functools.partial(
    step.train_steps,
    graphdef=graphdef,
    loss_fn=settings.family.loss,
    tx=tx,
    ema_decay=settings.optim.ema_decay,
  )
  return Program(
    mesh=mesh,
    graphdef=graphdef,
    init=jax.jit(init, out_shardings=shardings),
    train=jax.jit(
      train,
      donate_argnums=0,
      out_shardings=(shardings, sharding.replicated(mesh)),
    ),
    abstract_state=abstract_state,
  )


def _state_shardings(
  mesh: Mesh, shapes: step.TrainState, tx: optax.GradientTransformation
) -> step.TrainState:
  """EMA and optimizer moments lie where their parameter lies."""
  replicated = sharding.replicated(mesh)
  params = sharding.parameter_shardings(mesh, shapes.params)
  return step.TrainState(
    step=replicated,
    params=params,
    ema=params if shapes.ema else {},
    opt_state=optax.tree.map_params(
      tx,
      lambda _, where: where,
      shapes.opt_state,
      params,
      transform_non_params=lambda _: replicated,
    ),
    key=replicated,
  )


def make_datasets(settings: config_lib.Settings) -> dict[str, Dataset]:
  """Both splits; raises UserError on missing or malformed files."""
  sizes = {"train": settings.run.batch_size, "eval": settings.eval.batch_size}
  return {
    split: settings.task_module.make_dataset(
      settings.task, split, batch_size=size, seed=settings.run.seed
    )
    for split, size in sizes.items()
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
  started = time.monotonic()
  settings = config_lib.resolve(config)
  plain = config_lib.to_dict(config)
  workdir_lib.check_config(workdir, plain)
  if mode == "eval" and not (workdir / "config.json").exists():
    raise UserError(f"--workdir={workdir} holds no run to evaluate")
  if mode != "eval" and (done := _completed(workdir)):
    print(f"{workdir} is complete already")
    return done
  program = make_program(settings)
  datasets = make_datasets(settings)
  with workdir_lib.locked(workdir):
    workdir_lib.check_config(workdir, plain)  # Nobody came in between.
    if mode != "eval" and jax.process_index() == 0:
      workdir_lib.write_json(workdir / "config.json", plain)
    checkpoints = checkpoint_lib.Checkpoints(
      workdir / "checkpoints", settings.run.keep_checkpoints
    )
    state, before = _start(program, settings, checkpoints, mode)
    writer = metrics.Writer(workdir, settings.run.num_steps, int(state.step))
    evaluator = evaluate.make_evaluator(
      settings, program.graphdef, datasets["eval"], program.mesh
    )
    status = "completed"
    if mode != "eval":
      state, status = _train(
        program,
        settings,
        state,
        datasets["train"],
        writer,
        checkpoints,
        evaluator if mode == "train_and_eval" else None,
        lambda: before + time.monotonic() - started,
      )
    if mode != "train" and status == "completed":
      params = state.ema or state.params
      writer.write(int(state.step), "eval", evaluator(params))
      pictures = figures.make_figures(
        settings, program.graphdef, params, datasets["eval"], workdir
      )
      if pictures["depth"]:
        writer.write(int(state.step), "depth", pictures["depth"])
      writer.images(int(state.step), pictures["files"])
    checkpoints.close()
    writer.close()
    summary = {
      "status": status,
      "metrics": writer.last,
      "parameters": _size(state.params),
      "steps": int(state.step),
      "wall_seconds": round(before + time.monotonic() - started, 2),
      "digest": workdir_lib.digest(
        {"params": state.params, "ema": state.ema, "opt": state.opt_state}
      ),
      "data": {**datasets["train"].facts, **datasets["eval"].facts},
      **provenance.environment(),
    }
    name = "evaluation.json" if mode == "eval" else "summary.json"
    if jax.process_index() == 0:
      workdir_lib.write_json(workdir / name, summary)
  return summary


def _completed(workdir: pathlib.Path) -> dict[str, Any] | None:
  """The summary of a run that has nothing left to do."""
  path = workdir / "summary.json"
  summary = workdir_lib.read_json(path) if path.exists() else {}
  return summary if summary.get("status") == "completed" else None


def _start(
  program: Program,
  settings: config_lib.Settings,
  checkpoints: checkpoint_lib.Checkpoints,
  mode: str,
) -> tuple[step.TrainState, float]:
  """A fresh state or a checkpoint's, and the seconds that it took so far."""
  if mode != "eval" and not checkpoints.steps():
    return program.init(jax.random.key(settings.run.seed)), 0.0
  wanted = settings.eval.checkpoint_step if mode == "eval" else -1
  state, meta = checkpoints.restore(program.abstract_state, wanted)
  assert meta["batches"] == int(state.step)
  return state, meta["wall_seconds"]


def _train(
  program: Program,
  settings: config_lib.Settings,
  state: step.TrainState,
  dataset: Dataset,
  writer: metrics.Writer,
  checkpoints: checkpoint_lib.Checkpoints,
  evaluator: evaluate.Evaluator | None,
  wall_seconds: Callable[[], float],
) -> tuple[step.TrainState, str]:
  """The loop. Returns the last state and the status."""
  run_config = settings.run
  schedule = optim.make_schedule(settings.optim, run_config.num_steps)
  at = int(state.step)
  calls = stacked(
    pipeline.iterate(dataset.batches, start=at), run_config.steps_per_call
  )
  placed = sharding.batch_sharding(program.mesh, stacked=True)
  clock, pending = metrics.Clock(), []
  while at < run_config.num_steps:
    batches = clock.wait(lambda: sharding.put_batch(next(calls), placed))
    state, values = program.train(state, batches, {})
    pending.append(values)
    at += run_config.steps_per_call
    clock.count(run_config.steps_per_call)
    last = at == run_config.num_steps
    if last or at % run_config.log_every == 0:
      row = _mean(pending)  # The only read from the device.
      pending = []
      row["learning_rate"] = float(schedule(at - 1))
      writer.write(at, "train", {**row, **clock.rates(run_config.batch_size)})
      if not math.isfinite(float(row["loss"])):
        return state, "diverged"
    if last or at % run_config.checkpoint_every == 0:
      meta = {"batches": at, "wall_seconds": wall_seconds()}
      checkpoints.save(at, state, meta)
    if evaluator and _due(settings, at):
      params = state.ema or state.params
      writer.write(at, "eval", evaluator(params, settings.eval.num_examples))
      clock.reset()
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


def _size(params: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(params))
