"""loop.kernels: what models take instead of XLA."""

import contextlib
import dataclasses
import functools
import re

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
from tests_support import CONFIGS, crossing, load_config, namespace

from loopjax import config as config_lib
from loopjax import program
from loopjax.errors import UserError
from loopjax.kernels import KERNELS
from loopjax.models import MODELS
from loopjax.nn.attention import Attention
from loopjax.nn.fast_weights.layer import FastWeights
from loopjax.program import build
from loopjax.types import LoopOptions, TaskSpec

MELT = {
  "width": 16, "num_heads": 2, "num_layers": 2, "num_loops": 2,
  "chunk_size": 4, "distill": "none", "rope_base": 100.0, "init_std": 0.2,
  "precision": "float32",
}  # fmt: skip
# Family, settings, and number of tokens.
CASES = {
  "melt": ("melt", MELT, 8),
  "melt, scalar gate": ("melt", {**MELT, "gate": "scalar"}, 8),
  "sleep": (
    "sleep",
    {
      "width": 16, "num_heads": 2, "num_loops": 2, "window": 4,
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
    return MODELS[name].loss(merged, batch, jax.random.key(0), step, None)[0]

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
  return [pytest.param(case, marks=pytest.mark.manual) for case in cases]


@pytest.mark.parametrize(
  "case", ["looped", *slow("melt", "melt, scalar gate", "sleep")]
)
def test_the_model_is_the_same(case, interpreted, monkeypatch):
  found = {}
  is_splash = case == "looped"
  if not is_splash:
    # The interpreter of JAX 0.10 takes no kernel under vmap; splash attention
    # is interpreted in another way.
    own = KERNELS["tpu"]._replace(attention="xla")
    monkeypatch.setitem(KERNELS, "tpu", own)
  for kernels in ("xla", "tpu"):
    loss, params = loss_of(case, kernels)
    run = jax.value_and_grad(loss)
    compiled = jax.jit(run, compiler_options=examples.FAST)
    has_kernel = "pallas_call" in str(jax.make_jaxpr(run)(params))
    assert has_kernel == (kernels == "tpu")
    here = kernels == "tpu" and not is_splash
    with interpreted if here else contextlib.nullcontext():
      found[kernels] = jax.block_until_ready(compiled(params))
  np.testing.assert_allclose(found["tpu"][0], found["xla"][0], rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5),
    found["tpu"][1],
    found["xla"][1],
  )


@pytest.mark.long
def test_reading_with_a_cache_is_the_same(interpreted):
  """A prompt, one more token, and rows of their own lengths."""
  spec = TaskSpec(11, 8, tuple((i,) for i in range(8)), 1)
  family = MODELS["melt"]
  model = family, family.Config(**MELT), spec
  tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 10)
  valid = jnp.array([[True] * 4, [False, True, True, True]])

  def read(params, kernels):
    merged = examples.merged(
      *model, params, options=LoopOptions(kernels=kernels)
    )
    cache = family.reading.empty_cache(merged, 2, 6)
    prompt, cache = family.reading.read(
      merged, tokens[:, :4], cache, valid=valid
    )
    last, cache = family.reading.read(merged, tokens[:, 4:], cache)
    return prompt.logits[:, -1], last.logits, cache.length

  params, found = examples.params_of(*model), {}
  for kernels in ("xla", "tpu"):
    run = functools.partial(read, kernels=kernels)
    compiled = jax.jit(run, compiler_options=examples.FAST)
    with interpreted if kernels == "tpu" else contextlib.nullcontext():
      found[kernels] = jax.block_until_ready(compiled(params))
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, atol=1e-5),
    found["tpu"],
    found["xla"],
  )


@crossing("case", CASES, manual=("melt, scalar gate",))
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


class Device:
  """What is asked of a device."""

  def __init__(self, platform, compute_capability=""):
    self.platform = platform
    self.device_kind = f"a {platform}"
    if compute_capability:
      self.compute_capability = compute_capability


@pytest.mark.parametrize(("kernels", "device", "has"), [
  ("xla", Device("cpu"), True),
  ("tpu", Device("tpu"), True),
  ("tpu", Device("gpu", "9.0"), False),
  ("gpu", Device("gpu", "9.0"), True),
  ("gpu", Device("gpu", "8.0"), False),
  ("gpu", Device("cpu"), False),
])  # fmt: skip
def test_devices_that_have_kernels(kernels, device, has):
  assert program.have_kernels(device, kernels) == has
  if has:
    program.check_kernels(LoopOptions(kernels=kernels), device)
  else:
    with pytest.raises(UserError, match=f"'{kernels}' needs a .*, not a "):
      program.check_kernels(LoopOptions(kernels=kernels), device)


