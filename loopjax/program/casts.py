"""Moves the casts of parameters out of the loops that use them.

Families cast a float32 parameter at every use: in every chunk, loop and layer,
and again in the backward pass. This module rewrites the traced function,
gradients included: each parameter is cast once, before the first loop, and the
result is passed to the loops. Casting commutes with all operations in between.
Results are therefore bit-identical; gradients are cast and summed in float32 as
before.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

# Operations that only pass on or move elements of their first operand.
_MOVES = {
  "copy", "dynamic_slice", "reshape", "sharding_constraint", "slice", "squeeze",
  "stop_gradient", "transpose",
}  # fmt: skip


class Once(NamedTuple):
  """A function that takes its arguments in the dtypes in which it uses them.

  Attributes:
    call: takes the leaves of the arguments and returns the function's result.
    dtypes: the dtype of each leaf.
  """

  call: Callable[..., Any]
  dtypes: tuple[Any, ...]


def once(function: Callable[..., Any], *args: Any) -> Once:
  """The function for arguments that are already cast.

  Args:
    function: any function of arrays. If gradients are needed, differentiate it
      first: custom derivatives are opaque otherwise.
    args: pytrees of arrays or their shapes.
  """
  closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
  jaxpr, _ = _narrowed(closed.jaxpr, range(len(closed.jaxpr.invars)))
  called = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, closed.consts))
  structure = jax.tree.structure(shape)

  def call(*leaves: Any) -> Any:
    return jax.tree.unflatten(structure, called(*leaves))

  inputs: list[Any] = jaxpr.invars
  return Once(call, tuple(x.aval.dtype for x in inputs))


def _narrowed(jaxpr: Any, candidates: Sequence[int]) -> tuple[Any, dict]:
  """The program with some inputs in the dtype to which it casts them.

  Args:
    jaxpr: the program.
    candidates: the inputs whose dtype may change.

  Returns:
    (the program, the new dtypes by input).
  """
  inputs = [jaxpr.invars[i] for i in candidates]
  derived = {x for x in inputs if _is_float32(x)}
  if not derived:
    return jaxpr, {}
  eqns: list[Any] = []
  renamed: dict[Any, Any] = {}
  cast: dict[Any, Any] = {}
  for eqn in jaxpr.eqns:
    eqn = eqn.replace(invars=[_renamed(renamed, x) for x in eqn.invars])
    if eqn.primitive.name in _MOVES and _in(derived, eqn.invars[0]):
      derived.update(eqn.outvars)
    before, eqn, after, same = _with_inner(eqn, derived, cast)
    eqns += [*before, eqn, *after]
    renamed.update(same)
  outputs = [_renamed(renamed, x) for x in jaxpr.outvars]
  return _cast_inputs(jaxpr, eqns, outputs, candidates)


def _cast_inputs(
  jaxpr: Any, eqns: list[Any], outputs: list[Any], candidates: Sequence[int]
) -> tuple[Any, dict]:
  """Replaces the inputs that are only used in bfloat16."""
  readers = collections.defaultdict(list)
  for eqn in eqns:
    for place, x in enumerate(eqn.invars):
      if isinstance(x, core.Var):
        readers[x].append((place, eqn))
  returned = {x for x in outputs if isinstance(x, core.Var)}

  def read_as(x: Any) -> set:
    """The dtypes in which a value is used."""
    dtypes_read = {x.aval.dtype} if x in returned else set()
    for place, eqn in readers[x]:
      if eqn.primitive is primitives.convert_element_type_p:
        dtypes_read.add(eqn.outvars[0].aval.dtype)
      elif eqn.primitive.name in _MOVES and not place:
        dtypes_read |= read_as(eqn.outvars[0])
      else:
        dtypes_read.add(x.aval.dtype)
    return dtypes_read

  inputs, dtypes = list(jaxpr.invars), {}
  renamed: dict[Any, Any] = {}
  moved = set()  # Values whose dtype changed.
  narrow = jnp.dtype(jnp.bfloat16)
  for i in candidates:
    # Unused inputs too, for example in one branch of a condition.
    if _is_float32(inputs[i]) and read_as(inputs[i]) <= {narrow}:
      dtypes[i] = narrow
      moved.add(inputs[i])
      renamed[inputs[i]] = inputs[i] = _like(inputs[i], dtypes[i])
  rewritten = []
  for eqn in eqns:
    is_moved = bool(eqn.invars) and _in(moved, eqn.invars[0])
    eqn = eqn.replace(invars=[_renamed(renamed, x) for x in eqn.invars])
    if is_moved:
      (result,), source = eqn.outvars, eqn.invars[0]
      if eqn.primitive is primitives.convert_element_type_p:
        renamed[result] = source
        continue
      moved.add(result)
      renamed[result] = _like(result, source.aval.dtype)
      eqn = eqn.replace(outvars=[renamed[result]])
    rewritten.append(eqn)
  outputs = [_renamed(renamed, x) for x in outputs]
  return _program(jaxpr, inputs, rewritten, outputs), dtypes


def _with_inner(
  eqn: Any, derived: set, cast: dict
) -> tuple[list[Any], Any, list[Any], dict]:
  """Rewrites the program that an equation runs.

  Args:
    eqn: any equation.
    derived: values that are parameters, or parts of them.
    cast: casts so far, by value and dtype; new ones are added.

  Returns:
    (equations before it, the equation, equations after it, map from its results
    to equal values before it).
  """
  if eqn.primitive is primitives.cond_p:
    before, eqn = _with_branches(eqn, derived, cast)
    return before, eqn, [], {}
  program = _inner(eqn)
  if program is None:
    return [], eqn, [], {}
  name, first, carried, outputs = program
  inner = eqn.params[name]
  jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
  operands = eqn.invars[first:]
  candidates = [
    i for i, x in enumerate(operands) if i not in carried and _in(derived, x)
  ]
  if not candidates:
    return [], eqn, [], {}
  shapes = {operands[i].aval.shape for i in candidates}
  jaxpr, dtypes = _narrowed(jaxpr, candidates)
  before, operands = _cast_operands(eqn, operands, dtypes, cast)
  same = {}
  if eqn.primitive is primitives.scan_p:
    # A per-step input returned unchanged: the whole stacked input.
    rows = {
      jaxpr.invars[i]: operands[i] for i in range(carried.stop, len(operands))
    }
    for i in outputs:
      if _in(rows, jaxpr.outvars[i]):
        same[eqn.outvars[i]] = rows[jaxpr.outvars[i]]
  jaxpr, results, after = _cast_after(eqn, jaxpr, outputs, shapes)
  if isinstance(inner, core.ClosedJaxpr):
    inner = core.ClosedJaxpr(jaxpr, inner.consts)
  else:
    inner = jaxpr
  eqn = eqn.replace(
    invars=[*eqn.invars[:first], *operands],
    outvars=results,
    params={**eqn.params, name: inner},
  )
  return before, eqn, after, same


def _with_branches(eqn: Any, derived: set, cast: dict) -> tuple[list[Any], Any]:
  """`_with_inner` of a condition: (equations before it, the equation)."""
  index, *operands = eqn.invars
  branches = eqn.params["branches"]
  agreed = {i for i, x in enumerate(operands) if _in(derived, x)}
  narrowed_branches: list[tuple[Any, dict]] = []
  while agreed and (
    not narrowed_branches or any({*x} != agreed for _, x in narrowed_branches)
  ):
    narrowed_branches = [_narrowed(x.jaxpr, sorted(agreed)) for x in branches]
    agreed = agreed.intersection(*(x for _, x in narrowed_branches))
  if not agreed:
    return [], eqn
  before, operands = _cast_operands(
    eqn, operands, narrowed_branches[0][1], cast
  )
  narrowed = (
    core.ClosedJaxpr(jaxpr, x.consts)
    for x, (jaxpr, _) in zip(branches, narrowed_branches, strict=True)
  )
  eqn = eqn.replace(
    invars=[index, *operands],
    params={**eqn.params, "branches": tuple(narrowed)},
  )
  return before, eqn


def _cast_operands(
  eqn: Any, operands: list[Any], dtypes: dict, cast: dict
) -> tuple[list[Any], list[Any]]:
  """(new casts to insert before an equation, its cast operands)."""
  before, operands = [], list(operands)
  for i, dtype in dtypes.items():
    key = operands[i], dtype
    if key not in cast:
      cast[key] = _like(operands[i], dtype)
      before.append(_convert(eqn, operands[i], cast[key]))
    operands[i] = cast[key]
  return before, operands


def _inner(eqn: Any) -> tuple[str, int, range, Sequence[int]] | None:
  """The program that an equation runs, if its inputs may change dtype.

  Returns:
    (the parameter that holds the program, index of the operand that is its
    first input, inputs that must keep their dtypes, outputs that may change
    them), or None.
  """
  every, params = range(len(eqn.outvars)), eqn.params
  if eqn.primitive is primitives.scan_p:
    first, carried = _scanned(params)
    return "jaxpr", 0, range(first, first + carried), every[carried:]
  if eqn.primitive is primitives.while_p:
    first, carried = params["cond_nconsts"], params["body_nconsts"]
    return "body_jaxpr", first, range(carried, len(eqn.invars)), ()
  if eqn.primitive in (primitives.jit_p, primitives.remat_p):
    return "jaxpr", 0, range(0), every
  return None


def _scanned(params: Any) -> tuple[int, int]:
  """(number of constants, number of carried values) of a scan."""
  if "num_carry" in params:
    return params["num_consts"], params["num_carry"]
  constants, carried, _ = params["ft_in"].unpack()  # Since JAX 0.11.
  return len(constants), len(carried)


def _cast_after(
  eqn: Any, jaxpr: Any, outputs: Sequence[int], shapes: set
) -> tuple[Any, list[Any], list[Any]]:
  """Moves casts of returned gradients from inside a program to after it.

  Stacked gradients of layers are then stored in the dtype in which they are
  computed.

  Args:
    eqn: the equation that runs the program.
    jaxpr: the program.
    outputs: outputs whose dtype may change.
    shapes: shapes of the parameters, and thus of gradients.

  Returns:
    (the program, the equation's results, casts that follow it).
  """
  sources: dict[Any, Any] = {
    e.outvars[0]: e.invars[0]
    for e in jaxpr.eqns
    if e.primitive is primitives.convert_element_type_p
    and getattr(e.invars[0].aval, "dtype", None) == jnp.bfloat16
    and isinstance(e.invars[0], core.Var)
  }
  results, inside, after = list(eqn.outvars), list(jaxpr.outvars), []
  for i in outputs:
    x, outside = inside[i], results[i]
    if outside.aval.shape in shapes and _is_float32(x) and _in(sources, x):
      inside[i] = sources[x]
      results[i] = _like(outside, jnp.dtype(jnp.bfloat16))
      after.append(_convert(eqn, results[i], outside))
  return _program(jaxpr, jaxpr.invars, jaxpr.eqns, inside), results, after


def _program(jaxpr: Any, inputs: Any, eqns: Any, outputs: Any) -> Any:
  """The program with other equations."""
  return jaxpr.replace(
    invars=list(inputs),
    eqns=list(eqns),
    outvars=list(outputs),
    debug_info=jaxpr.debug_info.with_unknown_names(),
  )


def _convert(eqn: Any, source: Any, result: Any) -> Any:
  """The equation result = source, cast to the result's dtype."""
  dtype = result.aval.dtype
  shape = jax.ShapeDtypeStruct(source.aval.shape, source.aval.dtype)
  like = jax.make_jaxpr(lambda x: x.astype(dtype))(shape).eqns[0]
  return like.replace(
    invars=[source], outvars=[result], source_info=eqn.source_info, ctx=eqn.ctx
  )


def _like(x: Any, dtype: Any) -> Any:
  """A new value of the same shape, in another dtype."""
  aval: Any = x.aval
  return core.Var(aval.update(dtype=dtype, weak_type=False))


def _is_float32(x: Any) -> bool:
  return getattr(x.aval, "dtype", None) == jnp.float32


def _in(these: Any, x: Any) -> bool:
  return isinstance(x, core.Var) and x in these


def _renamed(names: dict, x: Any) -> Any:
  while isinstance(x, core.Var) and x in names:
    x = names[x]
  return x
