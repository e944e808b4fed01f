"""Chooses the implementation of `decode_embed`."""

from typing import Any

from loopjax.kernels.decode_embed import chunked, reference
from loopjax.types import Array

IMPLEMENTATIONS = ("reference", "chunked")
# On a CPU core, for value and gradient over 1,024 tokens of width 128, it took
# 0.74 of the reference's time and 0.64 of its memory at 1,050 tokens, 0.85 and
# 0.10 at 32,768; over the 128 likeliest tokens 0.44 and 0.08, 0.41 and 0.11
# (python benchmarks/bench_decode_embed.py --part=operator). No size was found
# at which the reference is faster.
DEFAULT = "chunked"
CHUNK_SIZE = 2048  # Maximum number of tokens of a chunk.


def decode_embed(
  hidden: Array,
  table: Array,
  head: Array | None = None,
  *,
  temperature: float = 1.0,
  top_k: int = 0,
  num_padding_tokens: int = 0,
  implementation: str | None = None,
) -> Array:
  """Phi(h) = sum_v p_v E[v] with p = softmax(U h / temperature).

  DiscoLoop, equation 5 (arXiv 2607.00341); with `top_k` Phi_k of appendix B.
  Products take their inputs as they are and accumulate in float32; the softmax
  is in float32.

  Args:
    hidden: h [..., D].
    table: E [V, D], the vectors that are averaged.
    head: U [V, D], the decoding matrix; E itself if None (tied).
    temperature: tau > 0; the logits are divided by it.
    top_k: p is restricted to the k most likely tokens and renormalised;
      0 for the whole vocabulary.
    num_padding_tokens: the last ids of the vocabulary get no probability.
    implementation: "reference" stores [..., V] arrays for the backward pass
      and supports all derivatives, "chunked" does not store them and supports
      reverse mode only; DEFAULT if None.

  Returns:
    [..., D] in float32, or float64 for float64 inputs.
  """
  implementation = implementation or DEFAULT
  options: dict[str, Any] = {
    "temperature": temperature,
    "top_k": top_k,
    "num_padding_tokens": num_padding_tokens,
  }
  if implementation == "chunked":
    return chunked.decode_embed(
      hidden, table, head, chunk_size=CHUNK_SIZE, **options
    )
  if implementation == "reference":
    return reference.decode_embed(hidden, table, head, **options)
  raise ValueError(
    f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
  )
