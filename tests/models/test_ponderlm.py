"""PonderLM's recurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest

from loopjax.models import looped, ponderlm
from loopjax.nn import attention
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), 2)
SMALL = ponderlm.Config(width=16, num_heads=2, num_layers=2, num_loops=3)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)


def run(config=SMALL, **call):
  return examples.run(ponderlm, config, SPEC, TOKENS, **call)


@pytest.mark.parametrize("changes", [
  {},
  {"tied": False, "temperature": 0.5},
  {"top_k": 4},
])  # fmt: skip
def test_passes_are_the_recursion_written_out(changes):
  config = dataclasses.replace(SMALL, **changes)
  model = examples.merged(ponderlm, config, SPEC)
  table = model.token_embedding.embedding[...]
  head = table if config.tied else model.head.kernel[...].T
  metadata = attention.make_metadata((1, 8), 8, config.rope_base)

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def language_model(x):
    for index in range(2):
      x = jax.tree.map(lambda leaf, i=index: leaf[i], model.layers)(
        x, metadata
      )[0]
    return model.final_norm(x)

  first = table[TOKENS]
  embedding, hidden, embeddings = first, [], []
  for _ in range(3):
    hidden.append(language_model(embedding))
    logits = (hidden[-1] @ head[:-2].T) / config.temperature
    if config.top_k:
      least = jnp.sort(logits, axis=-1)[..., -config.top_k, None]
      logits = jnp.where(logits >= least, logits, -jnp.inf)
    embedding = first + jax.nn.softmax(logits) @ table[:-2]
    embeddings.append(embedding)
  output = run(config, trace=ponderlm.TRACES)
  close = {"atol": 1e-4, "rtol": 1e-4}
  np.testing.assert_allclose(output.trace["hidden"], jnp.stack(hidden), **close)
  mixed = output.trace["mixed"]
  np.testing.assert_allclose(mixed[:2], jnp.stack(embeddings[:2]), **close)
  np.testing.assert_allclose(
    output.logits[..., :-2], hidden[-1] @ head[:-2].T, **close
  )


def test_one_pass_is_one_loop_of_the_looped_family():
  fields = {f.name for f in dataclasses.fields(looped.Config)}
  shared = {
    name: value
    for name, value in dataclasses.asdict(SMALL).items()
    if name in fields
  }
  vanilla = examples.run(
    looped, looped.Config(**shared), SPEC, TOKENS, num_loops=1
  )
  np.testing.assert_allclose(run(num_loops=1).logits, vanilla.logits, atol=1e-6)


@pytest.mark.long
def test_the_hidden_state_is_not_carried():
  """A pass that decodes to nothing starts as the first one did."""
  config = dataclasses.replace(SMALL, temperature=1e9)
  params = examples.params_of(ponderlm, config, SPEC)
  signs = jnp.where(jnp.arange(23) % 2 == 0, 1.0, -1.0)[:, None]
  table = 1e-3 * signs * jnp.ones_like(params["token_embedding"]["embedding"])
  params = {**params, "token_embedding": {"embedding": table}}
  # 22 tokens of equal chances, whose mean is 0.
  spec = dataclasses.replace(SPEC, num_padding_tokens=1)
  trace = examples.run(
    ponderlm, config, spec, TOKENS, params, trace=("hidden", "mixed")
  ).trace
  np.testing.assert_allclose(trace["mixed"][0], table[TOKENS], atol=1e-8)
  np.testing.assert_allclose(trace["hidden"][1], trace["hidden"][0], atol=1e-4)
  np.testing.assert_allclose(trace["hidden"][2], trace["hidden"][0], atol=1e-4)


def test_an_untied_head_has_its_parameters():
  spec = dataclasses.replace(SPEC, vocab_size=1051)

  def count(config):
    return examples.count(ponderlm, config, spec)

  block = 12 * 768**2 + 2 * 768
  tied = count(ponderlm.Config())
  assert tied == 4 * block + 1051 * 768 + 768
  assert count(ponderlm.Config(tied=False)) == tied + 1051 * 768


def test_costs_by_hand():
  spec = TaskSpec(1051, 4, ((0,),) * 4)
  flops = ponderlm.costs(ponderlm.Config(), spec, 3)["flops_per_example"]
  block = 12 * 768**2 + 2 * 4 * 768
  for loops, actual in zip((1, 2, 3), flops, strict=True):
    tables = 1 + 2 * (loops - 1)  # Read-out; logits and mean between passes.
    assert actual == 2 * 4 * (loops * 4 * block + tables * 1051 * 768)
