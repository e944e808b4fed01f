"""Parameters are cast once, before the loops that use them."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from jax.interpreters import partial_eval
from tests_support import SMOKE, by_size, crossing, load_config, train_batches

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.loop import depth
from loopjax.models import MODELS
from loopjax.nn import twin
from loopjax.program import build, gradients

FAMILIES = by_size(MODELS)


def casts_in(jaxpr, shape, inside=False):
  """Casts to bfloat16 of float32 arrays [..., *shape] within loops."""
  found = []
  for eqn in jaxpr.eqns:
    x = eqn.invars[0].aval if eqn.invars else None
    is_cast = eqn.primitive.name == "convert_element_type" and inside
    if is_cast and x.dtype == jnp.float32 and x.shape[-len(shape) :] == shape:
      found += [eqn] if eqn.outvars[0].aval.dtype == jnp.bfloat16 else []
    for inner in core.jaxprs_in_params(eqn.params):
      loop = eqn.primitive.name in ("scan", "while")
      found += casts_in(inner, shape, inside or loop)
  return found


def returned_by_scans(jaxpr, shape, dtype):
  """Results of scans with this shape and dtype."""
  found = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "scan":
      avals = [x.aval for x in eqn.outvars]
      found += [x for x in avals if (x.shape, x.dtype) == (shape, dtype)]
    for inner in core.jaxprs_in_params(eqn.params):
      found += returned_by_scans(inner, shape, dtype)
  return found


def loss(params, x, remat):
  """Two loops over three layers, whose weights are used in bfloat16."""

  def layer(x, of_layer):
    weights, scale = of_layer
    y = jnp.dot(x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16))
    return jnp.tanh(y.astype(jnp.float32)) * scale[None], None

  step = jax.checkpoint(layer) if remat else layer

  def loop(x, _):
    return jax.lax.scan(step, x, (params["stack"], params["scale"]))[0], None

  return jax.lax.scan(loop, x, length=2)[0].sum()


def compared(function, weights, *args):
  """Gradients by `weights` that are twins and as they are; both programs."""

  def of_twins(weights, *args):
    rounded = weights.astype(jnp.bfloat16)

    def total(weights):
      return function(twin.joined(weights, rounded), *args)

    return jax.value_and_grad(total)(weights)

  plain = jax.value_and_grad(function)
  got, expected = (jax.jit(f)(weights, *args) for f in (of_twins, plain))
  jax.tree.map(np.testing.assert_array_equal, got, expected)
  assert got[1].dtype == jnp.float32
  return [jax.make_jaxpr(f)(weights, *args).jaxpr for f in (of_twins, plain)]


@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_is_cast_before_loops(remat):
  draw = functools.partial(jax.random.normal, jax.random.key(0))
  scale, x = draw((3, 4)), draw((5, 4))

  def total(stack, x):
    return loss({"scale": scale, "stack": stack}, x, remat)

  once, plain = compared(total, draw((3, 4, 4)), x)
  assert casts_in(plain, (4, 4)) and not casts_in(once, (4, 4))
  # The backward pass takes the weights, and no copy that the forward pass made:
  # `jax.jit` removes what nothing uses.
  pruned, _ = partial_eval.dce_jaxpr(once, [True] * len(once.outvars))
  assert not returned_by_scans(pruned, (3, 4, 4), jnp.bfloat16)


@pytest.mark.parametrize("run", [
  functools.partial(depth.run, num_with_gradient=5),
  functools.partial(depth.run_all, max_loops=5, remat=False),
  functools.partial(depth.run_all, max_loops=5, remat=True),
], ids=["last", "all", "remat"])  # fmt: skip
def test_loops_whose_number_is_drawn_cast_nothing(run):
  """Nor do parameters under a condition, one branch of which is unused."""

  def step(weights, x, k):
    y = jnp.dot(x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16))
    return jnp.tanh(y.astype(jnp.float32))

  def total(weights, x, depth):
    return jnp.sum(run(step, weights, x, depth))

  draw = functools.partial(jax.random.normal, jax.random.key(0))
  once, plain = compared(total, draw((4, 4)), draw((3, 4)), jnp.asarray(3))
  assert casts_in(plain, (4, 4)) and not casts_in(once, (4, 4))


def test_gradients_of_many_loops_add_up_in_float32():
  """In bfloat16 the sum of 1,000 ones would stop at 256."""

  def total(w):
    def loop(x, _):
      return x + w.astype(jnp.bfloat16).astype(jnp.float32), None

    return jax.lax.scan(loop, jnp.zeros(()), length=1000)[0]

  rounded = jnp.ones((), jnp.bfloat16)
  gradient = jax.grad(lambda w: total(twin.joined(w, rounded)))(jnp.ones(()))
  assert gradient == 1000


def test_what_a_model_of_others_does_with_a_parameter_still_works():
  """Only `astype` reads the rounded one; all else is of the float32 array."""
  wide = jnp.asarray([[1.0, 2.0], [1 + 2**-12, 4.0]])
  both = twin.joined(wide, wide.astype(jnp.bfloat16))
  assert both.astype(jnp.bfloat16)[1, 0] == 1
  assert both.T.astype(jnp.bfloat16)[0, 1] == 1
  x = jnp.ones((2, 2))
  for got, expected in (
    (both[1], wide[1]), (both[...].astype(jnp.float32), wide),
    (x @ both, x @ wide), (both @ x, wide @ x), (1 - both, 1 - wide),
    (both * x, wide * x), (jnp.exp(both), jnp.exp(wide)),
    (both.reshape(-1), wide.reshape(-1)), (len(both), 2),
  ):  # fmt: skip
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_has_every_operator_of_an_array(compiled):
  def results(x, wide):
    other = np.full((2, 2), 2.0, np.float32)
    return [
      -x, +x, abs(x), round(x), [*x], x == x, x != wide, divmod(x, 2),
      divmod(other, x),
      [
        operation(*pair)
        for operation in (
          operator.add, operator.sub, operator.mul, operator.truediv,
          operator.floordiv, operator.mod, operator.pow, operator.matmul,
          operator.eq, operator.lt, operator.le, operator.gt, operator.ge,
        )
        for pair in ((x, x), (x, wide), (wide, x), (x, other), (other, x))
      ],
    ]  # fmt: skip

  def of_twin(wide):
    return results(twin.joined(wide, wide.astype(jnp.bfloat16)), wide)

  wide = jnp.arange(1.0, 5.0).reshape(2, 2)
  got = (jax.jit(of_twin) if compiled else of_twin)(wide)
  jax.tree.map(np.testing.assert_array_equal, got, results(wide, wide))
  with pytest.raises(TypeError, match="float32"):
    twin.joined(wide, wide.astype(jnp.bfloat16)) & 1


@pytest.mark.long
@crossing(
  "name",
  FAMILIES,
  # Long to compile, or like looped; golden numbers are of all families.
  manual=(
    "sleep",
    "adaptive",
    "melt",
    "recurrent",
    "hrm",
    "urm",
    "trm",
    "plt",
    "disco",
    "ponderlm",
    "transformer",
    "loopformer",
  ),
)
def test_families_compute_the_same(name):
  """Loss, metrics and gradients of parameters that are cast at every use."""
  config = load_config(*SMOKE[name])
  overrides = {"model.precision": "bfloat16", "run.num_microbatches": 2}
  config_lib.override(config, {**overrides, "loop.remat": "full"})
  assert_same(config_lib.resolve(config), 1)


@pytest.mark.long
def test_split_parameters_are_gathered_in_both_dtypes():
  config = load_config(*SMOKE["looped"])
  sizes = {"mesh.fsdp": 4, "mesh.min_split_size": 200}
  config_lib.override(config, {**sizes, "model.precision": "bfloat16"})
  assert_same(config_lib.resolve(config), 4)


def assert_same(settings, num_devices):
  """Bit by bit, with parameters cast once and at every use."""
  program = program_lib.make_program(settings, jax.devices()[:num_devices])
  state = program.init(jax.random.key(0))
  (batch,) = train_batches(settings, 1)
  batch = sharding.put_batch(program.mesh, batch, len(batch["weights"]))
  layout = program.uncompiled.keywords["layout"]
  assert layout.casts

  def loss_of(params, batch, key, step, frozen):
    del frozen
    model = nnx.merge(program.graphdef, params)
    return settings.family.loss(model, batch, key, step, None)

  def of_batch(state, batch, casts):
    return gradients.gradients(
      loss_of,
      (state.params, ({}, {})),
      batch,
      state.carried,
      (state.key, state.step),
      settings.run.num_microbatches,
      layout._replace(casts=casts),
    )

  got, expected = (
    jax.jit(build.on_mesh(program.mesh, functools.partial(of_batch, casts=x)))(
      state, batch
    )
    for x in (True, False)
  )
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_programs_that_compute_in_bfloat16_cast_once(precision):
  config = load_config(*SMOKE["looped"])
  config_lib.override(config, {"model.precision": precision})
  settings = config_lib.resolve(config)
  casts = program_lib.make_program(settings).uncompiled.keywords["layout"].casts
  assert casts == (precision == "bfloat16")
