"""Parameters are cast once, before the loops that use them."""

import functools

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
from loopjax.loop import depth
from loopjax.models import MODELS
from loopjax.program import casts, gradients
from loopjax.types import Carried

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


@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_is_cast_before_loops_and_its_gradients_after(remat):
  draw = functools.partial(jax.random.normal, jax.random.key(0))
  params = {"scale": draw((3, 4)), "stack": draw((3, 4, 4))}
  args = params, draw((5, 4))
  function = jax.value_and_grad(functools.partial(loss, remat=remat))
  made = casts.once(function, *args)
  assert made.dtypes == (jnp.float32, jnp.bfloat16, jnp.float32)
  taken = zip(jax.tree.leaves(args), made.dtypes, strict=True)
  leaves = [x.astype(dtype) for x, dtype in taken]
  got = jax.jit(made.call)(*leaves)
  jax.tree.map(np.testing.assert_array_equal, got, jax.jit(function)(*args))
  assert got[1]["stack"].dtype == jnp.float32
  plain = jax.make_jaxpr(function)(*args).jaxpr
  rewritten = jax.make_jaxpr(made.call)(*leaves).jaxpr
  assert casts_in(plain, (4, 4)) and not casts_in(rewritten, (4, 4))
  # The backward pass takes the weights, and no copy that the forward pass made:
  # `jax.jit` removes what nothing uses.
  used = [True] * len(rewritten.outvars)
  pruned, _ = partial_eval.dce_jaxpr(rewritten, used)
  copies = returned_by_scans(pruned, (3, 4, 4), jnp.bfloat16)
  assert len(copies) == remat  # Gradients of a step that runs again.


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
  args = draw((4, 4)), draw((3, 4)), jnp.asarray(3)
  function = jax.value_and_grad(total)
  made = casts.once(function, *args)
  assert made.dtypes[0] == jnp.bfloat16
  leaves = [x.astype(dtype) for x, dtype in zip(args, made.dtypes, strict=True)]
  got, expected = jax.jit(made.call)(*leaves), jax.jit(function)(*args)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, expected
  )
  plain = jax.make_jaxpr(function)(*args).jaxpr
  rewritten = jax.make_jaxpr(made.call)(*leaves).jaxpr
  assert casts_in(plain, (4, 4)) and not casts_in(rewritten, (4, 4))


def test_what_is_also_read_as_it_is_stays():
  def both(w, v):
    return (w.astype(jnp.bfloat16) * 2).sum() + w.sum(), v[1].astype(
      jnp.bfloat16
    )

  w = jnp.arange(3.0)
  assert casts.once(both, w, w).dtypes == (jnp.float32, jnp.bfloat16)


def test_gradients_of_many_loops_add_up_in_float32():
  """In bfloat16 the sum of 1,000 ones would stop at 256."""

  def total(w):
    def loop(x, _):
      return x + w.astype(jnp.bfloat16).astype(jnp.float32), None

    return jax.lax.scan(loop, jnp.zeros(()), length=1000)[0]

  made = casts.once(jax.grad(total), jnp.ones(()))
  assert made.dtypes == (jnp.bfloat16,)
  assert made.call(jnp.ones((), jnp.bfloat16)) == 1000


@pytest.mark.parametrize("num_parts", [1, 2])
def test_examples_that_are_only_read_in_bfloat16_are_cast_too(num_parts):
  """Tokens of a registered task may be vectors in float32."""

  def loss(params, batch, frozen):
    x = batch["inputs"].astype(jnp.bfloat16)
    y = x * jnp.tanh(x @ params.astype(jnp.bfloat16))
    return (total := jnp.mean(y.astype(jnp.float32))), {"loss": total}

  batch = {"inputs": jnp.linspace(-2, 2, 12).reshape(4, 3)}
  batch["weights"] = jnp.ones((4, 1))
  arguments = loss, (jnp.ones((3, 3)), {}), batch, Carried(), (), num_parts
  plain, cast = (
    gradients.gradients(*arguments, gradients.Layout(casts=x))
    for x in (False, True)
  )
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, cast
  )


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
  """Loss, metrics and gradients, up to the order of float32 sums."""
  config = load_config(*SMOKE[name])
  overrides = {"model.precision": "bfloat16", "run.num_microbatches": 2}
  config_lib.override(config, {**overrides, "loop.remat": "full"})
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[:1])
  state = program.init(jax.random.key(0))
  (batch,) = train_batches(settings, 1)

  def loss_of(params, batch, key, step, teacher):
    del teacher
    model = nnx.merge(program.graphdef, params)
    return settings.family.loss(model, batch, key, step, None)

  @functools.partial(jax.jit, static_argnums=2)
  def of_batch(state, batch, casts):
    constants = state.key, state.step
    layout = gradients.Layout(casts=casts)
    return gradients.gradients(
      loss_of, (state.params, {}), batch, state.carried, constants, 2, layout
    )

  got, expected = (of_batch(state, batch, casts) for casts in (True, False))

  def assert_close(x, y):
    assert x.dtype == y.dtype
    x, y = (np.asarray(a, np.float64) for a in (x, y))
    # Sums of gradients in bfloat16 would differ by thousandths.
    assert np.linalg.norm(x - y) <= 2e-4 * np.linalg.norm(y)

  jax.tree.map(assert_close, got, expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_programs_that_compute_in_bfloat16_cast_once(precision):
  config = load_config(*SMOKE["looped"])
  config_lib.override(config, {"model.precision": precision})
  settings = config_lib.resolve(config)
  casts = program_lib.make_program(settings).uncompiled.keywords["layout"].casts
  assert casts == (precision == "bfloat16")
