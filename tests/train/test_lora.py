"""Low-rank pairs: their algebra, what a run trains, stores and writes."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests_support import (
  crossing,
  load_config,
  make_datasets,
  refused,
  smoke,
  summary_of,
)

import loopjax
from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding, train
from loopjax.commands import describe
from loopjax.data import pipeline
from loopjax.nn import lora
from loopjax.optim import chain
from loopjax.program import step
from loopjax.run.checkpoints import integrity, restore
from loopjax.saved import trained
from loopjax.train.score import score_model

PAIRS = {"optim__lora_rank": 3, "optim__lora_targets": "query|mlp"}
pytestmark = pytest.mark.usefixtures("programs")
KEY = jax.random.key(0)


def matrices():
  keys = jax.random.split(KEY, 3)
  return {
    "layers": {
      "query": {"kernel": jax.random.normal(keys[0], (2, 6, 4))},
      "norm": {"scale": jnp.ones((2, 6))},
    },
    "table": {"embedding": jax.random.normal(keys[1], (7, 6))},
    "gate": jax.random.normal(keys[2], (6,)),
  }


def equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_pairs_stand_beside_their_matrices_and_change_nothing_at_first():
  params = matrices()
  how = lora.Adaptation(3, 16.0, "query|norm|table", "gate$")
  base, pairs = lora.split(params, how, KEY)
  shapes = jax.tree.map(jnp.shape, pairs, is_leaf=lambda x: x is None)
  assert shapes == {
    "layers": {"query": {"kernel": {"A": (2, 6, 3), "B": (2, 3, 4)}}},
    "table": {"embedding": {"A": (7, 3), "B": (3, 6)}},
    "gate": (6,),
  }
  equal(base, {k: x for k, x in params.items() if k != "gate"})
  equal(lora.merge(base, pairs, 16.0), params)
  # Another key, other A; and another A for every matrix.
  other = lora.split(params, how, jax.random.key(1))[1]
  a, b = (x["layers"]["query"]["kernel"]["A"] for x in (pairs, other))
  assert not np.allclose(a, b) and not np.allclose(a[0], a[1])


def test_matrices_of_one_shape_have_pairs_of_their_own():
  one = jnp.ones((6, 4))
  params = {"a": {"kernel": one}, "b": {"kernel": one}}
  _, pairs = lora.split(params, lora.Adaptation(3, 1.0, "kernel"), KEY)
  a, b = (np.ravel(pairs[name]["kernel"]["A"]) for name in "ab")
  assert not np.intersect1d(a, b).size


def test_a_runs_seed_draws_its_pairs():
  """They are no function of the model's own parameters' seed alone."""

  def first(seed):
    settings = config_lib.resolve(smoke(run__seed=seed, **PAIRS))
    key = jax.random.key(settings.run.seed)
    state = program_lib.initial_state(settings, optax.sgd(1.0), key)
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    drawn = [np.ravel(x) for path, x in leaves if path[-1].key == "A"]
    return np.concatenate(drawn)

  one, other = first(0), first(1)
  assert np.array_equal(one, first(0))
  assert not np.intersect1d(one, other).size
  assert len(np.unique(one)) == len(one)  # No part repeats another.


def test_the_sum_is_that_of_the_paper():
  """Equation 3, by NumPy in float64, layer by layer."""
  params = matrices()
  how = lora.Adaptation(3, 12.0, "query")
  base, pairs = lora.split(params, how, KEY)
  pair = pairs["layers"]["query"]["kernel"]
  pair["B"] = jax.random.normal(jax.random.key(7), pair["B"].shape)
  found = lora.merge(base, pairs, 12.0)
  w = np.float64(params["layers"]["query"]["kernel"])
  for i in range(2):
    ab = np.float64(pair["A"][i]) @ np.float64(pair["B"][i])
    got = found["layers"]["query"]["kernel"][i]
    np.testing.assert_allclose(got, w[i] + 12 / 3 * ab, rtol=2e-5, atol=2e-6)


def test_the_variance_of_a_is_one_over_the_inputs():
  params = {"kernel": jnp.zeros((400, 300))}
  _, pairs = lora.split(params, lora.Adaptation(200, 1.0, "kernel"), KEY)
  np.testing.assert_allclose(pairs["kernel"]["A"].std(), 1 / 20, rtol=0.02)
  assert not pairs["kernel"]["B"].any()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"targets": "nothing"}, "lora_targets='nothing' matches no matrix"),
    ({"targets": "norm"}, "lora_targets='norm' matches no matrix"),
    ({"frozen": "query"}, "lora_targets='query' matches no matrix"),
    ({"whole": "query"}, "lora_targets='query' matches no matrix"),
    ({"whole": "none"}, "lora_whole='none' matches no parameter"),
    ({"rank": 5}, r"lora_rank=5 exceeds layers/query/kernel \[6, 4\]"),
  ],
)
def test_what_cannot_be_adapted_is_named(changes, message):
  how = lora.Adaptation(2, 1.0, "query")._replace(**changes)
  with refused(message):
    lora.split(matrices(), how, KEY)


def one_step(num_microbatches, **overrides):
  """(state before, state after) of a step of plain gradient descent."""
  settings = config_lib.resolve(smoke(optim__warmup_steps=0, **overrides))
  graphdef, _ = program_lib.abstract_model(settings)
  dataset = make_datasets(settings)["train"]
  batch = next(pipeline.iterate(dataset.batches, num_threads=0))
  tx = optax.sgd(1.0)
  state = program_lib.initial_state(settings, tx, KEY)
  after, _ = jax.jit(
    lambda state: step.train_step(
      state, batch, {}, graphdef=graphdef, teacher_graphdef=None,
      loss_fn=settings.family.loss, tx=tx, ema_decay=0.0,
      num_microbatches=num_microbatches, max_bad_steps=1,
      alpha=settings.optim.lora_alpha,
    )
  )(state)  # fmt: skip
  return state, after


@crossing("num_microbatches", [1, 2])
def test_the_first_gradient_follows_from_the_matrix_s(num_microbatches):
  """dB = (alpha / rank) A^T dW, and dA = 0 because B is 0.

  At full rank, with A = 1 and alpha = rank, a step moves W as without pairs.
  """
  whole, moved = one_step(num_microbatches)
  gradient = jax.tree.map(jnp.subtract, whole.params, moved.params)
  before, after = one_step(
    num_microbatches, optim__lora_alpha=6.0, optim__lora_whole="head/bias",
    **PAIRS,
  )  # fmt: skip
  equal(lora.merge(before.base, before.params, 6.0), whole.params)
  equal(after.base, before.base)
  there = lora.flat(gradient)
  steps = lora.flat(jax.tree.map(jnp.subtract, before.params, after.params))
  pairs = lora.flat(before.params)
  assert len(steps) > 5
  for path, found in steps.items():
    if path[-1] == "A":
      assert not found.any()
    elif path[-1] == "B":
      a = np.float64(pairs[(*path[:-1], "A")])
      expected = 2 * a.mT @ np.float64(there[path[:-1]])
      np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
      assert np.abs(expected).max() > 1e-4
    else:
      assert path == ("head", "bias")
      np.testing.assert_allclose(found, there[path], rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("source")
  train.run(smoke(run__num_steps=10), workdir, "train")
  return workdir


def tuned_config(source, **overrides):
  values = {
    **PAIRS,
    "run__init_from": str(source),
    "run__seed": 5,
    "run__num_steps": 10,
    "run__checkpoint_every": 5,
    "eval__depth_factor": 0,
  }
  return smoke(**{**values, **overrides})


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory):
  """A run of ten steps on pairs."""
  workdir = tmp_path_factory.mktemp("tuned")
  train.run(tuned_config(source), workdir, "train_and_eval")
  return workdir


def state_of(workdir, at, config):
  program = program_lib.make_program(config_lib.resolve(config))
  return restore.state(workdir, at, program.abstract_state)[0], program


def test_only_pairs_are_trained_averaged_and_have_optimizer_state(
  source, tuned
):
  state, program = state_of(tuned, 10, tuned_config(source))
  before = trained.read(source)
  equal(state.base, before.params)  # Every bit, after ten steps.
  names = integrity.names(state.params)
  assert {name.rpartition("/")[2] for name in names} == {"A", "B"}
  assert integrity.names(state.ema) == names
  size = sum(x.size for x in jax.tree.leaves(state.params))
  count = optax.tree.get_all_with_path(state.opt_state, "count")
  moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
  assert moments == 2 * size and len(count) >= 1
  assert 8 * size < sum(x.size for x in jax.tree.leaves(before.params)) * 4
  assert all(x.any() for x in jax.tree.leaves(state.params))


def test_readers_get_the_sum(source, tuned):
  """Here by NumPy from the arrays of the checkpoint, averaged ones."""
  config = tuned_config(source)
  state, program = state_of(tuned, 10, config)
  alpha = config.optim.lora_alpha
  base, pairs = lora.flat(state.base), lora.flat(state.ema)
  found = lora.flat(trained.read(tuned).params)
  assert found.keys() == base.keys()
  changed = 0
  for path, w in base.items():
    expected = np.float64(w)
    if (*path, "A") in pairs:
      a, b = (np.float64(pairs[(*path, part)]) for part in "AB")
      expected = expected + alpha / a.shape[-1] * a @ b
      changed += not np.array_equal(found[path], w)
    np.testing.assert_allclose(found[path], expected, rtol=1e-5, atol=1e-6)
  assert changed == len(pairs) / 2
  equal(program.scored_params(state), trained.read(tuned).params)
  # The scores are those of the sum: --mode=eval reads it as others do.
  again = score_model(tuned_config(source), tuned)
  there = summary_of(tuned)
  for name in ("test/exact_match", "test/loss"):
    assert again["metrics"][name] == there["metrics"][name]
  size = sum(x.size for x in jax.tree.leaves(trained.read(source).params))
  assert there["parameters"] == size


def test_a_run_on_pairs_resumes_bit_for_bit(source, tuned, tmp_path):
  cut = tmp_path / "cut"
  shutil.copytree(tuned, cut)
  (cut / "summary.json").unlink()
  shutil.rmtree(cut / "checkpoints" / "10")
  train.run(tuned_config(source), cut, "train_and_eval")
  digests = [summary_of(x)["digest"] for x in (cut, tuned)]
  assert digests[0] == digests[1]
  assert digests[0] != summary_of(source)["digest"]


@pytest.mark.long
def test_a_run_on_pairs_starts_another_one(tuned, tmp_path):
  """From the sum, and with pairs of its own."""
  config = tuned_config(tuned, optim__lora_rank=1)
  train.run(config, tmp_path / "next", "train")
  state, _ = state_of(tmp_path / "next", 10, config)
  equal(state.base, trained.read(tuned).params)


def test_on_a_mesh_a_step_is_the_same(source):
  config = tuned_config(source, optim__lora_rank=4)
  config.mesh.min_split_size = 64  # Not more than a part of a pair has.
  found = []
  for devices, mesh in ((1, {}), (8, {"fsdp": 2, "tensor": 2})):
    one = config.copy_and_resolve_references()
    config_lib.override(one, {f"mesh.{k}": v for k, v in mesh.items()})
    settings = config_lib.resolve(one)
    program = program_lib.make_program(settings, jax.devices()[:devices])
    batch = next(
      pipeline.iterate(make_datasets(settings)["train"].batches, num_threads=0)
    )
    batches = jax.tree.map(lambda x: np.stack([x] * 2), batch)
    placed = sharding.put_batch(
      program.mesh, batches, settings.run.batch_size, stacked=True
    )
    state, _ = program.train(program.init(KEY), placed, {})
    found.append(jax.device_get((state.params, state.base)))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), *found)


@pytest.mark.parametrize(
  ("arg", "message"),
  [
    ("optim.lora_alpha=2.0", "lora_alpha has no effect while optim.lora_rank"),
    ("optim.lora_rank=4,optim.lora_alpha=0.0", "lora_alpha=0.0 must be > 0"),
    ("optim.lora_rank=4,optim.lora_targets=(", r"lora_targets='\(': missing"),
    ("optim.lora_rank=4,optim.name=muon", "needs 'adamw'"),
    ("optim.lora_rank=4,optim.rates=('B$=16','embedding=2')",
     "'embedding=2' applies to no parameter"),
    ("optim.lora_rank=4,optim.lora_targets=heads", "matches no matrix"),
    ("optim.lora_rank=4,optim.frozen=heads", "frozen='heads' matches no"),
  ],
)  # fmt: skip
def test_settings_of_pairs_that_have_no_effect_are_named(arg, message):
  with refused(message):
    config_lib.resolve(load_config("lm_looped", f"smoke,{arg}"))


def test_a_preset_s_muon_gives_way(capsys):
  config = load_config("lm_looped", "tiny,optim.lora_rank=4")
  settings = config_lib.resolve(config)
  assert settings.optim.name == "adamw"
  lines = capsys.readouterr().err.splitlines()
  assert "preset's optim.name='muon' does not apply" in lines[0]
  assert "optim.muon_learning_rate" in lines[1] and len(lines) == 2
  described = describe.describe(config)
  _, shapes = program_lib.abstract_model(settings)
  sizes = {n: x.size for n, x in lora.flat(shapes).items()}
  assert described["parameters"] == sum(sizes.values())
  layers = {path: x for path, x in lora.flat(shapes).items() if x.ndim == 3}
  pairs = sum(x.shape[0] * 4 * sum(x.shape[1:]) for x in layers.values())
  assert described["parameters_trained"] == pairs
  assert f"{pairs:,} of pairs" in describe.page(described).replace("\n", " ")


def test_rates_can_name_a_part_of_the_pairs():
  """LoRA+ (arXiv 2402.12354) has a higher rate for B."""
  config = chain.Config(
    lora_rank=2, rates=("/B$=16",), warmup_steps=0, weight_decay=0.0
  )
  _, pairs = lora.split(matrices(), lora.Adaptation(2, 1.0, "query"), KEY)
  tx = chain.make_optimizer(config, 2000)
  updates, _ = tx.update(
    jax.tree.map(jnp.ones_like, pairs), tx.init(pairs), pairs
  )
  pair = updates["layers"]["query"]["kernel"]
  np.testing.assert_allclose(pair["B"], 16 * pair["A"][0, 0, 0], rtol=1e-6)


def test_a_python_program_trains_pairs():
  """`Model.fit` of a model with these settings; it returns the sum."""
  model = loopjax.build(
    "looped", width=16, num_heads=2, num_layers=1, num_loops=2,
    optim__lora_rank=2, optim__lora_targets="query",
  )  # fmt: skip
  rows = np.arange(2 * 9).reshape(2, 9)
  tuned = model.fit([(rows, rows)] * 3, steps=3, tx=optax.adam(0.1), quiet=True)
  before, after = lora.flat(model.params), lora.flat(tuned.params)
  assert before.keys() == after.keys()
  for path, w in before.items():
    change = np.asarray(after[path] - w, np.float64)
    if "query" in path:
      assert (np.linalg.svd(change)[1] > 1e-5).sum(-1) == 2  # Its rank.
    else:
      assert not change.any()
