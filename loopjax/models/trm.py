"""TRM: one tiny network improves an answer and a latent state in turns.

Source: A. Jolicoeur-Martineau, "Less is more: recursive reasoning with tiny
networks", arXiv 2510.04871. The algorithm is `Model.recurse`, and what
surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any

from flax import nnx

from loopjax import checks
from loopjax.loop import driver
from loopjax.models import supervised
from loopjax.nn import attention, block, mlp, post_norm
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
NUM_STATES = 2  # Answer y and latent z.


@dataclasses.dataclass(frozen=True)
class Config:
  """Hyper-parameters; the defaults are the paper's (section 5.1).

  Attributes:
    width: D. num_heads: H. num_layers: of the network.
    mlp_ratio: F = floor(mlp_ratio D); 3 is 8/3 rounded up to 1,536.
    mixer: "attention", or "mlp" over the positions (section 4.5), the paper's
      choice for Sudoku.
    token_mlp_width: hidden features of the MLP over the positions.
    num_loops: N_sup, segments of supervision; the most in training.
    num_cycles: T, recursions of a segment, of which the last has a gradient.
    num_latent_steps: n, updates of z before each update of y.
    num_memory_tokens: M, positions before the task's tokens; the paper has the
      puzzle embedding there.
    positions, rope_base: of the rotary embedding, see
      `rope.positions_after_memory`; "offset" is the paper's.
    exploration: see `loop.supervision.halts`.
    token_loss: "stablemax" or "softmax" cross-entropy.
    precision: "float32" or "bfloat16" (of the matrix products' inputs).
  """

  width: int = 512
  num_heads: int = 8
  num_layers: int = 2
  mlp_ratio: float = 3.0
  mixer: str = "attention"
  token_mlp_width: int = 512
  num_loops: int = 16
  num_cycles: int = 3
  num_latent_steps: int = 6
  num_memory_tokens: int = 16
  positions: str = "offset"
  rope_base: float = 10_000.0
  exploration: float = 0.1
  token_loss: str = "stablemax"
  precision: str = "bfloat16"

  def __post_init__(self) -> None:
    supervised.check(self, num_layers=1, num_cycles=1, num_latent_steps=1)
    checks.one_of("model", self, mixer=("attention", "mlp"))
    checks.at_least("model", self, token_mlp_width=1)
    self.block_shape()
    disabled = {
      "attention": ("token_mlp_width",),
      "mlp": ("num_heads", "positions", "rope_base"),
    }[self.mixer]
    checks.without_effect(
      "model", self, f"model.mixer={self.mixer!r}", *disabled
    )

  def block_shape(self) -> Shape:
    """Sizes of a block; raises UserError if there is none of these."""
    heads = self.num_heads if self.mixer == "attention" else 1
    return supervised.block_shape(self.width, heads, self.mlp_ratio)


class Model(nnx.Module):
  """The tiny recursive model."""

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
    sizes, num_memory = config.block_shape(), config.num_memory_tokens
    self.ends = supervised.Ends(config.width, num_memory, spec, **shared)

    def layer() -> post_norm.PostNormBlock:
      mixer: Any = attention.Attention(sizes, **shared)
      if config.mixer == "mlp":
        tokens = num_memory + spec.sequence_length
        mixer = post_norm.TokenMLP(tokens, config.token_mlp_width, **shared)
      return post_norm.PostNormBlock(
        mixer,
        block.make_mlp(sizes, **shared),
        norm_axis=-1 if config.mixer == "attention" else -2,
        precision=precision,
      )

    self.layers = nnx.List([layer() for _ in range(config.num_layers)])

  def recurse(
    self, x: Array, state: supervised.State, kind: str
  ) -> supervised.State:
    """Deep recursion, the last one with a gradient (figure 3).

    Args:
      x: embedded inputs, f32 [B, S, D].
      state: the answer y and the latent z, the same shape.
      kind: of the loops, see `driver.run_loop`.
    """
    config, metadata = self.config, supervised.attention_metadata(self)

    def net(h: Array) -> Array:
      return post_norm.run_layers(self.layers, h, metadata)

    def latent_recursion(
      state: supervised.State, t: Array
    ) -> tuple[supervised.State, None]:
      y, z = state

      def think(z: Array, i: Array) -> tuple[Array, None]:
        return net(z + y + x), None  # z <- net(x, y, z), n times.

      z, _, _ = driver.run_loop(
        think,
        z,
        config.num_latent_steps,
        kind=kind,
        remat=self.options.remat,
      )
      return (net(y + z), z), None  # y <- net(y, z).

    # T - 1 times without a gradient, then once with it.
    _, state, _ = driver.run_truncated(
      latent_recursion,
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
  layer = block.flops(sizes, tokens)
  if config.mixer == "mlp":
    over_tokens = mlp.flops("swiglu", tokens, config.token_mlp_width)
    over_features = mlp.flops("swiglu", config.width, sizes.mlp_width)
    layer = config.width * over_tokens + tokens * over_features
  recursion = (config.num_latent_steps + 1) * config.num_layers * layer
  return supervised.costs(
    spec,
    config.width,
    num_loops,
    segment=config.num_cycles * recursion,
    with_gradient=recursion,
  )
