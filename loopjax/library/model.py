"""A model with its parameters, and what a Python program does with it."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.generate.sampling import Sampling
from loopjax.library import checked, evaluation, text, training
from loopjax.sections import flatten
from loopjax.types import Array, TaskSpec


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

  def __repr__(self) -> str:
    """One line: family, task, the settings that were changed, and the size."""
    settings = self.about.settings
    names = settings.model_name, settings.plain["task"]["name"]
    now, default = settings.plain, config_lib.to_dict(config_lib.make(*names))
    changed = [
      f"{key.removeprefix('model.').replace('.', '__')}={value!r}"
      for section in ("model", "task")
      for key, value in flatten({section: now[section]}).items()
      if value != flatten(default).get(key)
    ]
    words = [repr(names[0]), f"task={names[1]!r}", *changed]
    return f"<Model {' '.join(words)}: {self.num_parameters:,} parameters>"

  @property
  def spec(self) -> TaskSpec:
    """Vocabulary, length and coordinates of the tokens."""
    return self.about.settings.spec

  @property
  def num_parameters(self) -> int:
    """The number of elements of all parameters."""
    return sum(np.size(x) for x in jax.tree.leaves(self.params))

  def module(self) -> Any:
    """The Flax NNX module, for Flax's own optimizer and transforms."""
    return nnx.merge(self.graphdef, self.params)

  def logits(
    self,
    tokens: Any,
    *,
    num_loops: int | None = None,
    documents: Any = None,
  ) -> Array:
    """Logits of the predicted tokens, f32 [T, V] or [B, T, V].

    Args:
      tokens: token ids, [T] or [B, T].
      num_loops: number of loops; as in training if None.
      documents: of packed rows of text, the number of each token's document, of
        the shape of `tokens`; tokens attend to their own document only. A row
        is one document if None.

    Raises:
      UserError: the tokens are not ids of the model, or are too few for it, or
        it does not support this number of loops; or documents have another
        shape, or the task has none.
    """
    return self._run(tokens, num_loops, documents, ())[0]

  def trace(
    self,
    tokens: Any,
    *names: str,
    num_loops: int | None = None,
    documents: Any = None,
  ) -> dict[str, Array]:
    """Records of every loop, [K, T, ...] or [K, B, T, ...] by name.

    Args:
      tokens: token ids, [T] or [B, T].
      names: what to record, names from `traces` of the family.
      num_loops: K; as in training if None.
      documents: as in `logits`.

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
    return self._run(tokens, num_loops, documents, names)[1]

  def generate(
    self,
    prompt: str | Sequence[str],
    *,
    num_tokens: int | None = None,
    num_loops: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    bos: str | None = None,
  ) -> Any:
    """Returns a language model's continuation of a prompt.

    Args:
      prompt: the text to continue; or several, for a list of continuations,
        each the same as alone (up to the rounding of a batch).
      num_tokens: maximum number of tokens to generate; 256, or as many as fit
        into the model's sequence length after the prompt, if None.
      num_loops: number of loops per token; as in evaluation if None.
      temperature: divides the logits; 0 for greedy decoding.
      seed: seed of the random numbers; of the first of several prompts, whose
        seeds are counted up.
      stop: one string or several; the text ends before any of them.
      bos: the token at the beginning of the prompt: one of the tokenizer,
        "none" for nothing, of a model that was trained without one, or None for
        the token of the task.

    Raises:
      UserError: the model is not a language model, a number is out of range, or
        the prompt or `num_tokens` does not fit into the sequence length.
    """
    sampling = Sampling(temperature=temperature, seed=seed)
    several = isinstance(prompt, list | tuple)
    prompts: Any = prompt if several else [prompt]
    texts = text.generate(
      self,
      prompts,
      num_tokens,
      num_loops,
      sampling,
      stop,
      bos,
    )
    return texts if several else texts[0]

  def evaluate(
    self, dataset: Any, *, num_loops: int | None = None
  ) -> dict[str, float]:
    """The task's scores on a split, by the evaluation of `loopjax.main`.

    Args:
      dataset: `loopjax.datasets(...)["validation"]` or `["test"]` of the
        model's task, or a slice of it.
      num_loops: number of loops; as in evaluation if None.

    Returns:
      For each score its mean, "SCORE/standard_error", and both by group
      ("exact_match/rating=3-9"); "count", the number of examples. Splits within
      the dataset are scored apart: "SPLIT/SCORE".

    Raises:
      UserError: the dataset is not an evaluation split of the model's task, or
        the model does not support this number of loops.
    """
    return evaluation.evaluate(self, dataset, num_loops)

  def fit(
    self,
    data: Iterable[checked.Batch],
    *,
    steps: int,
    tx: optax.GradientTransformation | None = None,
    loss: training.Loss | None = None,
    seed: int = 0,
    every: int = 100,
    on_log: Callable[[int, dict[str, float], "Model"], Any] | None = None,
    quiet: bool = False,
  ) -> "Model":
    """The model, trained on batches by the train step of `loopjax.main`.

    A step is compiled once for the same settings, `loss`, `tx` and shapes; pass
    the same objects again to use it again. The default optimizer also depends
    on `steps`.

    Args:
      data: batches, such as `datasets(...)["train"]` or any iterator; each is
        (inputs, targets), i32 [B, T], or a task's dict, which may have
        "weights", f32 [B, T], and in text "documents", i32 [B, T].
      steps: number of optimizer steps.
      tx: the optimizer; from the model's settings if None.
      loss: the objective (module, batch, key, step, None) -> (loss, metrics), a
        scalar and a dict, which may be empty; the family's if None.
      seed: seed of the objective's random numbers.
      every: number of steps between calls of `on_log`.
      on_log: called with the number of steps, the mean of each training metric
        since the last call, and the model; training stops if it returns True.
      quiet: whether to print no progress to standard error.

    Returns:
      The trained model.

    Raises:
      UserError: the data end before the steps do, a batch is not what the model
        reads or of another shape than the first, the objective needs a teacher
        or is not of this form, or the loss is not finite.
    """
    return training.fit(self, data, steps, tx, loss, seed, every, on_log, quiet)

  def _run(
    self,
    tokens: Any,
    num_loops: int | None,
    documents: Any,
    names: tuple[str, ...],
  ) -> tuple[Array, dict[str, Array]]:
    settings = self.about.settings
    loops = checked.loops(settings, num_loops, settings.model.num_loops)
    ids, packed = _array(tokens), None
    is_row = ids.ndim == 1
    rows = checked.ids(settings, "tokens", ids[None] if is_row else ids)
    if documents is not None:
      packed = _array(documents)
      packed = packed[None] if is_row else packed
      packed = checked.documents(settings, packed, rows.shape)
    logits, trace = _forward(self, rows, loops, names, packed)
    if not is_row:
      return logits, trace
    return logits[0], jax.tree.map(lambda x: x[:, 0], trace)


def _array(given: Any) -> Any:
  """An array of the host or, if it already is there, of the device."""
  return given if isinstance(given, jax.Array) else np.asarray(given)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(
  model: Model,
  inputs: Array,
  num_loops: int,
  names: tuple[str, ...],
  documents: Array | None,
) -> tuple[Array, dict[str, Array]]:
  packed = {} if documents is None else {"documents": documents}
  output = model.module()(inputs, num_loops=num_loops, trace=names, **packed)
  return output.logits, output.trace
