"""DiscoLoop's identities."""

import dataclasses

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from numpy_layers import (
  attention,
  gelu_mlp,
  in_float64,
  layer_of,
  rms_normed,
  sigmoid,
  softmax,
  swiglu,
)

from loopjax.loop import channel, driver
from loopjax.models import disco, looped
from loopjax.types import TaskSpec

VOCABULARY, PADDING = 23, 2
SPEC = TaskSpec(VOCABULARY, 8, tuple((i,) for i in range(8)), PADDING)
SMALL = disco.Config(width=16, num_heads=2, num_layers=2, num_loops=3)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)


def params_of(config=SMALL):
  return examples.params_of(disco, config, SPEC)


def table_of(sharpen=1.0):
  return sharpen * params_of()["token_embedding"]["embedding"]


def run(*, num_loops=None, sharpen=1.0, **changes):
  """`sharpen` scales the embedding table."""
  table = {"embedding": table_of(sharpen)}
  params = {**params_of(), "token_embedding": table}
  config = dataclasses.replace(SMALL, **changes)
  return examples.run(
    disco, config, SPEC, TOKENS, params, num_loops=num_loops, trace=disco.TRACES
  )


class Oracle:
  """The paper's equations in NumPy, float64, one token at a time."""

  def __init__(self, params, config, num_padding):
    self.params = in_float64(params)
    self.config, self.num_padding = config, num_padding
    self.table = self.params["token_embedding"]["embedding"]

  def __call__(self, tokens):
    """tokens [T] -> (logits [T, V - padding], [H^k], [H~^k], [alpha^k])."""
    mixed = self.table[tokens]
    states, mixtures, gates = [], [], []
    for k in range(self.config.num_loops):
      hidden = self.stack(mixed)  # Equation 4, first half.
      last = k == self.config.num_loops - 1
      decoded = np.stack([self.decode(self.read(h)) for h in hidden])
      gate = np.zeros(len(tokens)) if last else self.gate(decoded)
      mixed = hidden + gate[:, None] * rms_normed(decoded, self.config.epsilon)
      states, mixtures = [*states, hidden], [*mixtures, mixed]
      gates = [*gates, gate]
    logits = self.read(hidden) @ self.table.T
    return logits[:, : -self.num_padding], states, mixtures, gates

  def decode(self, h):
    """Equation 5 over real tokens, or over the k most likely of them."""
    real = self.table[: -self.num_padding]
    logits = real @ h / self.config.temperature
    if self.config.top_k:
      best = np.argsort(logits)[-self.config.top_k :]
      return softmax(logits[best]) @ real[best]
    return softmax(logits) @ real

  def gate(self, decoded):
    if self.config.gate == "fixed":
      return np.full(len(decoded), self.config.gate_value)
    gate = self.params["channel"]["gate"]
    return sigmoid(decoded @ gate["weight"] + gate["bias"])

  def norm(self, x, scale):
    return rms_normed(x) * scale

  def read(self, h):
    last = self.config.loop_norm == "final_only"
    return self.norm(h, self.params["final_norm"]["scale"]) if last else h

  def stack(self, x):
    config = self.config
    mlp = swiglu if config.mlp == "swiglu" else gelu_mlp
    for index in range(config.num_layers):
      layer = layer_of(self.params["layers"], index)
      normed = self.norm(x, layer["attention_norm"]["scale"])
      x = x + attention(
        normed, layer["attention"], config.num_heads, config.rope_base
      )
      x = x + mlp(self.norm(x, layer["mlp_norm"]["scale"]), layer["mlp"])
    if config.loop_norm == "per_loop":
      x = self.norm(x, self.params["final_norm"]["scale"])
    return x


@pytest.mark.parametrize("changes", [
  {"mlp": "swiglu", "temperature": 0.5, "gate_value": 0.7},
  {"loop_norm": "final_only", "gate": "learned"},
  {"top_k": 4, "gate": "learned", "epsilon": 1e-3},
])  # fmt: skip
def test_numpy_agrees(changes):
  """All parameters random, to detect any omission."""
  config = dataclasses.replace(SMALL, **changes)
  params, treedef = jax.tree.flatten(params_of(config))
  keys = jax.random.split(jax.random.key(5), len(params))
  params = jax.tree.unflatten(
    treedef,
    [
      x + 0.3 * jax.random.normal(key, x.shape)
      for key, x in zip(keys, params, strict=True)
    ],
  )
  output = examples.run(
    disco, config, SPEC, TOKENS, params, trace=disco.TRACES, exact=True
  )
  oracle = Oracle(params, config, PADDING)
  logits, hidden, mixed, gate = oracle(np.asarray(TOKENS[0]))
  close = {"rtol": 1e-6, "atol": 1e-6}
  np.testing.assert_allclose(output.trace["hidden"][:, 0], hidden, **close)
  np.testing.assert_allclose(output.trace["mixed"][:, 0], mixed, **close)
  np.testing.assert_allclose(output.trace["gate"][:, 0], gate, **close)
  np.testing.assert_allclose(output.logits[0, :, :-PADDING], logits, **close)


