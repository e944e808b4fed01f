"""Models and data: load, build, save, datasets; and the loss of a batch."""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.config import sources
from loopjax.data import TASKS, check_dataset
from loopjax.errors import UserError, note, writing
from loopjax.hub import convert
from loopjax.library import checked, text, training
from loopjax.library.evaluation import Split, of_task
from loopjax.library.model import About, Model
from loopjax.models import MODELS, contract
from loopjax.program import state as state_lib
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.run.checkpoints import integrity
from loopjax.saved import trained
from loopjax.types import Array, Metrics

SPLITS = ("train", "validation", "test")
# What has the effect of settings that `build` refuses.
_INSTEAD = {
  "run.seed": "build(seed=) and fit(seed=)",
  "run.num_steps": "fit(steps=, total_steps=)",
  "run.batch_size": "datasets(batch_size=)",
  "run.log_every": "fit(every=)",
  "run.init_from": "loopjax.load",
  "eval.batch_size": "datasets(batch_size=)",
  "eval.split": "evaluate('validation') or evaluate('test')",
  "eval.checkpoint": "load(checkpoint=)",
}
_ONLY_COMMANDS = (
  "run.", "mesh.", "optim.ema_decay", "eval.every", "eval.num_examples",
  "eval.depth_",
)  # fmt: skip


def load(where: str | pathlib.Path, *, checkpoint: int | None = None) -> Model:
  """Loads a trained model: "zoo:NAME", a work directory, or a Hub folder.

  Args:
    where: the model; Hub parameters are loaded as float32.
    checkpoint: step of a run's checkpoint; the newest intact one if None.
  """
  folder = workdir_lib.path_of(where)
  if convert.is_folder(folder):
    if checkpoint is not None:
      raise UserError(f"checkpoint={checkpoint} has no effect on {folder}")
    _, settings, params = convert.read_folder(folder)
    graphdef, _ = program_lib.abstract_model(settings)
    return Model(params, graphdef, About(settings, folder.absolute()))
  run = trained.read(folder, checkpoint)
  folder = zoo.located(folder).absolute()
  convert.check_beginning(folder)
  return Model(run.params, run.graphdef, About(run.settings, folder, run.step))


def build(
  model: str, task: str = "text", *, seed: Any = 0, **settings: Any
) -> Model:
  """Builds a model with randomly initialised parameters.

  Args:
    model: a family, a key of `loopjax.models.MODELS`.
    task: the task, which defines the tokens, a key of `loopjax.data.TASKS`; the
      default is byte-level text.
    seed: seed of the parameters, an integer or, under `jax.vmap`, a traced one.
    settings: of the model by name (`width=128`), and of all sections by their
      names with two underscores (`task__sequence_length=256`). With a width
      and no setting of the heads, their number is the greatest with which they
      are at least as wide as the family's default heads.
  """
  config = _config(model, task, settings)
  for key in config_lib.by_user(config):
    if key in _INSTEAD or key.startswith(_ONLY_COMMANDS):
      raise UserError(
        f"build: {key} has no effect; use"
        f" {_INSTEAD.get(key, 'loopjax train, the command')}"
      )
  fitted = _fit_heads(config)
  resolved = config_lib.resolve(config)
  if fitted:
    note(fitted)
  if not isinstance(seed, jax.Array):
    seed = checked.seed(seed)
  params = state_lib.initial_params(resolved, jax.random.key(seed))
  graphdef, _ = program_lib.abstract_model(resolved)
  return Model(params, graphdef, About(resolved))


