"""The looped family as Ouro: sizes, objectives, and the exit gate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from tests_support import array_sizes, load_config, strict_dtypes

from loopjax import config as config_lib
from loopjax import program
from loopjax.loop import exits
from loopjax.models import looped
from loopjax.optim import chain
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), num_padding_tokens=2)
OURO = looped.Config(
  width=2048, num_layers=24, num_heads=16, mlp="swiglu", mlp_ratio=2.75,
  norm_order="branch", num_loops=4, tied=False, exit_gate="joint",
  rope_base=1e6,
)  # fmt: skip
SMALL = dataclasses.replace(
  OURO, width=16, num_heads=4, num_key_value_heads=2, num_layers=2, num_loops=3,
  init_std=0.2,
)  # fmt: skip


def batch(spec=SPEC):
  inputs, targets = jax.random.randint(jax.random.key(1), (2, 3, 8), 0, 21)
  weights = (jnp.arange(8) >= 3).astype(jnp.float32)
  weights = jnp.broadcast_to(weights[None], inputs.shape)
  return {"inputs": inputs, "targets": targets, "weights": weights}


def loss_of(config, params):
  model = examples.merged(looped, config, SPEC, params)
  step = jnp.zeros((), jnp.int32)
  return looped.loss(model, batch(), jax.random.key(0), step, None)


@functools.cache
@strict_dtypes()
def value_and_grad(config):
  """(loss, metrics, gradients) at the model's parameters."""
  run = jax.value_and_grad(functools.partial(loss_of, config), has_aux=True)
  params = examples.params_of(looped, config, SPEC)
  (value, metrics), grads = jax.jit(run, compiler_options=examples.FAST)(params)
  return value, metrics, grads


@pytest.mark.parametrize(
  ("layers", "parameters"), [(24, 1_434_652_673), (48, 2_667_974_657)]
)
def test_parameters_of_the_published_models(layers, parameters):
  spec = dataclasses.replace(SPEC, vocab_size=49_152)
  config = dataclasses.replace(OURO, num_layers=layers)
  assert examples.count(looped, config, spec) == parameters


def test_the_cache_of_the_published_model():
  """Table 2 of MELT (arXiv 2605.07721): 0.786432 MB a token."""
  config = dataclasses.replace(OURO, precision="bfloat16")
  model = examples.abstract(looped, config, SPEC)
  cache = jax.eval_shape(lambda: looped.FAMILY.reading.empty_cache(model, 1, 1))
  sizes = [x.size * x.dtype.itemsize for x in (cache.key, cache.value)]
  assert sum(sizes) == 786_432


def plain(params):
  """Losses [K, B, T] and gate logits, with an array of all logits."""
  data, model = batch(), examples.merged(looped, SMALL, SPEC, params)
  hidden = model(data["inputs"], trace=("hidden",)).trace["hidden"]
  logits = hidden @ params["head"]["kernel"]
  logits = logits.at[..., 21:].set(-1e9)
  picked = jax.nn.one_hot(data["targets"], 23)[None]
  losses = -jnp.sum(jax.nn.log_softmax(logits) * picked, axis=-1)
  gate = params["exit_gate"]
  return losses, hidden @ gate["kernel"][:, 0] + gate["bias"][0], logits


@pytest.mark.long
def test_the_first_stage_is_the_expected_loss_and_its_gradient():
  def objective(params):
    losses, gate, _ = plain(params)
    leave = jax.nn.sigmoid(gate)
    stay = 1 - leave
    chance = jnp.stack([leave[0], stay[0] * leave[1], stay[0] * stay[1]])
    value = jnp.sum(chance * losses + 0.05 * chance * jnp.log(chance), axis=0)
    weights = batch()["weights"]
    return jnp.sum(value * weights) / jnp.sum(weights)

  params = examples.params_of(looped, SMALL, SPEC)
  expected, slopes = jax.jit(
    jax.value_and_grad(objective), compiler_options=examples.FAST
  )(params)
  value, _, grads = value_and_grad(SMALL)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-3),
    grads,
    slopes,
  )
  assert all(jnp.any(x != 0) for x in jax.tree.leaves(grads))


def test_the_loss_is_no_loss_of_mixed_logits():
  """What published code returns for labels, and that of the last loop."""
  params = examples.params_of(looped, SMALL, SPEC)
  losses, gate, logits = plain(params)
  chance = jnp.exp(exits.log_distribution(gate))
  mixed = jnp.sum(chance[..., None] * logits, axis=0)
  picked = jax.nn.one_hot(batch()["targets"], 23)
  mixture = -jnp.sum(jax.nn.log_softmax(mixed) * picked, axis=-1)
  weights = batch()["weights"]
  mean = lambda x: jnp.sum(x * weights) / jnp.sum(weights)  # noqa: E731
  found = value_and_grad(SMALL)[1]["cross_entropy"]
  np.testing.assert_allclose(
    found, mean(jnp.sum(chance * losses, axis=0)), rtol=1e-5
  )
  for other in (mixture, losses[-1]):
    assert abs(float(found - mean(other))) > 1e-3


