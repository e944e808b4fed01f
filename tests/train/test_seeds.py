"""Runs of several seeds, trained in one program."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_float64 import without_rounding
from tests_support import SMOKE, load_config, refused, rows_of_metrics, smoke

from loopjax import config as config_lib
from loopjax import main, sharding, train
from loopjax import program as program_lib
from loopjax.data import pipeline
from loopjax.program import together
from loopjax.run import preemption
from loopjax.run import workdir as workdir_lib
from loopjax.train import calls as calls_lib
from loopjax.train import loop

pytestmark = pytest.mark.usefixtures("programs")
SEEDS = 0, 1


def counting():
  """A program whose state is a sum, to which a call adds its batch."""
  mesh = sharding.make_mesh(sharding.Config(), jax.devices()[:1])
  zero = jax.device_put(np.zeros(3, np.float32), sharding.replicated(mesh))

  def add(state, batch, teacher):
    del teacher
    return state + batch, {"batch": 2 * batch}

  run = types.SimpleNamespace(debug_nans=False)
  program = types.SimpleNamespace(
    train=jax.jit(add), uncompiled=add, mesh=mesh, abstract_state=zero,
    settings=types.SimpleNamespace(run=run),
  )  # fmt: skip
  return program, zero


def steps(calls, program, state, batches):
  """A run, whose result is its state and the sum of its metrics."""
  total = 0.0
  for batch in batches:
    row = jax.device_put(np.full(3, batch, np.float32), state.sharding)
    arguments = jnp.copy(state), row, {}
    calls.compile(program, arguments)
    state, metrics = yield arguments
    if batch < 0:
      raise ValueError("spoilt")
    total += float(metrics["batch"][0])
  return float(state[0]), total


def test_runs_that_end_early_let_the_others_continue():
  program, zero = counting()
  calls, batches = calls_lib.Calls(3), [[1, 2, 3], [4], [5, 6]]
  runs = [steps(calls, program, zero, one) for one in batches]
  assert calls.drive(runs) == [(6, 12), (4, 8), (11, 22)]
  assert sorted(calls._compiled) == [1, 2, 3]


def test_an_error_in_one_ends_all():
  program, zero = counting()
  calls = calls_lib.Calls(2)
  runs = [steps(calls, program, zero, one) for one in ([1, 2], [-1])]
  with pytest.raises(ValueError, match="spoilt"):
    calls.drive(runs)
  assert all(run.gi_frame is None for run in runs)


def config_of(seed, **overrides):
  """The family whose step is compiled fastest."""
  config = load_config(*SMOKE["looped"])
  values = {
    "run.seed": seed, "run.num_steps": 20, "run.steps_per_call": 5,
    "run.batch_size": 8, "run.log_every": 10, "run.checkpoint_every": 10,
    "eval.batch_size": 64, "eval.depth_factor": 0,
  }  # fmt: skip
  changes = {k.replace("__", "."): value for k, value in overrides.items()}
  config_lib.override(config, values | changes)
  return config


@pytest.mark.long
def test_a_call_of_several_is_a_call_of_each():
  """In float64, over two calls of five steps."""
  settings = [config_lib.resolve(config_of(seed)) for seed in SEEDS]
  program = program_lib.make_program(settings[0], jax.devices()[:1])
  one = without_rounding(program.uncompiled)
  several = without_rounding(together.together(program))
  key_of = jax.random.key
  states = [jax.device_get(program.init(key_of(seed))) for seed in SEEDS]
  sets = [train.make_datasets(x, program.mesh, ("train",)) for x in settings]
  rows = [
    loop.stacked(pipeline.iterate(x["train"].batches, num_threads=0), 5)
    for x in sets
  ]
  alone = [(state, {}) for state in states]
  for _ in range(2):
    batches = [next(x) for x in rows]
    states, metrics = several(states, batches, [{}, {}])
    alone = [
      one(state, batch, {})
      for (state, _), batch in zip(alone, batches, strict=True)
    ]
    for state, values, (own_state, own_values) in zip(
      states, metrics, alone, strict=True
    ):
      for got, want in zip(
        jax.tree.leaves((state._replace(key=0), values)),
        jax.tree.leaves((own_state._replace(key=0), own_values)),
        strict=True,
      ):
        np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-12)
  assert abs(metrics[0]["loss"][-1] - metrics[1]["loss"][-1]) > 1e-3


@pytest.mark.long
def test_each_run_is_one_of_its_own(tmp_path, monkeypatch):
  """Stopped and resumed, it has the files of a run that was alone."""
  config = config_of(0, eval__every=10, optim__ema_decay=0.9)
  workdirs = {seed: tmp_path / f"seed={seed}" for seed in SEEDS}
  asked = []

  def reached(notice):
    asked.append(notice)
    return len(asked) > 8

  with monkeypatch.context() as patch:
    patch.setattr(preemption.Notice, "reached", reached)
    stopped = train.run_seeds(config, workdirs, "train_and_eval")
  assert {x["status"] for x in stopped.values()} == {"preempted"}
  assert all(0 < x["steps"] < 20 for x in stopped.values())
  done = train.run_seeds(config, workdirs, "train_and_eval")
  assert train.run_seeds(config, workdirs, "train_and_eval") == done
  config.run.seed = 1
  workdir, alone = workdirs[1], tmp_path / "alone"
  summary = train.run(config, alone, "train_and_eval")
  assert summary.keys() == done[1].keys()
  assert workdir_lib.read_json(workdir / "summary.json") == done[1]
  assert train.run(config, workdir, "train_and_eval") == done[1]
  assert files(workdir) == files(alone)
  text, own = ((x / "config.json").read_text() for x in (workdir, alone))
  assert text == own
  rows = (rows_of_metrics(x) for x in (workdir, alone))
  for got, want in zip(*rows, strict=True):
    assert got.keys() == want.keys()
    for name, value in want.items():
      # Sums may be in another order; standard errors are small differences.
      near = 1e-2 if name.endswith("standard_error") else 1e-4
      if not isinstance(value, str):
        value = pytest.approx(value, rel=near, abs=1e-6)
      assert got[name] == value, name


def files(workdir):
  """The files of a run, without checkpoints and the board's."""
  return sorted(
    str(path.relative_to(workdir))
    for path in workdir.rglob("*")
    if path.is_file() and not {"checkpoints", "tb"} & {*path.parts}
  )


