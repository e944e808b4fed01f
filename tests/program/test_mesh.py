"""Every family on every kind of mesh equals itself on one device."""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import roofline
from jax.sharding import PartitionSpec as P
from tests_support import (
  OF_PAPERS,
  SMOKE,
  by_size,
  crossing,
  load_config,
  long_case,
  stacked,
  train_batches,
)

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.errors import UserError
from loopjax.models import MODELS
from loopjax.optim import parameters
from loopjax.program import build, gradients

MESHES = {
  "data": (8, 1, 1),
  "fsdp": (1, 8, 1),
  "tensor": (1, 1, 2),
  "data and fsdp": (2, 4, 1),
  "all": (2, 2, 2),
}

MIXED = "all"  # Has every axis; the others show which one fails.
FAMILIES = by_size(MODELS)
# Half a minute each; others have the same parts.
BY_HAND = (
  "transformer", "plt", "ponderlm", "disco", "loopformer", "trm", "hrm",
  "urm", "recurrent", "adaptive", "sleep",
)  # fmt: skip
BFLOAT16 = {"model.precision": "bfloat16", "run.steps_per_call": 1}


def make(name, mesh, microbatches=1, more=()):
  """Settings of a family's smoke preset; its small matrices are split too."""
  config = load_config(*SMOKE[name])
  sizes = dict(zip(sharding.AXES, mesh, strict=True))
  overrides = {f"mesh.{axis}": size for axis, size in sizes.items()}
  overrides |= {
    "mesh.min_split_size": 200,
    "run.num_microbatches": microbatches,
    **dict(more),
  }
  config_lib.override(config, overrides)
  return config_lib.resolve(config)


def steps(settings, devices, num_steps=2):
  """State and metrics after two steps on batches with uneven weights."""
  program = program_lib.make_program(settings, devices)
  rows = train_batches(settings, num_steps)
  uneven = np.random.default_rng(0).uniform(0, 2, (settings.run.batch_size, 1))
  for row in rows:
    row["weights"] = (row["weights"] * uneven).astype(np.float32)
  state = program.init(jax.random.key(0))
  return program.train(state, stacked(program, rows), {})


def assert_close(got, expected):
  """Losses, gradient norms and the resulting parameters."""
  (state, metrics), (reference, reference_metrics) = got, expected
  for name, value in reference_metrics.items():
    np.testing.assert_allclose(
      metrics[name], value, rtol=2e-4, atol=1e-5, err_msg=name
    )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5),
    jax.device_get(state.params),
    jax.device_get(reference.params),
  )


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(name, marks=pytest.mark.manual)
    if name in BY_HAND
    else long_case(name)
    if name != FAMILIES[0]
    else name
    for name in FAMILIES
  ],
)
def family(request):
  """A family's name, and two of its steps on one device."""
  settings = make(request.param, (1, 1, 1))
  return request.param, steps(settings, jax.devices()[:1])


@pytest.mark.long
@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param(
      mesh, id=name, marks=() if name == MIXED else pytest.mark.manual
    )
    for name, mesh in MESHES.items()
  ],
)
def test_a_mesh_computes_what_one_device_computes(family, mesh, capfd):
  name, expected = family
  devices = jax.devices()[: math.prod(mesh)]
  got = steps(make(name, mesh), devices)
  assert_close(got, expected)
  # The compiler warns when it gathers arrays that should stay split.
  assert "Involuntary full rematerialization" not in capfd.readouterr().err
  if mesh[1] > 1:
    assert_state_is_split(got[0])


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 4, 1), (2, 2, 1)], ids=str)
def test_gradients_are_means_over_all_devices(sizes):
  """Gradients of split and of replicated parameters."""
  mesh = sharding.make_mesh(sharding.Config(*sizes), jax.devices()[:4])
  specs = {"split": P(None, "fsdp"), "whole": P()}

  def gradient(examples, others):
    del others
    row = jnp.mean(examples, axis=0)  # Over a device's own examples.
    grads = {"split": row.reshape(2, 4), "whole": row[:3]}
    return examples, (grads, {"loss": row[3]})

  examples = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  run = build.on_mesh(
    mesh, lambda *x: gradients.data_parallel(gradient, gradient_specs=specs)(*x)
  )
  placed = sharding.put_batch(mesh, examples, 8)
  by_example, (found, metrics) = jax.jit(run)(placed, {})
  expected = examples.mean(axis=0)
  np.testing.assert_array_equal(by_example, examples)
  for got, want in (
    (found["split"], expected.reshape(2, 4)),
    (found["whole"], expected[:3]),
    (metrics["loss"], expected[3]),
  ):
    np.testing.assert_allclose(got, want, atol=1e-6)


