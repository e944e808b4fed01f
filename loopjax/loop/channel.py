"""Channels: how a loop's output becomes the next loop's input.

A channel is a callable between two loops:

  channel(hidden, read, table) -> (state, gate)

`hidden` [B, T, D] is the output of the loop, `read` [B, T, D] the hidden state
that the output layer would use (the same as `hidden` if every loop ends in a
norm), `table` [V, D] the embedding table. `state` [B, T, D] is the input of the
next loop, and `gate` f32 [B, T] the channel's gate. No channel follows the last
loop.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax.errors import UserError
from loopjax.kernels.decode_embed import decode_embed
from loopjax.nn import norm
from loopjax.types import Array, Precision, TaskSpec


def check_top_k(top_k: int, spec: TaskSpec) -> None:
  """Raises UserError if a task has fewer tokens than are to be averaged."""
  if top_k > spec.num_tokens:
    raise UserError(
      f"model.top_k={top_k} is more than the {spec.num_tokens} tokens of the"
      " task"
    )


Decode = Callable[[int], Array]  # top_k -> Phi.


def _straight_through(decode: Decode, top_k: int) -> Array:
  decoded, hard = decode(top_k), jax.lax.stop_gradient(decode(1))
  return hard + (decoded - jax.lax.stop_gradient(decoded))


GRADIENTS: Mapping[str, Callable[[Decode, int], Array]] = {
  "full": lambda decode, top_k: decode(top_k),
  "stop": lambda decode, top_k: jax.lax.stop_gradient(decode(top_k)),
  "straight_through": _straight_through,
}


@dataclasses.dataclass(frozen=True)
class SoftDecoder:
  """Phi(h) = sum_v p_v(h) E[v], p = softmax(U h / tau) (DiscoLoop, eq. 5).

  U and E are the tied table W in DiscoLoop.

  Attributes:
    temperature: tau.
    top_k: keep the k most likely tokens, renormalised; 0 for all.
    gradient: "full" differentiates Phi, "stop" treats it as a constant,
      "straight_through" has the value E[argmax p] and Phi's gradient.
    num_padding_tokens: ids at the end of the vocabulary that get no
      probability.
    precision: precision of the products; softmax and sums are in float32.
  """

  temperature: float = 1.0
  top_k: int = 0
  gradient: str = "full"
  num_padding_tokens: int = 0
  precision: Precision = Precision()

  def __call__(
    self, hidden: Array, table: Array, head: Array | None = None
  ) -> Array:
    """Decodes hidden states to tokens and embeds them again.

    Args:
      hidden: h [..., D].
      table: E [V, D].
      head: U [V, D]; E if None.

    Returns:
      f32 [..., D].
    """
    return GRADIENTS[self.gradient](
      lambda top_k: self._decode(hidden, table, head, top_k), self.top_k
    )

  def _decode(self, hidden, table, head, top_k: int) -> Array:
    compute = self.precision.compute
    return decode_embed(
      hidden.astype(compute),
      table.astype(compute),
      None if head is None else head.astype(compute),
      temperature=self.temperature,
      top_k=top_k,
      num_padding_tokens=self.num_padding_tokens,
    )


@dataclasses.dataclass(frozen=True)
class FixedGate:
  """alpha = value at every token (DiscoLoop, section 4)."""

  value: float

  def __call__(self, decoded: Array) -> Array:
    """decoded: [..., D]; returns f32 [...]."""
    return jnp.full(decoded.shape[:-1], self.value, jnp.float32)


class LearnedGate(nnx.Module):
  """alpha = sigmoid(<w, Phi> + b) (DiscoLoop, eq. 6).

  D + 1 parameters shared by all loops and positions. They start at 0: alpha
  starts at one half.
  """

  def __init__(self, width: int, *, precision: Precision):
    self.weight = nnx.Param(jnp.zeros((width,), precision.params))
    self.bias = nnx.Param(jnp.zeros((), precision.params))

  def __call__(self, decoded: Array) -> Array:
    """decoded: Phi(H) [..., D]; returns f32 [...]."""
    logits = jnp.einsum(
      "...d,d->...", decoded, self.weight[...], precision="highest"
    )
    return jax.nn.sigmoid(logits.astype(jnp.float32) + self.bias[...])


class MixedChannel(nnx.Module):
  """H + alpha RMSNorm(Phi(H)): both channels of DiscoLoop (eq. 4).

  The norm has no gain; the gate's D + 1 parameters are the only ones.
  """

  def __init__(
    self, decode: SoftDecoder, gate: FixedGate | LearnedGate, epsilon: float
  ):
    self.decode, self.gate, self.epsilon = decode, gate, epsilon

  @jax.named_scope("channel")
  def __call__(
    self, hidden: Array, read: Array, table: Array
  ) -> tuple[Array, Array]:
    """See the module docstring; arrays [B, T, D], [B, T, D] and [V, D]."""
    decoded = self.decode(read, table)  # Phi(H), eq. 5
    gate = self.gate(decoded)  # alpha, eq. 6
    injected = norm.rms_normalise(decoded, self.epsilon)
    return hidden + gate[..., None] * injected, gate  # H~, eq. 4
