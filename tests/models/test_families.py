"""What holds for every family in MODELS."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from flax import nnx
from in_float64 import without_rounding
from tests_support import (
  by_path,
  by_size,
  causal,
  crossing,
  long_case,
  strict_dtypes,
  traced_sizes,
)

from loopjax.data import TASKS
from loopjax.errors import UserError
from loopjax.loop import driver, starts
from loopjax.losses import tokens as token_losses
from loopjax.models import MODELS
from loopjax.nn import block
from loopjax.nn import keys as keys_lib
from loopjax.program import step as step_lib
from loopjax.types import (
  LoopOptions,
  Output,
  TaskSpec,
  TokenScores,
)

VOCABULARY, LENGTH, PADDING = 23, 8, 2
SPEC = TaskSpec(VOCABULARY, LENGTH, tuple((i,) for i in range(LENGTH)), PADDING)
LOOPS = 2
# Two heads of queries share one of keys; widths are not D / H.
GROUPED = {
  "num_heads": 2, "num_key_value_heads": 1, "head_width": 6,
  "norm_epsilon": 1e-5,
}  # fmt: skip
STACK = {**GROUPED, "width": 16, "num_layers": 2, "num_loops": LOOPS}
SEGMENTS = {
  "width": 16, "num_heads": 2, "num_loops": LOOPS, "num_cycles": 2,
  "num_memory_tokens": 2, "precision": "float32",
}  # fmt: skip
SMALL = {
  "adaptive": {
    **STACK, "num_local_slots": 6, "num_global_slots": 4, "init_std": 0.2,
    "loop_scale": -1.0, "tied": True,
  },
  "utm": {
    "width": 16, "num_heads": 2, "num_loops": LOOPS, "num_memory_tokens": 2,
    "router_bias": -1.0,
  },
  "looped": STACK,
  "loopformer": {**STACK, "init_std": 0.2},
  "disco": {**STACK, "gate": "learned"},
  "melt": {
    **STACK, "tied": True, "chunk_size": 1, "distill": "none",
    "rope_base": 1e4, "init_std": 0.2,
    "precision": "float32",
  },
  "plt": {**STACK, "window": 3},
  "ponderlm": {**STACK, "tied": False},
  "recurrent": {
    **STACK, "num_layers": 1, "num_prelude": 1, "num_coda": 1,
    "depth": "fixed", "num_with_gradient": 0, "state": "zero",
    "init_std": 0.1,
  },
  "sleep": {
    **GROUPED, "width": 16, "num_loops": LOOPS,
    "window": 4, "num_memory_heads": 2, "key_width": 8, "value_width": 8,
  },
  "transformer": STACK,
  "hrm": {**SEGMENTS, "num_layers": 1},
  "trm": {**SEGMENTS, "num_latent_steps": 2},
  "urm": {**SEGMENTS, "num_layers": 1, "num_inner_steps": 2},
}  # fmt: skip
FAMILIES = by_size(MODELS)
CAUSAL = causal()
# They run segments as urm does. test_peers.py has every gradient of theirs.
PEERS = ("hrm", "trm")
# Causal families that run their blocks, and write to their cache, as looped.
ALIKE = ("transformer", "ponderlm", "disco", "loopformer")
# Those that run more loops than they are trained with, and leave earlier loops
# as they were. A loop of LoopFormer depends on how many there are.
LOOPED = by_size(
  set(MODELS) - {"adaptive", "loopformer", "melt", "transformer"}
)
# Those that read out after every loop, and keep keys and values of each.
READ_OUT = by_size(set(CAUSAL) - {"adaptive", "sleep"})
DROPPING = by_size(set(READ_OUT) - {"melt"})
# Values of every setting, of which one is not that of a family's small model.
VALUES = {
  "width": (32,), "num_heads": (1,), "num_layers": (4,), "mlp_ratio": (2.0,),
  "mlp": ("gelu", "swiglu"), "num_loops": (3,), "rope_base": (100.0,),
  "init_std": (0.5,), "precision": ("bfloat16",), "dropout": (0.5,),
  "loop_norm": ("final_only", "per_loop"),
  # Ouro.
  "num_key_value_heads": (2,), "head_width": (4,), "qk_norm": (True,),
  "exit_gate": ("alone",), "entropy_weight": (0.5,),
  "value_bias": (True,), "norm_epsilon": (0.5,),
  "rope_scaling": ((8.0, 1.0, 4.0, 8.0),),
  # PLT.
  "window": (5,),
  # UTM.
  "num_memory_tokens": (3,), "norm": ("rmsnorm",),
  "positions": ("offset", "overlap"),
  "halting": ("ponder",), "router_bias": (1.0,),
  "freeze": ("post",), "ponder_weight": (0.5,),
  "ponder_warmup_steps": (9,),
  # DiscoLoop and PonderLM.
  "gate": ("learned", "fixed"), "gate_value": (0.5,), "temperature": (2.0,),
  "top_k": (5,), "decode_gradient": ("stop",), "epsilon": (0.1,),
  "tied": (True, False),
  # Recurrent depth.
  "num_prelude": (2,), "num_coda": (2,), "qk_bias": (True,),
  "norm_order": ("pre", "branch"), "injection": ("add", "diagonal"),
  "anchor_scale": (0.5,), "prelude_norm": (True,), "input_scale": (2.0,),
  "state": ("zero", "input"), "state_std": (0.1,), "update": ("gate", "damped"),
  "depth": ("poisson",), "calibrated": (True,),
  "max_loops": (2,), "depth_per": ("row",), "num_with_gradient": (1,),
  "growth_steps": ((7,),), "growth_loops": ((2,),), "relaxed_rank": (2,),
  # LoopFormer.
  "short_weight": (0.5,), "consistency_weight": (0.5,),
  # Adaptive loops and memory.
  "loop_update": ("delta",), "loop_scale": (-5.0,), "scale_from_step": (2,),
  "halting_mass": ("printed",), "num_local_slots": (5,),
  "num_global_slots": (5,), "memory_placement": ("pre_layer",),
  "memory_gate": ("scalar",), "gate_bias": (3.0,),
  "ponder_prior": (0.2,),
  # TRM, HRM and URM.
  "num_low_steps": (3,), "num_inner_steps": (3,), "mixer": ("mlp",),
  "token_mlp_width": (3,), "num_cycles": (3,),
  "num_latent_steps": (3,), "exploration": (0.3,), "token_loss": ("softmax",),
  "start": ("normal",), "damping": (0.3,), "path_noise": (0.5,),
}  # fmt: skip
# What has to be set for all others to matter.
MATTER = {
  "adaptive": {"ponder_weight": 0.1},
  "utm": {"ponder_weight": 0.1, "ponder_warmup_steps": 5},
  "disco": {"gate": "fixed"},
  "looped": {"exit_gate": "joint"},
}
# With which a setting may be changed, or matters.
MATTERS_WITH = {
  ("recurrent", "anchor_scale"): {"injection": "anchor"},
  ("recurrent", "state_std"): {"state": "normal"},
  ("recurrent", "calibrated"): {"depth": "poisson_lognormal"},
  ("recurrent", "max_loops"): {"depth": "poisson"},
  ("recurrent", "depth_per"): {"depth": "poisson"},
  **{
    ("recurrent", name): {"growth_steps": (5,), "growth_loops": (1,)}
    for name in ("growth_steps", "growth_loops")
  },
  ("trm", "mixer"): {"num_heads": 8},
  ("trm", "token_mlp_width"): {"mixer": "mlp", "num_heads": 8},
}

# Those that can draw the state before the first loop, and how.
RANDOM = {
  "recurrent": {"state": "normal"},
  **{name: {"start": "normal"} for name in ("hrm", "trm", "urm")},
}


def config_of(name, **changes):
  return MODELS[name].Config(**{**SMALL[name], **changes})


def split(name, options=LoopOptions()):
  """(graph, parameters)."""
  model = MODELS[name], config_of(name), SPEC
  return examples.graph(*model, options), examples.params_of(*model)


def batch():
  inputs, targets = jax.random.randint(
    jax.random.key(1), (2, 3, LENGTH), 0, VOCABULARY - PADDING
  )
  weights = (jnp.arange(LENGTH) >= 5).astype(jnp.float32)
  weights = jnp.broadcast_to(weights[None], inputs.shape)
  return {"inputs": inputs, "targets": targets, "weights": weights}


def batch_of(name, config=None):
  """The batch as a family's loss gets it in the first step."""
  family, found = MODELS[name], batch()
  if not family.init_carried:
    return found
  config, rows = config or config_of(name), len(found["inputs"])
  return {**found, "carried": family.init_carried(config, SPEC, rows)}


