"""Steps with non-finite numbers change nothing, are counted, and explained."""

import dataclasses
import functools
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests_support import crossing, make_datasets, smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding, train
from loopjax.data import pipeline
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import integrity
from loopjax.train import loop as train_loop


@functools.cache
def make(loss=None, **overrides):
  settings = config_lib.resolve(smoke(**overrides))
  if loss:
    family = types.SimpleNamespace(**vars(settings.family))
    family.loss = loss(settings.family.loss)
    settings = settings._replace(family=family)
  program = program_lib.make_program(settings, jax.devices()[:1])
  dataset = make_datasets(settings)["train"]
  batches = pipeline.iterate(dataset.batches, num_threads=0)
  return settings, program, [next(batches) for _ in range(4)]


def put(program, batches):
  tree = jax.tree.map(lambda *rows: np.stack(rows), *batches)
  size = len(batches[0]["weights"])
  return sharding.put_batch(program.mesh, tree, size, stacked=True)


def spoiled(batch, value=np.nan):
  weights = batch["weights"].copy()
  weights[3, 2] = value
  return {**batch, "weights": weights}


def assert_equal(tree, other):
  jax.tree.map(np.testing.assert_array_equal, tree, other)


def learned(state):
  return jax.device_get((state.params, state.ema, state.opt_state))


@crossing("value", [np.nan, np.inf])
def test_a_bad_batch_changes_nothing_but_the_count(value):
  _, program, batches = make()
  good = program.train(
    program.init(jax.random.key(0)), put(program, batches[:1]), {}
  )[0]
  before = learned(good)
  bad, metrics = program.train(
    good, put(program, [spoiled(batches[1], value)]), {}
  )
  assert_equal(learned(bad), before)
  assert int(bad.step) == 2
  assert (int(bad.bad.streak), int(bad.bad.first)) == (1, 1)
  assert np.asarray(bad.bad.hit).any()
  np.testing.assert_array_equal(metrics["accepted"], [0])
  after, metrics = program.train(bad, put(program, batches[2:3]), {})
  assert int(after.bad.streak) == 0
  assert not np.asarray(after.bad.hit).any()
  np.testing.assert_array_equal(metrics["accepted"], [1])
  assert not np.array_equal(
    after.params["head"]["bias"], before[0]["head"]["bias"]
  )


def with_bad_gradient(loss):
  """The loss stays finite; at step 1, one parameter's gradient is not."""

  def changed(model, batch, key, step, teacher):
    total, metrics = loss(model, batch, key, step, teacher)
    weight = model.memory_tokens[...][0, 0]
    zero = jnp.where(step == 1, 0.0 * weight, 1.0)
    total += jnp.sqrt(zero) - jax.lax.stop_gradient(jnp.sqrt(zero))
    return total, metrics

  return changed


@pytest.mark.long
def test_a_bad_gradient_is_laid_at_its_parameter():
  _, program, batches = make(with_bad_gradient)
  state, metrics = program.train(
    program.init(jax.random.key(0)), put(program, batches[:2]), {}
  )
  assert np.isfinite(metrics["loss"]).all()
  np.testing.assert_array_equal(metrics["accepted"], [1, 0])
  names = integrity.names(state.params)
  hit = [n for n, was in zip(names, state.bad.hit, strict=True) if was]
  assert hit == ["memory_tokens"]
  assert jax.tree.all(
    jax.tree.map(lambda x: jnp.isfinite(x).all(), state.params)
  )


@pytest.mark.long
def test_a_streak_stops_for_good():
  """Later steps in the same call do not count either."""
  _, program, batches = make(run__max_bad_steps=2)
  bad = [spoiled(batch) for batch in batches]
  state, _ = program.train(
    program.init(jax.random.key(0)), put(program, batches[:1]), {}
  )
  before = learned(state)
  state, _ = program.train(state, put(program, [*bad[1:3], batches[3]]), {})
  assert_equal(learned(state), before)
  assert (int(state.bad.streak), int(state.bad.first)) == (2, 1)


@pytest.mark.long
def test_single_bad_steps_do_not_stop():
  _, program, batches = make(run__max_bad_steps=2)
  mixed = [spoiled(batches[0]), batches[1], spoiled(batches[2]), batches[3]]
  state, _ = program.train(
    program.init(jax.random.key(0)), put(program, mixed), {}
  )
  alone, _ = program.train(
    program.init(jax.random.key(0)), put(program, batches[1:2]), {}
  )
  assert int(state.bad.streak) == 0
  assert int(optimizer_steps(state)) == 2
  assert int(optimizer_steps(alone)) == 1


def optimizer_steps(state):
  """Steps counted by the optimizer."""
  return optax.tree.get_all_with_path(state.opt_state, "count")[0][1]


def test_means_leave_bad_steps_out():
  pending = [
    {"accepted": np.array([1.0, 0.0]), "loss": np.array([2.0, np.nan])},
    {"accepted": np.array([1.0]), "loss": np.array([4.0])},
  ]
  row = train_loop.mean_of_good_steps(pending)
  assert row == {"loss": 3.0, "skipped_steps": 1.0}
  only_bad = [{"accepted": np.zeros(2), "loss": np.full(2, np.nan)}]
  row = train_loop.mean_of_good_steps(only_bad)
  assert np.isnan(row["loss"])
  assert row["skipped_steps"] == 2


