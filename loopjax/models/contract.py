"""What every family promises, checked on a small model of it."""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.errors import UserError, one_line
from loopjax.loop import exits
from loopjax.losses import tokens as token_losses
from loopjax.models import MODELS
from loopjax.nn.attention import cache as cache_lib
from loopjax.optim import parameters
from loopjax.protocols import Family
from loopjax.types import Array, LoopOptions, TaskSpec

_BATCH, _LENGTH, _VOCABULARY, _PADDING, _LOOPS = 2, 8, 23, 2, 3
_SMALL = {
  "num_heads": 2, "width": 32, "num_layers": 1, "num_loops": _LOOPS,
  "init_std": 0.2, "dropout": 0.0, "precision": "float32",
  "chunk_size": 4, "prefill_chunk": 1,  # Read as token by token.
}  # fmt: skip
# It compiles longer than it runs.
_FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}
_TOLERANCE = 1e-3  # Of the largest value; another model's logits differ by 1.
# Least and most of what XLA counts that `costs` may be: it leaves out
# point-wise operations.
_SHARE = (0.8, 1.05)
_COSTS = "costs are what XLA counts"


def small(config: Any) -> Any:
  """The config with few loops, layers and features, where it can have them."""
  return _changed(config, _SMALL)


def _changed(config: Any, values: Mapping[str, Any]) -> Any:
  """The config with those of the values that it can have, one by one."""
  known = {field.name for field in dataclasses.fields(config)}
  for name in (x for x in values if x in known):
    with contextlib.suppress(UserError):
      config = dataclasses.replace(config, **{name: values[name]})
  return config


def require(settings: Any, otherwise: str) -> str:
  """Raises UserError if a family from outside breaks a promise.

  Those of the package keep theirs, by their tests. Costs change no training,
  and those of a small model depend on its sizes: they are a note, no error.

  Args:
    settings: `config.Settings`, of whose model a small one is checked.
    otherwise: how to train without this, the end of the message.

  Returns:
    The note to show; "" if there is none.
  """
  name = settings.model_name
  if not MODELS.is_outside(name):
    return ""
  predicts_next = settings.spec.predicts_next
  found = results(settings.family, small(settings.model), predicts_next)
  wrong = {x: f"model.name={name!r}: {x}: {y}" for x, y in found if y}
  doubt = wrong.pop(_COSTS, "")
  if wrong:
    raise UserError("\n".join(wrong.values()) + f"; {otherwise}")
  return doubt


@functools.cache  # A process trains many models of a family.
def results(
  family: Family, config: Any, predicts_next: bool = False
) -> tuple[tuple[str, str], ...]:
  """(promise, what is wrong or "") for all that the family promises.

  A family without `reading` may attend to later tokens, unless it is trained to
  predict next tokens.
  """
  try:
    model = _Small(family, config)
  except Exception as error:
    return (("a small model of it can be made", _failure(error)),)
  checks: dict[str, Callable[[], str]] = {}
  with contextlib.suppress(UserError):  # A loss that needs a teacher.
    if family.check_teacher:
      family.check_teacher(config, None)
    checks["every parameter has a gradient"] = model.gradients
    checks["scan and unrolled loops agree"] = model.executions
  checks[_COSTS] = model.costs
  if family.reading or predicts_next:
    checks["no logit depends on a later token"] = model.causality
  elif not model.spec.predicts_next:
    checks["logits depend on later tokens"] = model.causality
  caches = family.reading.caches if family.reading else ()
  # A cache of another kind may hold a state from token to token.
  kinds = [x for x in caches if x in (caches[0], *cache_lib.KINDS)]
  for number, kind in enumerate(kinds):
    # Where loops share keys, decoding equals the forward pass with one loop.
    checks[f"prefill and decode are the forward pass (cache {kind})"] = (
      functools.partial(model.reading, kind, 1 if number else _LOOPS)
    )
  if family.reads_out_every_loop and family.reads_out_every_loop(config):
    checks["a score after loop k equals that of a run with k loops"] = (
      model.depths
    )
  with jax.default_matmul_precision("highest"):
    return tuple((name, _said(check)) for name, check in checks.items())


