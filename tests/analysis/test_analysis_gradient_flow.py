"""Jacobians and gradients of loops against dense ones."""

import json

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from analysis_examples import make_model, make_settings
from flax import nnx
from tests_support import crossing, load_config

from loopjax import config as config_lib
from loopjax.analysis import gradient_flow
from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.models import melt
from loopjax.saved import trained
from loopjax.types import TaskSpec

LOOPS, WIDTH = 3, 16
TOKENS = jax.random.randint(jax.random.key(5), (2, 6), 0, 5)
COUNT, TARGETS = np.array([6, 4]), np.array([3, 4])


def model_of(name, bias=0.0, **changes):
  changes = {"model__init_std": 0.3, "eval__depth_factor": 0, **changes}
  settings = make_settings(name, **changes)
  graphdef, params = make_model(settings)
  if bias:
    params["latent_gates"]["bias"] += bias
  return nnx.merge(graphdef, params)


@pytest.mark.long
@crossing("name", ["melt", "looped"], manual=("looped",))
def test_numbers_are_those_of_dense_jacobians(name):
  model = model_of(name)
  found = gradient_flow.measure(model, TOKENS, COUNT, TARGETS)
  loops = gradient_flow.recurrence(model, TOKENS, COUNT)
  step = jax.jit(loops.step)
  state, dense = loops.start, []
  for t in range(LOOPS):
    jacobian = jax.jit(jax.jacrev(lambda s, t=t: loops.step(s, t)[0]))(state)
    dense.append(np.stack([np.asarray(jacobian[b, :, b]) for b in range(2)]))
    state = step(state, t)[0]
  radius = np.abs(np.linalg.eigvals(dense)).max(axis=-1).mean(axis=1)
  np.testing.assert_allclose(found["radius"], radius, rtol=0.02)

  def loss(state):
    logits = model.logits(state[:, None, :WIDTH])[:, 0]
    return token_losses.token_cross_entropy(logits, jnp.asarray(TARGETS)).sum()

  gradient = np.asarray(jax.grad(loss)(state))
  norms = [gradient]
  for jacobian in reversed(dense):
    gradient = np.einsum("bi,bij->bj", gradient, jacobian)
    norms.insert(0, gradient)
  parts = {"hidden": slice(0, WIDTH)}
  if name == "melt":
    parts["latents"] = slice(WIDTH, None)
  assert found["gradient"].keys() == parts.keys()
  for part, where in parts.items():
    norm = np.linalg.norm(np.stack(norms)[:, :, where], axis=-1).mean(axis=1)
    np.testing.assert_allclose(
      found["gradient"][part], norm, rtol=1e-3, atol=1e-6
    )


@crossing("name", ["looped", "melt"])
def test_the_last_state_is_what_is_read_out(name):
  """The loops over a last token are those of the full forward pass."""
  model = model_of(name)
  loops = gradient_flow.recurrence(model, TOKENS, COUNT)
  step, state = jax.jit(loops.step), loops.start
  for t in range(LOOPS):
    state = step(state, t)[0]
  whole = jax.jit(model)(TOKENS).hidden
  expected = whole[np.arange(2), COUNT - 1]
  np.testing.assert_allclose(state[:, :WIDTH], expected, atol=1e-4)


def test_numbers_are_means_over_texts_and_shares_of_gates(monkeypatch):
  """For all kinds of gates: most neither keep nor replace a feature."""
  random = np.random.default_rng(0)
  found = {
    "hidden": random.uniform(size=(4, 3)),
    "latents": random.uniform(size=(4, 2, 3)),
    "state": np.eye(2) * random.uniform(-1, 1, (3, 3, 1, 1)),
    "latent": np.eye(2) * random.uniform(-1, 1, (2, 6, 1, 1)),
    "keep": np.array([0.05, 0.2, 0.89, 0.95, 0.97, 0.5, 0.08, 0.6])[
      random.integers(0, 8, (2, 2, 3, 4))
    ],
  }
  monkeypatch.setattr(gradient_flow, "_of_texts", lambda *_: found)
  got = gradient_flow.measure(None, TOKENS, np.array([6, 4, 2]), TARGETS)
  keep = found["keep"].reshape(2, -1)
  assert got == {
    "family": "melt",
    "texts": 3,
    "gradient": {
      "hidden": pytest.approx(found["hidden"].mean(1), rel=1e-6),
      "latents": got["gradient"]["latents"],
    },
    "radius": pytest.approx(
      np.abs(found["state"][..., 0, 0]).mean(1), rel=1e-6
    ),
    "latent": pytest.approx(
      np.abs(found["latent"][..., 0, 0]).mean(1), rel=1e-6
    ),
    "gate": {
      "mean": pytest.approx(keep.mean(1), rel=1e-6),
      "kept": pytest.approx((keep > 0.9).mean(1), rel=1e-6),
      "replaced": pytest.approx((keep < 0.1).mean(1), rel=1e-6),
    },
  }
  np.testing.assert_allclose(
    got["gradient"]["latents"], found["latents"].mean(axis=1), rtol=1e-6
  )