def output_of(name, inputs, params=None, num_loops=LOOPS, kind="scan"):
  """The output with every trace, from a program of `examples.run`."""
  call = {"num_loops": num_loops, "kind": kind}
  call["trace"] = tuple(MODELS[name].traces)
  return examples.run(
    MODELS[name], config_of(name), SPEC, inputs, params, **call
  )


@functools.cache
def forward(name, num_loops=LOOPS, kind="scan"):
  return output_of(name, batch()["inputs"], None, num_loops, kind)


@functools.cache
@strict_dtypes()
def value_and_grad(name, options=LoopOptions()):
  """(loss, metrics, gradients by path)."""
  graphdef, params = split(name, options=options)

  def loss(params):
    model = nnx.merge(graphdef, params)
    step = jnp.zeros((), jnp.int32)
    return MODELS[name].loss(
      model, batch_of(name), jax.random.key(0), step, None
    )

  run = jax.value_and_grad(loss, has_aux=True)
  (value, metrics), grads = jax.jit(run, compiler_options=examples.FAST)(params)
  return value, metrics, by_path(grads)


def changed(name, token=None, rows=None):
  """Real logits [B, T, V'] of `forward` with another token, or table.

  Args:
    name: of the family.
    token: index of the token that is another one, in every row.
    rows: (a slice of the table, what they become).
  """
  family, inputs = MODELS[name], batch()["inputs"]
  params = examples.params_of(family, config_of(name), SPEC)
  if token is not None:
    inputs = inputs.at[:, token].set((inputs[:, token] + 1) % 21)
  if rows is not None:
    table = params["token_embedding"]["embedding"].at[rows[0]].add(rows[1])
    params = {**params, "token_embedding": {"embedding": table}}
  return output_of(name, inputs, params).logits[..., :-PADDING]


