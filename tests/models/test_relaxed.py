"""Relaxed sharing: loops with differences are a stack of their sums."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from tests_support import refused

from loopjax.loop import relaxed
from loopjax.models import recurrent
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), 2)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
CONFIG = recurrent.Config(
  width=16, num_heads=2, init_std=0.3, norm_order="pre", injection="none",
  loop_norm="final_only", state="input", depth="fixed", num_with_gradient=0,
  num_prelude=1, num_layers=2, num_coda=0, num_loops=2, relaxed_rank=3,
)  # fmt: skip
UNSHARED = dataclasses.replace(
  CONFIG, num_layers=4, num_loops=1, relaxed_rank=0
)


def drawn():
  """Parameters, all differences random."""
  params = examples.params_of(recurrent, CONFIG, SPEC)
  generator = np.random.default_rng(0)
  differences = jax.tree.map(
    lambda x: jnp.asarray(generator.normal(0, 0.2, x.shape), x.dtype),
    params["differences"],
  )
  return {**params, "differences": differences}


def summed(params):
  """The parameters of the stack, in NumPy."""

  def one(shared, added):
    if isinstance(added, dict) and "A" in added:
      added = np.einsum("klir,klro->klio", added["A"], added["B"])
    elif isinstance(added, dict):
      return {name: one(x, added[name]) for name, x in shared.items()}
    both = np.asarray(shared)[None] + np.asarray(added)
    return both.reshape(-1, *both.shape[2:])

  whole = {k: x for k, x in params.items() if k != "differences"}
  return {**whole, "layers": one(params["layers"], params["differences"])}


def test_loops_with_differences_are_a_stack_of_their_sums():
  """At once, and with a number of loops that is an argument."""
  params = drawn()
  expected = examples.run(
    recurrent, UNSHARED, SPEC, TOKENS, summed(params)
  ).logits

  @jax.jit
  def both(params, depth):
    model = examples.merged(recurrent, CONFIG, SPEC, params)
    return model(TOKENS).logits, model(TOKENS, depth=depth).logits

  for logits in both(params, 2):
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)
  once = examples.run(recurrent, CONFIG, SPEC, TOKENS, params, num_loops=1)
  assert np.max(np.abs(once.logits - expected)) > 1e-2


def test_new_differences_add_nothing():
  params = examples.params_of(recurrent, CONFIG, SPEC)
  added = relaxed.Differences(params["layers"], 2, 3, jax.random.key(0))
  state = nnx.to_pure_dict(nnx.state(added))
  of_kernel = state["attention"]["query"]["kernel"]
  assert np.std(of_kernel["A"]) == pytest.approx(16**-0.5, rel=0.2)
  for k in (0, 1):
    here = jax.tree.map(lambda x, k=k: x[k], state)
    jax.tree.map(
      np.testing.assert_array_equal,
      relaxed._sum(params["layers"], here),
      params["layers"],
    )


def test_the_shared_layers_are_means_and_differences_their_best_of_a_rank():
  generator = np.random.default_rng(0)
  kernels = generator.normal(0, 1, (4, 6, 5)).astype(np.float32)
  gains = generator.normal(0, 1, (4, 6)).astype(np.float32)
  layers = {"kernel": jnp.asarray(kernels), "gain": jnp.asarray(gains)}
  shared, added = relaxed.split(layers, 2, 2)  # Layers 0, 1 and 2, 3.
  lacks = kernels.reshape(2, 2, 6, 5)
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  close(shared["kernel"], lacks.mean(0))
  close(shared["gain"][None] + added["gain"], gains.reshape(2, 2, 6))
  lacks = lacks - lacks.mean(0)
  rest = lacks - np.matmul(added["kernel"]["A"], added["kernel"]["B"])
  sizes = np.linalg.svd(lacks, compute_uv=False)
  close((rest**2).sum((-2, -1)), (sizes[..., 2:] ** 2).sum(-1), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("unstack", [False, True])
def test_they_are_read_as_at_once(unstack):
  """Token by token, with layers apart, and slots of the cache."""
  params = drawn()
  whole = examples.run(recurrent, CONFIG, SPEC, TOKENS, params).logits

  @jax.jit
  def read(params):
    model = examples.merged(recurrent, CONFIG, SPEC, params)
    cache = recurrent.empty_cache(model, 3, 8)
    first, cache = recurrent.read(model, TOKENS[:, :6], cache)
    cache = cache.of_rows(jnp.arange(3), None, unstack=unstack)
    model = recurrent.unstacked(model)
    found = [first.logits]
    for n in (6, 7):
      output, cache = recurrent.read(model, TOKENS[:, n : n + 1], cache)
      found.append(output.logits)
    return jnp.concatenate(found, axis=1)

  np.testing.assert_allclose(read(params), whole, atol=2e-5, rtol=0)


@pytest.mark.long
def test_each_loop_trains_its_own_difference():
  params = drawn()

  def loss(params):
    output = examples.merged(recurrent, CONFIG, SPEC, params)(TOKENS)
    return jnp.mean(output.logits**2)

  gradients = jax.jit(jax.grad(loss))(params)
  for leaf in jax.tree.leaves(gradients["differences"]):
    assert (np.abs(leaf).reshape(2, -1).max(axis=1) > 0).all()


def test_what_they_cannot_do_is_refused():
  with refused("relaxed_rank=3 needs model.depth='fixed'"):
    dataclasses.replace(CONFIG, depth="poisson")
  with refused("3 loops are more than model.num_loops=2"):
    dataclasses.replace(CONFIG, growth_steps=(1,), growth_loops=(3,))
  with refused("3 loops are more than model.num_loops=2"):
    recurrent.costs(CONFIG, SPEC, 3)


def test_matrices_of_one_shape_begin_with_pairs_of_their_own():
  """Else the first gradients of their other halves would be alike."""
  params = examples.params_of(recurrent, CONFIG, SPEC)
  first = [
    np.ravel(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["differences"])
    if path[-1].key == "A"
  ]
  assert len(first) > 3
  drawn_once = np.concatenate(first)
  assert len(np.unique(drawn_once)) == len(drawn_once)
