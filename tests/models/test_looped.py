"""The vanilla loop's identities."""

import dataclasses

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest

from loopjax.loop import driver
from loopjax.models import looped
from loopjax.nn import attention
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)))
SMALL = looped.Config(width=16, num_heads=2, num_layers=2, num_loops=3)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 23)


def run(config=SMALL, **call):
  return examples.run(looped, config, SPEC, TOKENS, **call)


@pytest.mark.parametrize(
  ("mlp", "ratio", "block"),
  [("gelu", 4.0, 12 * 768**2), ("swiglu", 8 / 3, 4 * 768**2 + 3 * 768 * 2048)],
)
def test_parameters_of_the_paper_scale(mlp, ratio, block):
  """L blocks of matrices and two gains, V rows, one last gain."""
  config = looped.Config(mlp=mlp, mlp_ratio=ratio)
  spec = dataclasses.replace(SPEC, vocab_size=1051)
  count = examples.count(looped, config, spec)
  assert count == 4 * (block + 2 * 768) + 1051 * 768 + 768


def test_the_language_model_of_appendix_b_has_441_million_parameters():
  """Feed-forward layers of 2,816, which the paper does not specify."""
  config = looped.Config(
    width=1024, num_layers=24, num_heads=16, mlp="swiglu", mlp_ratio=2.75,
    rope_base=1e6, num_loops=4,
  )  # fmt: skip
  spec = dataclasses.replace(SPEC, vocab_size=129_280)
  count = examples.count(looped, config, spec)
  block = 4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024
  assert count == 24 * block + 129_280 * 1024 + 1024
  assert round(count / 1e6, 1) == 440.7


@pytest.mark.long
def test_initial_matrices_have_the_configured_deviation():
  config = dataclasses.replace(SMALL, width=128, init_std=0.05)
  params = examples.params_of(looped, config, SPEC)
  matrices = [params["layers"]["mlp"]["value"]["kernel"]]
  matrices += [params["token_embedding"]["embedding"]]
  for matrix in matrices:
    np.testing.assert_allclose(jnp.std(matrix), 0.05, rtol=0.05)


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_loops_are_the_recursion_written_out(loop_norm):
  config = dataclasses.replace(SMALL, loop_norm=loop_norm)
  model = examples.merged(looped, config, SPEC)
  metadata = attention.make_metadata((1, 8), 8, config.rope_base)

  @jax.jit
  def apply_stack(x):
    for index in range(2):
      x = jax.tree.map(lambda leaf, i=index: leaf[i], model.layers)(
        x, metadata
      )[0]
    return x

  table = model.token_embedding.embedding[...]
  hidden, states = table[TOKENS], []
  for _ in range(3):
    hidden = apply_stack(hidden)
    if loop_norm == "per_loop":
      hidden = model.final_norm(hidden)
    states.append(hidden)
  if loop_norm == "final_only":
    hidden = model.final_norm(hidden)
  output = run(config, trace=("hidden",))
  np.testing.assert_allclose(
    output.trace["hidden"], jnp.stack(states), atol=1e-5
  )
  np.testing.assert_allclose(
    output.logits, jnp.einsum("btd,vd->btv", hidden, table), atol=1e-5
  )


def test_per_loop_states_have_unit_scale():
  output = run(trace=("hidden",))
  squares = jnp.mean(output.trace["hidden"] ** 2, axis=-1)
  np.testing.assert_allclose(squares, 1.0, atol=1e-2)
  norms = output.loops["hidden_norm"]
  np.testing.assert_allclose(norms, 4.0, atol=1e-2)  # sqrt(16)


def test_one_loop_does_not_depend_on_where_the_norm_is_counted():
  each, last = (
    run(dataclasses.replace(SMALL, loop_norm=kind), num_loops=1)
    for kind in ("per_loop", "final_only")
  )
  np.testing.assert_allclose(each.logits, last.logits, atol=1e-6)
  assert each.loops["hidden_norm"][0] > 2 * last.loops["hidden_norm"][0]


@pytest.mark.long
@pytest.mark.parametrize("loop", [0, 1])
def test_an_edit_reaches_later_loops_and_positions_alone(loop):
  """Earlier loops, this loop, and earlier tokens are bitwise unchanged."""

  def edit(state, k):
    hidden = state["hidden"]
    return {"hidden": jnp.where(k == loop, hidden.at[:, 5].add(1.0), hidden)}

  plain = run(trace=("hidden",))
  edited = run(trace=("hidden",), kind=driver.Watched(edit))
  before, after = plain.trace["hidden"], edited.trace["hidden"]
  assert jnp.array_equal(before[: loop + 1], after[: loop + 1])
  assert jnp.array_equal(before[:, :, :5], after[:, :, :5])
  moved = jnp.abs(before - after).max(axis=(1, 3))[loop + 1 :, 5:]
  assert (moved > 1e-4).all()
