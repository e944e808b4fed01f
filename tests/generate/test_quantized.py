"""Weights in 8 and 4 bits: loading, storage, refusals."""

import json
import pathlib
import sys

import generate_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests_support import causal, crossing, summary_of

from loopjax.errors import UserError
from loopjax.generate.engine import Engine, GenerationRequest, Sampling
from loopjax.hub import __main__ as hub
from loopjax.nn import linear
from loopjax.nn.fast_weights.gated_delta import GatedDeltaNet
from loopjax.nn.fast_weights.jet import JetBlock
from loopjax.run.checkpoints import quantized
from loopjax.saved import language_model, trained
from loopjax.types import Precision

NOVELS = pathlib.Path("zoo:novels")
GREEDY = Sampling(temperature=0.0)


def of_zoo(**options):
  return language_model.load(NOVELS, **options)


@pytest.mark.parametrize("weights", quantized.WEIGHTS)
def test_every_number_is_within_half_a_step_of_its_output(weights):
  generator = np.random.default_rng(0)
  params = {
    "layers": {"kernel": generator.normal(size=(3, 16, 18))},
    "table": {"embedding": generator.normal(size=(20, 16))},
    "gate": {"kernel": generator.normal(size=(16, 1))},
    "norm": {"scale": generator.normal(size=(16,))},
  }
  # Outputs of very different sizes do not disturb each other.
  params["layers"]["kernel"][1, :, 2] *= 1e4
  params["table"]["embedding"][3] *= 1e4
  params = jax.tree.map(jnp.asarray, params)
  made = quantized.quantized(params, weights)
  most = {"int8": 127.5, "int4": 7.5}[weights]
  for path, axis in ((("layers", "kernel"), -2), (("table", "embedding"), -1)):
    there, here = (x[path[0]][path[1]] for x in (params, made))
    step = np.abs(there).max(axis, keepdims=True) / most
    gap = np.abs(linear.dense(here) - there)
    assert np.all(gap <= 0.5001 * step) and gap.max() > 0
  assert made["gate"] == params["gate"] and made["norm"] == params["norm"]
  assert quantized.kind(made) == weights


@pytest.mark.parametrize(
  ("kind", "sizes"),
  [(GatedDeltaNet, (16, 16, 2, 2)), (JetBlock, (16, 16, 2, 8))],
)
def test_memory_layers_with_many_heads_take_quantised_weights(kind, sizes):
  """Also where a gate per head, or a tap generator, is large enough for it."""

  def make():
    return kind(*sizes, precision=Precision(), rngs=nnx.Rngs(params=0))

  graphdef, state = nnx.split(nnx.eval_shape(make))
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype),
    nnx.to_pure_dict(state),
  )
  made = quantized.quantized(params, "int8")
  assert hasattr(made["fast_weights"]["decay"]["kernel"], "qvalue")
  dense = jax.tree.map(
    linear.dense, made, is_leaf=lambda x: hasattr(x, "qvalue")
  )
  x = jnp.asarray(generator.normal(size=(1, 3, 16)), jnp.float32)

  @jax.jit
  def run(params):
    layer = nnx.merge(graphdef, params)
    return layer(x, layer.initial_state(1))[0]

  np.testing.assert_allclose(run(made), run(dense), atol=1e-5)


@pytest.mark.long
@crossing(
  "name",
  causal(),
  manual=(
    "sleep",
    "recurrent",
    "melt",
    "disco",
    "plt",
    "ponderlm",
    "loopformer",
    "transformer",
  ),
)
def test_a_quantised_model_writes_what_its_dense_weights_write(name):
  """In every family: the engine uses weights only through `linear.dense`."""
  family, graphdef, params = examples.model_of(name)
  made = quantized.quantized(params, "int8")
  dense = jax.tree.map(
    linear.dense, made, is_leaf=lambda x: hasattr(x, "qvalue")
  )
  found = []
  for weights in (made, dense):
    engine = Engine(
      family, graphdef, weights, num_slots=8, max_tokens=examples.LENGTH
    )
    # Two that decode together, then one alone.
    texts = engine.generate(
      [GenerationRequest((3, 1, 4), n, GREEDY) for n in (12, 6)]
    )
    found.append([x[1:3] for text in texts for x in text])
  np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.long
