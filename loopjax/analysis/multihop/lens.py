"""Logit lens and cosines of hidden states. Pure functions on arrays.

The logit lens applies the model's read-out to a state, P(e | H); the cosine
compares the state with an embedding, cos(H, W[e]) (DiscoLoop, table 1b).
"""

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.types import Array


def read_out(logits: Array, tokens: Array) -> dict[str, Array]:
  """The logit lens for given tokens.

  Args:
    logits: f32 [..., V]; the logits of padding ids are negligibly low.
    tokens: ids of interest, int [..., n].

  Returns:
    f32 [..., n]: "probability" P(e | H); "rank" from 1, ties broken by the
    lower id (rank 1 is the argmax); "reciprocal_rank"; "margin", logit minus
    the best other token's logit; and "entropy" of the whole distribution in
    nats, the same for all n.
  """
  log_chances = jax.nn.log_softmax(logits, axis=-1)
  entropy = -jnp.sum(jnp.exp(log_chances) * log_chances, axis=-1)
  ours = jnp.take_along_axis(logits, tokens, axis=-1)[..., None]
  theirs = logits[..., None, :]  # [..., 1, V]
  ids = jax.lax.broadcasted_iota(jnp.int32, theirs.shape, theirs.ndim - 1)
  lower = ids < tokens[..., None]
  rank = 1 + jnp.sum((theirs > ours) | ((theirs == ours) & lower), axis=-1)
  others = jnp.where(ids == tokens[..., None], -jnp.inf, theirs)
  return {
    "probability": jnp.exp(jnp.take_along_axis(log_chances, tokens, axis=-1)),
    "rank": rank.astype(jnp.float32),
    "reciprocal_rank": 1 / rank.astype(jnp.float32),
    "margin": ours[..., 0] - jnp.max(others, axis=-1),
    "entropy": jnp.broadcast_to(entropy[..., None], tokens.shape),
  }


def first_loops(is_argmax: np.ndarray) -> np.ndarray:
  """Marks the first loop at which a token is the argmax.

  Args:
    is_argmax: bool [N, K, ...], loops along axis 1.

  Returns:
    bool [N, K, ...], true once per row at most.
  """
  return is_argmax & (np.cumsum(is_argmax, axis=1) == 1)


def mean_embedding(table: Array, num_padding_tokens: int) -> Array:
  """Mean row of W over all real tokens, not only entities, [D]."""
  return jnp.mean(table[: len(table) - num_padding_tokens], axis=0)


def cosines(states: Array, vectors: Array, centre: Array) -> dict[str, Array]:
  """Cosines between states and embeddings.

  Args:
    states: H, f32 [..., D].
    vectors: W[e] of n tokens, f32 [..., n, D].
    centre: from `mean_embedding`, [D].

  Returns:
    f32 [..., n]: "cosine", cos(H, W[e]), and "centred_cosine", cos(H - m,
    W[e] - m) with the mean embedding m subtracted from both.
  """
  middle = jnp.expand_dims(centre, range(states.ndim - 1))
  return {
    "cosine": _cosine(states, vectors),
    "centred_cosine": _cosine(
      states - middle, vectors - jnp.expand_dims(middle, -2)
    ),
  }


def _cosine(states: Array, vectors: Array) -> Array:
  """Cosine; zero where either vector is zero."""
  products = jnp.einsum(
    "...d,...nd->...n", states, vectors, precision="highest"
  )
  lengths = jnp.linalg.norm(states, axis=-1)[..., None]
  lengths = lengths * jnp.linalg.norm(vectors, axis=-1)
  return products / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)
