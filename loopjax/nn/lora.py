"""Low-rank adaptation: few parameters that are trained beside frozen ones.

Source: LoRA (arXiv 2106.09685), equation 3: for x W, the frozen W [inputs,
outputs] becomes W + (alpha / rank) A B, with A [inputs, rank] normal and
B [rank, outputs] initially 0. Here the sum is computed once a step, before the
loops, and whatever reads the model reads the sum (`merge`).

Parameters are nested dicts. In the trained ones, a matrix is the dict {"A":
..., "B": ...}, at the matrix's path; stacks [layers, inputs, outputs] have
pairs with the same leading dimension.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.types import Array

_MATRICES = ("kernel", "embedding")  # Last parts of the paths of matrices.
Path = tuple[Any, ...]


class Adaptation(NamedTuple):
  """What is trained; patterns are regular expressions of parameter paths.

  Attributes:
    rank, alpha: of every pair.
    targets: the matrices that get a pair.
    whole: the parameters that are trained themselves, of any shape.
    frozen: the parameters that are neither; "" for none.
  """

  rank: int
  alpha: float
  targets: str
  whole: str = ""
  frozen: str = ""


def split(params: Any, how: Adaptation, key: Any) -> tuple[Any, Any]:
  """(frozen parameters, trained parameters); their `merge` are the parameters.

  Args:
    params: all parameters, arrays or abstract ones under `jax.eval_shape`.
    how: what is trained.
    key: random key of A, whose entries have variance 1 / inputs.
  """
  base, trained, num_whole = {}, {}, 0
  for index, (path, leaf) in enumerate(flat(params).items()):
    name = "/".join(map(str, path))
    if how.frozen and re.search(how.frozen, name):
      base[path] = leaf
    elif how.whole and re.search(how.whole, name):
      trained[path], num_whole = leaf, num_whole + 1
    else:
      base[path] = leaf
      if path[-1] in _MATRICES and re.search(how.targets, name):
        _check_rank(leaf, how.rank, name)
        pair_key = jax.random.fold_in(key, index)
        pair = first_pair(leaf.shape, leaf.dtype, how.rank, pair_key)
        trained |= {(*path, part): x for part, x in pair.items()}
  if how.whole and not num_whole:
    raise UserError(f"optim.lora_whole={how.whole!r} matches no parameter")
  if len(trained) == num_whole:
    raise UserError(f"optim.lora_targets={how.targets!r} matches no matrix")
  return nested(base), nested(trained)


def _check_rank(matrix: Array, rank: int, name: str) -> None:
  *_, inputs, outputs = matrix.shape
  if rank > min(inputs, outputs):
    raise UserError(
      f"optim.lora_rank={rank} exceeds {name} [{inputs}, {outputs}];"
      " optim.lora_targets selects other matrices"
    )


def first_pair(
  shape: tuple[int, ...], dtype: Any, rank: int, key: Any
) -> dict[str, Array]:
  """A [..., inputs, rank], normal, variance 1 / inputs, and B, which is 0.

  Args:
    shape: shape of the matrices to which A B is added, [..., inputs, outputs].
    dtype: of A and B.
    rank: r.
    key: random key.
  """
  *stack, inputs, outputs = shape
  normal = jax.random.normal(key, (*stack, inputs, rank), dtype)
  return {
    "A": normal / math.sqrt(inputs),
    "B": jnp.zeros((*stack, rank, outputs), dtype),
  }


def product(pair: Mapping[str, Array]) -> Array:
  """A B [..., inputs, outputs]; exact in float32 on every device."""
  return jnp.matmul(pair["A"], pair["B"], precision="highest")


@functools.partial(jax.jit, static_argnums=2)
def adapted(base: Any, trained: Any, alpha: float) -> Any:
  """The model's own parameters at the paths of the trained ones.

  Args:
    base, trained: from `split`.
    alpha: see `Adaptation`.

  Returns:
    W + (alpha / rank) A B for a pair; other trained parameters as they are.
  """
  frozen, leaves = flat(base), flat(trained)
  merged = {}
  for path, leaf in leaves.items():
    *above, part = path
    if tuple(above) not in frozen:
      merged[path] = leaf
    elif part == "A":
      added = product({"A": leaf, "B": leaves[(*above, "B")]})
      scale = alpha / leaf.shape[-1]
      merged[tuple(above)] = frozen[tuple(above)] + scale * added
  return nested(merged)


def merge(base: Any, trained: Any, alpha: float) -> Any:
  """All parameters of the model, with the pairs added to their matrices."""
  return joined(base, adapted(base, trained, alpha))


def joined(base: Any, others: Any) -> Any:
  """The union of both; where both have a parameter, it is from `others`."""
  return nested({**flat(base), **flat(others)}) if base else others


def rest(base: Any, others: Any) -> Any:
  """The parameters of `base` whose paths are not in `others`."""
  excluded = flat(others)
  return nested({p: x for p, x in flat(base).items() if p not in excluded})


def replaced(tree: Any, params: Any) -> Any:
  """A tree from `split` with the values of `params`; pairs are unchanged."""
  values = flat(params)
  return nested({p: values.get(p, x) for p, x in flat(tree).items()})


def flat(tree: Any, above: Path = ()) -> dict[Path, Any]:
  """The leaves of a nested dict, by path."""
  if not isinstance(tree, Mapping):
    return {above: tree}
  return {
    path: leaf
    for key in sorted(tree)
    for path, leaf in flat(tree[key], (*above, key)).items()
  }


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Any]:
  """The nested dict that has these leaves."""
  tree: dict[Any, Any] = {}
  for path, leaf in leaves.items():
    inner = tree
    for key in path[:-1]:
      inner = inner.setdefault(key, {})
    inner[path[-1]] = leaf
  return tree