def test_kernels_are_not_split_within_an_example():
  program.check_kernels(LoopOptions(), Device("tpu"), tensor=2)
  with pytest.raises(UserError, match="needs mesh.tensor=1"):
    program.check_kernels(LoopOptions(kernels="tpu"), Device("tpu"), tensor=2)


@pytest.mark.parametrize(("name", "kernels", "says"), [
  ("lm_looped", "gpu", "needs 16-bit inputs, not float32"),
  ("lm_melt", "gpu", "takes bfloat16 inputs"),
  ("gsm_sleep", "gpu", "needs 16-bit inputs, not float32"),
])  # fmt: skip
def test_models_that_kernels_do_not_support(name, kernels, says, monkeypatch):
  """Refused by tracing the step, before anything is compiled or written."""
  monkeypatch.setattr(build, "check_kernels", lambda *_: None)
  config = load_config(name, f"smoke,loop.kernels={kernels}")
  with pytest.raises(UserError, match=f"loop.kernels='{kernels}': .*{says}"):
    program.check_step(program.make_program(config_lib.resolve(config)))


# Other tasks and families with the layers of one that is left, whose tracing
# takes longest: automata for Sleep, urm for hrm, and looped.
ALIKE = (
  "depo_sleep", "gsm_sleep", "lm_sleep", "sudoku_hrm", "lm_loopformer",
  "lm_disco", "language_disco",
)  # fmt: skip


def scales():
  """(config, preset); "paper" is like "gpu" in all that kernels see."""
  for name in CONFIGS:
    presets = namespace(name)["PRESETS"]
    if name == "lm_melt_tune":  # Of an imported model; the zoo's is too small.
      continue
    if "gpu" in presets:
      marks = pytest.mark.manual if name in ALIKE else ()
      yield pytest.param(name, "gpu", marks=marks)
    if "paper" in presets:
      marks = pytest.mark.manual if "gpu" in presets else ()
      yield pytest.param(name, "paper", marks=marks)


# What no kernel sees, for the time that tracing takes.
FEW = {"num_loops": 2, "num_with_gradient": 1}
# Why presets take no kernels, whatever their precision.
NO_ATTENTION = "no effect with model.mixer='mlp'"
WITHOUT = {"sudoku_trm": NO_ATTENTION, "sudoku_eqr": NO_ATTENTION}
OF_FLOAT32 = "(16-bit|bfloat16) inputs"


@pytest.mark.parametrize("kernels", [
  pytest.param("gpu", marks=pytest.mark.long),
  pytest.param("tpu", marks=pytest.mark.manual),
])  # fmt: skip
@pytest.mark.parametrize(("name", "preset"), [*scales()])
def test_every_preset_has_kernels_or_a_line_that_says_why_not(
  monkeypatch, name, preset, kernels
):
  """In its own precision, or else in bfloat16; traced, not compiled."""
  monkeypatch.setattr(build, "check_kernels", lambda *_: None)

  def refusal(*changes):
    """The mistake that the user is told of; "" for none."""
    config = load_config(name, ",".join([preset, *changes]))
    for key, few in FEW.items():
      if key in config.model:
        config.model[key] = min(few, config.model[key])
    config.loop.kernels = kernels
    try:
      made = program.make_program(config_lib.resolve(config), jax.devices()[:1])
      program.check_step(made)
    except UserError as error:
      return str(error)
    return ""

  first = refusal()
  if name in WITHOUT:
    assert WITHOUT[name] in first
    return
  if first:
    assert kernels == "gpu"
    assert re.search(OF_FLOAT32, first)
    assert "\n" not in first
    assert not refusal("model.precision=bfloat16")


@pytest.mark.parametrize(("family", "settings"), [
  ("melt", {**MELT, "alpha": 0.5, "interpolation_steps": 4}),
  ("trm", {"mixer": "mlp"}),
])  # fmt: skip
def test_settings_without_a_kernel(family, settings):
  spec = TaskSpec(11, 8, tuple((i,) for i in range(8)), 1)
  config = MODELS[family].Config(**settings)
  with pytest.raises(UserError, match="loop.kernels"):
    examples.abstract(MODELS[family], config, spec, LoopOptions(kernels="tpu"))
