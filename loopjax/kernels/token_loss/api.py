"""Chooses the implementation of `token_loss` and `token_scores`."""

import jax

from loopjax.kernels.token_loss import chunked, reference
from loopjax.types import Array

IMPLEMENTATIONS = ("reference", "chunked")
DEFAULT = "chunked"
CHUNK_SIZE = 2048  # Maximum number of tokens of a chunk.


@jax.named_scope("read_out")
def token_loss(
  hidden: Array,
  table: Array,
  targets: Array,
  *,
  num_padding_tokens: int = 0,
  implementation: str | None = None,
) -> tuple[Array, Array]:
  """-log softmax(h W^T)[target] per token, and log sum exp h W^T.

  The latter is what a z-loss keeps small (PaLM, arXiv 2204.02311, section 5).
  Products take their inputs as they are and accumulate in float32; the softmax
  is in float32.

  Args:
    hidden: h [..., D].
    table: W [V, D], one row per token, in h's dtype: the embedding table if
      they are tied, else a separate read-out.
    targets: int [...], in 0 .. V - 1.
    num_padding_tokens: the last ids are not real tokens. Their logits are
      MASKED_LOGIT, so they get no probability; as targets they cost 1e9 nats,
      which a weight of zero removes, and have no gradient.
    implementation: "reference" stores [..., V] arrays for the backward pass
      and supports all derivatives, "chunked" does not store them and supports
      reverse mode only; DEFAULT if None.

  Returns:
    Two arrays [...] in nats, in float32, or float64 for float64 inputs.
  """
  implementation = implementation or DEFAULT
  if implementation == "chunked":
    return chunked.token_loss(
      hidden,
      table,
      targets,
      num_padding_tokens=num_padding_tokens,
      chunk_size=CHUNK_SIZE,
    )
  if implementation == "reference":
    return reference.token_loss(
      hidden, table, targets, num_padding_tokens=num_padding_tokens
    )
  raise ValueError(
    f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
  )


@jax.named_scope("read_out")
def token_scores(
  hidden: Array, table: Array, targets: Array, *, num_padding_tokens: int = 0
) -> tuple[Array, Array]:
  """-log softmax(h W^T)[target] per token, and the most likely token.

  Takes the arguments of `token_loss`, needs one pass over the chunks of the
  vocabulary, and has no gradient.

  Returns:
    Two arrays [...]: nats, in float32, or float64 for float64 inputs; ids i32,
    the first one in case of a tie.
  """
  return chunked.token_scores(
    hidden,
    table,
    targets,
    num_padding_tokens=num_padding_tokens,
    chunk_size=CHUNK_SIZE,
  )