@pytest.mark.parametrize("loop_norm", ["per_loop", "final_only"])
def test_a_closed_gate_is_the_vanilla_loop(loop_norm):
  """Equal parameters, bitwise equal outputs."""
  ours = dataclasses.replace(SMALL, loop_norm=loop_norm, gate_value=0.0)
  names = {field.name for field in dataclasses.fields(looped.Config)}
  shared = {k: v for k, v in dataclasses.asdict(ours).items() if k in names}
  vanilla = looped.Config(**shared)
  actual, expected = (
    examples.run(family, config, SPEC, TOKENS, params_of(), trace=("hidden",))
    for family, config in ((disco, ours), (looped, vanilla))
  )
  assert jnp.array_equal(actual.logits, expected.logits)
  assert jnp.array_equal(actual.trace["hidden"], expected.trace["hidden"])


@pytest.mark.long
def test_the_last_loop_injects_nothing_whatever_their_number():
  for num_loops in (1, 2, 5):
    trace = run(num_loops=num_loops).trace
    assert (trace["gate"][:-1] == 1).all()
    assert (trace["gate"][-1] == 0).all()
    assert jnp.array_equal(trace["mixed"][-1], trace["hidden"][-1])
    assert len(trace["gate"]) == num_loops


def test_an_open_gate_adds_the_mean_embedding_at_unit_scale():
  trace = run(sharpen=20.0, gate_value=0.5).trace
  added = (trace["mixed"] - trace["hidden"])[:-1]
  np.testing.assert_allclose(jnp.mean(added**2, -1), 0.25, rtol=1e-3)
  chances = jax.nn.softmax(trace["hidden"][0] @ table_of(20.0)[:-PADDING].T)
  decoded = rms_normed(np.asarray(chances @ table_of(20.0)[:-PADDING]))
  np.testing.assert_allclose(added[0], 0.5 * decoded, atol=1e-4)


@pytest.mark.long
def test_all_tokens_are_the_most_likely_ones():
  whole = run(sharpen=10.0)
  best = run(sharpen=10.0, top_k=VOCABULARY - PADDING)
  np.testing.assert_allclose(whole.logits, best.logits, atol=1e-3)
  few = run(sharpen=10.0, top_k=2)
  assert jnp.abs(whole.logits - few.logits).max() > 0.1


def test_cold_decoding_is_the_likeliest_embedding():
  cold = run(temperature=1e-6).trace
  hard = run(decode_gradient="straight_through").trace
  table = table_of()
  for trace in (cold, hard):
    token = jnp.argmax(trace["hidden"][0] @ table[:-PADDING].T, -1)
    expected = rms_normed(np.asarray(table[token]))
    added = trace["mixed"][0] - trace["hidden"][0]
    np.testing.assert_allclose(added, expected, atol=1e-4)


def test_the_gate_has_d_plus_1_parameters_and_starts_half_open():
  learned = dataclasses.replace(SMALL, gate="learned")
  added = examples.count(disco, learned, SPEC)
  added -= examples.count(disco, SMALL, SPEC)
  assert added == SMALL.width + 1
  output = examples.run(disco, learned, SPEC, TOKENS)
  assert jnp.array_equal(output.loops["gate_mean"], jnp.array([0.5, 0.5, 0.0]))


def test_costs_by_hand():
  spec = TaskSpec(1051, 4, ((0,),) * 4)
  config = disco.Config(num_loops=3, gate="learned")
  flops = disco.costs(config, spec, 3)["flops_per_example"]
  block = 12 * 768**2 + 2 * 4 * 768
  table = 1051 * 768
  for loops, actual in zip((1, 2, 3), flops, strict=True):
    mixings = (loops - 1) * (2 * table + 768)
    assert actual == 2 * 4 * (loops * 4 * block + table + mixings)
  few = disco.Config(num_loops=3, top_k=128)
  flops = disco.costs(few, spec, 2)["flops_per_example"]
  assert flops[1] == 2 * 4 * (2 * 4 * block + 2 * table + 128 * 768)


@pytest.mark.long
def test_an_edit_reaches_later_loops_and_positions_alone():
  """It gets the mixed state, which the trace has unchanged."""

  def traced(kind):
    names = disco.TRACES
    return examples.run(disco, SMALL, SPEC, TOKENS, trace=names, kind=kind)

  def edit(state, k):
    hidden = state["hidden"]
    return {"hidden": jnp.where(k == 1, hidden.at[:, 5].add(1.0), hidden)}

  plain, new = traced(None), traced(driver.Watched(edit))
  before, after = plain.trace["mixed"], new.trace["mixed"]
  assert jnp.array_equal(before[:2], after[:2])
  assert jnp.array_equal(before[:, :, :5], after[:, :, :5])
  assert (jnp.abs(before - after).max(axis=(1, 3))[2, 5:] > 1e-4).all()


@pytest.mark.long
@pytest.mark.parametrize(
  ("num_tokens", "width", "rms"), [(1051, 512, 0.53), (129_280, 32, 0.056)]
)
def test_a_fresh_table_damps_the_channel(num_tokens, width, rms):
  """For `Config.epsilon`: the norm of a mean of many small vectors."""
  noise = np.random.default_rng(0).standard_normal((num_tokens, width))
  table = jnp.asarray(0.02 * noise, jnp.float32)
  nothing = jnp.zeros((1, 1, width))
  mixed = channel.MixedChannel(
    channel.SoftDecoder(), channel.FixedGate(1.0), disco.Config().epsilon
  )
  added, _ = mixed(nothing, nothing, table)
  np.testing.assert_allclose(np.sqrt(np.mean(added**2)), rms, rtol=0.1)