def assert_state_is_split(state):
  """Most of the parameters, moments and averages are split over devices."""
  moments = optax.tree.get(state.opt_state, "mu")
  for tree in (state.params, moments, *([state.ema] if state.ema else [])):
    leaves = jax.tree.leaves(tree)
    local = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
    assert local < 0.7 * sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize("mesh", [(2, 1, 1)])
def test_microbatches_add_up_to_the_batch(family, mesh):
  name, expected = family
  devices = jax.devices()[: math.prod(mesh)]
  got = steps(make(name, mesh, microbatches=4), devices)
  assert_close(got, expected)


@crossing("name", ["looped", "melt"], manual=["melt"])
def test_copies_add_their_gradients_up_once_a_step(name):
  """Not once per loop, layer and microbatch."""
  config = load_config(*SMOKE[name])
  overrides = {"mesh.data": 2, "run.num_microbatches": 2}
  overrides |= {"run.steps_per_call": 1, "model.precision": "bfloat16"}
  config_lib.override(config, overrides)
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[:2])
  batches = program_lib.abstract_batches(settings, program.mesh)
  compiled = program.train.lower(program.abstract_state, batches, {}).compile()
  traffic = roofline.collectives(roofline.parse(compiled.as_text()))
  leaves = jax.tree.leaves(program.abstract_state.params)
  gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
  assert set(traffic.num_bytes) == {"all-reduce"}
  metrics = 1024  # Bytes, at most: scalars and values by loop.
  assert gradients <= traffic.num_bytes["all-reduce"] <= gradients + metrics


def traffic_of(settings, num_devices, **options):
  """(collectives of a step, bytes of the parameters in bfloat16)."""
  devices = jax.devices()[:num_devices]
  program = program_lib.make_program(settings, devices, **options)
  batches = program_lib.abstract_batches(settings, program.mesh)
  compiled = program.train.lower(program.abstract_state, batches, {}).compile()
  leaves = jax.tree.leaves(program.abstract_state.params)
  number = sum(leaf.size for leaf in leaves)
  return roofline.collectives(roofline.parse(compiled.as_text())), 2 * number


# Families that the pages of results have on several devices.
SPLIT = ("looped", "melt", "utm", "sleep")


@pytest.mark.long
@crossing(
  ("name", "mesh"),
  [
    (FAMILIES[0], (2, 4, 1)),
    *((name, (2, 2, 1)) for name in SPLIT),
    *((name, (2, 4, 1)) for name in FAMILIES[1:]),
  ],
  manual=[
    *((name, (2, 2, 1)) for name in SPLIT[1:]),
    *((name, (2, 4, 1)) for name in FAMILIES[1:]),
  ],
)
def test_split_parameters_are_gathered_once_a_step(name, mesh):
  """Their gradients are reduced once, with the results of one device."""
  # Muon also moves matrices: see below.
  more = {"optim.name": "adamw", "optim.muon_learning_rate": 2e-3, **BFLOAT16}
  settings = make(name, mesh, 2, more)
  traffic, weights = traffic_of(settings, math.prod(mesh))
  # On CPUs, XLA gathers bfloat16 arrays in float32.
  assert set(traffic.num_bytes) == {
    "all-gather",
    "reduce-scatter",
    "all-reduce",
  }
  assert traffic.num_bytes["all-gather"] <= 1.2 * 2 * weights
  assert mesh[1] * traffic.num_bytes["reduce-scatter"] <= 2 * weights
  assert traffic.num_bytes["all-reduce"] <= 2 * weights
  got = steps(settings, jax.devices()[: math.prod(mesh)], 1)[1]
  one = steps(make(name, (1, 1, 1), 2, more), jax.devices()[:1], 1)[1]
  np.testing.assert_allclose(got["grad_norm"], one["grad_norm"], rtol=2e-2)


