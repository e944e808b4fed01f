"""Runs a traced program with all its numbers in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
# Tiny programs take longer to compile than to run.
_FAST = {"xla_backend_optimization_level": 0}


def without_rounding(function):
  """The function in float64, compiled; its results are NumPy arrays."""
  compiled = jax.jit(in_float64(function), compiler_options=_FAST)

  def run(*args):
    with jax.enable_x64(True):
      return jax.device_get(compiled(*jax.tree.map(_wide, args)))

  return run


def in_float64(function):
  """The function, computed like its program, but in float64.

  Under `jax.enable_x64`. Casts between floating-point types do nothing,
  products accumulate in float64, and random numbers are the program's.
  Constants are unrounded, see `_exact`.
  """

  def run(*args):
    with jax.enable_x64(False):
      shapes = jax.tree.map(_as_in_program, args)
      closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    found = _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), found)

  return run


def _as_in_program(x):
  narrow = {np.float64: jnp.float32, np.int64: jnp.int32}
  dtype = getattr(x.dtype, "type", x.dtype)
  return jax.ShapeDtypeStruct(x.shape, narrow.get(dtype, x.dtype))


def _wide(x):
  if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
    return x
  if x.dtype in _FLOATS:
    return jnp.asarray(x, jnp.float64)
  return jnp.asarray(x, jnp.int32) if x.dtype == np.int64 else x


def _evaluated(jaxpr, constants, args):
  """The outputs of a program."""
  values = {}

  def read(x):
    if not isinstance(x, core.Literal):
      return values[x]
    if x.aval.dtype == jnp.float32 and not np.ndim(x.val):
      return jnp.asarray(_exact(np.float32(x.val)), jnp.float64)
    return _wide(jnp.asarray(x.val, x.aval.dtype))

  for variables, given in ((jaxpr.constvars, constants), (jaxpr.invars, args)):
    for x, value in zip(variables, given, strict=True):
      values[x] = _wide(value)
  for eqn in jaxpr.eqns:
    outputs = _step(eqn, [read(x) for x in eqn.invars])
    values.update(zip(eqn.outvars, map(_wide, outputs), strict=True))
  return [read(x) for x in jaxpr.outvars]


def _exact(x):
  """The value of a float32 constant before rounding.

  The root of an integer, a reciprocal root, or a decimal of six digits;
  otherwise the constant itself.
  """
  square = float(x) ** 2
  found = [float(f"{x:.6g}")]
  if 2**-20 < square < 2**20:
    n, over = max(round(square), 1), max(round(1 / square), 1)
    found += [math.copysign(y, x) for y in (n**0.5, over**-0.5)]
  return next((y for y in found if np.float32(y) == x), float(x))


def _inner(jaxpr):
  """A function of a list of arguments."""
  return functools.partial(
    _evaluated, getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
  )


def _step(eqn, args):
  """The results of one equation."""
  name, params = eqn.primitive.name, dict(eqn.params)
  if name == "scan":
    return _scan(params, args)
  if name == "while":
    return _while(params, args)
  if name == "cond":
    branches = [_inner(branch) for branch in params["branches"]]
    return jax.lax.switch(args[0], branches, args[1:])
  for inner in ("jaxpr", "call_jaxpr"):
    if inner in params:
      return _inner(params[inner])(args)
  if name in ("reduce_precision", "copy", "sharding_constraint"):
    return args[:1]
  dtypes = [getattr(x.aval, "dtype", None) for x in eqn.invars]
  if name == "convert_element_type" and params["new_dtype"] in _FLOATS:
    return [args[0].astype(jnp.float64)]
  reads_floats = any(dtype in _FLOATS for dtype in dtypes)
  if name == "bitcast_convert_type" or not reads_floats:
    args = [
      x.astype(dtype) if dtype in _FLOATS else x
      for x, dtype in zip(args, dtypes, strict=True)
    ]
  elif params.get("preferred_element_type") in _FLOATS:
    params["preferred_element_type"] = jnp.dtype(jnp.float64)
  if name in ("scatter-add", "scatter_add"):
    zero = jnp.zeros((), args[0].dtype)
    params["update_jaxpr"] = jax.make_jaxpr(jax.lax.add)(zero, zero).jaxpr
  found = eqn.primitive.bind(*args, **params)
  return found if eqn.primitive.multiple_results else [found]


def _scan(params, args):
  if "num_carry" in params:
    first, carried = params["num_consts"], params["num_carry"]
  else:
    first, carried = (len(x) for x in params["ft_in"].unpack()[:2])
  constants, rows = args[:first], args[first + carried :]
  body = _inner(params["jaxpr"])

  def step(carry, row):
    found = body([*constants, *carry, *row])
    return found[:carried], found[carried:]

  start = args[first : first + carried]
  options = {"length": params["length"], "reverse": params["reverse"]}
  carry, records = jax.lax.scan(step, start, rows, **options)
  return [*carry, *records]


def _while(params, args):
  of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
  test, body = _inner(params["cond_jaxpr"]), _inner(params["body_jaxpr"])
  for_test, for_body = args[:of_test], args[of_test : of_test + of_body]
  return jax.lax.while_loop(
    lambda carry: test([*for_test, *carry])[0],
    lambda carry: body([*for_body, *carry]),
    args[of_test + of_body :],
  )