def spoil_data(monkeypatch, first, last):
  """Batches first .. last of training contain a NaN."""
  iterate = pipeline.iterate

  def spoiling(batches, *args, **options):
    spoilt = batches.map_with_index(
      lambda index, batch: spoiled(batch) if first <= index <= last else batch
    )
    return iterate(spoilt, *args, **options)

  monkeypatch.setattr(train_loop.pipeline, "iterate", spoiling)


@pytest.mark.long
def test_a_run_goes_on_past_bad_batches(monkeypatch, tmp_path):
  spoil_data(monkeypatch, 11, 13)
  summary = train.run(smoke(), tmp_path, "train")
  assert summary["status"] == "completed"
  skipped = [r["skipped_steps"] for r in workdir_lib.read_metrics(tmp_path)]
  assert skipped == [0, 3]
  assert all("loss" in r for r in workdir_lib.read_metrics(tmp_path))


@pytest.mark.long
def test_a_run_that_diverges_says_where(monkeypatch, tmp_path):
  spoil_data(monkeypatch, 13, 99)
  config = smoke(run__max_bad_steps=4, eval__depth_factor=0)
  summary = train.run(config, tmp_path, "train_and_eval")
  assert summary["status"] == "diverged"
  assert "4 consecutive steps from step 13" in summary["reason"]
  assert "block/" in summary["reason"]
  assert not any(name.startswith("test/") for name in summary["metrics"])
  assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["10"]


def with_logarithm_of_zero(loss):
  def changed(model, batch, key, step, teacher):
    total, metrics = loss(model, batch, key, step, teacher)
    total += jnp.log(jnp.where(step == 12, -1.0, 1.0))
    return total, {**metrics, "loss": total}

  return changed


@pytest.mark.manual  # Every operation of a call runs separately.
def test_debug_nans_names_the_operation(monkeypatch, tmp_path):
  from loopjax.models import utm

  loss = with_logarithm_of_zero(utm.FAMILY.loss)
  monkeypatch.setattr(utm, "FAMILY", dataclasses.replace(utm.FAMILY, loss=loss))
  summary = train.run(smoke(run__debug_nans=True), tmp_path, "train")
  assert summary["status"] == "diverged"
  assert "encountered in log" in summary["reason"]
  called = "loopjax/program/step.py:"  # Where the loss is called.
  assert called in summary["reason"]
  assert summary["steps"] == 15  # The call of steps 10 .. 14.


@pytest.mark.long
def test_a_stopped_state_is_not_saved(monkeypatch, tmp_path):
  """It has counted bad steps; a later start would miss them."""
  spoil_data(monkeypatch, 3, 6)
  options = {
    "run__log_every": 20, "run__checkpoint_every": 5, "run__keep_checkpoints": 9
  }  # fmt: skip
  config = smoke(run__max_bad_steps=3, **options)
  assert train.run(config, tmp_path, "train")["status"] == "diverged"
  kept = [path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")]
  assert kept == ["5"]  # Two bad steps do not stop the run.
  straight = train.run(
    smoke(run__max_bad_steps=9, **options), tmp_path / "straight", "train"
  )
  again = train.run(smoke(run__max_bad_steps=9, **options), tmp_path, "train")
  assert again["status"] == straight["status"] == "completed"
  assert again["digest"] == straight["digest"]


@pytest.mark.long
def test_what_a_stopped_state_skips_is_counted():
  _, program, batches = make(run__max_bad_steps=1)
  _, metrics = program.train(
    program.init(jax.random.key(0)),
    put(program, [spoiled(batches[0]), *batches[1:3]]),
    {},
  )
  np.testing.assert_array_equal(metrics["accepted"], [0, 0, 0])


def test_a_frame_is_the_projects_only_if_it_is_in_the_package(tmp_path):
  """For any names of parent directories."""
  package = tmp_path / "loopjax" / "src" / "loopjax"
  other = tmp_path / "loopjax" / "lib" / "site-packages" / "loopjax_tools"
  for directory in (package, other):
    directory.mkdir(parents=True)
  (other / "a.py").write_text("def fail():\n  raise FloatingPointError\n")
  (package / "b.py").write_text("def call(function):\n  function()\n")
  fail = runpy.run_path(str(other / "a.py"))["fail"]
  call = runpy.run_path(str(package / "b.py"))["call"]
  try:
    call(fail)
  except FloatingPointError as error:
    assert train_loop.origin(error, package) == f" at {package / 'b.py'}:2"
    assert train_loop.origin(error, tmp_path / "elsewhere") == ""


def test_the_first_bad_operation_is_found():
  def function(x, y):
    return jnp.log(x) + y

  said = train_loop.find_nan(function, jnp.float32(-1), jnp.float32(1))
  assert "encountered in log" in said
  fine = train_loop.find_nan(function, jnp.float32(1), jnp.float32(1))
  assert fine.startswith("non-finite in the compiled step, but not")
