"""Names, shapes and checksums of arrays, independent of the mesh."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from loopjax.errors import UserError
from loopjax.run import processes
from loopjax.types import Array

_SHOWN = 4  # Names in a message before "and N more".


def names(tree: Any) -> list[str]:
  """Paths of a pytree's leaves, "params/block/...", in jax.tree order."""
  return [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]


def describe(tree: Any) -> dict[str, list[Any]]:
  """{path: [shape, dtype]} of arrays or their abstract forms."""
  leaves = jax.tree.leaves(tree)
  return {
    name: [list(leaf.shape), str(leaf.dtype)]
    for name, leaf in zip(names(tree), leaves, strict=True)
  }


def checksums(tree: Any) -> dict[str, str]:
  """64-bit checksum of every array, by path, computed on its devices.

  Every element's bits are mixed with its index, and the results are summed.
  Integer addition is order-independent, so every mesh gives the same sum;
  mixing is a bijection, so a change of one element is always detected, and of
  several except for one case in 2^64.
  """
  # One small program per shape: most arrays share theirs with an average and
  # two moments.
  leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  # One at a time: on virtual CPU devices and few cores, many programs that
  # exchange data block each other, until XLA ends the process.
  sums = [
    jax.block_until_ready(_sum(x, len(x.sharding.device_set) == 1))
    for x in leaves
  ]
  return {
    name: processes.gather_array(pair).astype(">u4").tobytes().hex()
    for name, pair in zip(names(tree), sums, strict=True)
  }


def record(tree: Any) -> dict[str, list[Any]]:
  """{path: [shape, dtype, checksum]} of arrays, the same on every mesh."""
  sums = checksums(tree)
  return {name: [*shape, sums[name]] for name, shape in describe(tree).items()}


def digest(content: Any) -> str:
  """sha256 of JSON-serialisable data."""
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


@functools.partial(jax.jit, static_argnums=1)
def _sum(x: Array, on_one_device: bool) -> Array:
  """u32 [2] of one array."""
  mixed = _bits(x)
  for axis in range(mixed.ndim):
    index = jax.lax.broadcasted_iota(jnp.uint32, mixed.shape, axis)
    mixed = _mix(mixed ^ _mix(index + jnp.uint32(axis)))
  halves = tuple(_mix(mixed ^ jnp.uint32(salt)) for salt in (1, 2))
  if on_one_device:
    # XLA fuses one reduction of both; two store all mixed bits. Of a sharded
    # array it would gather everything first.
    zero, axes = jnp.uint32(0), tuple(range(mixed.ndim))
    return jnp.stack(jax.lax.reduce(halves, (zero, zero), _add, axes))
  return jnp.stack([jnp.sum(half, dtype=jnp.uint32) for half in halves])


def _add(left: tuple[Array, ...], right: tuple[Array, ...]) -> list[Array]:
  return [a + b for a, b in zip(left, right, strict=True)]


def _bits(x: Array) -> Array:
  """The bits of an array as u32; 64-bit elements become a last axis of two."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == bool:
    x = x.astype(jnp.uint8)
  size = x.dtype.itemsize
  word = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
  return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def _mix(x: Array) -> Array:
  """The finalizer of MurmurHash3 (A. Appleby), a bijection of 32 bits."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


def compare(
  wanted: Mapping[str, Sequence[Any]],
  there: Mapping[str, Sequence[Any]],
  where: object,
) -> None:
  """Checks that the stored arrays are the expected ones."""
  missing = [name for name in wanted if name not in there]
  extra = [name for name in there if name not in wanted]
  other = [
    f"{name} ({there[name][1]}{there[name][0]} there, {mine[1]}{mine[0]} here)"
    for name, mine in wanted.items()
    if name in there and list(there[name][:2]) != list(mine)
  ]
  problems = [
    f"{label} {abbreviate(names)}"
    for label, names in (
      ("missing", missing), ("not in the model", extra), ("other shape", other)
    )
    if names
  ]  # fmt: skip
  if problems:
    raise UserError(f"{where} does not fit: {'; '.join(problems)}")


def without(tree: Any, dropped: set[str], prefix: str = "") -> Any:
  """A nested dict without some leaves; empty branches are removed too."""
  if not isinstance(tree, dict):
    return tree
  kept = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    if name not in dropped:
      value = without(value, dropped, f"{name}/")
      if value != {}:
        kept[key] = value
  return kept


def abbreviate(names: Sequence[str]) -> str:
  """Names for a message: the first few, and the number of the others."""
  more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
  return ", ".join(names[:_SHOWN]) + more
