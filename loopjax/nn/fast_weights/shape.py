"""The structure of a memory block, and its FLOPs."""

import dataclasses

from loopjax.kernels.gated_delta import chunked
from loopjax.nn import mlp
from loopjax.nn.fast_weights import layer as fast_weights
from loopjax.nn.shape import Shape


@dataclasses.dataclass(frozen=True)
class MemoryShape:
  """The structure of a memory block, in addition to its `Shape`.

  Attributes:
    kind: a key of MEMORIES.
    num_heads: H.
    key_width: d_k of a head.
    value_width: d_v of a head.
    gates: initial values of the gates.
    has_mlp: whether the block has an MLP; without it the output of the block is
      initially zero.
  """

  kind: str
  num_heads: int
  key_width: int
  value_width: int
  gates: fast_weights.Gates
  has_mlp: bool


def memory_flops(shape: Shape, memory: MemoryShape, num_tokens: int) -> int:
  """FLOPs of a memory block's forward pass on a window of one sequence.

  A multiply-add counts as two. Point-wise operations and the matrix inverse
  within a chunk are not counted. Every token counts the pairs of a whole chunk
  of an accelerator's size, however short the window; padding does not count.
  """
  width, heads = shape.width, memory.num_heads
  keys, values = heads * memory.key_width, heads * memory.value_width
  layer = width * (2 * keys + 3 * values + 2 * heads)
  if memory.kind == "jet":  # The tap generator of the convolution, four taps.
    layer += values // 8 * (width + 4 * values)
  rule = 3 * memory.key_width * memory.value_width
  chunk = chunked.even_size(num_tokens, chunked.CHUNK_SIZE)
  rule += 2 * chunk * (memory.key_width + memory.value_width)
  hidden = mlp.flops(shape.mlp, width, shape.mlp_width) * memory.has_mlp
  return num_tokens * (2 * (layer + heads * rule) + hidden)