def loss(
  model: Model,
  inputs: Any,
  targets: Any = None,
  *,
  weights: Any = None,
  documents: Any = None,
  key: Array | None = None,
  step: Any = None,
) -> tuple[Array, Metrics]:
  """The family's training objective, in nats.

  Its gradient: `jax.grad(loopjax.loss, has_aux=True)(model, batch)` is a
  `Model` of gradients.

  Args:
    model: the model.
    inputs: a batch as in `Model.fit`, such as a task's dict; or token ids, i32
      [B, T], with `targets`.
    targets: token ids, i32 [B, T]; None with a batch.
    weights: weights of the targets, f32 [B, T]; all 1 if None.
    documents: i32 [B, T]; tokens attend to tokens with the same number only. A
      row is one document if None.
    key: random key, another one for every step; needed if the objective draws,
      for example dropout or the number of loops.
    step: number of steps taken, an integer or a traced one; needed if the
      objective depends on it.

  Returns:
    (loss, f32 scalar; metrics by name).
  """
  _check_model(model)
  settings = model.about.settings
  if settings.family.init_carried:
    raise UserError(
      f"{settings.model_name!r} carries state from step to step; use Model.fit"
    )
  arrays = {"targets": targets, "weights": weights, "documents": documents}
  given = {name: x for name, x in arrays.items() if x is not None}
  if targets is None and given:
    raise UserError(
      f"loss: {', '.join(given)} with a batch; put it into the batch's dict"
    )
  if isinstance(inputs, Mapping) and given:
    raise UserError("loss: pass a dict, or inputs and targets, not both")
  batch = checked.batch(
    settings, inputs if targets is None else {"inputs": inputs, **given}
  )
  batch["mean_weight"] = jnp.mean(batch["weights"])
  objective = training.objective(settings)
  given = {"key": key, "step": step}
  missing = [name for name, x in given.items() if x is None]
  shapes = tuple((name, x.shape, x.dtype) for name, x in batch.items())
  if missing and (read := _read(model.about, shapes).intersection(missing)):
    raise UserError(
      f"loss: the objective of {settings.model_name!r} depends on the"
      f" {' and '.join(sorted(read))}; pass another one for every step, as in"
      " loss(model, batch, key=jax.random.key(n), step=n)"
    )
  key = jax.random.key(0) if key is None else key
  step = jnp.asarray(0 if step is None else step, jnp.int32)
  value, metrics = objective(model.module(), batch, key, step, None)
  return value, {"loss": value, **metrics}


@functools.lru_cache(maxsize=16)
def _read(about: About, shapes: tuple[Any, ...]) -> frozenset[str]:
  """Which of "key" and "step" the objective depends on, for such a batch."""
  graphdef, params = program_lib.abstract_model(about.settings)
  objective = training.objective(about.settings)
  batch = {
    name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes
  }

  def value(params: Any, batch: Any, key: Array, step: Array) -> Array:
    module = nnx.merge(graphdef, params)
    return objective(module, batch, key, step, None)[0]

  arguments = (params, batch, jax.random.key(0), jnp.zeros((), jnp.int32))
  jax.eval_shape(value, *arguments)  # Errors that are not of `vmap`.
  found = set()
  for at, name in ((2, "key"), (3, "step")):
    axes = [0 if n == at else None for n in range(len(arguments))]
    mapped: list[Any] = [*arguments]
    mapped[at] = jnp.stack([mapped[at]] * 2)
    # A result that does not depend on what `vmap` maps has no mapped axis.
    try:
      jax.eval_shape(jax.vmap(value, axes, out_axes=None), *mapped)
    except ValueError:
      found.add(name)
  return frozenset(found)


def save(model: Model, workdir: str | pathlib.Path) -> None:
  """Writes a model as a run, which every command can load.

  The run has the steps of the model's training, the batch size and the seed of
  the last `fit`, and otherwise the model's settings: your own `tx` or `loss`
  is not among them.
  """
  _check_model(model)
  workdir = workdir_lib.path_of(workdir)
  zoo.refuse(workdir, "choose another directory")
  workdir_lib.check_new(workdir)
  about = model.about
  _, wanted = program_lib.abstract_model(about.settings)
  found = integrity.describe(model.params)
  integrity.compare(integrity.describe(wanted), found, "this model")
  config = ml_collections.ConfigDict(about.settings.plain)
  config.run.update(about.options)
  origin = {"made_by": "loopjax.save", "steps": about.steps}
  files = sources.files(about.settings.plain)
  with writing(workdir):
    convert.write_run(
      workdir, config, model.params, text.hub_files(model), origin
    )
    sources.keep(workdir, files)