def test_the_trained_model_predicts_almost_as_well_in_half_the_memory():
  tokens = np.frombuffer(
    b"It was the best of times, it was the worst of times, and she had never "
    b"seen the house of which he had spoken to her in the evening before.",
    np.uint8,
  )
  inputs = jnp.asarray(tokens[None], jnp.int32)
  losses, sizes = {}, {}
  for weights in (None, "int8", "int4"):
    model = of_zoo(weights=weights)

    @jax.jit
    def loss(params, graphdef=model.graphdef):
      logits = nnx.merge(graphdef, params)(inputs[:, :-1]).logits
      chance = jax.nn.log_softmax(logits)
      at = jnp.take_along_axis(chance, inputs[:, 1:, None], axis=2)
      return -jnp.mean(at)

    losses[weights] = float(loss(model.params))
    sizes[weights] = quantized.num_bytes(model.params)
    assert model.facts.get("weights") == weights
  of_bfloat16 = sizes[None] / 2
  assert abs(losses["int8"] / losses[None] - 1) < 0.005
  assert sizes["int8"] <= 0.55 * of_bfloat16
  assert sizes["int4"] <= 0.3 * of_bfloat16
  assert losses["int4"] < 1.1 * losses[None]


@pytest.mark.long
@crossing("weights", ("int4", "int8"))
def test_a_stored_model_is_the_one_that_is_quantised_when_read(
  weights, tmp_path
):
  workdir = tmp_path / "small"
  arguments = ["quantize", str(NOVELS), str(workdir), f"--weights={weights}"]
  assert hub.main(arguments) == 0
  there, here = language_model.load(workdir), of_zoo(weights=weights)
  assert there.facts["weights"] == weights
  jax.tree.map(np.testing.assert_array_equal, there.params, here.params)
  summary = summary_of(workdir)
  assert summary["parameters"] == 468_737
  size = (workdir / "quantized.safetensors").stat().st_size
  assert size < 1.02 * quantized.num_bytes(here.params)
  with pytest.raises(UserError, match=f"the weights are already in {weights}"):
    language_model.load(workdir, weights="int8")
  with pytest.raises(UserError, match="quantised weights, which only generate"):
    trained.read(workdir)


def test_what_is_damaged_or_does_not_fit_is_one_line(tmp_path, capsys):
  workdir = tmp_path / "small"
  hub.main(["quantize", str(NOVELS), str(workdir), "--weights=int8"])
  assert hub.main(["quantize", "x", str(workdir), "--weights=int8"]) == 2
  assert "already contains a run" in capsys.readouterr().err
  other = ["quantize", str(NOVELS), str(tmp_path / "new"), "--weights=int8"]
  assert hub.main([*other, "--dtype=bfloat16"]) == 2
  assert "--dtype=bfloat16 has no effect on a run" in capsys.readouterr().err
  other[1] = "zoo:sudoku_6x6"
  assert hub.main(other) == 2
  assert "does not predict next tokens" in capsys.readouterr().err
  config = json.loads((workdir / "config.json").read_text())
  config["model"]["width"] = 64
  (workdir / "config.json").write_text(json.dumps(config))
  with pytest.raises(UserError, match="does not fit: other shape"):
    language_model.load(workdir)
  (workdir / "quantized.safetensors").write_bytes(b"short")
  with pytest.raises(UserError, match="cannot be read"):
    language_model.load(workdir)
  summary = summary_of(workdir)
  summary["weights"] = "int3"
  (workdir / "summary.json").write_text(json.dumps(summary))
  with pytest.raises(UserError, match="weights='int3' is not int8 or int4"):
    language_model.load(workdir)


@pytest.mark.long
def test_weights_that_cannot_be_quantised_are_refused(monkeypatch):
  params = {"gate": {"kernel": jnp.ones((16, 1))}}
  with pytest.raises(
    UserError, match="no matrix of this model has at least 16"
  ):
    quantized.quantized(params, "int8")
  monkeypatch.setitem(sys.modules, "qwix", None)
  with pytest.raises(UserError, match=r"pip install 'loopjax\[quantize\]'"):
    quantized.quantized(params, "int8")
