"""Losses of exit gates, trained jointly or separately (Ouro, arXiv 2510.25741).

The objective averages losses, not logits: the published code returns for
`labels` the cross-entropy of a mixture of all loops' logits, which is neither
this objective nor the loss of any loop.
"""

import jax
import jax.numpy as jnp

from loopjax.losses.tokens import batch_mean, means_by_loop
from loopjax.types import Array, Batch, Metrics

# Constants of the second stage (section 3.4): k, and gamma in nats.
SLOPE, THRESHOLD = 50.0, 0.005


def expected(
  losses: Array, log_chance: Array, batch: Batch, entropy_weight: float
) -> tuple[Array, Metrics]:
  """sum_t p_t loss_t - beta H(p), weighted by token (section 3.3).

  Up to a constant, -beta H(p) is beta times the KL divergence of p from a
  uniform prior over exits.

  Args:
    losses: losses of each token after each loop, f32 [K, B, T], nats.
    log_chance: log p, f32 [K, B, T], see `loop.exits.log_distribution`.
    batch: "weights" [B, T], and optionally "mean_weight".
    entropy_weight: beta.

  Returns:
    (f32 scalar, metrics: scalars and per-loop vectors by name).
  """
  chance = jnp.exp(log_chance)
  cross_entropy = batch_mean(jnp.sum(chance * losses, axis=0), batch)
  entropy = batch_mean(-jnp.sum(chance * log_chance, axis=0), batch)
  return cross_entropy - entropy_weight * entropy, {
    "cross_entropy": cross_entropy,
    "exit_entropy": entropy,
    "loop_loss": means_by_loop(losses, batch),
    "exit_chance": means_by_loop(chance, batch),
  }


def improvement(losses: Array, logits: Array, batch: Batch) -> Array:
  """Trains the gate to continue while loops improve the loss (section 3.4).

  With I_t = max(0, loss_{t-1} - loss_t), the target of the probability
  1 - lambda_t of continuing after loop t = 2 .. K is sigmoid(k (I_t - gamma));
  the result is their binary cross-entropy, averaged over loops and tokens. The
  token losses are constants.

  Args:
    losses: losses of each token after each loop, f32 [K, B, T], nats; K >= 2.
    logits: logits of the gate, f32 [K, B, T].
    batch: "weights" [B, T], and optionally "mean_weight".

  Returns:
    f32 scalar.
  """
  losses = jax.lax.stop_gradient(losses)
  better = jnp.maximum(losses[:-1] - losses[1:], 0.0)
  go_on = jax.nn.sigmoid(SLOPE * (better - THRESHOLD))
  of_loops = -(
    go_on * jax.nn.log_sigmoid(-logits[1:])
    + (1.0 - go_on) * jax.nn.log_sigmoid(logits[1:])
  )
  return batch_mean(jnp.mean(of_loops, axis=0), batch)
