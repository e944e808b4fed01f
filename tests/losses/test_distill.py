"""Distillation by chunks against the plain form, and both by hand."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vocabulary_examples
from jax.sharding import PartitionSpec as P
from vocabulary_examples import FAST, HIDDEN, ROWS, assert_close, like

from loopjax.losses import distill as losses
from loopjax.losses.distill import distill

CASES = {
  "jensen_shannon": {},
  "teacher_heavy": {"beta": 0.9},
  "forward": {"beta": 0.0},
  "reverse": {"beta": 1.0},
  "one_chunk": {"chunk": 64},
  "one_row_chunks": {"vocab": 5, "chunk": 1},
  "padding_fills_a_chunk": {"vocab": 32, "padding": 9, "beta": 0.2},
  "one_real_token": {"padding": 36},
  "one_teacher_of_all_loops": {"teacher_loops": 1},
  "one_teacher_forward": {"teacher_loops": 1, "beta": 0.0},
}


def arrays(case, dtype):
  """Two loops: student [2, 3, 5, 12], teacher of width 7, and tables."""
  keys = jax.random.split(jax.random.key(0), 4)
  vocab, loops = case.get("vocab", 37), case.get("teacher_loops", 2)
  shapes = ((2, 3, 5, 12), (vocab, 12), (loops, 3, 5, 7), (vocab, 7))
  return [
    jax.random.normal(key, shape).astype(dtype)
    for key, shape in zip(keys, shapes, strict=True)
  ]


def options(case):
  return {
    "beta": case.get("beta", 0.5),
    "num_padding_tokens": case.get("padding", 0),
  }


def chunks(case):
  size = case.get("chunk", 8)
  return functools.partial(distill, chunk_size=size, **options(case))


def plain(case):
  return functools.partial(vocabulary_examples.distill, **options(case))


def value_and_grads(form, student, student_table, teacher, teacher_table):
  """Divergences, and gradients of a weighted sum of them."""

  def weighted(student, student_table):
    values = form(student, student_table, teacher, teacher_table)
    weights = jnp.linspace(0.5, 1.5, values.size, dtype=values.dtype)
    return jnp.sum(weights.reshape(values.shape) * values), values

  run = jax.grad(weighted, (0, 1), has_aux=True)
  grads, values = jax.jit(run, compiler_options=FAST)(student, student_table)
  return values, grads


def by_formula(student, student_table, teacher, teacher_table, case):
  """Definition 3 of arXiv 2306.13649 and KL divergences, with probabilities."""
  real = len(student_table) - case.get("padding", 0)
  beta = case.get("beta", 0.5)

  def chances(hidden, table):
    logits = np.einsum("...d,vd->...v", hidden, table[:real])
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)

  def kl(p, q):
    return (p * np.log(p / q)).sum(-1)

  s, t = chances(student, student_table), chances(teacher, teacher_table)
  if beta in (0, 1):
    return kl(s, t) if beta else kl(t, s)
  m = beta * t + (1 - beta) * s
  return beta * kl(t, m) + (1 - beta) * kl(s, m)


@pytest.mark.parametrize("name", CASES)
def test_chunks_are_the_reference(name):
  case = CASES[name]
  with jax.enable_x64(True):
    operands = arrays(case, jnp.float64)
    actual, expected = (
      value_and_grads(form(case), *operands) for form in (chunks, plain)
    )
    assert actual[0].dtype == jnp.float64
    assert_close(actual, expected, 1e-10)
    by_hand = by_formula(*(np.asarray(x) for x in operands), case)
    np.testing.assert_allclose(actual[0], by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.02)]
)
def test_narrow_inputs_accumulate_in_float32(dtype, tolerance, beta):
  case = {"beta": beta, "padding": 6}
  operands = arrays(case, dtype)
  actual, expected = (
    value_and_grads(form(case), *operands) for form in (chunks, plain)
  )
  assert actual[0].dtype == jnp.float32
  assert {x.dtype for x in actual[1]} == {jnp.dtype(dtype)}
  assert_close(actual, expected, tolerance)
  # Divergences of rounded inputs, without further rounding.
  exact = plain(case)(*(x.astype(jnp.float32) for x in operands))
  assert_close(actual[0], exact, 1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equal_distributions_and_large_logits(beta):
  """Zero for equal distributions; finite for any logits."""
  hidden, table, *_ = arrays({}, jnp.float32)
  form = chunks({"beta": beta})
  same, grads = value_and_grads(form, hidden, table, hidden, table)
  np.testing.assert_allclose(same, 0, atol=1e-6)
  assert max(jnp.abs(x).max() for x in grads) < 1e-5
  far = value_and_grads(form, 1e4 * hidden, table, -1e4 * hidden, table)
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(far))
  if beta == 0.5:  # Disjoint: each is half of the mean.
    np.testing.assert_allclose(far[0], np.log(2), rtol=1e-5)
  assert (far[0] > 0.6).all()


def test_limits_of_the_generalized_divergence():
  """Divided by beta it tends to KL(T || S), by 1 - beta to KL(S || T)."""
  with jax.enable_x64(True):
    operands = [0.3 * x for x in arrays({}, jnp.float64)]
    for end, near in ((0.0, 1e-7), (1.0, 1 - 1e-7)):
      limit = distill(*operands, beta=end)
      quotient = distill(*operands, beta=near) / 1e-7
      np.testing.assert_allclose(quotient, limit, rtol=1e-5)


def test_the_teacher_is_a_constant():
  def total(*operands):
    return jnp.sum(distill(*operands))

  *_, teacher, table = jax.grad(total, range(4))(*arrays({}, jnp.float32))
  assert not teacher.any()
  assert not table.any()


def mean_divergence(*operands, form=distill):
  return jnp.mean(form(*operands))


@pytest.mark.parametrize("backward", [False, True])
def test_no_array_of_tokens_by_vocabulary_is_in_the_program(backward):
  operands = (like(2, 256, 16), like(16_384, 16)) * 2
  plain = functools.partial(mean_divergence, form=vocabulary_examples.distill)
  vocabulary_examples.assert_no_array_of_the_vocabulary(
    plain, mean_divergence, operands, backward, 1 / 3
  )


def test_a_mesh_changes_nothing():
  with jax.enable_x64(True):  # XLA splits programs in any dtype alike.
    student, _, teacher, _ = arrays({}, jnp.float64)
    keys = jax.random.split(jax.random.key(1))
    tables = [
      jax.random.normal(key, (4608, width))
      for key, width in zip(keys, (12, 7), strict=True)
    ]
    student, teacher = (
      jnp.concatenate([x[:, :2]] * 2, axis=1) for x in (student, teacher)
    )

    def loss(*operands):
      return jnp.mean(distill(*operands))

    operands = student, tables[0], teacher, tables[1]
    splits = (P(None, *HIDDEN), ROWS) * 2
    vocabulary_examples.on_a_mesh(loss, operands, splits)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_lowers_for_accelerators(platform):
  def loss(*operands):
    return jnp.mean(distill(*operands))

  shapes = (4, 2, 500, 2048), (49_152, 2048)
  operands = [like(*shape, dtype=jnp.bfloat16) for shape in shapes] * 2
  vocabulary_examples.assert_lowers(loss, operands, platform)


@pytest.mark.parametrize(("changes", "message"), [
  ({"beta": 1.1}, "beta=1.1 must be from 0 to 1"),
  ({"beta": float("nan")}, "beta=nan must be"),
])  # fmt: skip
def test_options_that_do_not_fit(changes, message):
  with pytest.raises(ValueError, match=message):
    distill(*arrays({}, jnp.float32), **changes)


def test_a_teacher_of_another_shape():
  student, table, teacher, other = arrays({}, jnp.float32)
  for wrong in (teacher[0], teacher[:, :, :4], jnp.zeros((3, 3, 5, 7))):
    with pytest.raises(ValueError, match=r"teacher must be \(2, 3, 5, 'D'\)"):
      distill(student, table, wrong, other)
  with pytest.raises(ValueError, match="37 tokens, teacher_table has 36"):
    distill(student, table, teacher, other[:-1])


def model(table):
  """What a loss uses of a model with this output table."""
  return types.SimpleNamespace(
    readout_table=lambda: table,
    config=types.SimpleNamespace(precision="float32"),
    spec=types.SimpleNamespace(num_padding_tokens=2),
  )


def test_mean_of_each_loop():
  """Weighted by token, and relative to the weight of the whole batch."""
  operands = arrays({}, jnp.float32)
  weights = jnp.asarray([[1.0] * 5, [0.0] * 5, [0.5] * 5])
  values = distill(*operands, beta=0.3, num_padding_tokens=2)
  expected = jnp.sum(values * weights[None], (1, 2)) / jnp.sum(weights)
  student, teacher = model(operands[1]), model(operands[3])
  batch = {"weights": weights}
  read = student, operands[0], teacher, operands[2]
  found = losses.by_loop(*read, batch, 0.3)
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  batch["mean_weight"] = 2 * jnp.mean(weights)
  found = losses.by_loop(*read, batch, 0.3)
  np.testing.assert_allclose(found, expected / 2, rtol=1e-6)
