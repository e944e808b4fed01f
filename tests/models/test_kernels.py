"""loop.kernels: what models take instead of XLA."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.extend import core as jax_core
from jax.sharding import AxisType

from loopjax import program
from loopjax.errors import UserError
from loopjax.kernels import KERNELS
from loopjax.models import MODELS
from loopjax.nn.attention import Attention
from loopjax.nn.fast_weights import FastWeights
from loopjax.types import LoopOptions, TaskSpec

MELT = {
  "width": 16, "num_heads": 2, "num_layers": 2, "num_loops": 2,
  "chunk_size": 4, "distill": "none", "rope_base": 100.0, "init_std": 0.2,
  "precision": "float32",
}  # fmt: skip
# Family, settings, and number of tokens.
CASES = {
  "melt": ("melt", MELT, 8),
  "melt, phase 1": (
    "melt", {**MELT, "alpha": 0.5, "interpolation_steps": 4}, 8,
  ),
  "melt, scalar gate": ("melt", {**MELT, "gate": "scalar"}, 8),
  "sleep": (
    "sleep",
    {
      "width": 16, "num_heads": 2, "num_passes": 2, "window": 4,
      "num_memory_heads": 2, "key_width": 8, "value_width": 8,
    },
    8,
  ),
  "looped": (
    "looped",
    {"width": 256, "num_heads": 2, "num_layers": 1, "num_loops": 2},
    128,
  ),
}  # fmt: skip


def loss_of(case, kernels):
  """(loss as a function of parameters, the parameters)."""
  name, settings, length = CASES[case]
  spec = TaskSpec(11, length, tuple((i,) for i in range(length)), 1)
  model = MODELS[name], MODELS[name].Config(**settings), spec
  inputs = jax.random.randint(jax.random.key(1), (2, length), 0, 10)
  batch = {
    "inputs": inputs,
    "targets": inputs[:, ::-1],
    "weights": jnp.ones(inputs.shape),
  }

  def loss(params):
    merged = examples.merged(
      *model, params, options=LoopOptions(kernels=kernels)
    )
    step = jnp.zeros((), jnp.int32)
    return MODELS[name].loss(merged, batch, jax.random.key(0), step, {})[0]

  return loss, examples.params_of(*model)


@pytest.fixture
def interpreted(monkeypatch):
  """A context in which kernels for TPUs run anywhere."""
  make = functools.partial(splash.make_splash_mha_single_device, interpret=True)
  monkeypatch.setattr(splash, "make_splash_mha_single_device", make)
  return pltpu.force_tpu_interpret_mode(
    pltpu.InterpretParams(uninitialized_memory="nan")
  )


def slow(*cases):
  return [pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(
  "case",
  ["melt", "looped", *slow("melt, phase 1", "melt, scalar gate", "sleep")],
)
def test_the_model_is_the_same(case, interpreted):
  found = {}
  for kernels in ("xla", "tpu"):
    loss, params = loss_of(case, kernels)
    run = jax.value_and_grad(loss)
    compiled = jax.jit(run, compiler_options=examples.FAST)
    has_kernel = "pallas_call" in str(jax.make_jaxpr(run)(params))
    assert has_kernel == (kernels == "tpu")
    # The interpreter of JAX 0.10 takes no kernel under vmap; splash attention
    # is interpreted in another way.
    is_splash = case == "looped"
    here = kernels == "tpu" and not is_splash
    with interpreted if here else contextlib.nullcontext():
      found[kernels] = jax.block_until_ready(compiled(params))
  np.testing.assert_allclose(found["tpu"][0], found["xla"][0], rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5),
    found["tpu"][1],
    found["xla"][1],
  )


@pytest.mark.parametrize("case", CASES)
def test_every_device_runs_kernels_on_its_own_examples(case):
  """The compiler cannot split them."""
  loss, params = loss_of(case, "tpu")
  mesh = jax.sharding.AbstractMesh(
    (2, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
  )

  def calls(jaxpr, is_split):
    for equation in jaxpr.eqns:
      inside = is_split or equation.primitive.name == "shard_map"
      if equation.primitive.name == "pallas_call":
        yield inside
      for inner in jax_core.jaxprs_in_params(equation.params):
        yield from calls(inner, inside)

  with jax.sharding.use_abstract_mesh(mesh):
    found = [*calls(jax.make_jaxpr(jax.grad(loss))(params).jaxpr, False)]
  assert found
  assert all(found)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_has_the_kernels_of_the_options(name):
  family = MODELS[name]
  spec = TaskSpec(11, 8, tuple((i,) for i in range(8)), 1)
  small = {"width": 32, "num_heads": 2, "chunk_size": 0, "window": 4}
  fields = {field.name for field in dataclasses.fields(family.Config)}
  config = family.Config(**{k: v for k, v in small.items() if k in fields})
  model = examples.abstract(family, config, spec, LoopOptions(kernels="gpu"))
  layers = [
    module
    for _, module in nnx.iter_modules(model)
    if isinstance(module, Attention | FastWeights)
  ]
  assert layers
  assert all(layer.kernels == KERNELS["gpu"] for layer in layers)


def test_kernels_of_another_platform_are_refused():
  options = LoopOptions(kernels="tpu")
  program.check_kernels(LoopOptions(), "cpu", tensor=2)
  program.check_kernels(options, "tpu")
  with pytest.raises(UserError, match="'tpu' does not run on a gpu;"):
    program.check_kernels(options, "gpu")
  with pytest.raises(UserError, match="needs mesh.tensor=1"):
    program.check_kernels(options, "tpu", tensor=2)
