"""MELT as a family: its parameters, and texts in chunks of tokens.

Source: arXiv 2605.07721; `algorithm.py` has what happens in a chunk. The
parameters are a `looped` model's with loop_norm="per_loop", and gates.
Training starts from such a model (`run.init_from`).

A cache has one entry per token and layer, for all loops. Tokens are read in
chunks of `Config.prefill_chunk`, so that results depend on where these end:
they equal those of the full forward pass if every call of `read` but the last
has a multiple of the chunk size, and always if the chunk size is 1.

A token that exits early skips the remaining loops for good: its entry keeps the
keys and values of its last loop, and later tokens attend to these in all loops.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.loop import driver, exits
from loopjax.models import causal, exiting
from loopjax.models.melt import algorithm
from loopjax.models.melt.algorithm import LatentCache
from loopjax.models.melt.config import LEARNED, Config, Options
from loopjax.models.melt.parameters import Gate, Layer, Stack
from loopjax.nn import linear, stack
from loopjax.types import PRECISIONS, Array, LoopOptions, Output, TaskSpec

TRACES = ("hidden", "prediction", "confidence")


class Model(nnx.Module):
  """The memory-efficient looped transformer."""

  logits = causal.logits
  readout_table = causal.readout_table

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    config.check_length(spec)
    config.check_kernels(options)
    self.config, self.spec, self.options = config, spec, options
    self.token_embedding = causal.token_embedding(config, spec, rngs)
    self.layers = causal.layers(config, config.num_layers, options, rngs)
    self.latent_gates = (
      stack.stacked(config.num_layers, rngs, Gate, config)
      if config.gate in LEARNED
      else None
    )
    self.final_norm = causal.final_norm(config, rngs)
    if not config.tied:
      self.head = causal.head(config, spec, rngs)
    if config.exit_gate != "none":
      self.exit_gate = causal.exit_gate(config, rngs)

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    trace: tuple[str, ...] = (),
    documents: Array | None = None,
  ) -> Output:
    """Predicts every next token, in chunks of `Config.prefill_chunk` tokens.

    Args:
      inputs: token ids [B, T]; any T. Padding must be at the end.
      num_loops: K >= 1; may differ from the number in training.
      kind: how the loop is executed; as in the model's options if None.
      trace: names from TRACES: "hidden" f32 [K, B, T, D]; "prediction", argmax
        of the read-out after every loop, i32 [K, B, T]; "confidence", its
        probability, f32 [K, B, T].
      documents: i32 [B, T], a number for each document of a row; tokens attend
        within their document. None if a row is one document. Chunks do not
        depend on documents.
    """
    num_tokens = inputs.shape[1]
    size = min(self.config.read_chunk(self.spec), num_tokens)
    padding = ((0, 0), (0, -num_tokens % size))
    padded = jnp.pad(inputs, padding)
    if documents is not None:
      documents = jnp.pad(documents, padding)
    options = self.pass_options(
      num_loops, kind, keep=("hidden",) if trace else ()
    )
    hidden, records = algorithm.run(
      self.stack(),
      options._replace(chunk_size=size),
      self.token_embedding(padded),
      documents=documents,
    )
    hidden = hidden[:, :num_tokens]
    traced = {name: records[name] for name in records if name == driver.STATE}
    if trace:
      by_loop = records["hidden"][:, :, :num_tokens]
      traced["hidden"] = by_loop
    if "prediction" in trace or "confidence" in trace:
      traced |= jax.lax.map(
        lambda x: linear.prediction_and_confidence(self.logits(x)), by_loop
      )
    loops_run = jnp.full(len(inputs), options.num_loops, jnp.float32)
    return Output(
      logits=self.logits(hidden),
      losses={},
      stats={"loops_run": loops_run},
      loops={"hidden_norm": records["hidden_norm"]},
      trace=checks.recorded(traced, trace),
      hidden=hidden,
    )

  def stack(self) -> Stack:
    """The parameters that every loop uses."""
    return Stack(Layer(self.layers, self.latent_gates), self.final_norm)

  def pass_options(
    self,
    num_loops: int | None = None,
    kind: driver.Kind | None = None,
    keep: tuple[str, ...] = (),
  ) -> Options:
    """Options of `algorithm.run` with one chunk; defaults from the config."""
    config = self.config
    num_loops = checks.num_loops(config, num_loops)
    return Options(
      gate=config.gate,
      num_loops=num_loops,
      rope_base=config.rope_base,
      kind=kind or self.options.execution,
      remat=self.options.remat,
      keep=keep,
    )

  def readout_input(self, hidden: Array) -> Array:
    """The state after a loop [..., D], which ends with a norm."""
    return hidden

  @jax.named_scope("gate")
  def exit_logits(self, hidden: Array) -> Array:
    """Log-odds of the exit gate f32 [...], of the state after a loop [..., D].

    The gate was trained with the looped model that the parameters come from.
    """
    return self.exit_gate(hidden)[..., 0]


def empty_cache(
  model: Model,
  batch: int,
  max_tokens: int,
  *,
  num_loops: int | None = None,
  kind: str | None = None,
) -> LatentCache:
  """See `Reading.empty_cache`; independent of the number of loops."""
  del num_loops, kind
  config, shape = model.config, model.config.block_shape()
  entries = config.num_layers * (max_tokens + config.read_chunk(model.spec))
  heads = (shape.num_key_value_heads, shape.head_width)
  compute = PRECISIONS[config.precision].compute
  empty = jnp.zeros((batch, entries, *heads), compute)
  return LatentCache(empty, empty, jnp.zeros(batch, jnp.int32))


def read(
  model: Model,
  tokens: Array,
  cache: LatentCache,
  *,
  num_loops: int | None = None,
  valid: Array | None = None,
  exit_policy: exits.ExitPolicy | None = None,
) -> tuple[Output, LatentCache]:
  """`Reading.read` with early exits; without them if there is no policy.

  The first chunk begins with the first token that is not padding. If rows have
  several tokens, which are parts of prompts, they run up to
  `exit_policy.num_loops` loops without an early exit.
  """
  config = model.config
  chunk = config.read_chunk(model.spec)
  max_tokens = cache.capacity(config.num_layers) - chunk
  num_tokens = tokens.shape[1]
  if num_tokens > max_tokens:
    raise UserError(
      f"{num_tokens} tokens do not fit into a cache of {max_tokens}"
    )
  if valid is None:
    valid = jnp.ones(tokens.shape, bool)
  # Valid tokens first, so that chunks do not depend on padding.
  order = jnp.argsort(~valid, axis=1, stable=True)
  tokens, valid = (
    jnp.take_along_axis(x, order, axis=1) for x in (tokens, valid)
  )
  size = min(chunk, num_tokens)
  padding = ((0, 0), (0, -num_tokens % size))

  def by_chunk(x: Array) -> Array:
    x = jnp.pad(x, padding)
    return jnp.swapaxes(x.reshape(len(x), -1, size), 0, 1)

  rule = (
    exit_policy.rule if exit_policy is not None and num_tokens == 1 else "fixed"
  )

  def step(
    cache: LatentCache, part: Any
  ) -> tuple[LatentCache, tuple[Array, Array]]:
    tokens, valid = part
    return _read_chunk(
      model, tokens, valid, cache, num_loops, exit_policy, rule
    )

  parts = by_chunk(tokens), by_chunk(valid)
  if len(parts[0]) == 1:
    cache, (hidden, loops) = step(cache, jax.tree.map(lambda x: x[0], parts))
  else:
    cache, (hidden, loops) = jax.lax.scan(step, cache, parts)
    loops = jnp.max(loops, axis=0)
    hidden = jnp.swapaxes(hidden, 0, 1)
    hidden = hidden.reshape(len(tokens), -1, config.width)
  inverse = jnp.argsort(order, axis=1)
  hidden = jnp.take_along_axis(hidden, inverse[..., None], axis=1)
  stats = {"loops_run": loops.astype(jnp.float32)}
  output = Output(model.logits(hidden), {}, stats, {}, {}, hidden)
  return output, cache


def _read_chunk(
  model: Model,
  tokens: Array,
  valid: Array,
  cache: LatentCache,
  num_loops: int | None,
  exit_policy: exits.ExitPolicy | None,
  rule: str,
) -> tuple[LatentCache, tuple[Array, Array]]:
  """Reads a chunk of tokens [B, C] with padding at the end.

  Returns:
    The cache; (the output of each row's last loop [B, C, D], the number of
    loops of each row i32 [B]).
  """
  num_loops = model.pass_options(num_loops).num_loops
  count = jnp.sum(valid, axis=1, dtype=jnp.int32)
  hidden, reads = model.token_embedding(tokens), count > 0
  cached, one_loop = loop_on_cache(model, cache, hidden)

  def step(hidden: Array, cached: Any, t: Array, live: Array) -> Any:
    return one_loop(hidden, cached, t, reads & live)

  def all_live(carry: Any, t: Array) -> tuple[Any, None]:
    hidden, cached = carry
    return one_loop(hidden, cached, t, reads), None

  carry = hidden, cached
  if exit_policy is None:
    (hidden, cached), _, _ = driver.run_loop(all_live, carry, num_loops)
    loops = jnp.full(len(tokens), num_loops, jnp.int32)
  else:
    hidden, cached, loops = exiting.run(
      model, exit_policy, rule, step, carry, reads, num_loops
    )
  key, value = cached[1]
  cache = LatentCache(key, value, cache.length + count, cache.span)
  return cache, (hidden, loops)


def loop_on_cache(
  model: Model, cache: LatentCache, hidden: Array
) -> tuple[Any, Callable[[Array, Any, Array, Array], tuple[Array, Any]]]:
  """One loop over tokens that follow a cache, and what it starts from.

  Args:
    model: the model.
    cache: the tokens before.
    hidden: embedded tokens [B, C, D].

  Returns:
    (latents and the cache's keys and values, `cached` before the first loop;
    the step of `exiting.run`, whose index may be each row's, [B, 1, 1]).
  """
  stack = model.stack()
  options = model.pass_options(kind="scan")._replace(remat="none")
  chunk, start = algorithm.begin_on_cache(stack, options, cache, hidden)

  def one_loop(
    hidden: Array, cached: Any, t: Array, live: Array
  ) -> tuple[Array, Any]:
    state, _ = algorithm.one_loop(
      stack, options, chunk, algorithm.State(hidden, *cached), t, live=live
    )
    return state.hidden, (state.latents, state.key_values)

  return (start.latents, start.key_values), one_loop