def test_what_needs_a_program_of_its_own_is_refused(tmp_path):
  workdirs = {seed: tmp_path / str(seed) for seed in SEEDS}
  for options, said in (
    ({"run__profile_steps": "1:2"}, "--seeds needs run.profile_steps=''"),
    ({"mesh__fsdp": 2}, "--seeds needs mesh.fsdp=1"),
  ):
    with refused(said):
      train.run_seeds(smoke(**options), workdirs, "train")
  config = "--config=configs/sudoku_utm.py:smoke"
  for flags, said in (
    (["--seeds=0,0"], "--seeds=0,0 is not a list such as 0,1,2"),
    (["--seeds=1,01"], "--seeds=1,01 is not a list such as 0,1,2"),
    (["--seeds=a"], "--seeds=a is not a list"),
    (["--seeds=0,1", "--mode=eval"], "--seeds has no effect with --mode=eval"),
    (["--seeds=0,1", "--config.run.seed=3"], "no effect with run.seed"),
  ):
    with refused(said):
      main.start(main.parser().parse_config([config, *flags]))
  assert not any(workdir.exists() for workdir in workdirs.values())


def test_the_command_has_a_directory_for_each(tmp_path, capsys, monkeypatch):
  def run_seeds(config, workdirs, mode, finish, extend):
    del config, finish
    assert (mode, extend) == ("train", False)
    assert workdirs == {seed: tmp_path / f"seed={seed}" for seed in (3, 1)}
    diverged = {"status": "diverged", "reason": "not finite", "steps": 7}
    scores = {"test/exact_match": 0.5, "test/count": 8}
    return {3: diverged, 1: {"status": "completed", "metrics": scores}}

  monkeypatch.setattr(train, "run_seeds", run_seeds)
  config = "--config=configs/sudoku_utm.py:smoke"
  flags = ["--mode=train", f"--workdir={tmp_path}", "--seeds=3,1"]
  assert main.main([config, *flags]) == 3
  said = capsys.readouterr().out.splitlines()
  assert said[-3:] == [
    "seed 3: diverged; not finite",
    "seed 1: completed; test: exact_match 0.5 on 8 examples",
    f"next: loopjax table {tmp_path}",
  ]
