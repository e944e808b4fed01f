"""UTM's identities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from loopjax.errors import UserError
from loopjax.models import utm
from loopjax.nn import rope
from loopjax.types import LoopOptions, TaskSpec

SPEC = TaskSpec(
  6, 16, tuple((i // 4, i % 4, i // 8 * 2 + i % 4 // 2) for i in range(16))
)
SMALL = utm.Config(
  width=16, num_heads=2, num_loops=4, num_memory_tokens=3, router_bias=-1.0
)
KEY = jax.random.key(0)


def make(config=SMALL, options=LoopOptions(), spec=SPEC, seed=0):
  return utm.Model(config, spec, options, rngs=nnx.Rngs(params=seed))


def batch(size=3):
  tokens = jax.random.randint(jax.random.key(1), (size, 16), 1, 6)
  targets = jax.random.randint(jax.random.key(2), (size, 16), 2, 6)
  return {
    "inputs": tokens,
    "targets": targets,
    "weights": jnp.ones((size, 16)),
  }


def value_and_grad(config, options=LoopOptions(), step=0):
  graphdef, params = nnx.split(make(config, options))

  def loss(params):
    model = nnx.merge(graphdef, params)
    return utm.loss(model, batch(), KEY, jnp.asarray(step), {})[0]

  value, grads = jax.value_and_grad(loss)(nnx.to_pure_dict(params))
  return value, grads


def leaves(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_the_paper_has_3_177_612_parameters():
  spec = TaskSpec(11, 81, tuple((i,) for i in range(81)))
  model = nnx.eval_shape(lambda: make(utm.Config(), spec=spec))
  sizes = {
    name: sum(leaf.size for leaf in jax.tree.leaves(part))
    for name, part in nnx.to_pure_dict(nnx.state(model)).items()
  }
  assert sizes.pop("cell_type") + sizes.pop("memory_type") == 1_024
  assert sizes == {
    "block": 3_147_392,
    "token_embedding": 5_632,
    "step_embedding": 9_216,
    "memory_tokens": 8_192,
    "router": 513,
    "head": 5_643,
  }


@pytest.mark.parametrize("halting", ["act", "ponder", "fixed"])
@pytest.mark.parametrize("norm", ["derf_utm", "derf", "rmsnorm", "layernorm"])
def test_every_parameter_gets_a_gradient(halting, norm):
  # A fixed depth has no router to bias.
  bias = -3.0 if halting == "fixed" else -1.0
  config = dataclasses.replace(
    SMALL, halting=halting, norm=norm, router_bias=bias
  )
  _, grads = value_and_grad(config)
  zero = [name for name, g in leaves(grads).items() if not jnp.any(g != 0)]
  assert not zero


def test_the_ponder_term_alone_moves_the_router():
  graphdef, params = nnx.split(make())

  def ponder(params):
    return nnx.merge(graphdef, params)(batch()["inputs"]).losses["ponder"]

  grads = jax.grad(ponder)(nnx.to_pure_dict(params))
  assert jnp.abs(grads["router"]["kernel"]).max() > 1e-4
  assert jnp.abs(grads["router"]["bias"]).max() > 1e-3


def test_the_ponder_weight_warms_up():
  config = dataclasses.replace(SMALL, ponder_weight=0.5, ponder_warmup_steps=10)
  plain, _ = value_and_grad(SMALL)
  ponder = make()(batch()["inputs"]).losses["ponder"]
  for step, share in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
    value, _ = value_and_grad(config, step=step)
    np.testing.assert_allclose(value, plain + 0.5 * share * ponder, rtol=1e-5)


@pytest.mark.parametrize("freeze", ["pre", "post", "none"])
def test_loop_kinds_agree(freeze):
  config = dataclasses.replace(SMALL, freeze=freeze, router_bias=0.5)
  model = make(config)
  scan, unrolled, early = (
    model(batch()["inputs"], kind=kind, trace=("weight",))
    for kind in ("scan", "unroll", "while")
  )
  np.testing.assert_allclose(scan.logits, unrolled.logits, atol=1e-5)
  np.testing.assert_allclose(scan.logits, early.logits, atol=1e-5)
  np.testing.assert_allclose(
    scan.trace["weight"], early.trace["weight"], atol=1e-6
  )
  scan_grads = value_and_grad(config)[1]
  unroll_grads = value_and_grad(config, LoopOptions("unroll"))[1]
  for name, grad in leaves(scan_grads).items():
    np.testing.assert_allclose(
      grad, leaves(unroll_grads)[name], atol=1e-5, err_msg=name
    )


def test_while_runs_only_until_every_token_has_stopped():
  model = make(dataclasses.replace(SMALL, router_bias=9.0))
  early = model(batch()["inputs"], kind="while", num_loops=50)
  assert (early.stats["loops_run"] == 1).all()
  slow = make(dataclasses.replace(SMALL, router_bias=-9.0))
  full = slow(batch()["inputs"], kind="while", num_loops=7)
  assert (full.stats["loops_run"] == 7).all()


def test_no_memory_tokens_is_a_model_without_memory():
  """T=0 against the recursion written out without any memory."""
  model = make(dataclasses.replace(SMALL, num_memory_tokens=0))
  names = set(nnx.to_pure_dict(nnx.state(model)))
  assert names.isdisjoint({"memory_tokens", "memory_type"})
  inputs = batch()["inputs"]
  tables = rope.rope_tables(jnp.arange(16)[:, None], 8, SMALL.rope_base)
  hidden = model.token_embedding(inputs) + model.cell_type.embedding[...][None]
  output, spent = jnp.zeros_like(hidden), jnp.zeros((3, 16))
  stopped = jnp.zeros((3, 16), bool)
  for k in range(4):
    step_vector = model.step_embedding.embedding[...][k][None, None]
    g = model.block(hidden + step_vector, tables)
    p = jax.nn.sigmoid(model.router(g)[..., 0])
    stops = ~stopped & ((spent + p >= 0.95) | (k == 3))
    weight = jnp.where(stopped, 0.0, jnp.where(stops, 1.0 - spent, p))
    output = output + weight[..., None] * g
    stopped = stopped | stops
    hidden = jnp.where(stopped[..., None], hidden, g)
    spent = spent + p
  actual = model(inputs)
  np.testing.assert_allclose(actual.logits, model.head(output), atol=1e-5)
  assert "halting_steps_memory" not in actual.stats


def test_memory_tokens_are_read():
  graphdef, params = nnx.split(make())

  def logits(memory):
    pure = {**nnx.to_pure_dict(params), "memory_tokens": memory}
    return jnp.sum(nnx.merge(graphdef, pure)(batch()["inputs"]).logits ** 2)

  grad = jax.grad(logits)(nnx.to_pure_dict(params)["memory_tokens"])
  assert (jnp.abs(grad).max(axis=1) > 1e-6).all()


def test_one_fixed_loop_is_one_block():
  config = dataclasses.replace(
    SMALL, halting="fixed", num_loops=1, router_bias=-3.0
  )
  model = make(config)
  inputs = batch()["inputs"]
  tables = rope.rope_tables(model._positions(), 8, config.rope_base)
  u = model._embed(inputs) + model._step_vector(jnp.asarray(0))
  expected = model.head(model.block(u, tables)[:, 3:])
  np.testing.assert_allclose(model(inputs).logits, expected, atol=1e-5)


@pytest.mark.parametrize("freeze", ["pre", "post", "none"])
def test_freeze_says_which_state_a_halted_token_keeps(freeze):
  """Every token stops at step 0 or 1; what others see of it must differ."""
  config = dataclasses.replace(
    SMALL, freeze=freeze, router_bias=9.0, step_embedding="none"
  )
  model = make(config)
  hidden = model(batch()["inputs"], trace=("hidden",)).trace["hidden"]
  repeats = [
    jnp.allclose(hidden[k], hidden[k + 1], atol=1e-6) for k in range(3)
  ]
  # pre: h stays the embedding, so every step computes the same g. post: h is
  # g_0 from step 1 on. none: h keeps changing.
  expected = {
    "pre": [True, True, True],
    "post": [False, True, True],
    "none": [False, False, False],
  }
  assert repeats == expected[freeze]


def test_step_embedding_wraps_or_clamps_past_the_trained_depth():
  wrap = make()
  clamp = make(dataclasses.replace(SMALL, step_embedding="clamp"))
  table = wrap.step_embedding.embedding[...]
  assert jnp.array_equal(
    wrap._step_vector(jnp.asarray(5)), table[1][None, None]
  )
  assert jnp.array_equal(
    clamp._step_vector(jnp.asarray(5)), table[3][None, None]
  )


@pytest.mark.parametrize("positions", ["overlap", "offset", "grid", "none"])
def test_positions(positions):
  model = make(dataclasses.replace(SMALL, positions=positions))
  table = np.asarray(model._positions())
  assert table.shape[0] == 19
  first_cell = {"overlap": [0], "offset": [3], "none": [0], "grid": [0, 0, 0]}
  assert table[3].tolist() == first_cell[positions]
  # Memory stands in a row in front, along every coordinate.
  places = np.arange(3) * (positions != "none")
  assert (table[:3] == places[:, None]).all()
  if positions == "grid":
    assert table[3 + 6].tolist() == [1, 2, 1]
  rotated = model(batch()["inputs"]).logits
  assert jnp.isfinite(rotated).all()


def test_trace_is_what_the_model_did():
  model = make(dataclasses.replace(SMALL, router_bias=0.0))
  output = model(batch()["inputs"], trace=utm.TRACES)
  trace = output.trace
  blend = jnp.einsum("rbs,rbsd->bsd", trace["weight"], trace["hidden"])
  np.testing.assert_allclose(model.head(blend[:, 3:]), output.logits, atol=1e-4)
  np.testing.assert_allclose(trace["attention"].sum(-1), 1.0, atol=1e-5)
  decoded = jnp.argmax(model.head(trace["hidden"][:, :, 3:]), -1)
  assert jnp.array_equal(decoded, trace["prediction"])


def test_bfloat16_keeps_sums_in_float32():
  model = make(dataclasses.replace(SMALL, precision="bfloat16"))
  output = model(batch()["inputs"], trace=("hidden", "weight"))
  assert output.logits.dtype == jnp.float32
  assert output.trace["hidden"].dtype == jnp.float32
  np.testing.assert_allclose(output.trace["weight"].sum(0), 1.0, atol=1e-6)
  exact = make()(batch()["inputs"]).logits
  assert 0 < jnp.abs(output.logits - exact).max() < 0.2


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_memory_tokens": -1}, "num_memory_tokens=-1"),
    ({"num_loops": 0}, "num_loops=0"),
    ({"epsilon": 0.0}, "epsilon=0.0"),
    ({"epsilon": 1.0}, "epsilon=1.0"),
    ({"norm": "batchnorm"}, "norm='batchnorm'"),
    ({"width": 20, "num_heads": 8}, "multiple"),
    ({"ponder_warmup_steps": 5}, "ponder_warmup_steps has no effect"),
    ({"ponder_over": "cells"}, "ponder_over has no effect"),
    ({"positions": "none", "rope_base": 7.0}, "rope_base has no effect"),
    ({"num_memory_tokens": 0, "memory_init_std": 1.0}, "memory_init_std has"),
    ({"width": None}, "width=None is no int"),
    ({"halting": "fixed", "router_bias": 0.0}, "router_bias has no effect"),
    ({"halting": "fixed", "ponder_weight": 0.1}, "ponder_weight has no effect"),
    ({"halting": "ponder", "epsilon": 0.1}, "epsilon has no effect"),
  ],
)
def test_impossible_configs_are_named(changes, message):
  with pytest.raises(UserError, match=message) as caught:
    utm.Config(**changes)
  assert "\n" not in str(caught.value)


def test_costs_count_the_matrix_products():
  """Against XLA's own count of an unrolled forward pass."""
  config = dataclasses.replace(SMALL, width=64, num_heads=4)
  model = make(config, LoopOptions("unroll"))
  graphdef, params = nnx.split(model)

  def forward(params, inputs):
    return nnx.merge(graphdef, params)(inputs).logits

  inputs = batch(1)["inputs"]
  compiled = jax.jit(forward).lower(params, inputs).compile()
  counted = compiled.cost_analysis()["flops"]
  ours = utm.costs(config, SPEC, 4)["flops_per_example"]
  assert len(ours) == 4
  assert 0.75 * counted < ours[-1] < 1.05 * counted