@pytest.mark.long
def test_saturated_gates_pass_everything_or_nothing():
  """Proposition E.1: z = 1 gives a radius of 1, z = 0 of 0."""
  for bias, radius, part in ((50.0, 1.0, "kept"), (-50.0, 0.0, "replaced")):
    model = model_of("melt", bias=bias)
    found = gradient_flow.measure(model, TOKENS, COUNT, TARGETS)
    np.testing.assert_allclose(found["latent"], [radius] * 2, atol=1e-4)
    np.testing.assert_allclose(found["gate"]["mean"], [radius] * 2, atol=1e-4)
    assert found["gate"][part] == [1.0, 1.0]


@pytest.mark.long
@crossing("gate", ["scalar", "ema"], manual=("ema",))
def test_a_gate_that_all_features_share_scales_them_all(gate):
  found = gradient_flow.measure(
    model_of("melt", model__gate=gate), TOKENS, COUNT, TARGETS
  )
  assert len(found["gate"]["mean"]) == len(found["latent"]) == LOOPS - 1
  if gate == "ema":
    np.testing.assert_allclose(found["gate"]["mean"], [0.2] * 2, rtol=1e-5)
    np.testing.assert_allclose(found["latent"], [0.2] * 2, rtol=1e-4)


def test_texts_end_where_their_first_document_does():
  batch = {
    "inputs": np.array([[1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 4]]),
    "targets": np.array([[2, 3, 4, 5], [2, 9, 0, 0], [7, 8, 9, 10]]),
    "documents": np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 2, 2, 2]]),
  }
  spec = TaskSpec(10, 4, ((0,), (1,), (2,), (3,)), 1)
  tokens, count, targets = gradient_flow.texts_of(batch, spec)
  assert (count.tolist(), targets.tolist()) == ([4, 2], [5, 9])
  assert len(tokens) == 2


@pytest.mark.long
def test_runs_are_drawn_beside_each_other(tmp_path, capsys, monkeypatch):
  def read(workdir):
    if workdir.name == "none":
      raise UserError(f"{workdir} contains no run")
    config = load_config("lm_melt", f"smoke,model.name={workdir.name}")
    config.optim.rates = ()  # The looped model has no gates.
    settings = config_lib.resolve(config)
    return trained.TrainedModel(settings, *make_model(settings), 0)

  def measure(model, tokens, count, targets):
    assert len(tokens) == len(count) == len(targets) == 4
    one = {"gradient": {"hidden": [3.0, 2.0]}, "radius": [2.0]}
    if not isinstance(model, melt.Model):
      return {"family": "looped", **one}
    one["gradient"]["latents"] = [0.0, 1.0]
    gate = {"mean": [], "kept": [], "replaced": []}
    return {"family": "melt", **one, "latent": [], "gate": gate}

  monkeypatch.setattr(trained, "read", read)
  monkeypatch.setattr(gradient_flow, "measure", measure)
  runs = [str(tmp_path / name) for name in ("melt", "looped")]
  assert gradient_flow.main([*runs, "--texts=4"]) == 0
  files = sorted((tmp_path / "melt" / "analysis").iterdir())
  assert sorted(capsys.readouterr().out.split()) == [str(x) for x in files]
  numbers, picture = files
  found = json.loads(numbers.read_text())
  assert [one["family"] for one in found.values()] == ["melt", "looped"]
  assert np.std(matplotlib.image.imread(picture)[..., :3]) > 0.02
  assert gradient_flow.main([str(tmp_path / "none")]) == 2
  assert "error: " in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path, drawn):
  one = {"gradient": {"hidden": [3.0, 2.0]}, "radius": [2.0]}
  paths = ("a/looped", "b/looped", "b/melt")
  gradient_flow.write(dict.fromkeys(paths, one), tmp_path)
  lines = drawn["gradient_flow.png"].axes[0].get_lines()
  assert [x.get_label() for x in lines] == ["a/looped", "b/looped", "melt"]
  assert len({x.get_color() for x in lines}) == 3


def test_lines_stand_at_their_loops(tmp_path, drawn):
  """Latents and gates begin with the second loop."""
  one = {
    "gradient": {"hidden": [4.0, 2.0, 1.0], "latents": [3.0, 0.5, 0.25]},
    "radius": [0.5, 0.6, 0.7],
    "latent": [0.1, 0.2],
    "gate": {"mean": [0.3, 0.4], "kept": [0.5, 0.6], "replaced": [0.7, 0.8]},
  }
  gradient_flow.write({"runs/melt": one}, tmp_path)
  back, forth, gates = drawn["gradient_flow.png"].axes
  found = [
    {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    for axes in (back, forth, gates)
  ]
  assert found[0] == {
    "melt": [[0, 4.0], [1, 2.0], [2, 1.0]],
    "melt, latents": [[0, 3.0], [1, 0.5], [2, 0.25]],
  }
  assert found[1]["melt"] == [[1, 0.5], [2, 0.6], [3, 0.7]]
  assert found[1]["melt, latent only"] == [[2, 0.1], [3, 0.2]]
  assert found[2]["mean z"] == [[2, 0.3], [3, 0.4]]
  assert back.get_xlabel() == "after loop"