@crossing("name", FAMILIES, manual=PEERS)
def test_every_parameter_gets_a_gradient(name):
  _, _, grads = value_and_grad(name)
  assert not [path for path, grad in grads.items() if not jnp.any(grad != 0)]
  assert all(jnp.isfinite(grad).all() for grad in grads.values())


# The driver runs their loops as it runs those of looped; test_sleep.py unrolls
# its passes by hand and rematerialises its windows.
@crossing("name", FAMILIES, manual=(
  "transformer", "plt", "ponderlm", "disco", "loopformer", "sleep", *PEERS,
))  # fmt: skip
def test_loop_kinds_and_rematerialisation_agree(name):
  value, _, grads = value_and_grad(name)
  other, _, other_grads = value_and_grad(name, LoopOptions("unroll", "full"))
  np.testing.assert_allclose(value, other, rtol=1e-6)
  for path, grad in grads.items():
    # Sums in another order: a few roundings of the largest element.
    most = 2e-6 + 5e-6 * float(jnp.max(jnp.abs(grad)))
    np.testing.assert_allclose(
      grad, other_grads[path], atol=most, rtol=0, err_msg=path
    )


@crossing("name", FAMILIES)
def test_rematerialisation_is_in_the_program(name):
  def is_rematerialised(remat):
    graphdef, params = split(name, LoopOptions("scan", remat))

    def logits(params):
      return nnx.merge(graphdef, params)(batch()["inputs"]).logits

    return "remat" in str(jax.make_jaxpr(logits)(params))

  assert is_rematerialised("full")
  assert not is_rematerialised("none")


@pytest.mark.parametrize("name", FAMILIES)
def test_zero_loops_are_a_mistake(name):
  model = examples.abstract(MODELS[name], config_of(name), SPEC)
  with pytest.raises(UserError, match="num_loops=0 must be"):
    model(batch()["inputs"], num_loops=0)


@crossing("name", LOOPED, manual=(*PEERS, "ponderlm"))
def test_while_and_more_loops_than_trained_go_the_same_way(name):
  few, many = forward(name), forward(name, 3 * LOOPS, "while")
  assert jnp.isfinite(many.logits).all()
  for trace, record in few.trace.items():
    assert len(many.trace[trace]) == 3 * LOOPS
    if trace in ("hidden", "prediction", "confidence"):
      np.testing.assert_allclose(
        record, many.trace[trace][:LOOPS], atol=1e-5, err_msg=trace
      )


