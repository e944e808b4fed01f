"""Checks the inputs of `distill` and chooses the implementation."""

from typing import Any

import jax

from loopjax.kernels.distill import chunked, reference
from loopjax.types import Array

IMPLEMENTATIONS = ("reference", "chunked")
DEFAULT = "chunked"
CHUNK_SIZE = 2048  # Maximum number of tokens of a chunk.


@jax.named_scope("read_out")
def distill(
  student: Array,
  student_table: Array,
  teacher: Array,
  teacher_table: Array,
  *,
  beta: float = 0.5,
  temperature: float = 1.0,
  num_padding_tokens: int = 0,
  implementation: str | None = None,
) -> Array:
  """Divergence of a student's distribution over tokens from a teacher's.

  With S = softmax(student W_S^T / temperature), T = softmax(teacher W_T^T /
  temperature) and M = beta T + (1 - beta) S, per token

    beta KL(T || M) + (1 - beta) KL(S || M)   for 0 < beta < 1,
    KL(T || S)                                for beta = 0,
    KL(S || T)                                for beta = 1.

  The first is the generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649,
  section 3.1), which tends to 0 at both ends; the others are the limits of its
  quotient by beta and by 1 - beta. There is no factor temperature^2.

  Products take their inputs as they are and accumulate in float32; both softmax
  functions are in float32.

  Args:
    student: [..., D_S], such as of K loops [K, B, T, D_S].
    student_table: W_S [V, D_S] in the student's dtype.
    teacher: [..., D_T], the student's leading dimensions, or 1 in place of some
      of them: one teacher of all loops is [1, B, T, D_T]. A constant.
    teacher_table: W_T [V, D_T]. A constant.
    beta: from 0 to 1.
    temperature: > 0.
    num_padding_tokens: the last ids of the vocabulary get no probability.
    implementation: "reference" stores [..., V] arrays for the backward pass
      and supports all derivatives, "chunked" does not store them and supports
      reverse mode only; DEFAULT if None.

  Returns:
    [...] in nats, in float32, or float64 for float64 inputs.

  Raises:
    ValueError: shapes or options do not fit.
  """
  lead = student.shape[:-1]
  if teacher.ndim != student.ndim or any(
    theirs not in (1, ours)
    for theirs, ours in zip(teacher.shape[:-1], lead, strict=True)
  ):
    raise ValueError(
      f"teacher must be {(*lead, 'D')}, or 1 in place of some of these, not"
      f" {teacher.shape}"
    )
  if len(student_table) != len(teacher_table):
    raise ValueError(
      f"student_table has {len(student_table)} tokens, teacher_table has"
      f" {len(teacher_table)}"
    )
  if not 0 <= beta <= 1 or not temperature > 0:
    raise ValueError(
      f"beta={beta} must be from 0 to 1, temperature={temperature} above 0"
    )
  constants = jax.lax.stop_gradient((teacher, teacher_table))
  options: dict[str, Any] = {
    "beta": float(beta),
    "temperature": float(temperature),
    "num_padding_tokens": num_padding_tokens,
  }
  implementation = implementation or DEFAULT
  if implementation == "chunked":
    return chunked.distill(
      student, student_table, *constants, chunk_size=CHUNK_SIZE, **options
    )
  if implementation == "reference":
    return reference.distill(student, student_table, *constants, **options)
  raise ValueError(
    f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
  )
