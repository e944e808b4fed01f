"""URM: one state, and an MLP that convolves neighbouring tokens.

Source: "Universal reasoning model", arXiv 2512.14693. The algorithm is
`Model.recurse`, and what surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from loopjax import checks
from loopjax.loop import driver
from loopjax.models import supervised
from loopjax.nn import attention, block, convolution, linear, post_norm
from loopjax.nn.shape import Shape
from loopjax.types import (
  PRECISIONS,
  Array,
  Carried,
  LoopOptions,
  Output,
  Precision,
  TaskSpec,
)

TRACES, HEADLINE = supervised.TRACES, supervised.HEADLINE
loss = supervised.loss
NUM_STATES = 1
KERNEL = 2  # Tokens that the convolution sees: the one before, and its own.


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the authors' script for Sudoku.

  Attributes:
    width: D. num_heads: H. num_layers: of the network.
    mlp_ratio: F = floor(mlp_ratio D); 3 is 8/3 rounded up to 1,536.
    num_loops: segments of supervision; the most in training.
    num_cycles: of a segment, of which the last has a gradient.
    num_inner_steps: applications of the network in a cycle.
    num_memory_tokens: positions before the task's tokens; the puzzle embedding.
    positions, rope_base: of the rotary embedding, see
      `rope.positions_after_memory`; "offset" is the paper's.
    exploration: see `loop.supervision.halts`.
    token_loss: "stablemax" or "softmax" cross-entropy.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
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

  def __post_init__(self) -> None:
    supervised.check(self, num_layers=1, num_cycles=1, num_inner_steps=1)
    self.block_shape()

  def block_shape(self) -> Shape:
    """Sizes of a block; raises UserError if there is none of these."""
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
      hidden_width, KERNEL, use_bias=True, **shared
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
    checks.one_document(spec, "sees a whole row at once")
    self.config, self.spec, self.options = config, spec, options
    self.num_states = NUM_STATES
    precision = PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    sizes = config.block_shape()
    self.ends = supervised.Ends(
      config.width, config.num_memory_tokens, spec, **shared
    )
    self.layers = nnx.List(
      [
        post_norm.PostNormBlock(
          attention.Attention(sizes, **shared),
          ConvSwiGLU(config.width, sizes.mlp_width, **shared),
          precision=precision,
        )
        for _ in range(config.num_layers)
      ]
    )

  def recurse(
    self, x: Array, state: supervised.State, kind: str
  ) -> supervised.State:
    """Cycles of inner steps, the last with a gradient (truncated
    back-propagation through loops).

    Args:
      x: embedded inputs, f32 [B, S, D].
      state: h, the same shape.
      kind: of the loops, see `driver.run_loop`.
    """
    config, metadata = self.config, supervised.attention_metadata(self)

    def inner(h: Array, i: Array) -> tuple[Array, None]:
      return post_norm.run_layers(self.layers, h + x, metadata), None

    def cycle(
      state: supervised.State, k: Array
    ) -> tuple[supervised.State, None]:
      h, _, _ = driver.run_loop(
        inner,
        state[0],
        config.num_inner_steps,
        kind=kind,
        remat=self.options.remat,
      )
      return (h,), None

    _, state, _ = driver.run_truncated(
      cycle,
      state,
      config.num_cycles,
      num_with_gradient=1,
      want_first=False,
      kind=kind,
    )
    return state

  def __call__(
    self,
    inputs: Array,
    *,
    num_loops: int | None = None,
    kind: str | None = None,
    trace: tuple[str, ...] = (),
  ) -> Output:
    """Predicts every token at once, see `supervised.run`."""
    return supervised.run(self, inputs, num_loops, kind, trace)


def init_carried(config: Config, spec: TaskSpec, batch_size: int) -> Carried:
  """What the first step receives: rows without examples."""
  return supervised.init_carried(
    NUM_STATES, config.width, config.num_memory_tokens, spec, batch_size
  )


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by segment; a training step is one segment.

  A multiply-add counts as two; point-wise operations are left out.
  """
  tokens = config.num_memory_tokens + spec.sequence_length
  sizes = config.block_shape()
  taps = 2 * KERNEL * sizes.mlp_width * tokens
  cycle = (
    config.num_inner_steps
    * config.num_layers
    * (block.flops(sizes, tokens) + taps)
  )
  return supervised.costs(
    spec,
    config.width,
    num_loops,
    segment=config.num_cycles * cycle,
    with_gradient=cycle,
  )
