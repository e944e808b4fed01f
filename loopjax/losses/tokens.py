"""Losses in nats, in float32."""

import jax
import jax.numpy as jnp

from loopjax.types import Array, Batch


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


def weighted_mean(
  values: Array, weights: Array, mean_weight: Array | None = None
) -> Array:
  """sum(values * weights) / sum(weights); 0 where all weights are 0.

  Args:
    values: any shape.
    weights: the same shape, any dtype.
    mean_weight: scalar, mean weight of the whole batch that these are part of;
      the results of the parts then average to that of the whole batch. The mean
      of `weights` if None.
  """
  weights = weights.astype(jnp.float32)
  if mean_weight is None:
    mean_weight = jnp.mean(weights)
  return jnp.mean(values * weights) / jnp.maximum(mean_weight, 1e-9)


def linear_warmup(step: Array, num_steps: int) -> Array:
  """min(1, step / num_steps): the factor of a penalty; 1 without warm-up.

  UTM, section 5.1 (lambda warm-up).
  """
  if num_steps == 0:
    return jnp.ones((), jnp.float32)
  return jnp.minimum(1.0, step.astype(jnp.float32) / num_steps)


def next_token(logits: Array, batch: Batch) -> Array:
  """Cross-entropy weighted by token, f32 scalar, in nats.

  Args:
    logits: of all T tokens or only the last ones, [B, T or fewer, V]; tokens
      without logits have a loss of zero, so their weights should be zero.
    batch: "targets" and "weights" [B, T], and optionally "mean_weight".
  """
  without = batch["targets"].shape[1] - logits.shape[1]
  cross_entropy = token_cross_entropy(logits, batch["targets"][:, without:])
  return weighted_mean(
    jnp.pad(cross_entropy, ((0, 0), (without, 0))),
    batch["weights"],
    batch.get("mean_weight"),
  )
