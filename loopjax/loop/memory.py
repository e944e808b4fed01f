"""Learned memory banks with gated reads by hidden states.

Adaptive Loops and Memory (arXiv 2603.08391, section 2.2). Banks are parameters:
no sequence is ever written to them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from loopjax import sharding
from loopjax.kernels.vocabulary import widened
from loopjax.nn import linear, norm
from loopjax.types import Array, Precision

# Number of a gate's logits, from the width.
GATES: Mapping[str, Callable[[int], int]] = {
  "vector": lambda width: width,
  "scalar": lambda _: 1,
}


class MemoryBank(nnx.Module):
  """M slots: keys and values, each [M, D] (section 2.2)."""

  def __init__(
    self,
    num_slots: int,
    width: int,
    *,
    init: linear.Initializer,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shape = (num_slots, width)
    self.keys = nnx.Param(init(rngs.params(), shape, precision.params))
    self.values = nnx.Param(init(rngs.params(), shape, precision.params))


class GatedRead(nnx.Module):
  """g * W m: the gated read of a bank by a hidden state (equations 6 to 9).

  The gate has one logit per feature ("vector") or one for all ("scalar"). Its
  matrix is initialised to zero: it starts at sigmoid(gate_bias).
  """

  def __init__(
    self,
    width: int,
    *,
    gate: str,
    gate_bias: float,
    init: linear.Initializer,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    # Without biases, as in ViT-22B (arXiv 2302.05442), which the paper cites: a
    # bias of the keys would add the same logit to every slot, with no effect.
    self.query_norm = norm.rms_norm(width, **shared)
    self.key_norm = norm.rms_norm(width, **shared)
    self.output = linear.linear(width, width, init=init, **shared)
    self.gate = linear.readout(
      width,
      GATES[gate](width),
      bias=gate_bias,
      init=nnx.initializers.zeros_init(),
      **shared,
    )
    self.precision = precision

  @jax.named_scope("memory")
  def __call__(self, h: Array, bank: MemoryBank) -> tuple[Array, Array, Array]:
    """Reads a bank for every token.

    Args:
      h: [B, T, D].
      bank: the bank of M slots.

    Returns:
      (the vector to add to h, f32 [B, T, D]; g, f32 [B, T, D] or [B, T, 1]; the
      attention over slots, f32 [B, T, M]).
    """
    compute, accumulate = self.precision.compute, self.precision.accumulate
    query = self.query_norm(h).astype(compute)
    keys, values = (
      sharding.gather_parameter(x[...]) for x in (bank.keys, bank.values)
    )
    keys = self.key_norm(keys).astype(compute)
    logits = widened("btd,md->btm", query, keys)
    weights = jax.nn.softmax(logits / h.shape[-1] ** 0.5, axis=-1)
    retrieved = jnp.einsum(
      "btm,md->btd", weights.astype(compute), values.astype(compute)
    )  # (6), (7)
    # In the precision of the other linear maps: it is as large as these, unlike
    # a router.
    logits = widened(
      "nd,de->ne",
      h.astype(compute).reshape(-1, h.shape[-1]),
      self.gate.kernel[...].astype(compute),
    )
    assert self.gate.bias is not None
    # Added to the product's rows: compilers then fuse it.
    logits = logits + self.gate.bias[...][None]
    gate = jax.nn.sigmoid(logits).reshape(*h.shape[:-1], -1)  # (8)
    added = gate * self.output(retrieved).astype(accumulate)  # (9)
    return added, gate, weights


def read_flops(width: int, num_slots: int, gate: str) -> int:
  """Forward FLOPs of one token's read; 0 for a bank without slots.

  Includes attention over the slots, the output map, and the gate.
  """
  products = 2 * num_slots + width + GATES[gate](width)
  return 2 * width * products if num_slots else 0
