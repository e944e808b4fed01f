"""Adaptive loops and memory: the paper's identities, and a NumPy oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from numpy_layers import (
  attention,
  gelu_mlp,
  in_float64,
  layer_of,
  rms_normed,
  sigmoid,
  softmax,
)
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.models import adaptive, transformer
from loopjax.optim import parameters
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), num_padding_tokens=2)
SMALL = adaptive.Config(
  width=16, num_heads=2, num_layers=2, num_loops=3, num_local_slots=6,
  num_global_slots=4, init_std=0.3, loop_scale=-1.0,
)  # fmt: skip
NO_MEMORY = dataclasses.replace(SMALL, num_local_slots=0, num_global_slots=0)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
PAPER = adaptive.Config()  # With memory.
LOOP = dataclasses.replace(PAPER, num_local_slots=0, num_global_slots=0)
# The control with three times the layers: one iteration is the plain block.
ISO_FLOP = dataclasses.replace(
  LOOP, num_layers=36, num_loops=1, loop_update="delta", scale_from_step=2
)


def run(config=SMALL, params=None, **call):
  return examples.run(adaptive, config, SPEC, TOKENS, params, **call)


def drawn(config=SMALL, seed=7, scale=1.0):
  """Non-zero parameters: routers and gates depend on the token."""
  params = examples.params_of(adaptive, config, SPEC)
  noise = np.random.default_rng(seed)

  def shaken(path, leaf):
    if not {"router", "gate"} & {getattr(key, "key", None) for key in path}:
      return leaf
    return leaf + jnp.asarray(noise.normal(0, scale, leaf.shape), leaf.dtype)

  return jax.tree_util.tree_map_with_path(shaken, params)


def spec_of(vocab, tokens=1024):
  return TaskSpec(vocab, tokens, tuple((i,) for i in range(tokens)))


@pytest.mark.parametrize(
  ("config", "norms", "routers", "millions"),
  [
    (LOOP, 12 * 3 + 1, 12 * (769 + 1 + 3), 162.2),
    # Projections of queries and keys have no bias.
    (PAPER, 12 * 5 + 1, 12 * (769 + 1 + 3), 210.2),
    (ISO_FLOP, 36 * 2 + 1, 0, 332.1),
  ],
)
def test_parameters_of_the_paper(config, norms, routers, millions):
  """Table 2, where "200M" is 162.2; norms, routers and scales come on top."""
  count = examples.count(adaptive, config, spec_of(50_304))
  assert round((count - norms * 2 * 768 - routers) / 1e6, 1) == millions
  blocks = 12 * config.num_layers * 768**2
  banks = 2 * 768 * (12 * config.num_local_slots + config.num_global_slots)
  reads = 12 * 2 * (2 * 768**2 + 768) if banks else 0
  tables = 2 * 50_304 * 768
  extra = norms * 2 * 768 + routers
  assert count == tables + blocks + banks + reads + extra


def test_three_loops_cost_what_36_layers_cost():
  """And memory in every iteration costs 169.9 M multiply-adds, once 56.6 M."""
  spec = spec_of(50_304)

  def flops(config):
    costs = adaptive.costs(config, spec, config.num_loops)
    return costs["flops_per_example"][-1]

  routers = 12 * 3 * 1024 * 2 * 769
  assert flops(LOOP) - routers == flops(ISO_FLOP)
  for placement, expected in (("in_loop", 169.9), ("pre_layer", 56.6)):
    config = dataclasses.replace(PAPER, memory_placement=placement)
    added = (flops(config) - flops(LOOP)) / 1024 / 2e6
    assert round(added, 1) == expected


def test_one_loop_without_memory_is_the_plain_transformer():
  config = dataclasses.replace(
    NO_MEMORY, num_loops=1, loop_update="delta", scale_from_step=2,
    norm="rmsnorm", tied=True, loop_scale=-7.0,
  )  # fmt: skip
  params = examples.params_of(adaptive, config, SPEC)
  plain = transformer.Config(
    width=16, num_heads=2, num_layers=2, num_loops=1, loop_norm="final_only"
  )
  same = {
    "token_embedding": params["token_embedding"],
    "layers": params["layers"]["block"],
    "final_norm": params["final_norm"],
  }
  expected = examples.run(transformer, plain, SPEC, TOKENS, same).logits
  np.testing.assert_allclose(run(config).logits, expected, atol=2e-5)


def layer_norm(x, params):
  centred = x - x.mean(-1, keepdims=True)
  normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  return normed * params["scale"] + params["bias"]


def block_by_hand(x, params):
  """x [T, D] through one block, query by query and head by head."""
  normed = layer_norm(x, params["attention_norm"])
  x = x + attention(normed, params["attention"], 2, 10_000)
  return x + gelu_mlp(layer_norm(x, params["mlp_norm"]), params["mlp"])


def read_by_hand(h, bank, params):
  """g * W m of one token h [D] (equations 6 to 9)."""
  keys, query = (
    rms_normed(x) * params[f"{name}_norm"]["scale"]
    for name, x in (("key", bank["keys"]), ("query", h))
  )
  weights = softmax(keys @ query / 16**0.5)
  retrieved = weights @ bank["values"]
  gate = sigmoid(h @ params["gate"]["kernel"] + params["gate"]["bias"])
  return gate * (retrieved @ params["output"]["kernel"])


def by_hand(config, params, tokens):
  """Logits [T, V] and E[n] [T, L] of one sequence, in float64."""
  params = in_float64(params)
  x, steps = params["token_embedding"]["embedding"][tokens], []
  for index in range(config.num_layers):
    layer = layer_of(params["layers"], index)

    def enriched(h, layer=layer):
      return np.stack([
        token
        + read_by_hand(token, layer["local_bank"], layer["local_read"])
        + read_by_hand(token, params["global_bank"], layer["global_read"])
        for token in h
      ])  # fmt: skip

    h = enriched(x) if config.memory_placement == "pre_layer" else x
    states, chances = [], []
    for t in range(1, config.num_loops + 1):
      if config.memory_placement == "in_loop":
        h = enriched(h)
      if config.loop_update == "literal":
        added = block_by_hand(layer_norm(h, layer["loop_norm"]), layer["block"])
      else:
        added = block_by_hand(h, layer["block"]) - h
      scale = 1.0
      if t >= config.scale_from_step:
        alpha = layer["loop_scale"][t - config.scale_from_step]
        scale = np.log1p(np.exp(alpha))
      h = h + scale * added
      states.append(h)
      step = np.full((len(h), 1), t / config.num_loops)
      logits = np.concatenate([h, step], -1) @ layer["router"]["kernel"]
      chances.append(sigmoid(logits + layer["router"]["bias"])[:, 0])
    weights = np.array([
      chances[n] * np.prod([1 - p for p in chances[:n]], axis=0)
      for n in range(config.num_loops)
    ])  # fmt: skip
    if config.halting_mass == "remainder":
      weights[-1] = 1 - weights[:-1].sum(0)
    if config.halting_mass == "renormalised":
      weights /= weights.sum(0)
    x = np.einsum("nt,ntd->td", weights, np.array(states))
    steps.append(weights.T @ np.arange(1, config.num_loops + 1))
    if config.memory_placement == "post_layer":
      x = enriched(x)
  hidden = layer_norm(x, params["final_norm"])
  return hidden @ params["head"]["kernel"], np.stack(steps, -1)


@pytest.mark.parametrize("changes", [
  {},
  {"halting_mass": "printed", "memory_gate": "scalar"},
  {"halting_mass": "renormalised", "memory_placement": "pre_layer"},
  {"loop_update": "delta", "memory_placement": "post_layer"},
  {"loop_update": "delta", "scale_from_step": 2},
])  # fmt: skip
def test_numpy_agrees(changes):
  config = dataclasses.replace(SMALL, **changes)
  params = drawn(config)
  output = run(config, params, exact=True)
  for b, tokens in enumerate(np.asarray(TOKENS)):
    logits, steps = by_hand(config, params, tokens)
    np.testing.assert_allclose(
      output.logits[b, :, :21], logits[:, :21], atol=1e-6
    )
    found = [output.stats[f"ponder_steps/layer={i}"][b] for i in range(2)]
    np.testing.assert_allclose(found, steps.mean(0), atol=1e-6)
    np.testing.assert_allclose(
      output.stats["ponder_steps"][b], steps.mean(), atol=1e-6
    )


@pytest.mark.parametrize(("mass", "total", "steps"), [
  ("remainder", 1.0, 1.75),
  ("printed", 0.875, 1.375),
  ("renormalised", 1.0, 1.375 / 0.875),
])  # fmt: skip
def test_a_fresh_router_halts_by_coin_tosses(mass, total, steps):
  output = run(dataclasses.replace(SMALL, halting_mass=mass))
  np.testing.assert_allclose(output.stats["ponder_steps"], steps, rtol=1e-6)
  ponder = (steps - 1) / 2  # n~, equation 12.
  np.testing.assert_allclose(output.losses["ponder"], ponder, rtol=1e-6)
  if mass != "renormalised":  # The trace has the weights before that.
    np.testing.assert_allclose(output.loops["output_weight"].sum(), total)


@pytest.mark.parametrize("bias", [0.0, 80.0, -80.0])
def test_halting_weights_are_a_distribution(bias):
  params = drawn(scale=20.0)
  params["layers"]["router"]["bias"] += bias
  weights = run(params=params, trace=("halting",)).trace["halting"]
  assert weights.shape == (3, 3, 8, 2)
  assert (weights >= 0).all()
  np.testing.assert_allclose(weights.sum(0), 1.0, atol=1e-6)


@pytest.mark.long
def test_the_router_learns_through_the_remainder():
  """E[n] = 1 + q + q^2 with q = 1 - p, because of the remainder."""
  graphdef = examples.graph(adaptive, SMALL, SPEC)
  params = examples.params_of(adaptive, SMALL, SPEC)

  def ponder(params):
    return nnx.merge(graphdef, params)(TOKENS).losses["ponder"]

  grads = jax.jit(jax.grad(ponder))(params)["layers"]["router"]
  # d q = -p (1 - p); a mean over 2 layers, divided by N - 1.
  np.testing.assert_allclose(
    grads["bias"][:, 0], -0.25 * (1 + 2 * 0.5) / 2 / 2, rtol=1e-5
  )


@pytest.mark.long
def test_the_prior_is_a_truncated_geometric_distribution():
  """Value and gradient, for a router with the same output for every token."""
  config = dataclasses.replace(SMALL, ponder_weight=0.25, ponder_prior=0.3)
  graphdef = examples.graph(adaptive, config, SPEC)
  params = examples.params_of(adaptive, config, SPEC)
  weights = jnp.ones(TOKENS.shape)
  batch = {"inputs": TOKENS, "targets": TOKENS, "weights": weights}

  def found(bias):
    router = {**params["layers"]["router"], "bias": jnp.full((2, 1), bias)}
    layers = {**params["layers"], "router": router}
    model = nnx.merge(graphdef, {**params, "layers": layers})
    total, metrics = adaptive.loss(model, batch, None, None, None)
    return metrics["prior"], total - metrics["cross_entropy"]

  def expected(bias):
    p = jax.nn.sigmoid(bias)
    halting = jnp.stack([p, (1 - p) * p, (1 - p) ** 2])
    prior = jnp.array([0.3, 0.7 * 0.3, 0.7**2 * 0.3])
    return jnp.sum(halting * jnp.log(halting / (prior / jnp.sum(prior))))

  run = jax.jit(jax.value_and_grad(found, has_aux=True))
  for bias in (0.0, 1.3):
    (value, added), slope = run(bias)
    wanted, wanted_slope = jax.value_and_grad(expected)(bias)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    np.testing.assert_allclose(added, 0.25 * wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slope, wanted_slope, rtol=1e-3)
  (value, _), slope = run(200.0)  # All halt at once.
  first = 0.3 / (0.3 + 0.7 * 0.3 + 0.7**2 * 0.3)
  np.testing.assert_allclose(value, -np.log(first), rtol=1e-5)
  assert np.isfinite(slope)


@crossing("placement", ["in_loop", "pre_layer", "post_layer"])
@crossing("gate", ["vector", "scalar"], manual=["scalar"])
def test_closed_gates_are_no_memory(placement, gate):
  config = dataclasses.replace(
    SMALL, gate_bias=-1e4, memory_placement=placement, memory_gate=gate
  )
  params = examples.params_of(adaptive, config, SPEC)
  without = {k: v for k, v in params.items() if k != "global_bank"}
  without["layers"] = {
    k: v
    for k, v in params["layers"].items()
    if k not in ("local_bank", "local_read", "global_read")
  }
  plain = run(NO_MEMORY, without).logits
  assert jnp.array_equal(run(config, params).logits, plain)
  wide_open = dataclasses.replace(config, gate_bias=0.0)
  assert jnp.abs(run(wide_open).logits - plain).max() > 1e-2


@pytest.mark.long
def test_gates_start_at_their_bias():
  for bias in (-3.0, 0.0, 3.0):
    stats = run(dataclasses.replace(SMALL, gate_bias=bias)).stats
    for name in ("local_gate/layer=0", "global_gate/layer=1"):
      np.testing.assert_allclose(stats[name], sigmoid(bias), rtol=1e-5)


@pytest.mark.long
@crossing("placement", ["in_loop", "pre_layer", "post_layer"])
def test_slots_that_are_read_alike_have_full_entropy(placement):
  """Equal keys: attention is uniform for any query."""
  config = dataclasses.replace(SMALL, memory_placement=placement)
  params = drawn(config)
  alike = jnp.ones_like(params["global_bank"]["keys"])
  params["global_bank"]["keys"] = alike
  slots = ("local_slots", "global_slots")
  output = run(config, params, trace=slots)
  uniform = output.trace["global_slots"]
  assert uniform.shape == (3, 3, 2, 4)
  np.testing.assert_allclose(uniform, 0.25, rtol=1e-5)
  local = output.trace["local_slots"]
  assert local.shape == (3, 3, 2, 6)
  np.testing.assert_allclose(local.sum(-1), 1.0, rtol=1e-5)
  assert local.std(-1).min() > 1e-3
  same = [jnp.array_equal(local[0], local[t]) for t in (1, 2)]
  assert same == [placement != "in_loop"] * 2
  for i in range(2):
    entropy = output.stats[f"global_entropy/layer={i}"]
    np.testing.assert_allclose(entropy, np.log(4), rtol=1e-5)
    # Tokens differ: on average they use more slots than each alone.
    mean = local[:, :, i].mean(axis=0)
    of_mean = -(mean * jnp.log(mean)).sum(-1)
    assert (output.stats[f"local_entropy/layer={i}"] < of_mean).all()


@pytest.mark.parametrize("padding", [22, 3])
def test_padding_is_left_out_of_statistics(padding):
  """Padding at the end of a row is seen by no token.

  Its id is separate, or one that documents also have, such as a tokenizer's end
  token.
  """
  params = drawn()
  padded = TOKENS.at[:, 5:].set(padding)
  short = examples.run(adaptive, SMALL, SPEC, TOKENS[:, :5], params)
  found = examples.run(adaptive, SMALL, SPEC, padded, params)
  if padding == 3:
    documents = jnp.ones_like(TOKENS).at[:, 5:].set(0)
    model = functools.partial(examples.merged, adaptive, SMALL, SPEC)
    forward = jax.jit(
      lambda params: model(params)(padded, documents=documents),
      compiler_options=examples.FAST,
    )
    found = forward(params)
  for name, value in short.stats.items():
    np.testing.assert_allclose(found.stats[name], value, rtol=1e-4)
  np.testing.assert_allclose(
    found.losses["ponder"], short.losses["ponder"], rtol=1e-5
  )


def test_every_layer_has_scales_of_its_own():
  params = drawn()
  alpha = jnp.arange(6.0).reshape(2, 3)
  params["layers"]["loop_scale"] = alpha
  loops = run(params=params).loops
  for i in range(2):
    np.testing.assert_allclose(
      loops[f"loop_scale/layer={i}"], np.log1p(np.exp(alpha[i])), rtol=1e-5
    )
  fewer = run(params=params, num_loops=2).loops
  for name in ("loop_scale/layer=0", "loop_scale/layer=1"):
    np.testing.assert_allclose(fewer[name], loops[name][:2])


@pytest.mark.long
def test_no_scale_is_the_identity():
  config = dataclasses.replace(NO_MEMORY, loop_scale=-1e4)
  model = examples.merged(adaptive, config, SPEC)
  embedded = model.final_norm(model.token_embedding(TOKENS))
  np.testing.assert_allclose(run(config).hidden, embedded, atol=1e-5)
  alpha = examples.params_of(adaptive, PAPER_LIKE, SPEC)["layers"]["loop_scale"]
  assert alpha.shape == (2, 3)
  assert (alpha == -7.0).all()


PAPER_LIKE = dataclasses.replace(SMALL, loop_scale=-7.0)


@pytest.mark.long
@pytest.mark.parametrize("threshold", [1.0, 0.7])
def test_a_layers_loop_ends_when_all_have_spent_their_mass(threshold):
  """Layer 0 halts at once; layer 1 with probability 1/2 per step."""
  params = examples.params_of(adaptive, SMALL, SPEC)
  bias = params["layers"]["router"]["bias"]
  params["layers"]["router"]["bias"] = bias.at[0].set(200.0)
  call = {"exit_threshold": threshold, "trace": ("halting",)}
  whole = run(params=params, kind="scan", **call)
  early = run(params=params, kind="while", **call)
  np.testing.assert_allclose(early.logits, whole.logits, atol=1e-5)
  for name in whole.stats.keys() - {"loops_run"}:
    np.testing.assert_allclose(
      early.stats[name], whole.stats[name], rtol=1e-5, err_msg=name
    )
  assert jnp.array_equal(early.trace["halting"], whole.trace["halting"])
  last = 2 if threshold == 0.7 else 3  # 1/2, 1/4: 0.75 after two.
  assert (whole.stats["loops_run"] == 3).all()
  assert (early.stats["loops_run"] == (1 + last) / 2).all()
  halting = whole.trace["halting"][:, 0, 0]  # [N, L]
  np.testing.assert_allclose(halting[:, 0], [1, 0, 0])
  rest = [0.5, 0.5, 0] if threshold == 0.7 else [0.5, 0.25, 0.25]
  np.testing.assert_allclose(halting[:, 1], rest)


@pytest.mark.long
def test_one_token_that_goes_on_keeps_the_loop_going():
  params = drawn()
  kernel = jnp.zeros_like(params["layers"]["router"]["kernel"])
  params["layers"]["router"]["kernel"] = kernel.at[:, 0].set(60.0)
  early = run(params=params, kind="while", trace=("halting",))
  spent = early.trace["halting"][0] == 1.0
  assert spent.any()
  assert not spent.all(axis=(0, 1)).any()
  whole = run(params=params, kind="scan")
  assert (early.stats["loops_run"] > 1).all()
  np.testing.assert_allclose(early.logits, whole.logits, atol=1e-5)


def test_decay_leaves_scales_gates_and_banks_alone():
  params = nnx.to_pure_dict(nnx.state(examples.abstract(adaptive, SMALL, SPEC)))
  decayed = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, applies in jax.tree_util.tree_leaves_with_path(
      parameters.decay_mask(params, "matrices")
    )
    if applies
  }
  reads = [f"{bank}_read/{w}" for bank in ("local", "global") for w in
           ("output", "gate")]  # fmt: skip
  block = [f"block/attention/{w}" for w in ("query", "key", "value", "output")]
  block += ["block/mlp/value", "block/mlp/output", "router"]
  assert decayed == {"head/kernel"} | {
    f"layers/{name}/kernel" for name in block + reads
  }


@pytest.mark.long
def test_more_iterations_than_were_trained_are_one_line():
  model = examples.abstract(adaptive, SMALL, SPEC)
  with pytest.raises(UserError, match="num_loops=4 must be 1 to 3"):
    model(TOKENS, num_loops=4)
  for threshold in (0.0, 0, 2):
    with pytest.raises(UserError, match=f"exit_threshold={threshold} must be"):
      model(TOKENS, exit_threshold=threshold)
  with pytest.raises(UserError, match="num_loops=4 must be 1 to 3"):
    adaptive.costs(SMALL, SPEC, 4)
