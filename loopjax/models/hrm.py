"""HRM: a slow network and a fast one, with a gradient of one step.

Source: G. Wang et al., "Hierarchical reasoning model", arXiv 2506.21734. The
algorithm is `Model.recurse`, and what surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from loopjax import checks
from loopjax.loop import driver
from loopjax.models import supervised
from loopjax.nn import attention, block, post_norm, remat
from loopjax.nn.shape import Shape
from loopjax.types import (
  PRECISIONS,
  Array,
  Carried,
  LoopOptions,
  Output,
  TaskSpec,
)

TRACES, HEADLINE = supervised.TRACES, supervised.HEADLINE
loss = supervised.loss
NUM_STATES = 2  # High-level z_H, which is read out, and low-level z_L.


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the authors' code's.

  Attributes:
    width: D. num_heads: H. num_layers: of each of the two networks.
    mlp_ratio: F = floor(mlp_ratio D); 3 is 8/3 rounded up to 1,536.
    num_loops: M_max, segments of supervision; the most in training.
    num_cycles: N, high-level steps of a segment.
    num_low_steps: T, low-level steps before each of them.
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
  num_low_steps: int = 2
  num_memory_tokens: int = 1
  positions: str = "offset"
  rope_base: float = 10_000.0
  exploration: float = 0.1
  token_loss: str = "stablemax"
  precision: str = "bfloat16"

  def __post_init__(self) -> None:
    supervised.check(self, num_layers=1, num_cycles=1, num_low_steps=1)
    self.block_shape()

  def block_shape(self) -> Shape:
    """Sizes of a block; raises UserError if there is none of these."""
    return supervised.block_shape(self.width, self.num_heads, self.mlp_ratio)


class Model(nnx.Module):
  """The hierarchical reasoning model."""

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

    def network() -> nnx.List:
      return nnx.List(
        [
          post_norm.PostNormBlock(
            attention.Attention(sizes, **shared),
            block.make_mlp(sizes, **shared),
            precision=precision,
          )
          for _ in range(config.num_layers)
        ]
      )

    self.ends = supervised.Ends(
      config.width, config.num_memory_tokens, spec, continues=True, **shared
    )
    self.low, self.high = network(), network()

  def recurse(
    self, x: Array, state: supervised.State, kind: str
  ) -> supervised.State:
    """N cycles of T low steps and a high one (equations 1 and 2).

    The gradient is that of the last low and the last high step alone (the
    one-step gradient approximation).

    Args:
      x: embedded inputs, f32 [B, S, D].
      state: z_H and z_L, the same shape.
      kind: of the loops, see `driver.run_loop`.
    """
    config, metadata = self.config, supervised.attention_metadata(self)

    def low(z_h: Array, z_l: Array) -> Array:  # f_L
      return post_norm.run_layers(self.low, z_l + z_h + x, metadata)

    def high(z_h: Array, z_l: Array) -> Array:  # f_H
      return post_norm.run_layers(self.high, z_h + z_l, metadata)

    def low_steps(state: supervised.State, num: int) -> supervised.State:
      def step(z_l: Array, i: Array) -> tuple[Array, None]:
        return low(state[0], z_l), None

      z_l, _, _ = driver.run_loop(step, state[1], num, kind=kind)
      return state[0], z_l

    def cycle(
      state: supervised.State, k: Array
    ) -> tuple[supervised.State, None]:
      z_h, z_l = low_steps(state, config.num_low_steps)
      return (high(z_h, z_l), z_l), None

    def last(state: supervised.State) -> supervised.State:
      z_h, z_l = state
      z_l = low(z_h, z_l)
      return high(z_h, z_l), z_l

    if config.num_cycles > 1:
      state, _, _ = driver.run_loop(
        cycle, state, config.num_cycles - 1, kind=kind
      )
    if config.num_low_steps > 1:
      state = low_steps(state, config.num_low_steps - 1)
    last = remat.rematerialised(last, self.options.remat, prevent_cse=True)
    return last(jax.lax.stop_gradient(state))

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
  """Forward FLOPs of one example by segment.

  A training step is one segment, and a second one without a gradient for the
  target of the head to continue. A multiply-add counts as two; point-wise
  operations are left out.
  """
  tokens = config.num_memory_tokens + spec.sequence_length
  network = config.num_layers * block.flops(config.block_shape(), tokens)
  return supervised.costs(
    spec,
    config.width,
    num_loops,
    segment=config.num_cycles * (config.num_low_steps + 1) * network,
    with_gradient=2 * network,
    num_forward=2,
  )
