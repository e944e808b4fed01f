"""Losses in nats, in float32.

`token_loss` fuses logits and cross-entropy, by chunks of the vocabulary
(`vocabulary.add_logits`). It creates no array of all logits; the backward pass
is written out. It keeps h and both sums, and recomputes the logits. With
l = h W^T, p = softmax(l), and the cotangent g of the cross-entropy,

  dL/dl_v = g (p_v - [v = target])
  dL/dh = sum_v dL/dl_v W[v],  dL/dW[v] = sum_h dL/dl_v h.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.kernels import vocabulary
from loopjax.kernels.vocabulary import product
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  Metrics,
  Output,
  TokenScores,
)


class Options(NamedTuple):
  """Static options.

  Attributes:
    num_tokens: real tokens, which come first in the vocabulary.
    num_chunks: n.
  """

  num_tokens: int
  num_chunks: int


class Sums(NamedTuple):
  """Running sums of a pass over the chunks, for each token.

  Attributes:
    top: the largest logit so far. total: sum of exp(logit - top).
    picked: the target's logit; 0 until its chunk.
  """

  top: Array
  total: Array
  picked: Array


@jax.named_scope("read_out")
def token_loss(
  hidden: Array,
  table: Array,
  targets: Array,
  *,
  num_padding_tokens: int = 0,
  chunk_size: int = vocabulary.CHUNK_SIZE,
) -> Array:
  """-log softmax(h W^T)[target] per token.

  Products do not convert their inputs and accumulate in float32; the softmax is
  in float32. Supports reverse mode only.

  Args:
    hidden: h [..., D].
    table: W [V, D], one row per token, in h's dtype: the embedding table if
      they are tied, else a separate read-out.
    targets: int [...], in 0 .. V - 1.
    num_padding_tokens: the last ids are not real tokens. Their logits are
      MASKED_LOGIT and their probability 0. As targets they cost 1e9 nats, which
      a weight of zero removes, and have no gradient.
    chunk_size: no array is larger than [..., chunk_size] or the table.

  Returns:
    [...] in nats, in float32, or float64 for float64 inputs.
  """
  folded, options = _folded(table, num_padding_tokens, chunk_size)
  return _token_loss(hidden, folded, targets, options)


@jax.named_scope("read_out")
def token_scores(
  hidden: Array,
  table: Array,
  targets: Array,
  *,
  num_padding_tokens: int = 0,
  chunk_size: int = vocabulary.CHUNK_SIZE,
) -> tuple[Array, Array]:
  """-log softmax(h W^T)[target] per token, and the most likely token.

  Arguments as in `token_loss`. One pass over the vocabulary's chunks; no
  gradient.

  Returns:
    Two arrays [...]: nats, in float32, or float64 for float64 inputs; ids i32,
    the first one in case of a tie.
  """
  folded, options = _folded(table, num_padding_tokens, chunk_size)
  unknown = jnp.int32(folded.shape[0] * options.num_chunks)

  def step(chunk: Array, carry: tuple[Sums, Array]) -> tuple[Sums, Array]:
    before, best = carry
    logits, ids = _logits(hidden, folded, chunk, options)
    sums = _add(before, logits, ids, targets)
    is_top = logits == sums.top[..., None]
    first = jnp.min(jnp.where(is_top, ids, unknown), axis=-1)
    # `first` is valid only if this chunk has the largest logit so far.
    first = jnp.where(sums.top > before.top, first, jnp.minimum(first, best))
    return sums, first

  start = _empty(hidden, targets), jnp.full(targets.shape, unknown)
  sums, best = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return _losses(sums), best


def _folded(
  table: Array, num_padding_tokens: int, chunk_size: int
) -> tuple[Array, Options]:
  """The table, folded into chunks of at most `chunk_size` tokens."""
  num_chunks = vocabulary.num_chunks(len(table), chunk_size)
  options = Options(len(table) - num_padding_tokens, num_chunks)
  return vocabulary.fold(table, num_chunks), options


def _logits(
  hidden: Array, folded: Array, chunk: Array, options: Options
) -> tuple[Array, Array]:
  """Logits [..., C] of a chunk, and ids; MASKED_LOGIT for padding tokens."""
  logits, ids = vocabulary.logits(hidden, folded, chunk)
  real = ids < options.num_tokens
  return jnp.where(real, logits, vocabulary.MASKED_LOGIT), ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_loss(
  hidden: Array, folded: Array, targets: Array, options: Options
) -> Array:
  """`token_loss` with a folded table."""
  return _forward(hidden, folded, targets, options)[0]


def _empty(hidden: Array, targets: Array) -> Sums:
  """The sums before the first chunk."""
  wide = jnp.promote_types(jnp.float32, hidden.dtype)
  return Sums(
    jnp.full(targets.shape, -jnp.inf, wide),
    jnp.zeros(targets.shape, wide),
    jnp.zeros(targets.shape, wide),
  )


def _add(sums: Sums, logits: Array, ids: Array, targets: Array) -> Sums:
  """The sums updated with the logits [..., C] of a chunk."""
  top, total, _, _ = vocabulary.add_logits(sums.top, sums.total, logits)
  of_target = jnp.where(ids == targets[..., None], logits, 0)
  return Sums(top, total, sums.picked + jnp.sum(of_target, axis=-1))


def _losses(sums: Sums) -> Array:
  """Cross-entropy."""
  top, total, picked = sums
  # Subtract from the maximum first: top + log(total) would round away the loss
  # of an almost certain token.
  return (top - picked) + jnp.log(total)


def _forward(hidden, folded, targets, options):
  def step(chunk, sums):
    return _add(sums, *_logits(hidden, folded, chunk, options), targets)

  sums = jax.lax.fori_loop(0, options.num_chunks, step, _empty(hidden, targets))
  return _losses(sums), (hidden, folded, targets, sums.top, sums.total)


def _backward(options, residuals, d_loss):
  hidden, folded, targets, top, total = residuals
  factor = (d_loss / total)[..., None]

  def step(chunk, carry):
    d_hidden, d_folded = carry
    logits, ids = _logits(hidden, folded, chunk, options)
    # Not exp(logits - log sum exp): a large sum would round the difference.
    d_logits = factor * jnp.exp(logits - top[..., None])
    is_target = ids == targets[..., None]
    d_logits -= jnp.where(is_target, d_loss[..., None], 0)
    # The logit of a padding id is a constant, even if the id is a target.
    d_logits = jnp.where(ids < options.num_tokens, d_logits, 0)
    d_logits = d_logits.astype(hidden.dtype)
    rows = vocabulary.rows(folded, chunk)
    d_hidden += product("...v,vd->...d", d_logits, rows)
    d_rows = product("...v,...d->vd", d_logits, hidden)
    return d_hidden, vocabulary.put_rows(d_folded, d_rows, chunk)

  start = jnp.zeros(hidden.shape, top.dtype), jnp.zeros_like(folded)
  d_hidden, d_folded = jax.lax.fori_loop(0, options.num_chunks, step, start)
  return d_hidden.astype(hidden.dtype), d_folded, None


_token_loss.defvjp(_forward, _backward)


def token_cross_entropy(logits: Array, targets: Array) -> Array:
  """-log softmax(logits)[target] per token.

  Args:
    logits: [..., V].
    targets: int [...].

  Returns:
    f32 [...], nats.
  """
  logits = logits.astype(jnp.float32)
  picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - picked


def stablemax_logits(logits: Array) -> Array:
  """log s(logits), f32: their softmax is the stablemax of the logits.

  Stablemax is s(x) / sum s with s(x) = x + 1, or 1 / (1 - x) below 0, in place
  of exp(x) (arXiv 2501.04697, equation 2). Logits need not grow without bound,
  and confident models keep a gradient.
  """
  logits = logits.astype(jnp.float32)
  # The branch not taken is finite too.
  below, above = jnp.minimum(logits, 0.0), jnp.maximum(logits, 0.0)
  return jnp.where(logits < 0, -jnp.log1p(-below), jnp.log1p(above))


# The distribution is the softmax of these functions of the logits.
DISTRIBUTIONS = {
  "softmax": lambda logits: logits.astype(jnp.float32),
  "stablemax": stablemax_logits,
}


def weighted_mean(
  values: Array, weights: Array, mean_weight: Array | None = None
) -> Array:
  """sum(values * weights) / sum(weights); 0 where all weights are 0.

  Args:
    values: any shape.
    weights: the same shape, any dtype.
    mean_weight: scalar, mean weight of the whole batch if `values` is a
      microbatch, which makes the mean over microbatches equal to the whole
      batch's. None for the mean of `weights`.
  """
  weights = weights.astype(jnp.float32)
  if mean_weight is None:
    mean_weight = jnp.mean(weights)
  return jnp.mean(values * weights) / jnp.maximum(mean_weight, 1e-9)


def batch_mean(values: Array, batch: Batch) -> Array:
  """The mean of values [B, T] by the weights of a batch, f32 scalar.

  Args:
    values: [B, T].
    batch: "weights" [B, T], and optionally "mean_weight", see `weighted_mean`.
  """
  return weighted_mean(values, batch["weights"], batch.get("mean_weight"))


def means_by_loop(values: Array, batch: Batch) -> Array:
  """`batch_mean` of values [K, B, T] after each loop, f32 [K]."""
  return jax.vmap(lambda x: batch_mean(x, batch))(values)


def row_means(values: Array, weights: Array) -> Array:
  """Weighted means of the rows of [B, T], f32 [B]; 0 without any weight."""
  weights = weights.astype(jnp.float32)
  return jnp.sum(values * weights, 1) / jnp.maximum(jnp.sum(weights, 1), 1e-9)


def linear_warmup(step: Array, num_steps: int) -> Array:
  """min(1, step / num_steps), the factor of a penalty; 1 without warm-up.

  UTM, section 5.1 (lambda warm-up).
  """
  if num_steps == 0:
    return jnp.ones((), jnp.float32)
  return jnp.minimum(1.0, step.astype(jnp.float32) / num_steps)


def next_token(model: Any, hidden: Array, batch: Batch) -> Array:
  """Next-token cross-entropy in nats, f32 scalar, weighted by token.

  Creates no [tokens, vocabulary] array, see `token_loss`.

  Args:
    model: the model, whose output table is used.
    hidden: hidden states before unembedding, of all T tokens or only the last
      ones, [B, T or fewer, D]. The others have zero loss; their weights should
      be zero.
    batch: "targets" and "weights" [B, T], and optionally "mean_weight".
  """
  without = batch["targets"].shape[1] - hidden.shape[1]
  losses = _with_table(token_loss, model, hidden, batch["targets"][:, without:])
  return batch_mean(jnp.pad(losses, ((0, 0), (without, 0))), batch)


def next_token_by_loop(model: Any, hidden: Array, targets: Array) -> Array:
  """Next-token cross-entropy after each loop, f32 [K, B, T], in nats.

  Creates no [tokens, vocabulary] array, see `token_loss`.

  Args:
    model: the model, whose output table is used.
    hidden: hidden states before unembedding after each of K loops, [K, B, T,
      D].
    targets: int [B, T].
  """
  targets = jnp.broadcast_to(targets, hidden.shape[:-1])
  return _with_table(token_loss, model, hidden, targets)


def read_out(model: Any, hidden: Array, targets: Array) -> TokenScores:
  """Losses and predictions of the last S tokens, for evaluation.

  Creates no [tokens, vocabulary] array, see `token_loss`.

  Args:
    model: the model, whose output table is used.
    hidden: hidden states before unembedding, [B, S, D].
    targets: int [B, T], T >= S.
  """
  targets = targets[:, targets.shape[1] - hidden.shape[1] :]
  return TokenScores(*_with_table(token_scores, model, hidden, targets))


def _with_table(
  function: Callable[..., Any], model: Any, hidden: Array, targets: Array
) -> Any:
  """`token_loss` or `token_scores` with a model's output table."""
  dtype = PRECISIONS[model.config.precision].compute
  return function(
    hidden.astype(dtype),
    model.readout_table().astype(dtype),
    targets,
    num_padding_tokens=model.spec.num_padding_tokens,
  )


def scores(output: Output, targets: Array) -> TokenScores:
  """Losses and predictions of all tokens, or of the last S if only these exist.

  Args:
    output: output of a model; uses its `tokens`, or else its logits.
    targets: int [B, T].
  """
  if output.tokens is not None:
    return output.tokens
  targets = targets[:, targets.shape[1] - output.logits.shape[1] :]
  predicted = jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
  return TokenScores(token_cross_entropy(output.logits, targets), predicted)


def graded(output: Output, batch: Batch) -> tuple[Array, Array, Array]:
  """Losses, nats; whether predictions are right, 1 or 0; and weights.

  Each f32 [B, S], of all tokens or of the last S if only these are predicted.
  """
  losses, predicted = scores(output, batch["targets"])
  targets, weights = (
    batch[name][:, -losses.shape[1] :] for name in ("targets", "weights")
  )
  return losses, (predicted == targets).astype(jnp.float32), weights


def output_loss(
  model: Any, output: Output, batch: Batch
) -> tuple[Array, Metrics]:
  """Cross-entropy of an output's predictions, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  return next_token(model, output.hidden, batch), output.loops
