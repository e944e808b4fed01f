"""Tiny models for tests: initialised piece by piece, run as compiled programs.

Families and configs share the pieces' initialisers, each compiled once; every
model's forward pass is compiled as a whole.
"""

import functools

import jax
from flax import nnx
from in_float64 import without_rounding
from tests_support import strict_dtypes

from loopjax.types import LoopOptions

# Tiny programs take longer to compile than to run.
FAST = {"xla_backend_optimization_level": 0}


def abstract(family, config, spec, options=LoopOptions()):
  """The model with shapes in place of its parameters."""
  return nnx.eval_shape(
    lambda: family.Model(config, spec, options, rngs=nnx.Rngs(params=0))
  )


@functools.cache
def graph(family, config, spec, options=LoopOptions()):
  """The model without its parameters."""
  return nnx.split(abstract(family, config, spec, options))[0]


@functools.cache
def _drawn(family, config, spec):
  with jax.ensure_compile_time_eval():  # The first caller may be traced.
    model = family.Model(config, spec, rngs=nnx.Rngs(params=0))
  return nnx.to_pure_dict(nnx.state(model))


def params_of(family, config, spec):
  """Parameters as a new nested dict."""
  return jax.tree.map(lambda x: x, _drawn(family, config, spec))


def merged(family, config, spec, params=None, options=LoopOptions()):
  """The model with its own or other parameters."""
  params = params or params_of(family, config, spec)
  return nnx.merge(graph(family, config, spec, options), params)


@functools.cache
def _forward(family, config, spec, options, exact, call):
  @strict_dtypes()
  def forward(params, inputs, arrays):
    model = merged(family, config, spec, params, options)
    return model(inputs, **arrays, **dict(call))

  if exact:
    return without_rounding(forward)
  return jax.jit(forward, compiler_options=FAST)


def run(
  family,
  config,
  spec,
  inputs,
  params=None,
  *,
  options=LoopOptions(),
  keys=None,
  exact=False,
  **call,
):
  """The model's output for inputs; `keys` and `call` as in `Model.__call__`.

  In float64 and as NumPy arrays if `exact`, for comparisons without rounding.
  """
  forward = _forward(family, config, spec, options, exact, tuple(call.items()))
  params = params or params_of(family, config, spec)
  return forward(params, inputs, {} if keys is None else {"keys": keys})


def count(family, config, spec):
  """Number of parameters, without initialising them."""
  params = nnx.state(abstract(family, config, spec))
  return sum(leaf.size for leaf in jax.tree.leaves(params))
