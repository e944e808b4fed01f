"""A model with its parameters, and what a Python program does with it."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.library import checked, evaluation, text, training
from loopjax.loop import driver
from loopjax.program import state as state_lib
from loopjax.sections import flatten
from loopjax.types import Array, TaskSpec

Edit = Callable[[Any, Array], Any]  # (state, k) -> state.


@dataclasses.dataclass(frozen=True, eq=False)
class About:
  """What a model is, besides its parameters.

  Equal if the settings are, so that JAX compiles once for models that differ in
  their parameters only, and combines them.

  Attributes:
    settings: the checked config, with sections model, task, optim, ...
    folder: where the model was loaded from, absolute: the program may change
      its current folder; None if it was built.
    steps: of its training by `fit` or a run. What `jax.jit` returns has those
      of the model with which the function was compiled.
    options: settings of section run in the last call of `fit`, or empty.
  """

  settings: config_lib.Settings
  folder: pathlib.Path | None = None
  steps: int = 0
  options: Mapping[str, int] = dataclasses.field(default_factory=dict)

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
  drop_fields=("stopped",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A model with its parameters.

  Attributes:
    params: parameters, a nested dict of arrays.
    graphdef: the model without them: `nnx.merge(graphdef, params)`.
    about: settings, and where the model was loaded from.
    stopped: where `fit` stopped, with the optimizer's state, of a model that it
      returned and of copies by `copy` or `pickle`; models that `jax` or
      `dataclasses.replace` makes of it have None.
  """

  params: Any
  graphdef: nnx.GraphDef
  about: About
  stopped: training.Stopped | None = dataclasses.field(default=None, init=False)

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
    return state_lib.num_elements(self.params)

  def module(self) -> Any:
    """The Flax NNX module, for Flax's own optimizer and transforms."""
    return nnx.merge(self.graphdef, self.params)

  def logits(
    self,
    tokens: Any,
    *,
    num_loops: int | None = None,
    documents: Any = None,
    edit: Edit | None = None,
  ) -> Array:
    """Logits of the predicted tokens, f32 [T, V] or [B, T, V].

    Args:
      tokens: token ids, [T] or [B, T].
      num_loops: number of loops; as in evaluation if None.
      documents: of packed rows of text, the number of each token's document, of
        the shape of `tokens`; tokens attend to their own document only. A row
        is one document if None.
      edit: function (state, k) -> the state that loop k = 0 .. K - 1 passes on
        instead, or that is read out; see `loop.driver.Watched` for what is a
        state. It is compiled into the program: pass the same function again
        for other tokens.
    """
    return self._run(tokens, num_loops, documents, (), edit)[0]

  def trace(
    self,
    tokens: Any,
    *names: str,
    num_loops: int | None = None,
    documents: Any = None,
    edit: Edit | None = None,
  ) -> dict[str, Any]:
    """Records of every loop, [K, T, ...] or [K, B, T, ...] by name.

    Args:
      tokens: token ids, [T] or [B, T].
      names: what to record, names from `traces` of the family; or "state", what
        passes from loop to loop, arrays by name, see `loop.driver.Watched`.
      num_loops: K; as in evaluation if None.
      documents, edit: as in `logits`.
    """
    supported = (*self.about.settings.family.traces, driver.STATE)
    for name in names:
      if name not in supported:
        raise UserError(f"trace {name!r} is not one of {', '.join(supported)}")
    if not names:
      raise UserError(
        f"pass the names of the traces to record: {', '.join(supported)}"
      )
    found = self._run(tokens, num_loops, documents, names, edit)[1]
    return {name: found[name] for name in names}

  generate = text.generate
  evaluate = evaluation.evaluate
  fit = training.fit

  def _run(
    self,
    tokens: Any,
    num_loops: int | None,
    documents: Any,
    names: tuple[str, ...],
    edit: Edit | None,
  ) -> tuple[Array, dict[str, Any]]:
    settings = self.about.settings
    loops = checked.loops(settings, num_loops, settings.eval_loops)
    ids, packed = checked.array("tokens", tokens), None
    is_row = ids.ndim == 1
    rows = checked.ids(settings, "tokens", ids[None] if is_row else ids)
    if documents is not None:
      packed = checked.array("documents", documents)
      packed = packed[None] if is_row else packed
      packed = checked.documents(settings, packed, rows.shape)
    watches = edit is not None or driver.STATE in names
    recorded = tuple(name for name in names if name != driver.STATE)
    call = self, rows, loops, recorded, packed, watches, edit
    logits, trace = _forward(*call)
    if not is_row:
      return logits, trace
    return logits[0], jax.tree.map(lambda x: x[:, 0], trace)


@functools.partial(jax.jit, static_argnums=(2, 3, 5, 6))
def _forward(
  model: Model,
  inputs: Array,
  num_loops: int,
  names: tuple[str, ...],
  documents: Array | None,
  watches: bool,
  edit: Edit | None,
) -> tuple[Array, dict[str, Any]]:
  call: dict[str, Any] = {} if documents is None else {"documents": documents}
  if watches:
    call["kind"] = driver.Watched(edit)
  output = model.module()(inputs, num_loops=num_loops, trace=names, **call)
  return output.logits, output.trace
