"""URM: one state, and an MLP that convolves neighbouring tokens.

Source: "Universal reasoning model", arXiv 2512.14693. The algorithm is
`Model.recurse`, and what surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.models import ends, supervised
from loopjax.nn import attention, block, linear, post_norm
from loopjax.nn.fast_weights import convolution
from loopjax.nn.shape import Shape
from loopjax.protocols import Family
from loopjax.types import PRECISIONS, Array, LoopOptions, Precision, TaskSpec

CONVOLUTION_WIDTH = (
  2  # Tokens that the convolution sees: the one before, and its own.
)


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the authors' script for Sudoku.

  Attributes:
    width: D.
    num_heads: H.
    num_layers: layers of the network.
    mlp_ratio: F = floor(mlp_ratio D); 3 is 8/3 rounded up to 1,536.
    num_loops: segments of supervision; the most in training.
    num_cycles: recursions of a segment; only the last has a gradient.
    num_inner_steps: applications of the network in a cycle.
    num_memory_tokens: positions before the task's tokens; the puzzle embedding.
    positions, rope_base: settings of the rotary embedding, see
      `rope.positions_after_memory`; "offset" is the paper's.
    exploration: see `loop.supervision.halts`.
    token_loss: cross-entropy of the "stablemax" or the "softmax" of logits.
    precision: "float32" or "bfloat16", the dtype of matrix products' inputs.
  """

  width: int = 512
  num_heads: int = 8
  num_layers: int = 4
  mlp_ratio: float = 3.0
  num_loops: int = 16
  num_cycles: int = 2
  num_inner_steps: int = 6
  num_memory_tokens: int = 1
  positions: str = "offset"
  rope_base: float = 10_000.0
  exploration: float = 0.1
  token_loss: str = "stablemax"
  precision: str = "bfloat16"
  num_states: ClassVar[int] = 1

  def __post_init__(self) -> None:
    supervised.check(self, num_layers=1, num_cycles=1, num_inner_steps=1)
    self.block_shape()

  def block_shape(self) -> Shape:
    """The sizes of a block; raises UserError if they are invalid."""
    return supervised.block_shape(self.width, self.num_heads, self.mlp_ratio)


class ConvSwiGLU(nnx.Module):
  """W_o silu(conv(silu(W_g x) * W_v x)) (section 3, "ConvSwiGLU").

  A depthwise convolution over the token before and the token itself.
  """

  def __init__(
    self,
    width: int,
    hidden_width: int,
    *,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    self.gate = linear.linear(width, hidden_width, **shared)
    self.value = linear.linear(width, hidden_width, **shared)
    self.convolution = convolution.ShortConvolution(
      hidden_width, CONVOLUTION_WIDTH, use_bias=True, **shared
    )
    self.output = linear.linear(hidden_width, width, **shared)

  def __call__(self, x: Array) -> Array:
    """x: [B, S, D]; returns the same in the compute dtype."""
    gated = jax.nn.silu(self.gate(x)) * self.value(x)
    return self.output(self.convolution(gated, None))


class Model(nnx.Module):
  """The universal reasoning model."""

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    self.config, self.spec, self.options = config, spec, options
    kernels, precision = KERNELS[options.kernels], PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    sizes = config.block_shape()
    self.ends = ends.Ends(config, spec, rngs=rngs)
    self.layers = nnx.List(
      [
        post_norm.PostNormBlock(
          attention.Attention(sizes, kernels=kernels, **shared),
          ConvSwiGLU(config.width, sizes.mlp_width, **shared),
          precision=precision,
        )
        for _ in range(config.num_layers)
      ]
    )

  def recurse(
    self, x: Array, state: supervised.State, kind: str
  ) -> supervised.State:
    """Cycles of inner steps on the state (h,), the last with a gradient.

    Truncated back-propagation through loops.
    """
    config, metadata = self.config, ends.attention_metadata(self)

    def inner_step(h: Array) -> Array:
      return post_norm.run_layers(self.layers, h + x, metadata)

    def cycle(state: supervised.State) -> supervised.State:
      (h,) = state
      h = driver.repeat(
        inner_step,
        h,
        config.num_inner_steps,
        kind=kind,
        remat=self.options.remat,
      )
      return (h,)

    return supervised.last_with_gradient(cycle, state, config.num_cycles, kind)

  __call__ = supervised.run


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by segment; a training step is one segment.

  A multiply-add counts as two; point-wise operations are left out.
  """
  tokens = config.num_memory_tokens + spec.sequence_length
  sizes = config.block_shape()
  taps = 2 * CONVOLUTION_WIDTH * sizes.mlp_width * tokens
  cycle = (
    config.num_inner_steps
    * config.num_layers
    * (block.flops(sizes, tokens) + taps)
  )
  return supervised.costs(
    config,
    spec,
    num_loops,
    segment=config.num_cycles * cycle,
    with_gradient=cycle,
  )


FAMILY = Family(
  Config=Config,
  Model=Model,
  loss=supervised.loss,
  costs=costs,
  traces=supervised.TRACES,
  headline=supervised.HEADLINE,
  init_carried=supervised.init_carried,
  num_memory_tokens=supervised.num_memory_tokens,
)
