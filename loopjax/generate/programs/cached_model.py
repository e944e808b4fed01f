"""A model and its cache, as the engine's programs use them."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from loopjax.errors import UserError
from loopjax.loop import exits
from loopjax.nn import linear
from loopjax.protocols import Exits, Reading
from loopjax.types import PRECISIONS, Array, Output

_MAX_UNROLLED = 32  # Layers times loops: each takes time to compile.


class CachedModel(NamedTuple):
  """A model without its parameters, and the options of its cache; static.

  Attributes:
    reading: the family's.
    graphdef: the model without its parameters.
    num_loops: maximum number of loops per token.
    max_tokens: maximum length of a sequence, prompt included.
    cache_kind: see `Reading.empty_cache`.
    exit_rule, exit_kept: `rule` and `kept` of `loop.exits.ExitPolicy`; without
      effect if the family has no early exits.
    platform: platform of the devices.
  """

  reading: Reading
  graphdef: nnx.GraphDef
  num_loops: int
  max_tokens: int
  cache_kind: str
  exit_rule: str
  exit_kept: str
  platform: str

  def check(self, config: Any) -> None:
    """Raises UserError for a cache or exits that the model does not support.

    Args:
      config: config of the model.
    """
    early, caches = self.reading.exits, self.reading.caches
    for name, value, values in (
      ("cache_kind", self.cache_kind, caches),
      ("exit_rule", self.exit_rule, exits.RULES if early else ("fixed",)),
      ("exit_kept", self.exit_kept, exits.KEPT),
    ):
      if value not in values:
        raise UserError(
          f"{name}={value!r} is not one of {', '.join(values)} for this model"
        )
    if early:
      early.check(config, self.exit_rule, self.exit_kept, self.cache_kind)

  @property
  def has_places(self) -> bool:
    """Whether a token's cache entries do not depend on later calls."""
    return self.cache_kind == "per_loop" and self.reading.has_places

  def check_prefill(self, config: Any) -> None:
    """Raises UserError if prefill with fewer loops is unsupported."""
    if not self.reading.exits:
      raise UserError(
        "prefill_loops: this model family does not support skipping loops"
      )
    if self.exit_kept == "computed":
      raise UserError(
        "prefill_loops: exit_kept='computed' runs all loops of a prompt"
      )
    # Skipped loops get the same cache entries as after early exits. The rule
    # "change" needs no gate.
    check = self.reading.exits.check
    check(config, "change", self.exit_kept, self.cache_kind)

  @property
  def takes_rows(self) -> bool:
    """Whether decoding uses a cache of only the active rows.

    On a CPU, where copying them costs less than products of all slots' rows.
    """
    return self.platform == "cpu" and self.reading.has_places

  def unrolls(self, config: Any) -> bool:
    """Whether decoding may compile every layer of every loop separately."""
    few = self.num_loops * config.num_layers <= _MAX_UNROLLED
    return few and self._unstacks

  def for_decoding(self, params: Any) -> "tuple[CachedModel, Any]":
    """The model and its parameters as decoding takes them."""
    if not (self.reading.unstacked and self._unstacks):
      return self, params
    model = self.reading.unstacked(nnx.merge(self.graphdef, params))
    graphdef, state = nnx.split(model)
    return self._replace(graphdef=graphdef), nnx.to_pure_dict(state)

  @property
  def _unstacks(self) -> bool:
    """Whether decoding has each layer's parameters apart."""
    return self.platform == "cpu" and self.reading.unstacked is not None

  def empty_cache(self, params: Any, batch: int, max_tokens: int) -> Any:
    """See `Reading.empty_cache`."""
    model: Any = nnx.merge(self.graphdef, params)
    return self.reading.empty_cache(
      model,
      batch,
      max_tokens,
      num_loops=self.num_loops,
      kind=self.cache_kind,
    )

  def read(
    self,
    model: Any,
    tokens: Array,
    cache: Any,
    *,
    valid: Array,
    num_loops: Array | None,
    exit_threshold: Array,
    span: int | None,
    fills: bool = False,
  ) -> tuple[Output, Any]:
    """See `Reading.read`.

    Args:
      model: the model with its parameters.
      tokens: token ids [B, S].
      cache: cache of the tokens before them.
      valid: bool [B, S], false for padding.
      num_loops, exit_threshold: [B], as in `ExitPolicy`; without effect if the
        family has no early exits. Without `num_loops` there are none, and all
        loops run.
      span: number of cache entries that attention reads, see `HasSpan`; None
        for all.
      fills: as in `ExitPolicy`.
    """
    options: dict[str, Any] = {"num_loops": self.num_loops, "valid": valid}
    if num_loops is not None and self.reading.exits:
      options["exit_policy"] = exits.ExitPolicy(
        exit_threshold, num_loops, self.exit_rule, self.exit_kept, fills
      )
    cache = self._within(cache, span)
    output, cache = self.reading.read(model, tokens, cache, **options)
    return output, self._within(cache, None)

  def _within(self, cache: Any, span: int | None) -> Any:
    """See `HasSpan`; a cache without a span as it is."""
    return cache.within(span) if self.reading.has_span else cache

  def batch_axes(self, params: Any) -> Any:
    """The batch axis of each leaf of the cache; -1 for a leaf without one."""
    first, second = (
      self._cache_shapes(params, batch, self.max_tokens) for batch in (1, 2)
    )
    return jax.tree.map(_axis, first, second)

  def place_axes(self, params: Any) -> Any:
    """The axis of tokens of each leaf of the cache; -1 for one without."""
    first, second = (
      self._cache_shapes(params, 1, self.max_tokens + extra) for extra in (0, 1)
    )
    return jax.tree.map(_axis, first, second)

  def is_bounded(self, params: Any) -> bool:
    """Whether the cache's size depends on the maximum length of a sequence."""
    short, long = (
      [x.shape for x in jax.tree.leaves(self._cache_shapes(params, 1, length))]
      for length in (1, 2)
    )
    return short != long

  def _cache_shapes(self, params: Any, batch: int, max_tokens: int) -> Any:
    make = functools.partial(
      self.empty_cache, batch=batch, max_tokens=max_tokens
    )
    return jax.eval_shape(make, params)


def _axis(first: Any, second: Any) -> int:
  """The first axis in which two shapes differ; -1 for none."""
  pairs = enumerate(zip(first.shape, second.shape, strict=True))
  return next((i for i, (m, n) in pairs if m != n), -1)


def read_out(model: Any, hidden: Array) -> Array:
  """Logits f32 [..., V] of the output layer's input [..., D].

  In the model's compute dtype, as in training and scoring.
  """
  compute = PRECISIONS[model.config.precision].compute
  table = model.readout_table().astype(compute)
  return linear.token_logits(
    hidden.astype(compute), table, model.spec.num_padding_tokens
  )


def default_exit_rule(early: Exits | None, config: Any) -> str:
  """The exit rule that a model was trained for; "fixed" for no early exits."""
  return early.rule(config) if early else "fixed"