@pytest.mark.long
@crossing("name", SPLIT, manual=SPLIT[1:])
def test_sixteen_devices_gather_parameters_once_a_step(name):
  """Four copies, each split over four devices; in a process that has them."""
  more = {"optim.name": "adamw", "optim.muon_learning_rate": 2e-3, **BFLOAT16}
  program = f"""\
import json, test_mesh
settings = test_mesh.make({name!r}, (4, 4, 1), 1, {more!r})
traffic, weights = test_mesh.traffic_of(settings, 16)
print(json.dumps([dict(traffic.num_bytes), weights]))
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    env={
      **os.environ,
      "JAX_NUM_CPU_DEVICES": "16",
      "PYTHONPATH": os.pathsep.join(sys.path),
    },
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    text=True,
    check=True,
  )
  moved, weights = json.loads(done.stdout.splitlines()[-1])
  assert moved["all-gather"] <= 1.2 * 2 * weights
  assert 4 * moved["reduce-scatter"] <= 2 * weights


@pytest.mark.long
def test_muon_moves_matrices_and_gathers_none():
  """To the devices that have whole matrices, and back; steps are not split."""
  settings = make("melt", (1, 8, 1), 1, {"optim.name": "muon", **BFLOAT16})
  traffic, weights = traffic_of(settings, 8)
  assert traffic.num_bytes["all-gather"] <= 1.2 * 2 * weights
  # In float32; eight devices, two layers of matrices.
  assert 0 < traffic.num_bytes["all-to-all"] <= 2 * weights
  assert "collective-permute" not in traffic.num_bytes


@pytest.mark.long
@crossing("name", ["looped", "melt", "adaptive"], manual=["melt", "adaptive"])
def test_no_collective_grows_with_the_number_of_devices(name):
  """With equal numbers of examples on each."""

  def moved(num_devices):
    of_muon = {"optim.name": "adamw", "optim.muon_learning_rate": 2e-3}
    more = {**BFLOAT16, **of_muon, "run.batch_size": 2 * num_devices}
    more |= {"eval.batch_size": num_devices}
    settings = make(name, (1, num_devices, 1), 1, more)
    return traffic_of(settings, num_devices)[0].num_bytes

  few, many = moved(2), moved(8)
  assert set(few) == set(many)
  metrics = 256  # Bytes: biases that eight devices cannot share.
  assert all(many[kind] <= few[kind] + metrics for kind in few)


@crossing("gather", ["weights", "use"])
def test_what_gathers_in_less_memory_gathers_more_often(gather):
  more = {**BFLOAT16, "mesh.gather": gather}
  settings = make("looped", (1, 8, 1), 1, more)
  traffic, weights = traffic_of(settings, 8)
  once = traffic.num_bytes["all-gather"] <= 1.2 * 2 * weights
  assert once == (gather == "weights")


def test_every_family_has_a_smoke_preset():
  assert set(SMOKE) == set(MODELS)


def abstract(**shapes):
  return {
    name.replace("__", "/"): jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }


def specs(mesh, params, min_split_size=1):
  sizes = sharding.Config(*mesh)
  mesh = sharding.make_mesh(sizes, jax.devices())
  found = sharding.parameter_shardings(
    mesh, params, parameters.splits(params), min_split_size
  )
  return {name: where.spec for name, where in found.items()}


def test_splits_are_of_the_last_dimensions():
  params = abstract(query__kernel=(8, 16), stack__query__kernel=(3, 8, 16))
  found = specs((2, 2, 2), params)
  assert tuple(found["query/kernel"]) == ("fsdp", "tensor")
  assert tuple(found["stack/query/kernel"]) == (None, "fsdp", "tensor")


def test_small_parameters_lie_whole():
  found = specs((1, 8, 1), abstract(query__kernel=(8, 16)), 129)
  assert tuple(found["query/kernel"]) == ()


@pytest.mark.parametrize(("params", "message"), [
  (abstract(router__kernel=(64, 64)), "router/kernel .* splits no dimension"),
  (abstract(query__kernel=(9, 9)),
   "query/kernel .* no dimension is a multiple"),
])  # fmt: skip
def test_a_large_parameter_that_cannot_be_split_is_named(params, message):
  with pytest.raises(UserError, match=message):
    specs((1, 4, 2), params)
  specs((8, 1, 1), params)  # Nothing is split: no error.


@functools.cache
def of_the_papers_size(name):
  """Abstract parameters."""
  settings = config_lib.resolve(load_config(name, "paper"))
  return program_lib.abstract_model(settings)[1]


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("name", OF_PAPERS)
def test_every_large_parameter_of_the_papers_sizes_is_split(name, mesh):
  params = of_the_papers_size(name)
  where = sharding.parameter_shardings(
    sharding.make_mesh(
      sharding.Config(*mesh), jax.devices()[: math.prod(mesh)]
    ),
    params,
    parameters.splits(params),
    sharding.Config().min_split_size,
  )
  assert any(any(x.spec) for x in jax.tree.leaves(where))


def test_put_batch_gives_every_device_its_rows():
  mesh = sharding.make_mesh(sharding.Config(2, 2, 2), jax.devices())
  batch = {"x": np.arange(2 * 8 * 3).reshape(2, 8, 3)}
  placed = sharding.put_batch(mesh, batch, 8, stacked=True)["x"]
  np.testing.assert_array_equal(placed, batch["x"])
  for shard in placed.addressable_shards:
    assert shard.data.shape == (2, 2, 3)
  np.testing.assert_array_equal(sharding.local_rows(mesh, 8), np.arange(8))