def _said(check: Callable[[], str]) -> str:
  """What a check finds, or how the family's code fails in it."""
  try:
    return check()
  except Exception as error:
    return _failure(error)


def _failure(error: Exception) -> str:
  """The error, and where the family's code fails."""
  frame = traceback.extract_tb(error.__traceback__)[-1]
  where = f"{frame.filename}, line {frame.lineno}"
  return f"{type(error).__name__}: {one_line(error)} ({where})"


class _Small:
  """A model of a family, and what its properties need."""

  def __init__(self, family: Family, config: Any):
    self.family, self.config = family, config
    self._compiled: dict[int, Any] = {}
    self.spec = self._spec(_VOCABULARY, _LENGTH)
    random = np.random.default_rng(0)

    def varied(x: Any) -> Any:
      """With noise if all are equal: gates and biases of 0 hide mistakes."""
      same = (x == x.flat[0]).all()
      return x + (0.2 * same * random.normal(size=x.shape)).astype(x.dtype)

    @jax.jit
    def drawn() -> Any:
      model = family.Model(config, self.spec, rngs=nnx.Rngs(params=0))
      return nnx.to_pure_dict(nnx.state(model))

    self.params = jax.tree.map(varied, jax.tree.map(np.asarray, drawn()))
    ids = random.integers(_VOCABULARY - _PADDING, size=(2, _BATCH, _LENGTH))
    self.inputs, self.targets = jnp.asarray(ids, jnp.int32)

  def _spec(self, vocabulary: int, length: int) -> TaskSpec:
    """Next tokens, if the family predicts them; else of a whole row."""
    spec = TaskSpec(
      vocabulary, length, num_padding_tokens=_PADDING, predicts_next=True
    )
    try:
      self._graph(self.config, spec, LoopOptions())
    except UserError:
      return dataclasses.replace(spec, predicts_next=False)
    return spec

  def _graph(self, config: Any, spec: TaskSpec, options: LoopOptions) -> Any:
    """(graph, abstract parameters)."""
    model = nnx.eval_shape(
      lambda: self.family.Model(
        config, spec, options, rngs=nnx.Rngs(params=jax.random.key(0))
      )
    )
    return nnx.split(model)

  def _jit(self, function: Any, execution: str = "scan") -> Any:
    """function(model, *arguments), compiled, without the model."""
    graph, _ = self._graph(self.config, self.spec, LoopOptions(execution))

    def run(params: Any, *arguments: Any) -> Any:
      return function(nnx.merge(graph, params), *arguments)

    compiled = jax.jit(run, compiler_options=_FAST)
    return functools.partial(compiled, self.params)

  def _logits(self, inputs: Array, num_loops: int) -> Array:
    """The logits of inputs, without the ids that pad the vocabulary."""
    if num_loops not in self._compiled:
      self._compiled[num_loops] = self._jit(
        lambda model, x: model(x, num_loops=num_loops).logits[..., :-_PADDING]
      )
    logits: Array = self._compiled[num_loops](inputs)
    return logits

  def _gradients(self, execution: str) -> dict[str, Array]:
    """The gradients by path, after all schedules of the loss."""
    batch: dict[str, Any] = {
      "inputs": self.inputs,
      "targets": self.targets,
      "weights": jnp.ones(self.inputs.shape),
      "mean_weight": jnp.float32(1),
    }
    if self.family.init_carried:
      batch["carried"] = self.family.init_carried(
        self.config, self.spec, _BATCH
      )

    def gradient(model: Any) -> Any:
      graph, params = nnx.split(model)

      def loss(params: Any) -> Array:
        step = jnp.asarray(10**6, jnp.int32)
        merged = nnx.merge(graph, params)
        return self.family.loss(merged, batch, jax.random.key(0), step, None)[0]

      return jax.grad(loss)(nnx.to_pure_dict(params))

    found = self._jit(gradient, execution)()
    paths = jax.tree_util.tree_leaves_with_path(found)
    return {parameters.name_of(path): x for path, x in paths}

  @functools.cached_property
  def _scanned(self) -> dict[str, Array]:
    return self._gradients("scan")

  def gradients(self) -> str:
    """Which parameters have none, or one that is not finite."""
    untrained = self.family.untrained
    pattern = (untrained(self.config) if untrained else "") or r"(?!)"
    wrong = [
      name
      for name, x in self._scanned.items()
      if not re.search(pattern, name)
      and not (jnp.isfinite(x).all() and jnp.any(x != 0))
    ]
    return f"none, or not finite: {', '.join(wrong)}" if wrong else ""

  def executions(self) -> str:
    """How far gradients of unrolled loops are from those of `scan`."""
    unrolled = self._gradients("unroll")
    wrong = {x: _differ(self._scanned[x], unrolled[x]) for x in unrolled}
    return next((f"{name} {text}" for name, text in wrong.items() if text), "")

  def causality(self) -> str:
    """Whether logits before a changed token move, and those after it do."""
    at = _LENGTH // 2
    other = self.inputs.at[:, at].set((self.inputs[:, at] + 1) % 21)
    both = (self._logits(x, _LOOPS) for x in (self.inputs, other))
    moved = jnp.abs(next(both) - next(both)).max(axis=(0, 2)) > 1e-6
    if self.spec.predicts_next and moved[:at].any():
      return f"token {at} changes the logits of token {int(moved.argmax())}"
    later = moved[at:] if self.spec.predicts_next else moved
    return "" if later.any() else f"token {at} changes no logits"

  def reading(self, kind: str, num_loops: int) -> str:
    """How far logits that are read in parts are from the forward pass."""
    part, call = self.family.reading, dict[str, Any](num_loops=num_loops)
    assert part
    expected, text = self._logits(self.inputs, num_loops), ""
    exiting = dict[str, Any]()
    if part.exits:  # As in generation.
      most = jnp.full(_BATCH, num_loops)
      policy = exits.ExitPolicy(jnp.ones(_BATCH), most, "fixed")
      exiting["exit_policy"] = policy

    def read(model: Any, tokens: Array, cache: Any) -> Any:
      output, cache = part.read(model, tokens, cache, **call, **exiting)
      return output.logits[..., :-_PADDING], cache

    run = self._jit(read)
    empty = self._jit(
      lambda m: part.empty_cache(m, _BATCH, _LENGTH, kind=kind, **call)
    )()
    for ends in ((4, 8), (4, 5, 6, 7, 8)):
      cache, begin = empty, 0
      for end in ends:
        logits, cache = run(self.inputs[:, begin:end], cache)
        text = text or _differ(expected[:, begin:end], logits)
        begin = end
    return text and f"logits {text}; a family with reading=None has neither"

  def depths(self) -> str:
    """How far losses after each loop are from those of runs with fewer."""
    call = {"num_loops": _LOOPS, "targets": self.targets}
    losses = self._jit(lambda m: m(self.inputs, **call).trace["loss"])()
    for k, loss in enumerate(losses, 1):
      logits = self._logits(self.inputs, k)
      alone = token_losses.token_cross_entropy(logits, self.targets)
      if wrong := _differ(alone, loss):
        return (
          f"the losses at k={k} {wrong}; reads_out_every_loop=None has no such"
          " scores"
        )
    return ""

  def costs(self) -> str:
    """Which share of XLA's FLOPs the family counts."""
    one_chunk = {"chunk_size": 0, "prefill_chunk": 0}  # No scan over chunks.
    sizes = {"width": 128, "num_loops": 2, **one_chunk}
    wide = _changed(self.config, sizes)
    spec = self._spec(512, 32)
    graph, params = self._graph(wide, spec, LoopOptions("unroll"))
    run = jax.jit(lambda p, x: nnx.merge(graph, p)(x).logits)
    inputs = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    analysis: Any = run.lower(params, inputs).compile(_FAST).cost_analysis()
    of_loops = self.family.costs(wide, spec, wide.num_loops)
    share = of_loops["flops_per_example"][-1] / analysis["flops"]
    if _SHARE[0] < share < _SHARE[1]:
      return ""
    return f"{share:.2f} of them; XLA counts the body of a scan once"


def _differ(expected: Array, found: Array) -> str:
  """How far arrays differ; "" if they are equal but for rounding."""
  scale = float(jnp.max(jnp.abs(expected)))
  error = float(jnp.max(jnp.abs(expected - found)))
  return "" if error <= _TOLERANCE * scale else f"differ by {error:.2g}"
