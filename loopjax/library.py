"""From Python: `loopjax.load`, `build`, `loss`, `save`, `datasets`.

A `Model` is a pytree whose leaves are its parameters: `jax.grad`, `jax.vmap`,
`jax.tree` and Optax accept it. Everything here calls the same functions as the
commands; `docs/library.md` is the tutorial.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from flax import nnx

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.data import TASKS, pipeline
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.errors import UserError, local_path, writing
from loopjax.generate import source
from loopjax.generate import text as text_lib
from loopjax.generate.engine import Engine
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.hub import convert
from loopjax.optim import chain
from loopjax.program import fresh, step
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.saved import language_model as language_model_lib
from loopjax.saved import trained
from loopjax.types import Array, Metrics, TaskSpec

# Inputs and targets, each i32 [B, T], or a task's batch: a dict of arrays.
Batch = tuple[Any, Any] | Mapping[str, Any]
# (model, batch, key, step, teacher) -> (loss, metrics), see `protocols.Family`.
Loss = Callable[..., tuple[Array, Metrics]]
SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class About:
  """What a model is, besides its parameters.

  Equal if the settings are, so that JAX compiles once for models that differ in
  their parameters only, and combines them.

  Attributes:
    settings: the checked config, with sections model, task, optim, ...
    folder: where the model was loaded from; None if it was built.
  """

  settings: config_lib.Settings
  folder: pathlib.Path | None = None

  @functools.cached_property
  def _key(self) -> str:
    return json.dumps(self.settings.plain, sort_keys=True)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, About) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("params",),
  meta_fields=("graphdef", "about"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A model with its parameters.

  Attributes:
    params: parameters, a nested dict of arrays.
    graphdef: the model without them: `nnx.merge(graphdef, params)`.
    about: settings, and where the model was loaded from.
  """

  params: Any
  graphdef: nnx.GraphDef
  about: About

  @property
  def spec(self) -> TaskSpec:
    """Vocabulary, length and coordinates of the tokens."""
    return self.about.settings.spec

  @property
  def num_parameters(self) -> int:
    """The number of elements of all parameters."""
    return sum(x.size for x in jax.tree.leaves(self.params))

  def module(self) -> Any:
    """The Flax NNX module, for Flax's own optimizer and transforms."""
    return nnx.merge(self.graphdef, self.params)

  def logits(self, tokens: Any, *, num_loops: int | None = None) -> Array:
    """Logits of the predicted tokens, f32 [T, V] or [B, T, V].

    Args:
      tokens: token ids, [T] or [B, T].
      num_loops: number of loops; as in training if None.

    Raises:
      UserError: the tokens are not ids of the model, or are too few for it, or
        it does not support this number of loops.
    """
    return self._run(tokens, num_loops, ())[0]

  def trace(
    self, tokens: Any, *names: str, num_loops: int | None = None
  ) -> dict[str, Array]:
    """Records of every loop, [K, T, ...] or [K, B, T, ...] by name.

    Args:
      tokens: token ids, [T] or [B, T].
      names: what to record, names from `traces` of the family.
      num_loops: K; as in training if None.

    Raises:
      UserError: the family has no such record; or as in `logits`.
    """
    there = self.about.settings.family.traces
    for name in names:
      if name not in there:
        raise UserError(f"trace {name!r} is not one of {', '.join(there)}")
    if not names:
      raise UserError(
        f"pass the names of the traces to record: {', '.join(there)}"
      )
    return self._run(tokens, num_loops, names)[1]

  def generate(
    self,
    prompt: str,
    *,
    num_tokens: int = 100,
    num_loops: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
  ) -> str:
    """Returns a language model's continuation of a prompt.

    Args:
      prompt: the text to continue.
      num_tokens: maximum number of tokens to generate.
      num_loops: number of loops per token; as in evaluation if None.
      temperature: divides the logits; 0 for greedy decoding.
      seed: seed of the random numbers.
      stop: one string or several; the text ends before any of them.

    Raises:
      UserError: the model is not a language model, or a number is out of range.
    """
    settings = self.about.settings
    loops = _checked_loops(settings, num_loops, settings.eval_loops)
    language_model, engine = _generator(self, loops)
    request = GenerationRequest(
      language_model.tokenizer.encode_prompt(prompt),
      num_tokens,
      Sampling(temperature=temperature, seed=seed),
      stop_tokens=language_model.stop_tokens,
    )
    stops = (stop,) if isinstance(stop, str) else stop
    try:
      (found,) = text_lib.generate_texts(
        engine, language_model.tokenizer, [request], stops
      )
    except KeyboardInterrupt:
      _generator.cache_clear()  # Its engine is in the middle of this text.
      raise
    return found.text

  def fit(
    self,
    data: Iterable[Batch],
    *,
    steps: int,
    tx: optax.GradientTransformation | None = None,
    loss: Loss | None = None,
    seed: int = 0,
    every: int = 100,
    on_eval: Callable[[int, dict[str, float], "Model"], Any] | None = None,
  ) -> "Model":
    """The model, trained on batches by the train step of `loopjax.main`.

    Args:
      data: batches, such as `datasets(...)["train"]` or any iterator; each is
        (inputs, targets), i32 [B, T], or a task's dict, which may have
        "weights".
      steps: number of optimizer steps.
      tx: the optimizer; from the model's settings if None.
      loss: the objective (module, batch, key, step, None) -> (loss, metrics);
        the family's if None.
      seed: seed of the objective's random numbers.
      every: number of steps between calls of `on_eval`.
      on_eval: called with the number of steps, the mean of each metric since
        the last call, and the model; training stops if it returns True.

    Returns:
      The trained model.

    Raises:
      UserError: the data end before the steps do, a batch is not what the model
        reads or of another shape than the first, the objective needs a teacher,
        or the loss is not finite.
    """
    for name, value in (("steps", steps), ("every", every)):
      if value < 1:
        raise UserError(f"{name}={value} must be at least 1")
    settings = self.about.settings
    tx = tx or _optimizer(settings, steps)
    batches = iter(
      pipeline.iterate(data) if hasattr(data, "to_iter_dataset") else data
    )
    first = _batch(self, _next(batches, 0, steps))
    options = dataclasses.replace(settings.run, batch_size=len(first["inputs"]))
    carried = fresh.init_carried(settings._replace(run=options))

    @jax.jit  # So that no two of its arrays share a buffer: steps consume them.
    def init(params: Any) -> step.TrainState:
      copied = jax.tree.map(jnp.copy, params)
      return step.init_state(copied, tx, jax.random.key(seed), False, carried)

    state = init(self.params)
    run = jax.jit(
      functools.partial(
        step.train_step,
        graphdef=self.graphdef,
        teacher_graphdef=None,
        loss_fn=loss or _objective(settings),
        tx=tx,
        ema_decay=0.0,
        num_microbatches=1,
        max_bad_steps=1,
      ),
      donate_argnums=0,
    )
    batch, kept = first, []
    for number in range(1, steps + 1):
      state, metrics = run(state, batch, {})
      kept.append(metrics)
      if number % every == 0 or number == steps:
        _check_finite(state.bad)
        means, kept = _means(kept), []
        now = dataclasses.replace(self, params=state.params)
        if on_eval and on_eval(number, means, _copied(now)):
          break
      if number < steps:
        batch = _batch(self, _next(batches, number, steps), first)
    return dataclasses.replace(self, params=state.params)

  def _run(
    self, tokens: Any, num_loops: int | None, names: tuple[str, ...]
  ) -> tuple[Array, dict[str, Array]]:
    settings = self.about.settings
    loops = _checked_loops(settings, num_loops, settings.model.num_loops)
    ids = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    is_row = ids.ndim == 1
    rows = _ids(settings, "tokens", ids[None] if is_row else ids)
    logits, trace = _forward(self, rows, loops, names)
    if not is_row:
      return logits, trace
    return logits[0], jax.tree.map(lambda x: x[:, 0], trace)


