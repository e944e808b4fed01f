"""Losses in nats, in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from loopjax.losses.token_loss import token_loss, token_scores
from loopjax.types import (
  PRECISIONS,
  Array,
  Batch,
  Metrics,
  Output,
  Precision,
  TokenScores,
)


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


def linear_warmup(step: Array, num_steps: int) -> Array:
  """min(1, step / num_steps), the factor of a penalty; 1 without warm-up.

  UTM, section 5.1 (lambda warm-up).
  """
  if num_steps == 0:
    return jnp.ones((), jnp.float32)
  return jnp.minimum(1.0, step.astype(jnp.float32) / num_steps)


def next_token(
  hidden: Array,
  table: Array,
  batch: Batch,
  *,
  num_padding_tokens: int = 0,
  precision: Precision,
) -> tuple[Array, Array]:
  """Next-token cross-entropy and z-loss, weighted by token.

  Creates no [tokens, vocabulary] array, see `losses.token_loss`.

  Args:
    hidden: hidden states before unembedding, of all T tokens or only the last
      ones, [B, T or fewer, D]. The others have zero loss; their weights should
      be zero.
    table: unembedding matrix, [V, D].
    batch: "targets" and "weights" [B, T], and optionally "mean_weight".
    num_padding_tokens: ids at the end of the vocabulary that are not tokens.
    precision: precision of the products.

  Returns:
    Two f32 scalars: the mean cross-entropy in nats, and the mean squared log
    normaliser (PaLM, arXiv 2204.02311, section 5).
  """
  without = batch["targets"].shape[1] - hidden.shape[1]
  losses, normaliser = token_loss(
    hidden.astype(precision.compute),
    table.astype(precision.compute),
    batch["targets"][:, without:],
    num_padding_tokens=num_padding_tokens,
  )

  def mean(values: Array) -> Array:
    values = jnp.pad(values, ((0, 0), (without, 0)))
    return weighted_mean(values, batch["weights"], batch.get("mean_weight"))

  return mean(losses), mean(normaliser**2)


def next_token_by_loop(
  hidden: Array,
  table: Array,
  batch: Batch,
  *,
  num_padding_tokens: int = 0,
  precision: Precision,
) -> Array:
  """Next-token cross-entropy after each loop, in nats.

  Creates no [tokens, vocabulary] array, see `losses.token_loss`.

  Args:
    hidden: hidden states before unembedding after each of K loops, [K, B, T,
      D].
    table: unembedding matrix, [V, D].
    batch: "targets" [B, T].
    num_padding_tokens: ids at the end of the vocabulary that are not tokens.
    precision: precision of the products.

  Returns:
    f32 [K, B, T].
  """
  targets = jnp.broadcast_to(batch["targets"][None], hidden.shape[:-1])
  losses, _ = token_loss(
    hidden.astype(precision.compute),
    table.astype(precision.compute),
    targets,
    num_padding_tokens=num_padding_tokens,
  )
  return losses


def of_rows(model: Any, output: Output, batch: Batch) -> Array:
  """Mean cross-entropy of each row, f32 [B], nats; no gradient."""
  hidden, table = jax.lax.stop_gradient((output.hidden, model.readout_table()))
  losses = next_token_by_loop(
    hidden[None],
    table,
    batch,
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )[0]
  weights = batch["weights"].astype(jnp.float32)
  return jnp.sum(losses * weights, 1) / jnp.maximum(jnp.sum(weights, 1), 1e-9)


def read_out(
  hidden: Array,
  table: Array,
  targets: Array,
  *,
  num_padding_tokens: int = 0,
  precision: Precision,
) -> TokenScores:
  """Losses and predictions of the last S tokens, for evaluation.

  Creates no [tokens, vocabulary] array, see `losses.token_loss`.

  Args:
    hidden: hidden states before unembedding, [B, S, D].
    table: unembedding matrix, [V, D].
    targets: int [B, T], T >= S.
    num_padding_tokens: ids at the end of the vocabulary that are not tokens.
    precision: precision of the products.
  """
  return TokenScores(
    *token_scores(
      hidden.astype(precision.compute),
      table.astype(precision.compute),
      targets[:, targets.shape[1] - hidden.shape[1] :],
      num_padding_tokens=num_padding_tokens,
    )
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


def of_output(
  model: Any, output: Output, batch: Batch
) -> tuple[Array, Metrics]:
  """Cross-entropy of an output's predictions, weighted by token.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  total, _ = next_token(
    output.hidden,
    model.readout_table(),
    batch,
    num_padding_tokens=model.spec.num_padding_tokens,
    precision=PRECISIONS[model.config.precision],
  )
  return total, {"loss": total, **output.loops}