@crossing("name", FAMILIES)
def test_a_start_of_a_row_is_the_same_in_any_batch(name):
  """Noise on the embedded tokens; each start has its own."""
  config = config_of(name, **RANDOM.get(name, {}))
  draws_state = MODELS[name].draws_state
  assert (name in RANDOM) == bool(draws_state and draws_state(config))
  noise = 0.0 if name in RANDOM else 0.5
  options = starts.Starts(4, noise, "confidence", 0, name in RANDOM, None, ())

  @without_rounding
  def logits(params, inputs, number):
    model = examples.merged(MODELS[name], config, SPEC, params)
    keys = keys_lib.by_content(jax.random.key(0), inputs)
    call = starts.begin(model, keys_lib.fold_in(keys, number), options)
    return model(inputs, **call).logits

  params, inputs = split(name)[1], batch()["inputs"]
  first, other = np.int32(1), np.int32(2)
  whole, alone = (
    logits(params, inputs, first),
    logits(params, inputs[1:2], first),
  )
  np.testing.assert_allclose(whole[1:2], alone, atol=1e-8)
  assert np.abs(logits(params, inputs, other) - whole).max() > 1e-3


# Whose last loop is unlike the others.
LAST_IS_UNLIKE = {"disco", "ponderlm", "utm"}
# Whose loops read the state, and nothing else of their example.
OPEN = ("looped", "disco", "loopformer", "transformer", "utm")


def watched(name, edit=None, loops=None, num_loops=LOOPS):
  kind = driver.Watched(edit, loops)
  return output_of(name, batch()["inputs"], None, num_loops, kind)


@crossing("name", FAMILIES)
def test_a_loop_that_is_watched_is_the_same(name):
  """With an edit that changes nothing, to the last bit."""
  plain, seen = forward(name), watched(name, lambda state, k: state)
  states = seen.trace.pop("state")
  if MODELS[name].Model.__module__.startswith("loopjax."):
    two = name in ("hrm", "trm", "melt", "sleep")
    assert len(jax.tree.leaves(states)) == 1 + two
  # Two layers, eight chunks, or a window before the last one.
  loops = {"adaptive": 2, "melt": 8}.get(name, 1) * LOOPS
  for state in jax.tree.leaves(states):
    assert state.shape[:2] == (loops, 3)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, seen))


@crossing("name", FAMILIES)
def test_the_rest_of_the_loops_go_on_from_the_state(name):
  states = watched(name).trace["state"]

  def begin(state, k):
    first = k % LOOPS == 0
    return jax.tree.map(lambda x, y: jnp.where(first, x[k], y), states, state)

  rest = watched(name, begin, range(1, LOOPS)).trace["state"]

  def last(x):
    return x.reshape(-1, LOOPS, *x.shape[1:])[:, 1]

  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(last(x), y, atol=1e-5),
    states, rest,
  )  # fmt: skip


@crossing("name", LOOPED)
def test_the_state_is_that_of_fewer_loops(name):
  few, many = watched(name), watched(name, num_loops=2 * LOOPS)
  same = LOOPS - (name in LAST_IS_UNLIKE)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x[:same], y[:same], atol=1e-5),
    few.trace["state"], many.trace["state"],
  )  # fmt: skip


@crossing("name", [x for x in FAMILIES if x not in ("adaptive", "sleep")])
def test_a_state_of_another_example_gives_its_answer(name):
  """After the last loop or, without an input that enters again, any other."""
  plain = watched(name)
  states = plain.trace["state"]
  after = 0 if name in OPEN else LOOPS - 1
  same = slice(after, None, 1 if name in OPEN else LOOPS)

  def other(state, k):
    return jax.tree.map(
      lambda x, y: jnp.where(k % LOOPS == after, x[k, ::-1], y), states, state
    )

  patched = watched(name, other)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(
      x[same, ::-1], y[same], atol=1e-5
    ),
    states, patched.trace["state"],
  )  # fmt: skip
  if name != "utm":  # It answers with a weighted sum over all loops.
    np.testing.assert_allclose(plain.logits[::-1], patched.logits, atol=1e-4)
  assert jnp.abs(plain.logits - patched.logits).max() > 0.1