@functools.lru_cache(maxsize=2)  # An engine keeps what it has compiled.
def _generator(
  model: Model, num_loops: int
) -> tuple[language_model_lib.LanguageModel, Engine]:
  settings = model.about.settings
  reading = settings.family.reading
  if reading is None or not isinstance(settings.task, TextConfig):
    raise UserError(
      f"a model {settings.model_name!r} of the task"
      f" {settings.plain['task']['name']!r} does not generate text"
    )
  tokenizer = tokenizer_lib.of(settings.task)
  files = _hub_files(model)
  language_model = language_model_lib.LanguageModel(
    tokenizer=tokenizer,
    stop_tokens=language_model_lib.stop_tokens(tokenizer, files)
    if files
    else (tokenizer.end,),
    context_length=model.spec.sequence_length,
    graphdef=model.graphdef,
    params=model.params,
    call={"num_loops": num_loops},
    facts={"model": settings.model_name},
  )
  return language_model, source.make_engine(
    language_model, num_slots=1, max_tokens=model.spec.sequence_length
  )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(
  model: Model, inputs: Array, num_loops: int, names: tuple[str, ...]
) -> tuple[Array, dict[str, Array]]:
  output = model.module()(inputs, num_loops=num_loops, trace=names)
  return output.logits, output.trace


