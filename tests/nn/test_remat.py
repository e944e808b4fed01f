"""Stored and recomputed residuals."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tests_support import load_config

from loopjax import config as config_lib
from loopjax import program
from loopjax.nn import remat
from loopjax.types import LoopOptions


def test_auto_is_a_policy_by_platform_and_others_stay():
  auto = LoopOptions("unroll", "auto")
  assert remat.AUTO["cpu"] in remat.POLICIES
  assert remat.resolve(auto, "cpu") == LoopOptions("unroll", remat.AUTO["cpu"])
  assert remat.resolve(auto, "tpu") == LoopOptions("unroll", "dots")
  full = LoopOptions("scan", "full")
  assert remat.resolve(full, "cpu") == full


def test_programs_keep_what_suits_their_devices():
  settings = config_lib.resolve(load_config("sudoku_utm", "smoke"))
  assert settings.loop.remat == "auto"
  made = program.make_program(settings, jax.devices()[:1])
  assert made.settings.loop.remat == remat.AUTO["cpu"]
  graphdef, _ = program.abstract_model(made.settings)
  assert made.graphdef == graphdef


@pytest.mark.long
def test_policies_are_ordered_by_what_they_keep():
  def kept(policy):
    config = load_config("lm_looped", "smoke")
    config_lib.override(config, {"loop.remat": policy})
    settings = config_lib.resolve(config)
    graphdef, params = program.abstract_model(settings)
    batch = settings.task_module.abstract_batch(settings.task, 4)

    def backward(params, inputs):
      def outputs(params):
        model = nnx.merge(graphdef, params)
        return model(inputs, num_loops=3, kind="scan").hidden

      return jax.vjp(outputs, params)[1]

    shapes = jax.eval_shape(backward, params, batch["inputs"])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

  sizes = [kept(policy) for policy in remat.POLICIES]
  assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_barrier_keeps_compilers_from_undoing_it(prevent_cse):
  """CPUs drop the barrier, and then code outside loops is merged again.

  This therefore checks the compiler's input.
  """

  def value(x):
    again = remat.rematerialised(jnp.sin, "full", prevent_cse=prevent_cse)
    return jnp.sum(again(again(x)))

  text = jax.jit(jax.grad(value)).lower(jnp.ones(3)).as_text()
  assert ("optimization_barrier" in text) == prevent_cse
