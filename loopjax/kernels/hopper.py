"""What kernels for Hopper GPUs, by Mosaic GPU, have in common."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

PARAMS = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


def transforms(columns: int):
  """Layout of tiles in shared memory that the tensor cores require."""
  swizzle = plgpu.find_swizzle(16 * columns)
  return (
    plgpu.TilingTransform((8, swizzle // 2)),
    plgpu.SwizzleTransform(swizzle),
  )


def smem(shape: tuple[int, ...]):
  """A tile in shared memory, in bfloat16."""
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms(shape[-1]))
