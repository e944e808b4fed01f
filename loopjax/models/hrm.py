"""HRM: a slow network and a fast one, with a gradient of one step.

Source: G. Wang et al., "Hierarchical reasoning model", arXiv 2506.21734. The
algorithm is `Model.recurse`, and what surrounds it `supervised.loss`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx

from loopjax import checks
from loopjax.kernels import KERNELS
from loopjax.loop import driver
from loopjax.models import ends, supervised
from loopjax.nn import attention, block, post_norm, remat
from loopjax.types import PRECISIONS, Array, LoopOptions, TaskSpec

Fast = tuple[Array, Array | None]  # z_L, and keys of noise.
Carry = tuple[Array, Fast]


@dataclasses.dataclass(frozen=True)
class Config(supervised.Config):
  """Hyper-parameters; the defaults are the authors' code's.

  Those of `supervised.Config`, and:

  Attributes:
    num_cycles: N, high-level steps of a segment.
    num_low_steps: T, low-level steps before each of them.
  """

  num_low_steps: int = checks.setting(2, least=1)
  state_names: ClassVar[tuple[str, ...]] = ("z_H", "z_L")

  def __post_init__(self) -> None:
    super().__post_init__()


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
    self.config, self.spec, self.options = config, spec, options
    kernels, precision = KERNELS[options.kernels], PRECISIONS[config.precision]
    shared: dict[str, Any] = {"precision": precision, "rngs": rngs}
    sizes = config.block_shape()

    def network() -> nnx.List:
      return nnx.List(
        [
          post_norm.PostNormBlock(
            attention.Attention(sizes, kernels=kernels, **shared),
            block.make_mlp(sizes, **shared),
            precision=precision,
          )
          for _ in range(config.num_layers)
        ]
      )

    self.ends = ends.Ends(config, spec, continues=True, rngs=rngs)
    self.low, self.high = network(), network()

  def recurse(
    self,
    x: Array,
    state: supervised.State,
    kind: str,
    keys: Array | None = None,
    cut: supervised.Cut = jax.lax.stop_gradient,
  ) -> supervised.State:
    """N cycles of T low-level steps and a high-level one, on (z_H, z_L).

    Equations 1 and 2. Only the last step of each network has a gradient (the
    one-step gradient approximation).
    """
    config, metadata = self.config, ends.attention_metadata(self)

    def low(z_h: Array, fast: Fast) -> Fast:  # f_L
      z_l, keys = fast
      new = post_norm.run_layers(self.low, z_l + z_h + x, metadata)
      return supervised.moved(config, z_l, new, keys)

    def high(carry: Carry) -> Carry:  # f_H
      z_h, (z_l, keys) = carry
      new = post_norm.run_layers(self.high, z_h + z_l, metadata)
      z_h, keys = supervised.moved(config, z_h, new, keys)
      return z_h, (z_l, keys)

    def low_steps(carry: Carry, num: int) -> Carry:
      z_h, fast = carry
      return z_h, driver.repeat(lambda z: low(z_h, z), fast, num, kind=kind)

    def cycle(carry: Carry) -> Carry:
      return high(low_steps(carry, config.num_low_steps))

    def last(carry: Carry) -> Carry:
      z_h, fast = carry
      return high((z_h, low(z_h, fast)))

    z_h, z_l = state
    carry: Carry = (z_h, (z_l, keys))
    carry = driver.repeat(cycle, carry, config.num_cycles - 1, kind=kind)
    carry = low_steps(carry, config.num_low_steps - 1)
    last = remat.rematerialised(last, self.options.remat, prevent_cse=True)
    z_h, (z_l, _) = last(cut(carry))
    return z_h, z_l

  __call__ = supervised.run


def costs(config: Config, spec: TaskSpec, num_loops: int) -> dict[str, object]:
  """Forward FLOPs of one example by segment.

  A training step is one segment, and a second one without a gradient for the
  target of the head to continue.
  """
  tokens = config.num_memory_tokens + spec.sequence_length
  network = config.num_layers * block.flops(config.block_shape(), tokens)
  return supervised.costs(
    config,
    spec,
    num_loops,
    segment=config.num_cycles * (config.num_low_steps + 1) * network,
    with_gradient=2 * network,
    num_forward=2,
  )


FAMILY = supervised.family(Config, Model, costs)
