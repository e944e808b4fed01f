"""Post-norm blocks, which normalise the residual stream after each branch.

Source: HRM (arXiv 2506.21734), TRM (2510.04871) and URM (2512.14693), which
share the block but differ in its two branches.
"""

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from loopjax import sharding
from loopjax.nn import attention, linear, mlp, norm
from loopjax.types import Array, Precision

_EPSILON = 1e-5  # As in the authors' code.


class PostNormBlock(nnx.Module):
  """x <- rms(x + mixer(x)), then x <- rms(x + mlp(x)); norms without gains.

  The residual stream has the accumulate dtype. The outputs of the branches are
  named "attention" and "mlp" for rematerialisation policies.
  """

  def __init__(
    self, mixer: Any, mlp: Any, *, norm_axis: int = -1, precision: Precision
  ):
    """Combines two branches.

    Args:
      mixer: a layer (x, metadata) -> (mixed, None) that mixes tokens, such as
        `Attention` or `TokenMLP`.
      mlp: a layer x -> mixed that mixes features.
      norm_axis: axis of the first norm: -1 for features; -2 for positions, as
        in TRM's code with a `TokenMLP`.
      precision: the residual stream has its accumulate dtype.
    """
    self.mixer, self.mlp = mixer, mlp
    self.norm_axis, self.precision = norm_axis, precision

  def __call__(self, x: Array, metadata: attention.Metadata) -> Array:
    """x: [B, S, D]; returns [B, S, D] with unit mean square over features."""
    x = sharding.split_by_example(x)
    mixed, _ = self.mixer(x, metadata)
    x = self._added(x, checkpoint_name(mixed, "attention"), self.norm_axis)
    return self._added(x, checkpoint_name(self.mlp(x), "mlp"), -1)

  def _added(self, x: Array, branch: Array, axis: int) -> Array:
    x = x + branch.astype(self.precision.accumulate)
    return sharding.split_by_example(norm.rms_normalise(x, _EPSILON, axis))


def run_layers(
  layers: nnx.List, x: Array, metadata: attention.Metadata
) -> Array:
  """Applies blocks to x [B, S, D], one after another."""
  for layer in layers:
    x = layer(x, metadata)
  return x


class TokenMLP(nnx.Module):
  """A gated MLP over positions, shared by all features.

  Replaces attention if the number of positions is small and fixed (TRM, section
  4.5; MLP-Mixer, arXiv 2105.01601).
  """

  def __init__(
    self,
    num_tokens: int,
    hidden_width: int,
    *,
    init: linear.Initializer = linear.LECUN_NORMAL,
    precision: Precision,
    rngs: nnx.Rngs,
  ):
    self.mlp = mlp.Gated(
      num_tokens,
      hidden_width,
      activation=jax.nn.silu,
      init=init,
      precision=precision,
      rngs=rngs,
    )

  def __call__(
    self, x: Array, metadata: attention.Metadata
  ) -> tuple[Array, None]:
    """x: [B, S, D]; returns ([B, S, D] in the compute dtype, None)."""
    del metadata  # Every position has its own weights.
    return self.mlp(x.mT).mT, None
