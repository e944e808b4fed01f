"""Small models of the real families, untrained."""

import functools

import jax
from flax import nnx

from loopjax.models import MODELS
from loopjax.types import TaskSpec

LENGTH, PADDING = 4, 2
SPEC = TaskSpec(23, LENGTH, tuple((i,) for i in range(LENGTH)), PADDING)
TOKENS = jax.random.randint(jax.random.key(1), (3, LENGTH), 0, 21)
# The trace of what each family carries from loop to loop.
STATE = {"looped": "hidden", "disco": "mixed"}
_SMALL = {"width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 3}
_FAST = {"xla_backend_optimization_level": 0}


@functools.cache
def model_of(name, loop_norm="per_loop"):
  """(build, params, table) with embeddings large enough to matter."""
  family = MODELS[name]
  config = family.Config(**_SMALL, loop_norm=loop_norm)

  def draw():
    model = family.Model(config, SPEC, rngs=nnx.Rngs(params=0))
    return nnx.to_pure_dict(nnx.state(model))

  params = jax.jit(draw, compiler_options=_FAST)()
  params["token_embedding"]["embedding"] *= 20.0
  graphdef, _ = nnx.split(
    nnx.eval_shape(lambda: family.Model(config, SPEC, rngs=nnx.Rngs(params=0)))
  )
  build = functools.partial(nnx.merge, graphdef)
  return build, params, params["token_embedding"]["embedding"]
