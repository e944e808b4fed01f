"""One step against the same step by hand, and on a mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests_support import smoke, stacked, train_batches

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.losses import tokens as token_losses
from loopjax.nn import keys
from loopjax.program import build, step


def make(**overrides):
  settings = config_lib.resolve(smoke(**overrides))
  return settings, train_batches(settings, 3)


def one_device(settings):
  return program_lib.make_program(settings, jax.devices()[:1])


def test_steps_are_gradient_optimizer_and_average():
  settings, batches = make(optim__ema_decay=0.2, optim__warmup_steps=0)
  program = one_device(settings)
  state = program.init(jax.random.key(3))
  params = jax.device_get(state.params)
  from loopjax.optim import chain

  tx = chain.make_optimizer(settings.optim, settings.run.num_steps)
  opt_state, ema = tx.init(params), params

  def loss(params, batch, at):
    model = nnx.merge(program.graphdef, params)
    return settings.family.loss(model, batch, jax.random.key(0), at, None)[0]

  gradients, update = jax.jit(jax.grad(loss)), jax.jit(tx.update)
  for at, batch in enumerate(batches):
    grads = gradients(params, batch, jnp.asarray(at))
    updates, opt_state = update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    decay = min(0.2, (1 + at) / (10 + at))  # The last of three is 0.2.
    ema = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, ema, params)
  state, metrics = program.train(state, stacked(program, batches), {})
  assert state.step == 3
  for got, expected in ((state.params, params), (state.ema, ema)):
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, atol=2e-6), got, expected
    )
  total, router = metrics["grad_norm"], metrics["grad_norm/router"]
  assert (total > router).all() and (router > 0).all()


@pytest.mark.long
def test_one_call_of_three_steps_is_three_calls():
  settings, batches = make()
  program = one_device(settings)
  together, _ = program.train(
    program.init(jax.random.key(0)), stacked(program, batches), {}
  )
  apart = program.init(jax.random.key(0))
  for batch in batches:
    apart, _ = program.train(apart, stacked(program, [batch]), {})
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    together.params,
    apart.params,
  )


def test_microbatches_count_by_their_weights():
  """A part with few weighted tokens contributes little to the gradient."""
  graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
  params, tx = nnx.to_pure_dict(params), optax.sgd(0.1)
  inputs = jax.random.normal(jax.random.key(1), (8, 4, 3))
  few = jnp.arange(8)[:, None] % 4 >= jnp.arange(4)[None]
  batch = {"inputs": inputs, "weights": few.astype(jnp.float32)}

  def loss(model, batch, *_):
    values = model(batch["inputs"])[..., 0] ** 2
    weights, mean_weight = batch["weights"], batch["mean_weight"]
    value = token_losses.weighted_mean(values, weights, mean_weight)
    return value, {}  # "loss" is added.

  def run(number):
    static = {
      "graphdef": graphdef, "teacher_graphdef": None, "loss_fn": loss, "tx": tx,
      "ema_decay": 0.0, "num_microbatches": number, "max_bad_steps": 1,
    }  # fmt: skip
    state = step.init_state(params, tx, jax.random.key(0), False)
    after, metrics = jax.jit(functools.partial(step.train_step, **static))(
      state, batch, {}
    )
    return after.params, metrics["loss"]

  jax.tree.map(
    lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-5),
    run(4),
    run(1),
  )


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (2, 2, 1)])
@pytest.mark.parametrize("number", [1, 2])
def test_draws_are_of_the_step_and_the_example_alone(mesh, number):
  """Independent of the mesh and of the number of microbatches."""
  size, num_steps, tx = 8, 3, optax.sgd(0.1)
  graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
  params = nnx.to_pure_dict(params)

  def loss(model, batch, key, *_):
    drawn = jax.vmap(jax.random.uniform)(keys.by_example(key, batch))
    carried = batch["carried"].by_example
    carried = jnp.roll(carried, -1, axis=1).at[:, -1].set(drawn)
    value = jnp.mean(model(batch["inputs"]))
    return value, {"carried": step.Carried(carried)}

  one = {
    "inputs": jnp.ones((size, 3)),
    "targets": jnp.ones(size),
    "weights": jnp.ones(size),
  }
  batches = jax.tree.map(lambda x: jnp.stack([x] * num_steps), one)
  carried = step.Carried(jnp.zeros((size, num_steps)))
  state = step.init_state(params, tx, jax.random.key(5), False, carried)
  over = sharding.make_mesh(
    sharding.Config(*mesh), jax.devices()[: math.prod(mesh)]
  )
  train = functools.partial(
    step.train_steps,
    graphdef=graphdef,
    teacher_graphdef=None,
    loss_fn=loss,
    tx=tx,
    ema_decay=0.0,
    num_microbatches=number,
    max_bad_steps=1,
  )
  state = jax.device_put(state, sharding.replicated(over))
  batches = jax.device_put(batches, sharding.replicated(over))
  after, _ = jax.jit(program_lib.on_mesh(over, train))(state, batches, {})
  expected = [
    [
      jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, at), row))
      for at in range(num_steps)
    ]
    for key in [jax.random.key(5)]
    for row in range(size)
  ]
  np.testing.assert_array_equal(after.carried.by_example, np.array(expected))


def test_what_is_scored_is_the_average():
  tx, params = optax.sgd(0.1), {"w": jnp.ones(2)}
  averaged, plain = (
    step.init_state(params, tx, jax.random.key(0), use_ema)
    for use_ema in (True, False)
  )
  averaged = averaged._replace(params={"w": jnp.zeros(2)})
  assert step.scored_params(averaged) is averaged.ema
  assert step.scored_params(plain) is plain.params


def test_init_state_average_starts_at_the_parameters():
  tx = optax.sgd(0.1)
  params = {"w": jnp.ones(2)}
  state = step.init_state(params, tx, jax.random.key(0), True)
  assert state.ema["w"] is not params["w"]
  assert jnp.array_equal(state.ema["w"], params["w"])
  assert step.init_state(params, tx, jax.random.key(0), False).ema == {}


@pytest.mark.long
def test_the_step_is_compiled_with_the_options_of_its_platform(monkeypatch):
  """XLA knows the GPU options, and a program's options reach the compiler."""
  for options in build.COMPILER_OPTIONS.values():
    assert jax.jit(jnp.sin, compiler_options=options)(0.0) == 0.0
  monkeypatch.setattr(build, "COMPILER_OPTIONS", {"cpu": {"no_such": True}})
  settings = config_lib.resolve(smoke(model__num_loops=1))
  program = program_lib.make_program(settings, jax.devices()[:1])
  batches = program_lib.abstract_batches(settings, program.mesh)
  lowered = program.train.lower(program.abstract_state, batches, {})
  with pytest.raises(jax.errors.JaxRuntimeError, match="no_such"):
    lowered.compile()