def datasets(
  task: str | Model, *, batch_size: int = 32, seed: int = 0, **settings: Any
) -> dict[str, Any]:
  """The Grain pipelines of a task, by split; elements are batches.

  Args:
    task: a key of `loopjax.data.TASKS`; or a model, for its task with the
      settings that it was built or trained with.
    batch_size: examples per batch.
    seed: seed of the training order.
    settings: of the task, such as `box_rows=2`; files are a path, a list of
      paths, or a text as in a config.

  Returns:
    "train" (infinite), "validation" and "test": `grain.MapDataset` of dicts
    with "inputs", "targets", "weights" and other arrays of the task.
  """
  batch_size = checked.integer("batch_size", batch_size, 1)
  seed = checked.seed(seed)
  record: Any
  if isinstance(task, Model):
    changed = of_task(task.about.settings, settings)
    record, module = changed.task, changed.task_module
  else:
    config_lib.make("transformer", task)  # Names an unknown task.
    named = {f"task__{name}": value for name, value in settings.items()}
    config = _config("transformer", task, named)
    record, module = config_lib.record("task", dict(config.task)), TASKS[task]
  splits = {}
  for split in SPLITS:
    dataset = module.make_dataset(
      record, split, batch_size=batch_size, seed=seed
    )
    splits[split] = Split(
      check_dataset(module, record, split, batch_size, dataset)
    )
  return splits


def check_family(family: str | types.ModuleType, **settings: Any) -> None:
  """Prints for each promise of a family whether a small model keeps it.

  Of the model: prefill and decode with each cache are the forward pass, a score
  after loop k equals that of a run with k loops, logits do not depend on later
  tokens (or do, where it reads whole rows), every parameter has a gradient,
  unrolled loops compute the same, and `costs` are what XLA counts.

  Args:
    family: its name or module.
    settings: of its config, by name; sizes are made small.
  """
  if not isinstance(family, str | types.ModuleType):
    raise UserError(f"family={family!r:.80} is not a family's name or module")
  name = family if isinstance(family, str) else family.__name__
  config = config_lib.make(name, "text")
  named = {f"model.{x}": value for x, value in settings.items()}
  config_lib.override(config, named)
  made = contract.small(config_lib.record("model", dict(config.model)))
  found = contract.results(MODELS[name], made)
  for promise, wrong in found:
    print(f"{'FAILS' if wrong else 'holds'}  {promise}{wrong and f': {wrong}'}")
  if broken := [promise for promise, wrong in found if wrong]:
    raise UserError(f"{name} breaks {len(broken)} of {len(found)} promises")


def _check_model(model: object) -> None:
  """Raises UserError for anything else."""
  if not isinstance(model, Model):
    raise UserError(f"{model!r:.80} is not a model of loopjax")


def _fit_heads(config: ml_collections.ConfigDict) -> str:
  """Gives heads of a width that the user chose their default width, or more.

  Returns:
    what to say of it, "" if the heads are the default's or the user's.
  """
  model, default = config.model, MODELS[config.model.name].Config()
  heads, by_user = getattr(default, "num_heads", 0), config_lib.by_user(config)
  own = {"model.num_heads", "model.head_width", "model.num_key_value_heads"}
  if not heads or by_user & own or "model.width" not in by_user:
    return ""
  fitting = max(1, model.width // (default.width // heads))
  while model.width % (2 * fitting) and fitting > 1:
    fitting -= 1
  if fitting == heads:
    return ""
  config_lib.override(config, {"model.num_heads": fitting})
  return (
    f"model.num_heads={fitting}, for model.width={model.width}; the default is"
    f" {heads}"
  )


def _config(
  model: str, task: str, settings: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """A config without warm-up, and without evaluations at other depths."""
  config = config_lib.make(model, task)
  named = {
    name.replace("__", ".") if "__" in name else f"model.{name}": value
    for name, value in settings.items()
  }
  if len(named) < len(settings):
    raise UserError(f"a setting is given twice: {', '.join(settings)}")
  named = {name: checked.setting(name, value) for name, value in named.items()}
  config_lib.override(config, {"optim.warmup_steps": 0, "eval.depth_factor": 0})
  config_lib.set_by_user(config, named)
  return config
