"""TRM: one tiny network improves an answer and a latent state in turns.

Source: A. Jolicoeur-Martineau, "Less is more: recursive reasoning with tiny
networks", arXiv 2510.04871. The algorithm is `Model.recurse`, and what
surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from loopjax import checks
from loopjax.errors import UserError
from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.models import ends, supervised
from loopjax.nn import attention, block, mlp, post_norm
from loopjax.nn.shape import Shape
from loopjax.types import PRECISIONS, Array, LoopOptions, TaskSpec

Carry = tuple[supervised.State, Array | None]  # The state, and keys of noise.


@dataclasses.dataclass(frozen=True)
class Config(supervised.Config):
  """Hyper-parameters; the defaults are the paper's (section 5.1).

  Those of `supervised.Config`, and:

  Attributes:
    mixer: "attention", or "mlp" over the positions (section 4.5), the paper's
      choice for Sudoku.
    token_mlp_width: hidden features of the MLP over the positions.
    num_cycles: T, recursions of a segment; only the last has a gradient.
    num_latent_steps: n, updates of z before each update of y.
  """

  num_layers: int = 2
  num_cycles: int = 3
  num_memory_tokens: int = 16
  mixer: str = "attention"
  token_mlp_width: int = checks.setting(512, least=1)
  num_latent_steps: int = checks.setting(6, least=1)
  # The answer y and the latent z.
  state_names: ClassVar[tuple[str, ...]] = ("y", "z")

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of("model", self, mixer=("attention", "mlp"))
    disabled = {
      "attention": ("token_mlp_width",),
      "mlp": ("num_heads", "positions", "rope_base"),
    }[self.mixer]
    checks.without_effect("model", self, "mixer", *disabled)

  def block_shape(self) -> Shape:
    """As in `supervised.Config`; an MLP over positions has no heads."""
    if self.mixer == "attention":
      return super().block_shape()
    plain = supervised.Config(self.width, 1, mlp_ratio=self.mlp_ratio)
    return plain.block_shape()


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
    self.config, self.spec, self.options = config, spec, options
    if config.mixer == "mlp" and options.kernels != "xla":
      raise UserError("loop.kernels has no effect with model.mixer='mlp'")
    kernels, precision = KERNELS[options.kernels], PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    sizes, num_memory = config.block_shape(), config.num_memory_tokens
    self.ends = ends.Ends(config, spec, rngs=rngs)

    def layer() -> post_norm.PostNormBlock:
      mixer: Any = attention.Attention(sizes, kernels=kernels, **shared)
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
    self,
    x: Array,
    state: supervised.State,
    kind: str,
    keys: Array | None = None,
    cut: supervised.Cut = jax.lax.stop_gradient,
  ) -> supervised.State:
    """Deep recursion (figure 3) on the answer and the latent state (y, z).

    T latent recursions, the last of them with a gradient.
    """
    config, metadata = self.config, ends.attention_metadata(self)

    def net(h: Array) -> Array:
      return post_norm.run_layers(self.layers, h, metadata)

    def latent_recursion(carry: Carry) -> Carry:
      (y, z), keys = carry

      def improved(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        z, keys = carry
        return supervised.moved(config, z, net(z + y + x), keys)

      z, keys = driver.repeat(  # z <- net(x, y, z), n times.
        improved,
        (z, keys),
        config.num_latent_steps,
        kind=kind,
        remat=self.options.remat,
      )
      y, keys = supervised.moved(config, y, net(y + z), keys)  # y <- net(y, z).
      return (y, z), keys

    state, _ = supervised.last_with_gradient(
      latent_recursion, (state, keys), config.num_cycles, kind, cut
    )
    return state

  __call__ = supervised.run


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by segment; a training step is one segment."""
  tokens = config.num_memory_tokens + spec.sequence_length
  sizes = config.block_shape()
  layer = block.flops(sizes, tokens)
  if config.mixer == "mlp":
    over_tokens = mlp.flops("swiglu", tokens, config.token_mlp_width)
    over_features = mlp.flops("swiglu", config.width, sizes.mlp_width)
    layer = config.width * over_tokens + tokens * over_features
  recursion = (config.num_latent_steps + 1) * config.num_layers * layer
  return supervised.costs(
    config,
    spec,
    num_loops,
    segment=config.num_cycles * recursion,
    with_gradient=recursion,
  )


FAMILY = supervised.family(Config, Model, costs)
