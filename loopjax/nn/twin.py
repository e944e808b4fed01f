"""Parameters that exist in two dtypes: cast once a step, not at every use."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.types import Array

# Last names of the parameters that products use.
_NAMES = ("kernel", "embedding", "values")
_BOTH_SIDES = (
  "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul",
  "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
_OPERATORS = (
  *_BOTH_SIDES, *(f"r{name}" for name in _BOTH_SIDES),
  "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round",
  "len", "iter", "contains", "bool", "int", "float", "complex", "index",
)  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Twin:
  """A parameter in float32, and rounded to bfloat16.

  `astype` chooses; all else is of the float32 array. The gradient of the
  rounded one is cast to float32 where it arises, and is the gradient of `wide`:
  loops add it up in float32, as if the parameter were cast at every use.

  Attributes:
    wide: the parameter.
    narrow: the parameter in bfloat16; gets no gradient.
  """

  wide: Array
  narrow: Array

  def astype(self, dtype: Any) -> Array:
    if dtype == self.narrow.dtype:
      return _rounded(self.wide, self.narrow)
    return self.wide.astype(dtype)

  def __getitem__(self, index: Any) -> Any:
    return self if index is ... else self.wide[index]

  @property
  def T(self) -> "Twin":
    return Twin(self.wide.T, self.narrow.T)

  def __jax_array__(self) -> Array:
    return self.wide

  def __getattr__(self, name: str) -> Any:
    return getattr(self.wide, name)

  __array_priority__ = 200  # NumPy's arrays leave operators to this one.


def _of_wide(name: str) -> Any:
  """A method of the float32 array; Python looks up operators on the class."""

  def result(self: Twin, *others: Any) -> Any:
    values = (x.wide if isinstance(x, Twin) else x for x in others)
    return getattr(self.wide, name)(*values)

  return result


for _name in _OPERATORS:
  setattr(Twin, f"__{_name}__", _of_wide(f"__{_name}__"))


@jax.custom_vjp
def _rounded(wide: Array, narrow: Array) -> Array:
  return narrow


_rounded.defvjp(
  lambda wide, narrow: (narrow, None),
  lambda _, cotangent: (cotangent.astype(jnp.float32), None),
)


def is_multiplied(path: Any, x: Array) -> bool:
  """Whether a float32 parameter is one of products, by its name."""
  name = getattr(path[-1], "key", None)
  return name in _NAMES and x.dtype == jnp.float32


def joined(params: Any, rounded: Any) -> Any:
  """Parameters, as a `Twin` where there is a rounded copy and not None."""
  return jax.tree.map(
    lambda wide, narrow: wide if narrow is None else Twin(wide, narrow),
    params,
    rounded,
  )