def load(where: str | pathlib.Path, *, checkpoint: int | None = None) -> Model:
  """Loads a trained model: "zoo:NAME", a work directory, or a Hub folder.

  Args:
    where: the model; Hub parameters are loaded as float32.
    checkpoint: step of a run's checkpoint; the newest intact one if None.

  Raises:
    UserError: there is no such model, or it cannot be read.
  """
  folder = local_path(str(where))
  if _is_hub_folder(folder):
    if checkpoint is not None:
      raise UserError(f"checkpoint={checkpoint} has no effect on {folder}")
    _, settings, params = convert.read_folder(folder)
    graphdef, _ = program_lib.abstract_model(settings)
    return Model(params, graphdef, About(settings, folder))
  run = trained.read(folder, checkpoint)
  folder = zoo.located(folder)
  convert.check_beginning(folder)
  return Model(run.params, run.graphdef, About(run.settings, folder))


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
      names with two underscores (`task__sequence_length=256`).

  Raises:
    UserError: an unknown name, or a value that is invalid.
  """
  config = _config(model, task, settings)
  checked = config_lib.resolve(config)
  tx = optax.identity()
  params = fresh.fresh_state(checked, tx, jax.random.key(seed)).params
  graphdef, _ = program_lib.abstract_model(checked)
  return Model(params, graphdef, About(checked))


def loss(
  model: Model,
  inputs: Any,
  targets: Any,
  *,
  weights: Any = None,
  key: Array | None = None,
  step: int = 0,
) -> tuple[Array, Metrics]:
  """The family's training objective, in nats.

  Its gradient: `jax.grad(loopjax.loss, has_aux=True)(model, inputs, targets)`
  is a `Model` of gradients.

  Args:
    model: the model.
    inputs, targets: token ids, i32 [B, T].
    weights: weights of the targets, f32 [B, T]; all 1 if None.
    key: random key; `jax.random.key(0)` if None.
    step: number of steps taken, on which some objectives depend.

  Returns:
    (loss, f32 scalar; metrics by name).

  Raises:
    UserError: the family carries state from step to step, which `fit` trains;
      or as in `Model.fit`.
  """
  settings = model.about.settings
  if settings.family.init_carried:
    raise UserError(
      f"{settings.model_name!r} carries state from step to step; use Model.fit"
    )
  given = {"inputs": inputs, "targets": targets}
  batch = _batch(
    model, given if weights is None else {**given, "weights": weights}
  )
  batch["mean_weight"] = jnp.mean(batch["weights"])
  key = jax.random.key(0) if key is None else key
  return _objective(settings)(
    model.module(), batch, key, jnp.asarray(step, jnp.int32), None
  )


def save(model: Model, workdir: str | pathlib.Path) -> None:
  """Writes a model as a run with zero steps, which every command can load.

  Raises:
    UserError: the directory already contains a run, or cannot be written.
  """
  workdir = local_path(str(workdir))
  zoo.refuse(workdir, "choose another directory")
  if (workdir / "config.json").exists():
    raise UserError(f"{workdir}: already contains a run")
  with writing(workdir):
    convert.write_run(
      workdir,
      ml_collections.ConfigDict(model.about.settings.plain),
      model.params,
      _hub_files(model),
      {"made_by": "loopjax.save"},
    )


def datasets(
  task: str, *, batch_size: int = 32, seed: int = 0, **settings: Any
) -> dict[str, Any]:
  """The Grain pipelines of a task, by split; elements are batches.

  Args:
    task: a key of `loopjax.data.TASKS`.
    batch_size: examples per batch.
    seed: seed of the training order.
    settings: of the task, such as `box_rows=2`.

  Returns:
    "train" (infinite), "validation" and "test": `grain.MapDataset` of dicts
    with "inputs", "targets", "weights" and other arrays of the task.

  Raises:
    UserError: an unknown task or setting, or files that are missing.
  """
  config_lib.make("transformer", task)  # Names an unknown task.
  named = {f"task__{name}": value for name, value in settings.items()}
  config = _config("transformer", task, named)
  checked = config_lib.record("task", dict(config.task))
  return {
    split: TASKS[task]
    .make_dataset(checked, split, batch_size=batch_size, seed=seed)
    .batches
    for split in SPLITS
  }


def _config(
  model: str, task: str, settings: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """A config without warm-up, and without evaluations at other depths."""
  config = config_lib.make(model, task)
  named = {
    name.replace("__", ".") if "__" in name else f"model.{name}": value
    for name, value in settings.items()
  }
  config_lib.override(config, {"optim.warmup_steps": 0, "eval.depth_factor": 0})
  config_lib.set_by_user(config, named)
  return config


def _checked_loops(
  settings: config_lib.Settings, given: int | None, default: int
) -> int:
  """The number of loops to run; raises UserError unless the model can."""
  loops = default if given is None else given
  label = f"num_loops={loops}"
  if loops < 1:
    raise UserError(f"{label} must be at least 1")
  config_lib.check_loops(settings, loops, label)
  return loops


def _optimizer(
  settings: config_lib.Settings, steps: int
) -> optax.GradientTransformation:
  """The settings' optimizer; UserError if its schedule does not fit."""
  try:
    return chain.make_optimizer(settings.optim, steps)
  except UserError as error:
    raise UserError(f"{error}; or give tx, an optimizer") from error