@crossing("name", CAUSAL)
def test_no_logit_depends_on_a_later_token(name):
  """And each depends on its own token and all before it."""
  logits = forward(name).logits[..., :-PADDING]
  for token in range(LENGTH):
    moved = jnp.abs(changed(name, token) - logits).max(axis=(0, 2)) > 0
    assert jnp.array_equal(moved, jnp.arange(LENGTH) >= token)


@crossing("name", CAUSAL)
def test_padding_ids_are_never_predicted_and_move_nothing(name):
  """With rows such that, as tokens, they would win by far."""
  output = forward(name)
  assert (output.logits[..., -PADDING:] < -1e8).all()
  if name in READ_OUT:
    assert (output.trace["prediction"] < VOCABULARY - PADDING).all()
  logits = output.logits[..., :-PADDING]
  for value in (100.0, -100.0):
    moved = changed(name, rows=(slice(-PADDING, None), value))
    np.testing.assert_array_equal(moved, logits)
  for token in range(VOCABULARY - PADDING):
    assert jnp.any(changed(name, rows=(token, 0.1)) != logits)


@crossing("name", CAUSAL)
def test_padding_targets_without_weight_leave_the_loss_alone(name):
  data = batch()
  token_loss = token_losses.token_cross_entropy(
    forward(name).logits,
    jnp.where(data["weights"] == 0, VOCABULARY - 1, data["targets"]),
  )
  loss = token_losses.weighted_mean(token_loss, data["weights"])
  value, metrics, _ = value_and_grad(name)
  own = metrics.get("cross_entropy", value)  # Without other terms.
  np.testing.assert_allclose(loss, own, rtol=1e-5)


@crossing(
  ("name", "top_k"),
  [*((name, 0) for name in CAUSAL), ("disco", 4), ("ponderlm", 4)],
)
def test_training_makes_no_array_of_tokens_by_vocabulary(name, top_k):
  """Of 24 tokens by 8,192 ids; the table has 16 numbers an id."""
  spec = dataclasses.replace(SPEC, vocab_size=8192)
  family, data = MODELS[name], batch()
  changes = {"top_k": top_k} if top_k else {}
  model = examples.abstract(family, config_of(name, **changes), spec)
  graphdef, params = nnx.split(model)

  def loss(params):
    key, step = jax.random.key(0), jnp.zeros((), jnp.int32)
    return family.loss(nnx.merge(graphdef, params), data, key, step, None)[0]

  assert max(traced_sizes(jax.grad(loss), params)) < 24 * 8192


@functools.partial(jax.jit, compiler_options=examples.FAST)
def read_out(model, hidden, targets):
  return token_losses.read_out(model, hidden, targets)


@crossing("name", CAUSAL)
def test_what_scores_read_of_hidden_states_is_what_they_read_of_logits(name):
  output, targets = forward(name), batch()["targets"]
  model = examples.merged(MODELS[name], config_of(name), SPEC)
  got = read_out(model, output.hidden, targets)
  losses, predicted = token_losses.scores(output, targets)
  np.testing.assert_allclose(got.losses, losses, atol=1e-5)
  np.testing.assert_array_equal(got.predicted, predicted)
  # Of the last tokens alone, as where a model predicts no others.
  last = read_out(model, output.hidden[:, 3:], targets)
  np.testing.assert_allclose(last.losses, losses[:, 3:], atol=1e-5)


def test_evaluation_makes_no_array_of_tokens_by_vocabulary():
  """Of 24 tokens by 8,192 ids, as in training."""
  spec = dataclasses.replace(SPEC, vocab_size=8192)
  model = examples.abstract(MODELS["looped"], config_of("looped"), spec)
  graphdef, params = nnx.split(model)
  evaluate = functools.partial(
    step_lib.eval_step,
    graphdef=graphdef,
    score=TASKS["text"].score,
    num_loops=LOOPS,
    execution="scan",
  )
  data = {**batch(), "bytes": jnp.ones((3, LENGTH)), "valid": jnp.ones(3, bool)}
  assert max(traced_sizes(evaluate, params, data)) < 24 * 8192


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_task_reads_logits_where_there_are_scores(name):
  task = TASKS[name]
  batch = task.abstract_batch(task.Config(), 4)
  shape = batch["targets"].shape
  tokens = TokenScores(
    jax.ShapeDtypeStruct(shape, jnp.float32),
    jax.ShapeDtypeStruct(shape, jnp.int32),
  )

  def score(tokens, batch):
    return task.score(Output(None, {}, {}, {}, {}, tokens=tokens), batch)

  scores = jax.eval_shape(score, tokens, batch)
  assert {x.shape for x in jax.tree.leaves(scores)} == {(4,)}


