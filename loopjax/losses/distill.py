"""Distillation from a teacher's distributions over tokens, in nats."""

import jax

from loopjax.kernels.distill import distill
from loopjax.losses.tokens import weighted_mean
from loopjax.types import Array, Batch, Precision


def by_loop(
  student: Array,
  student_table: Array,
  teacher: Array,
  teacher_table: Array,
  batch: Batch,
  *,
  beta: float = 0.5,
  temperature: float = 1.0,
  num_padding_tokens: int = 0,
  precision: Precision,
) -> Array:
  """Divergence from the teacher after each loop, weighted by token.

  MELT distils every loop of the student (arXiv 2605.07721, section 3.3). No
  [tokens, vocabulary] array is made; see `kernels.distill`.

  Args:
    student: hidden states before unembedding after each of K loops, [K, B, T,
      D].
    student_table: unembedding matrix, [V, D].
    teacher: the teacher's hidden states, [K, B, T, D'] loop by loop, or [1, B,
      T, D'] for the same teacher after every loop. A constant.
    teacher_table: [V, D']. A constant.
    batch: "weights" [B, T], and optionally "mean_weight".
    beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between
      them for the generalized Jensen-Shannon divergence.
    temperature: both logits are divided by it.
    num_padding_tokens: number of ids at the end of the vocabulary that are not
      real tokens.
    precision: precision of the products.

  Returns:
    f32 [K], the mean over tokens after each loop.
  """
  divergence = distill(
    *(
      x.astype(precision.compute)
      for x in (student, student_table, teacher, teacher_table)
    ),
    beta=beta,
    temperature=temperature,
    num_padding_tokens=num_padding_tokens,
  )
  return jax.vmap(
    lambda x: weighted_mean(x, batch["weights"], batch.get("mean_weight"))
  )(divergence)
