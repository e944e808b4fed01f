"""One step against the same step written out by hand, and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests_support import smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding, step, train
from loopjax.data import pipeline


def make(**overrides):
  settings = config_lib.resolve(smoke(**overrides))
  dataset = train.make_datasets(settings)["train"]
  batches = pipeline.iterate(dataset.batches, num_threads=0)
  return settings, [next(batches) for _ in range(3)]


def one_device(settings):
  return program_lib.make_program(settings, jax.devices()[:1])


def stacked(program, batches):
  tree = jax.tree.map(lambda *rows: np.stack(rows), *batches)
  placed = sharding.batch_sharding(program.mesh, stacked=True)
  return sharding.put_batch(tree, placed)


def test_steps_are_gradient_optimizer_and_average():
  settings, batches = make(optim__ema_decay=0.7)
  program = one_device(settings)
  state = program.init(jax.random.key(3))
  params = jax.device_get(state.params)
  from loopjax import optim

  tx = optim.make_optimizer(settings.optim, settings.run.num_steps)
  opt_state, ema = tx.init(params), params
  for at, batch in enumerate(batches):

    def loss(params, batch=batch, at=at):
      model = nnx.merge(program.graphdef, params)
      key = jax.random.key(0)
      return settings.family.loss(model, batch, key, jnp.asarray(at), {})[0]

    grads = jax.grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: 0.7 * e + 0.3 * p, ema, params)
  state, metrics = program.train(state, stacked(program, batches), {})
  assert state.step == 3
  for got, expected in ((state.params, params), (state.ema, ema)):
    jax.tree.map(
      lambda g, e: np.testing.assert_allclose(g, e, atol=2e-6), got, expected
    )
  assert metrics["grad_norm"] > metrics["grad_norm/router"] > 0


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


@pytest.mark.parametrize(
  "mesh", [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]
)
def test_a_mesh_computes_what_one_device_computes(mesh):
  data, fsdp, tensor = mesh
  settings, batches = make(
    mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor
  )
  on_mesh = program_lib.make_program(settings)
  alone = one_device(settings._replace(mesh=sharding.Config()))
  results = []
  for program in (on_mesh, alone):
    state = program.init(jax.random.key(0))
    results.append(program.train(state, stacked(program, batches), {}))
  (mesh_state, mesh_metrics), (state, metrics) = results
  np.testing.assert_allclose(mesh_metrics["loss"], metrics["loss"], rtol=1e-5)
  np.testing.assert_allclose(
    mesh_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-4
  )
  if fsdp > 1:
    kernel = mesh_state.params["block"]["attention"]["query"]["kernel"]
    moment = optax.tree.get(mesh_state.opt_state, "mu")
    moment = moment["block"]["attention"]["query"]["kernel"]
    assert kernel.sharding.spec[0] == moment.sharding.spec[0] == "fsdp"
  assert int(state.step) == int(mesh_state.step) == 3


def test_init_state_average_starts_at_the_parameters():
  tx = optax.sgd(0.1)
  params = {"w": jnp.ones(2)}
  state = step.init_state(params, tx, jax.random.key(0), True)
  assert state.ema["w"] is not params["w"]
  assert jnp.array_equal(state.ema["w"], params["w"])
  assert step.init_state(params, tx, jax.random.key(0), False).ema == {}