@crossing("name", FAMILIES)
def test_trace_is_what_the_model_did(name):
  output = forward(name)
  assert set(output.trace) == set(MODELS[name].traces)
  assert all(len(record) == LOOPS for record in output.trace.values())
  if name in READ_OUT:
    chances = jax.nn.softmax(output.logits)
    last = output.trace["prediction"][-1], output.trace["confidence"][-1]
    assert jnp.array_equal(last[0], jnp.argmax(chances, -1))
    np.testing.assert_allclose(last[1], jnp.max(chances, -1), rtol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("num_loops", [0, -1])
def test_no_loops_at_all_is_one_line(name, num_loops):
  model = examples.abstract(MODELS[name], config_of(name), SPEC)
  with pytest.raises(UserError, match=f"num_loops={num_loops}") as caught:
    model(batch()["inputs"], num_loops=num_loops)
  assert "\n" not in str(caught.value)
  with pytest.raises(UserError, match=f"num_[a-z]+={num_loops}"):
    config_of(name, num_loops=num_loops)


def keys_of(seed):
  """A random key for each row of `batch`."""
  return jax.random.split(jax.random.key(seed), len(batch()["inputs"]))


# Every family hands its keys to its blocks: see the loops' own keys below.
@crossing("name", DROPPING, manual=("plt", *ALIKE))
def test_dropout_needs_keys_and_follows_them(name):
  def run(keys, **changes):
    config, inputs = config_of(name, **changes), batch()["inputs"]
    call = {"num_loops": LOOPS, "trace": ("hidden",)}
    return examples.run(MODELS[name], config, SPEC, inputs, keys=keys, **call)

  keys = [keys_of(seed) for seed in (0, 0, 1)]
  plain = run(None, dropout=0.5).logits
  first, again, other = (run(each, dropout=0.5) for each in keys)
  np.testing.assert_allclose(plain, forward(name).logits, atol=1e-6)
  assert jnp.array_equal(plain, run(keys[0]).logits)  # A rate of zero.
  assert jnp.array_equal(first.logits, again.logits)
  assert jnp.abs(first.logits - plain).max() > 1e-3
  assert jnp.abs(first.logits - other.logits).max() > 1e-3
  assert jnp.abs(first.trace["hidden"][0] - other.trace["hidden"][0]).max() > 0


@functools.cache
def programs_of(name, config):
  """All of them, kept for the settings that change this config."""
  return list(programs(name, config))


def programs(name, config):
  """Text of the program that draws a model, then of that for its loss.

  Most settings show in the first, so that the second is not traced.
  """
  family = MODELS[name]

  def draw(key):
    return nnx.split(family.Model(config, SPEC, rngs=nnx.Rngs(params=key)))

  def loss(params, key, step):
    model = nnx.merge(graphdef, params)
    return family.loss(model, batch_of(name, config), key, step, None)[0]

  key, step = jax.random.key(0), jnp.asarray(0)
  with strict_dtypes():
    drawing, (graphdef, params) = jax.make_jaxpr(draw, return_shape=True)(key)
  yield str(drawing)
  with strict_dtypes():
    trained = jax.make_jaxpr(loss)(params, key, step)
  yield str(trained)


SLOW = ("adaptive", "disco", "recurrent", "urm")


# Sleep takes long to trace, and MELT needs a teacher; their own tests have it.
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.manual)
    if name in (*PEERS, "loopformer", "ponderlm")
    else long_case(name)
    if name in SLOW
    else name
    for name in by_size({*FAMILIES} - {"melt", "sleep"})
  ],
)
def test_no_setting_is_ignored(name):
  config = config_of(name, **MATTER.get(name, {}))
  plain, ignored = programs_of(name, config), []
  assert list(programs(name, config)) == plain
  for field in dataclasses.fields(config):
    now = getattr(config, field.name)
    other = next(value for value in VALUES[field.name] if value != now)
    under = MATTERS_WITH.get((name, field.name), {})
    base = dataclasses.replace(config, **under)
    changed = dataclasses.replace(base, **{field.name: other})
    before = programs_of(name, base) if under else plain
    pairs = zip(programs(name, changed), before, strict=True)
    if all(new == old for new, old in pairs):
      ignored.append(field.name)
  assert not ignored


