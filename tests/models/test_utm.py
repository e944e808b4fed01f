"""UTM's identities."""

import dataclasses

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from tests_support import by_path, crossing

from loopjax.analysis.plots.maps import quadrants
from loopjax.models import utm
from loopjax.nn import attention, block, rope
from loopjax.types import LoopOptions, TaskSpec

SPEC = TaskSpec(
  6, 16, tuple((i // 4, i % 4, i // 8 * 2 + i % 4 // 2) for i in range(16))
)
SMALL = utm.Config(
  width=16, num_heads=2, num_loops=4, num_memory_tokens=3, router_bias=-1.0
)
KEY = jax.random.key(0)
BATCH = {
  "inputs": jax.random.randint(jax.random.key(1), (3, 16), 1, 6),
  "targets": jax.random.randint(jax.random.key(2), (3, 16), 2, 6),
  "weights": jnp.ones((3, 16)),
}


def make(config=SMALL):
  return examples.merged(utm, config, SPEC)


def positions_of(config):
  return rope.positions_after_memory(
    config.positions, config.num_memory_tokens, SPEC.coordinates
  )


def run(config=SMALL, **call):
  """The output; `call` as in `examples.run`."""
  return examples.run(utm, config, SPEC, BATCH["inputs"], **call)


def gradient_of(function, config=SMALL, options=LoopOptions()):
  """(value, gradient) of `function` of a model."""
  graphdef = examples.graph(utm, config, SPEC, options)

  def value(params):
    return function(nnx.merge(graphdef, params))

  run = jax.jit(jax.value_and_grad(value), compiler_options=examples.FAST)
  return run(examples.params_of(utm, config, SPEC))


def loss_of(model, step=0):
  return utm.loss(model, BATCH, KEY, jnp.asarray(step), None)[0]


def test_the_paper_has_3_177_612_parameters():
  spec = TaskSpec(11, 81, tuple((i,) for i in range(81)))
  model = examples.abstract(utm, utm.Config(), spec)
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


@crossing(
  ("halting", "norm"),
  [
    *(("act", norm) for norm in ("derf_utm", "derf", "rmsnorm", "layernorm")),
    ("ponder", "derf_utm"),
    ("fixed", "derf_utm"),
  ],
  manual=[("act", "derf"), ("act", "layernorm")],
)
def test_every_parameter_gets_a_gradient(halting, norm):
  # A fixed depth has no router to bias.
  bias = -3.0 if halting == "fixed" else -1.0
  config = dataclasses.replace(
    SMALL, halting=halting, norm=norm, router_bias=bias
  )
  _, grads = gradient_of(loss_of, config)
  zero = [name for name, g in by_path(grads).items() if not np.any(g != 0)]
  assert not zero


def test_the_ponder_term_alone_moves_the_router():
  _, grads = gradient_of(lambda model: model(BATCH["inputs"]).losses["ponder"])
  assert np.abs(grads["router"]["kernel"]).max() > 1e-4
  assert np.abs(grads["router"]["bias"]).max() > 1e-3


def test_the_ponder_weight_warms_up():
  config = dataclasses.replace(SMALL, ponder_weight=0.5, ponder_warmup_steps=10)

  def loss_at(config):
    return jax.jit(lambda step: loss_of(make(config), step))

  plain, warmed = loss_at(SMALL)(0), loss_at(config)
  ponder = run().losses["ponder"]
  for step, share in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
    np.testing.assert_allclose(
      warmed(step), plain + 0.5 * share * ponder, rtol=1e-5
    )


@pytest.mark.long
@crossing("freeze", ["pre", "post", "none"], manual=("post", "none"))
def test_loop_kinds_agree(freeze):
  config = dataclasses.replace(SMALL, freeze=freeze, router_bias=0.5)
  scan, unrolled, early = (
    run(config, kind=kind, trace=("weight",))
    for kind in ("scan", "unroll", "while")
  )
  np.testing.assert_allclose(scan.logits, unrolled.logits, atol=1e-5)
  np.testing.assert_allclose(scan.logits, early.logits, atol=1e-5)
  np.testing.assert_allclose(
    scan.trace["weight"], early.trace["weight"], atol=1e-6
  )
  scan_grads = gradient_of(loss_of, config)[1]
  unroll_grads = gradient_of(loss_of, config, LoopOptions("unroll"))[1]
  for name, grad in by_path(scan_grads).items():
    np.testing.assert_allclose(
      grad, by_path(unroll_grads)[name], atol=1e-5, err_msg=name
    )


def test_while_runs_only_until_every_token_has_stopped():
  early = run(
    dataclasses.replace(SMALL, router_bias=9.0), kind="while", num_loops=50
  )
  assert (early.stats["loops_run"] == 1).all()
  slow = dataclasses.replace(SMALL, router_bias=-9.0)
  full = run(slow, kind="while", num_loops=7)
  assert (full.stats["loops_run"] == 7).all()


def test_no_memory_tokens_is_a_model_without_memory():
  """T = 0 against the recursion written without any memory."""
  config = dataclasses.replace(SMALL, num_memory_tokens=0)
  model, inputs = make(config), BATCH["inputs"]
  names = set(nnx.to_pure_dict(nnx.state(model)))
  assert names.isdisjoint({"memory_tokens", "memory_type"})

  @jax.jit
  def by_hand(inputs):
    tables = rope.rope_tables(jnp.arange(16)[:, None], 8, SMALL.rope_base)
    hidden = model.token_embedding(inputs)
    hidden += model.cell_type.embedding[...][None]
    output, spent = jnp.zeros_like(hidden), jnp.zeros((3, 16))
    stopped = jnp.zeros((3, 16), bool)
    for k in range(4):
      step_vector = model.step_embedding.embedding[...][k][None, None]
      g, _ = model.block(hidden + step_vector, attention.Metadata(tables))
      p = jax.nn.sigmoid(model.router(g)[..., 0])
      stops = ~stopped & ((spent + p >= 0.95) | (k == 3))
      weight = jnp.where(stopped, 0.0, jnp.where(stops, 1.0 - spent, p))
      output = output + weight[..., None] * g
      stopped = stopped | stops
      hidden = jnp.where(stopped[..., None], hidden, g)
      spent = spent + p
    return model.head(output)

  actual = run(config)
  np.testing.assert_allclose(actual.logits, by_hand(inputs), atol=1e-5)
  assert "ponder_steps_memory" not in actual.stats


def test_memory_lies_in_memory_as_cells_do():
  """Otherwise XLA for GPUs gives the whole stream a copied row's layout."""
  program = jax.make_jaxpr(make()._embed)(BATCH["inputs"])
  (found,) = [x for x in program.eqns if "layout" in x.params]
  assert found.invars[0].aval.shape == (3, SMALL.num_memory_tokens, SMALL.width)
  assert found.params["layout"].major_to_minor == (0, 1, 2)


def test_memory_tokens_are_read():
  _, grads = gradient_of(
    lambda model: jnp.sum(model(BATCH["inputs"]).logits ** 2)
  )
  assert (np.abs(grads["memory_tokens"]).max(axis=1) > 1e-6).all()


def test_one_fixed_loop_is_one_block():
  config = dataclasses.replace(
    SMALL, halting="fixed", num_loops=1, router_bias=-3.0
  )
  model = make(config)

  @jax.jit
  def by_hand(inputs):
    positions = positions_of(config)
    tables = rope.rope_tables(positions, 8, config.rope_base)
    u = model._embed(inputs) + model._step_vector(jnp.asarray(0))
    return model.head(model.block(u, attention.Metadata(tables))[0][:, 3:])

  expected = by_hand(BATCH["inputs"])
  np.testing.assert_allclose(run(config).logits, expected, atol=1e-5)


@pytest.mark.parametrize("freeze", ["pre", "post", "none"])
def test_freeze_says_which_state_a_halted_token_keeps(freeze):
  """Every token stops at step 0 or 1; other tokens must see a difference."""
  config = dataclasses.replace(SMALL, freeze=freeze, router_bias=9.0)
  params = examples.params_of(utm, config, SPEC)
  steps = jax.tree.map(jnp.zeros_like, params["step_embedding"])
  params = {**params, "step_embedding": steps}
  output = run(config, params=params, trace=("hidden",))
  hidden = np.asarray(output.trace["hidden"])
  repeats = [np.allclose(hidden[k], hidden[k + 1], atol=1e-6) for k in range(3)]
  # pre: h stays the embedding, so every step computes the same g. post: h is
  # g_0 from step 1 on. none: h continues to change.
  expected = {
    "pre": [True, True, True],
    "post": [False, True, True],
    "none": [False, False, False],
  }
  assert repeats == expected[freeze]


def test_step_embedding_wraps_past_the_trained_depth():
  model = make()
  vector = model.step_embedding.embedding[...][1]
  assert jnp.array_equal(model._step_vector(jnp.asarray(5))[0, 0], vector)


@pytest.mark.parametrize("positions", ["overlap", "offset", "grid", "none"])
def test_positions(positions):
  config = dataclasses.replace(SMALL, positions=positions)
  table = np.asarray(positions_of(config))
  assert table.shape[0] == 19
  first_cell = {"overlap": [0], "offset": [3], "none": [0], "grid": [0, 0, 0]}
  assert table[3].tolist() == first_cell[positions]
  # Memory comes first, with increasing positions in every coordinate.
  places = np.arange(3) * (positions != "none")
  assert (table[:3] == places[:, None]).all()
  if positions == "grid":
    assert table[3 + 6].tolist() == [1, 2, 1]
  assert np.isfinite(run(config).logits).all()


def test_trace_is_what_the_model_did():
  config = dataclasses.replace(SMALL, router_bias=0.0)
  output, model = run(config, trace=utm.TRACES), make(config)
  trace = output.trace
  blend = jnp.einsum("rbs,rbsd->bsd", trace["weight"], trace["hidden"])
  np.testing.assert_allclose(model.head(blend[:, 3:]), output.logits, atol=1e-4)
  np.testing.assert_allclose(trace["attention"].sum(-1), 1.0, atol=1e-5)
  decoded = jnp.argmax(model.head(trace["hidden"][:, :, 3:]), -1)
  assert jnp.array_equal(decoded, trace["prediction"])


@pytest.mark.parametrize("kind", ["scan", "while"])
def test_attention_on_memory_is_that_of_the_maps(kind):
  """Over each row's own steps, whatever the loop and the other rows do."""
  config = dataclasses.replace(SMALL, router_bias=1.2, num_loops=6)
  names = ("attention", "attention_mass", "weight")
  output = run(config, kind=kind, trace=names)
  ran = np.any(np.asarray(output.trace["weight"]) > 0, axis=2)  # [K, B]
  assert ran.sum(axis=0).tolist() == [4, 3, 3]
  assert (output.stats["loops_run"] == (6 if kind == "scan" else 4)).all()
  mass = quadrants(np.asarray(output.trace["attention"]), 3)  # [K, B, H] each.
  for name, query in (("sequence", "sm"), ("memory", "mm")):
    actual = output.stats[f"attention_{name}_to_memory"]
    expected = mass[query].mean(axis=2).mean(axis=0, where=ran)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_attention_on_memory_is_said_only_if_there_is_any():
  config = dataclasses.replace(SMALL, num_memory_tokens=0)
  output = run(config, trace=("attention_mass",))
  assert not np.any(output.trace["attention_mass"])
  assert not [name for name in output.stats if "attention" in name]
  assert not [name for name in run().stats if "attention" in name]


def test_bfloat16_keeps_sums_in_float32():
  config = dataclasses.replace(SMALL, precision="bfloat16")
  output = run(config, trace=("hidden", "weight"))
  assert output.logits.dtype == jnp.float32
  assert output.trace["hidden"].dtype == jnp.float32
  np.testing.assert_allclose(output.trace["weight"].sum(0), 1.0, atol=1e-6)
  assert 0 < np.abs(output.logits - run().logits).max() < 0.2


def test_costs_by_hand():
  """Of 16 tokens and 3 of memory: the block, the router and the read-out."""
  found = utm.costs(SMALL, SPEC, 2)["flops_per_example"]
  loop = block.flops(SMALL.block_shape(), 19) + 2 * 19 * 16
  assert found == [2 * 16 * 16 * 6 + loop * n for n in (1, 2)]
