"""Tiny models for tests, drawn and run by compiled programs.

Running them operation by operation would compile every one by itself.
"""

import functools

import jax
from flax import nnx

from loopjax.types import LoopOptions

# Tiny programs take longer to compile than to run.
FAST = {"xla_backend_optimization_level": 0}


def abstract(family, config, spec, options=LoopOptions()):
  """The model with shapes in place of its parameters."""
  return nnx.eval_shape(
    lambda: family.Model(config, spec, options, rngs=nnx.Rngs(params=0))
  )


@functools.cache
def params_of(family, config, spec):
  """Parameters as a nested dict."""

  def draw():
    model = family.Model(config, spec, rngs=nnx.Rngs(params=0))
    return nnx.to_pure_dict(nnx.state(model))

  return jax.jit(draw, compiler_options=FAST)()


def merged(family, config, spec, params=None, options=LoopOptions()):
  """The model with its parameters, or others."""
  graphdef, _ = nnx.split(abstract(family, config, spec, options))
  return nnx.merge(graphdef, params or params_of(family, config, spec))


def run(family, config, spec, inputs, params=None, **call):
  """The model's output for inputs; `call` as in `Model.__call__`."""

  def forward(params, inputs):
    return merged(family, config, spec, params)(inputs, **call)

  params = params or params_of(family, config, spec)
  return jax.jit(forward, compiler_options=FAST)(params, inputs)


def count(family, config, spec):
  """Number of parameters, without drawing them."""
  params = nnx.state(abstract(family, config, spec))
  return sum(leaf.size for leaf in jax.tree.leaves(params))