@crossing("name", DROPPING)
def test_every_loop_drops_by_a_key_of_its_own(name, monkeypatch):
  """Blocks that show their key in the place of what they make."""

  def shown(self, x, mixed, keys):
    del self, mixed
    return jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys)

  monkeypatch.setattr(block.Block, "add", shown)
  model = examples.merged(MODELS[name], config_of(name, num_loops=3), SPEC)

  @jax.jit
  def run(keys):
    output = model(batch()["inputs"], keys=keys, trace=("hidden",))
    return output.trace["hidden"]

  hidden = run(keys_of(0))
  for first, second in itertools.combinations(hidden, 2):
    assert jnp.abs(first - second).max() > 0.1


@crossing("name", [*CAUSAL])
def test_grouped_keys_are_heads_with_the_same_keys(name):
  config, family = config_of(name), MODELS[name]
  params = examples.params_of(family, config, SPEC)

  def repeated(path, x):
    place = jax.tree_util.keystr(path, simple=True, separator="/")
    if not re.search("attention/(key|value)/kernel$", place):
      return x
    return jnp.concatenate([x, x], axis=-1)

  whole = jax.tree_util.tree_map_with_path(repeated, params)
  full = dataclasses.replace(config, num_key_value_heads=0)
  call = {"num_loops": LOOPS, "kind": "scan"}
  output = examples.run(family, full, SPEC, batch()["inputs"], whole, **call)
  expected = forward(name).logits
  np.testing.assert_allclose(output.logits, expected, atol=1e-5)


@crossing("name", FAMILIES)
def test_bfloat16_multiplies_and_float32_adds(name):
  model = examples.abstract(
    MODELS[name], config_of(name, precision="bfloat16"), SPEC
  )
  graphdef, params = nnx.split(model)

  def run(params):
    return nnx.merge(graphdef, params)(batch()["inputs"], trace=("hidden",))

  program, output = jax.make_jaxpr(run, return_shape=True)(params)
  assert output.logits.dtype == jnp.float32
  assert output.trace["hidden"].dtype == jnp.float32
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
  assert "bf16" in str(program)


@crossing("name", FAMILIES)
def test_costs_are_what_xla_counts(name):
  """An unrolled forward pass; point-wise operations make up the rest."""
  width, length = 128, 32
  spec = TaskSpec(512, length, tuple((i,) for i in range(length)))
  # An unrolled program leaves out the end of a pass of which only fast weights
  # are needed.
  loops = 1 if name == "sleep" else 2
  # Nor is a scan over chunks counted more than once.
  whole = {"chunk_size": 0, "prefill_chunk": 0} if name == "melt" else {}
  if name in CAUSAL:
    whole["head_width"] = 96
  config = config_of(name, width=width, num_loops=loops, **whole)
  graphdef, params = nnx.split(
    examples.abstract(MODELS[name], config, spec, LoopOptions("unroll"))
  )

  def run(params, inputs):
    return nnx.merge(graphdef, params)(inputs).logits

  inputs = jax.ShapeDtypeStruct((1, length), jnp.int32)
  compiled = jax.jit(run).lower(params, inputs).compile(examples.FAST)
  counted = compiled.cost_analysis()["flops"]
  ours = MODELS[name].costs(config, spec, loops)["flops_per_example"]
  assert len(ours) == loops
  least = 0.93 if name == "sleep" else 0.95  # It inverts matrices, too.
  assert least * counted < ours[-1] < counted


def test_configs_are_frozen():
  for name in FAMILIES:
    with pytest.raises(dataclasses.FrozenInstanceError):
      MODELS[name].Config().width = 1