def _objective(settings: config_lib.Settings) -> Loss:
  """The family's loss; raises UserError if it learns from a teacher."""
  family = settings.family
  if family.check_teacher:
    try:
      family.check_teacher(settings.model, settings.spec, None)
    except UserError as error:
      raise UserError(f"there is no teacher here: {error}") from error
  return family.loss


def _ids(settings: config_lib.Settings, name: str, given: Any) -> Array:
  """Token ids [B, T]; raises UserError if they are none of the model."""
  ids = given if isinstance(given, jax.Array) else np.asarray(given)
  if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
    raise UserError(
      f"{name} of shape {ids.shape} and dtype {ids.dtype} are invalid: expected"
      " integer ids [B, T]"
    )
  spec = settings.spec
  is_whole = settings.family.reading is None or spec.num_answer_tokens > 0
  if is_whole and ids.shape[1] != spec.sequence_length:
    raise UserError(
      f"{name}: {settings.model_name!r} reads rows of {spec.sequence_length}"
      f" tokens, not {ids.shape[1]}"
    )
  if ids.size and not isinstance(ids, jax.core.Tracer):
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= spec.vocab_size:
      raise UserError(
        f"{name}: ids from {low} to {high} are not in [0, {spec.vocab_size})"
      )
  return jnp.asarray(ids, jnp.int32)


def _batch(
  model: Model, batch: Batch, first: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """A batch with all that a loss reads, of the same shapes as the first."""
  if not isinstance(batch, Mapping):
    if isinstance(batch, str) or len(batch) != 2:
      raise UserError("a batch is (inputs, targets), or a dict that has them")
    batch = dict(zip(("inputs", "targets"), batch, strict=True))
  found = {name: jnp.asarray(x) for name, x in batch.items()}
  for name in ("inputs", "targets"):
    if name not in batch:
      raise UserError(f"a batch needs {name!r}, token ids [B, T]")
    found[name] = _ids(model.about.settings, name, batch[name])
  shape = found["targets"].shape
  found.setdefault("weights", jnp.ones(shape))
  found["weights"] = found["weights"].astype(jnp.float32)
  if model.spec.packs_documents:
    found.setdefault("documents", jnp.ones(shape, jnp.int32))
  for name in ("inputs", "weights"):
    if found[name].shape != shape:
      raise UserError(
        f"{name} of shape {found[name].shape} beside targets of {shape}"
      )
  if first and first["targets"].shape != shape:
    raise UserError(
      f"a batch of shape {shape} after one of {first['targets'].shape}"
    )
  return found


def _next(batches: Any, number: int, steps: int) -> Batch:
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
  found = jax.device_get(kept)
  return {
    name: float(np.mean([one[name] for one in found]))
    for name, value in found[-1].items()
    if np.ndim(value) == 0
  }


def _copied(model: Model) -> Model:
  """With parameters of its own: the next step consumes the state's."""
  return jax.tree.map(jnp.copy, model)


def _is_hub_folder(folder: pathlib.Path) -> bool:
  path = folder / "config.json"
  return path.is_file() and "model_type" in workdir_lib.read_json(path)


def _hub_files(model: Model) -> pathlib.Path | None:
  """Where tokenizer and config of a model of the Hub are; None if built."""
  folder = model.about.folder
  if folder is None or _is_hub_folder(folder):
    return folder
  return folder / convert.DIRECTORY
