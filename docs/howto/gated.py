"""Looped transformer that keeps a learned share of its state in every loop.

h <- s h + (1 - s) f(h), with f the stack of blocks and s in [0, 1] per feature:
a highway network (arXiv 1505.00387, equation 3) over loops, whose gate does not
depend on the input.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from loopjax import checks
from loopjax.models import looped
from loopjax.optim import parameters
from loopjax.types import Array, LoopOptions, TaskSpec

# How the new parameter is split over devices, and its optimizer and decay.
parameters.register(parameters.Row("keep_logit", P(), "adamw", "all"))


@dataclasses.dataclass(frozen=True)
class Config(looped.Config):
  """Those of `looped`, and:

  Attributes:
    keep_logit: log-odds of s at the start; -2 keeps 0.12 of the state.
  """

  keep_logit: float = checks.setting(-2.0, least=-10)


class Model(looped.Model):
  """The looped transformer, with another step from loop to loop."""

  def __init__(
    self,
    config: Config,
    spec: TaskSpec,
    options: LoopOptions = LoopOptions(),
    *,
    rngs: nnx.Rngs,
  ):
    super().__init__(config, spec, options, rngs=rngs)
    self.keep_logit = nnx.Param(jnp.full(config.width, config.keep_logit))

  def transform(
    self, call: looped.causal.Call, carry: looped.causal.Carry, loop: Array
  ) -> looped.causal.Carry:
    """The state f32 [B, T, D] and the cache, after one more loop."""
    after, cache = super().transform(call, carry, loop)
    kept = jax.nn.sigmoid(self.keep_logit[...])[None, None]  # [1, 1, D].
    return kept * carry[0] + (1 - kept) * after, cache


# What is not named here is as in `looped`: loss, costs, traces, generation.
FAMILY = dataclasses.replace(looped.FAMILY, Config=Config, Model=Model)
