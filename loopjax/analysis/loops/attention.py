"""What each head attends to: memory, sequence, row, column, box.

Maps are attention weights [..., S, S], queries by keys, memory tokens first,
every row summing to one. All results are linear in the maps, or ratios of
linear results: maps averaged over examples give the pooled numbers.

The paper also gives each head a role: "reader", "writer", "constraint". The
masses of its H1, a writer, and of H5, which is not a writer, agree to within
0.05. Therefore only masses are reported here, no roles. "s" is the sequence,
"m" the memory; "sm" means queries of the sequence, mass on memory.
"""

from collections.abc import Sequence

import numpy as np

QUADRANTS = ("sm", "ss", "mm", "ms")


def quadrants(maps: np.ndarray, num_memory: int) -> dict[str, np.ndarray]:
  """Attention mass by kind of query and key (UTM, table 6).

  Args:
    maps: f32 [..., S, S].
    num_memory: M.

  Returns:
    "sm", "ss", "mm", "ms": mean over queries of the mass on these keys, [...].
    sm + ss = 1 and mm + ms = 1; without memory ss = 1 and the others are 0.
  """
  to_memory = maps[..., :num_memory].sum(axis=-1)
  to_sequence = maps[..., num_memory:].sum(axis=-1)
  result = {
    "sm": to_memory[..., num_memory:].mean(axis=-1),
    "ss": to_sequence[..., num_memory:].mean(axis=-1),
  }
  if num_memory:
    result["mm"] = to_memory[..., :num_memory].mean(axis=-1)
    result["ms"] = to_sequence[..., :num_memory].mean(axis=-1)
  else:
    result["mm"] = result["ms"] = np.zeros_like(result["ss"])
  return result


def uniform_quadrants(num_tokens: int, num_memory: int) -> dict[str, float]:
  """`quadrants` of a head that attends uniformly to all S tokens.

  With few memory tokens nearly all mass is on the sequence by chance.
  """
  maps = np.full((num_tokens, num_tokens), 1 / num_tokens)
  return {k: float(v) for k, v in quadrants(maps, num_memory).items()}


def coordinate_shares(
  maps: np.ndarray, num_memory: int, coordinates: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
  """Fraction of the sequence's attention to itself that shares a coordinate.

  On a board the coordinates are row, column and box: a head that propagates a
  rule stands out. A token shares all coordinates with itself.

  Args:
    maps: f32 [..., S, S].
    num_memory: M.
    coordinates: coordinates of every position of the sequence, [T, A].

  Returns:
    (fraction of the ss mass on keys with the query's coordinate a, [..., A];
    the value for uniform attention over the sequence, [A]).
  """
  inside = maps[..., num_memory:, num_memory:]
  points = np.asarray(coordinates)
  same = points[:, None, :] == points[None, :, :]
  mass = np.einsum("...qk,qka->...a", inside, same.astype(inside.dtype))
  total = inside.sum(axis=(-2, -1))[..., None]
  # A head that attends only to memory has no mass to distribute.
  share = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
  return share, same.mean(axis=(0, 1))
