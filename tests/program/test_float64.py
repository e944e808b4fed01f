"""The error of bfloat16: every family's loss and gradients against float64."""

import jax
import numpy as np
import pytest
from flax import nnx
from in_float64 import in_float64
from tests_support import SMOKE, by_size, crossing, load_config, train_batches

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.models import MODELS
from loopjax.program import gradients

# bfloat16 rounds by at most 2^-9 = 0.002; errors of a gradient add up over
# loops, layers and the backward pass.
OF_LOSS, OF_GRADIENTS, OF_PARAMETERS = 3e-3, 0.05, 0.06


def norm(tree):
  leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
  return np.sqrt(sum(np.sum(x**2) for x in leaves))


def both(name, precision):
  """Loss and gradients of a batch: in a precision, and in float64."""
  config = load_config(*SMOKE[name])
  overrides = {"model.precision": precision, "run.num_microbatches": 2}
  config_lib.override(config, overrides)
  settings = config_lib.resolve(config)
  program = program_lib.make_program(settings, jax.devices()[:1])
  state = program.init(jax.random.key(0))
  (batch,) = train_batches(settings, 1)

  def loss_of(params, batch, key, step, teacher):
    del teacher
    model = nnx.merge(program.graphdef, params)
    value, metrics = settings.family.loss(model, batch, key, step, None)
    return value, {"loss": value, **metrics}

  layout = gradients.Layout(casts=precision == "bfloat16")

  def run(params, batch, key, step, carried):
    metrics, _, grads = gradients.gradients(
      loss_of, (params, {}), batch, carried, (key, step), 2, layout
    )
    return metrics["loss"], grads

  args = state.params, batch, state.key, state.step, state.carried
  got = jax.device_get(jax.jit(run)(*args))
  with jax.enable_x64(True):
    expected = jax.device_get(jax.jit(in_float64(run))(*args))
  return got, expected


def differences(got, expected):
  """Relative to the norm of all; for each parameter, to its own norm."""
  apart = jax.tree.map(
    lambda x, y: np.asarray(x, np.float64) - y, got, expected
  )
  each = jax.tree.map(lambda x, y: norm(x) / (norm(y) + 1e-12), apart, expected)
  return norm(apart) / norm(expected), each


@pytest.mark.long
@crossing(
  "name",
  by_size(MODELS),
  manual=(
    "sleep",
    "recurrent",
    "hrm",
    "adaptive",
    "ponderlm",
    "plt",
    "loopformer",
    "transformer",
  ),  # fmt: skip
)
def test_bfloat16_is_float64_but_for_rounding(name):
  (loss, grads), (exact_loss, exact) = both(name, "bfloat16")
  assert abs(loss - exact_loss) <= OF_LOSS * abs(exact_loss)
  total, each = differences(grads, exact)
  assert 1e-5 < total < OF_GRADIENTS
  assert np.median(jax.tree.leaves(each)) < OF_PARAMETERS, each


@pytest.mark.long
def test_float32_is_closer_by_far():
  (loss, grads), (exact_loss, exact) = both("looped", "float32")
  assert abs(loss - exact_loss) <= 1e-6 * abs(exact_loss)
  assert differences(grads, exact)[0] < 1e-5
