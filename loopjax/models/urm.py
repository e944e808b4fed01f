"""URM: one state, and an MLP that convolves neighbouring tokens.

Source: "Universal reasoning model", arXiv 2512.14693. The algorithm is
`Model.recurse`, and what surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.models import ends, supervised
from loopjax.nn import attention, block, linear, post_norm
from loopjax.nn.fast_weights import convolution
from loopjax.types import PRECISIONS, Array, LoopOptions, Precision, TaskSpec

# Tokens that the convolution sees: the one before, and its own.
CONVOLUTION_WIDTH = 2

Carry = tuple[Array, Array | None]  # The state, and keys of noise.


@dataclasses.dataclass(frozen=True)
class Config(supervised.Config):
  """Hyper-parameters; the defaults are the authors' script for Sudoku.

  Those of `supervised.Config`, and:

  Attributes:
    num_cycles: recursions of a segment; only the last has a gradient.
    num_inner_steps: applications of the network in a cycle.
  """

  num_inner_steps: int = checks.setting(6, least=1)
  state_names: ClassVar[tuple[str, ...]] = ("h",)

  def __post_init__(self) -> None:
    super().__post_init__()


class ConvSwiGLU(nnx.Module):
  """W_o silu(conv(silu(W_g x) * W_v x)) (section 3, "ConvSwiGLU").

  A depthwise convolution over the token before and the token itself.
  """

  def __init__(
    self, width: int, hidden_width: int, *, precision: Precision, rngs: nnx.Rngs
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
    self,
    x: Array,
    state: supervised.State,
    kind: str,
    keys: Array | None = None,
    cut: supervised.Cut = jax.lax.stop_gradient,
  ) -> supervised.State:
    """Cycles of inner steps on the state (h,), the last with a gradient.

    Truncated back-propagation through loops.
    """
    config, metadata = self.config, ends.attention_metadata(self)

    def inner_step(carry: Carry) -> Carry:
      h, keys = carry
      new = post_norm.run_layers(self.layers, h + x, metadata)
      return supervised.moved(config, h, new, keys)

    def cycle(carry: Carry) -> Carry:
      return driver.repeat(
        inner_step,
        carry,
        config.num_inner_steps,
        kind=kind,
        remat=self.options.remat,
      )

    (h,) = state
    h, _ = supervised.last_with_gradient(
      cycle, (h, keys), config.num_cycles, kind, cut
    )
    return (h,)

  __call__ = supervised.run


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by segment; a training step is one segment."""
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


FAMILY = supervised.family(Config, Model, costs)