def test_the_second_stage_trains_the_gate_alone():
  config = dataclasses.replace(SMALL, exit_gate="alone")
  value, metrics, grads = value_and_grad(config)
  losses, gate, _ = plain(examples.params_of(looped, config, SPEC))
  better = jnp.maximum(losses[:-1] - losses[1:], 0)
  go_on = jax.nn.sigmoid(50 * (better - 0.005))
  leave = jax.nn.sigmoid(gate[1:])
  each = -go_on * jnp.log(1 - leave) - (1 - go_on) * jnp.log(leave)
  weights = batch()["weights"]
  expected = jnp.sum(each.mean(axis=0) * weights) / jnp.sum(weights)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  gate_grads = grads.pop("exit_gate")
  assert all(jnp.any(x != 0) for x in jax.tree.leaves(gate_grads))
  assert not any(jnp.any(x != 0) for x in jax.tree.leaves(grads))
  assert metrics["loop_loss"].shape == (3,)


def test_a_gate_that_is_not_trained_leaves_the_loss_of_the_last_loop():
  config = dataclasses.replace(SMALL, exit_gate="unused")
  value, _, grads = value_and_grad(config)
  losses, _, _ = plain(examples.params_of(looped, config, SPEC))
  weights = batch()["weights"]
  expected = jnp.sum(losses[-1] * weights) / jnp.sum(weights)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  assert not any(jnp.any(x != 0) for x in jax.tree.leaves(grads["exit_gate"]))


@pytest.mark.parametrize(("gate", "others", "pattern"), [
  ("unused", "", "^exit_gate/"),
  ("alone", "", "^(?!exit_gate/)"),
  ("unused", "norm/", "norm/|^exit_gate/"),
  ("joint", "norm/", "norm/"),
  ("joint", "", ""),
])  # fmt: skip
def test_what_the_loss_leaves_out_is_frozen(gate, others, pattern):
  """Weight decay would change it."""
  arg = f"smoke,model.exit_gate={gate},optim.frozen={others}"
  settings = config_lib.resolve(load_config("lm_looped", arg))
  assert settings.optim.frozen == pattern
  if pattern:
    shapes = program.abstract_model(settings)[1]
    mask = chain.frozen_mask(shapes, settings.optim.frozen)
    found = mask["exit_gate"]["kernel"], mask["token_embedding"]["embedding"]
    assert found == (gate == "unused", gate == "alone")


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_the_gate_reads_the_normed_state_in_float32(loop_norm):
  """Also where matrices are multiplied in bfloat16."""
  config = dataclasses.replace(SMALL, precision="bfloat16", loop_norm=loop_norm)
  params = examples.params_of(looped, config, SPEC)
  model = examples.merged(looped, config, SPEC, params)
  hidden = jax.random.normal(jax.random.key(3), (3, 2, 8, 16)) * 5
  state = np.asarray(hidden, np.float64)
  if loop_norm == "final_only":
    state = state / np.sqrt(np.mean(state**2, axis=-1, keepdims=True) + 1e-6)
  weight = np.asarray(params["exit_gate"]["kernel"], np.float64)
  found = model.exit_logits(hidden)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, (state @ weight)[..., 0], atol=1e-5)


@pytest.mark.long
def test_a_sure_gate_in_bfloat16_still_learns():
  """At a logit of 8 its chance to go on is 3.4e-4, and 0 in bfloat16."""
  config = dataclasses.replace(SMALL, precision="bfloat16")
  params = examples.params_of(looped, config, SPEC)
  gate = params["exit_gate"]
  params["exit_gate"] = {
    "kernel": 0 * gate["kernel"], "bias": gate["bias"] + 8.0
  }  # fmt: skip
  run = jax.value_and_grad(functools.partial(loss_of, config), has_aux=True)
  (_, metrics), grads = jax.jit(run, compiler_options=examples.FAST)(params)
  stay = 1 / (1 + np.exp(8.0))
  expected = [1 - stay, stay * (1 - stay), stay**2]
  np.testing.assert_allclose(metrics["exit_chance"], expected, rtol=1e-4)
  assert jnp.all(grads["exit_gate"]["bias"] != 0)


def test_no_loop_makes_an_array_of_tokens_by_vocabulary():
  """Of 24 tokens by 8,192 ids, after any of the loops."""
  spec = dataclasses.replace(SPEC, vocab_size=8192)
  graphdef, params = nnx.split(examples.abstract(looped, SMALL, spec))

  def loss(params):
    model, step = nnx.merge(graphdef, params), jnp.zeros((), jnp.int32)
    return looped.loss(model, batch(), jax.random.key(0), step, None)[0]

  compiled = jax.jit(jax.grad(loss)).lower(params).compile(examples.FAST)
  assert max(array_sizes(compiled.as_text())) < 24 * 8192


def test_training_costs_all_read_outs():
  spec = dataclasses.replace(SPEC, vocab_size=1000)
  forward = looped.costs(SMALL, spec, 3)["flops_per_example"]
  stack = forward[1] - forward[0]
  head = forward[0] - stack
  cost = "training_flops_per_example"
  for kind, passes in (("joint", 3), ("alone", 1)):
    config = dataclasses.replace(
      SMALL, exit_gate=kind, entropy_weight=looped.Config().entropy_weight
    )
    assert looped.costs(config, spec, 3)[cost] == passes * 3 * (stack + head)
  assert cost not in looped.costs(looped.Config(), spec, 2)
