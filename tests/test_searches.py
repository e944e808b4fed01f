"""The searches of docs/howto/search.md, with a few steps of training."""

import pytest
from tests_support import ROOT, script

import loopjax

pytestmark = pytest.mark.long


def search_with(name):
  """A script of docs/howto, which needs the package that it is named after."""
  pytest.importorskip(name)
  return script(ROOT / "docs" / "howto" / f"search_{name}.py")


def test_optuna_ends_hopeless_trials_by_validation(monkeypatch, capsys):
  search = search_with("optuna")
  optuna = search.optuna
  study = search.main(num_trials=2, steps=5)
  assert [len(trial.intermediate_values) for trial in study.trials] == [5, 5]
  assert study.best_value == min(trial.value for trial in study.trials)
  assert "; test/exact_match 0." in capsys.readouterr().out
  data = loopjax.datasets("sudoku", batch_size=64, **search.BOARDS)
  pruner = optuna.pruners.ThresholdPruner(upper=0.0)
  study = optuna.create_study(pruner=pruner)
  study.optimize(lambda trial: search.objective(trial, data, 5), 1)
  (trial,) = study.trials
  assert trial.state is optuna.trial.TrialState.PRUNED
  assert list(trial.intermediate_values) == [1]
  scores = search.train(data, trial.params, 1).evaluate(data["validation"])
  assert trial.intermediate_values[1] == pytest.approx(scores["loss"])


def test_wandb_runs_log_validation_and_end_by_it(monkeypatch, tmp_path):
  """Without the service: an agent that gives its settings to each run."""
  search = search_with("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_DIR", str(tmp_path))
  monkeypatch.setenv("WANDB_SILENT", "true")
  found, swept = [], []

  def agent(sweep_id, function, count):
    assert sweep_id == "id"
    found.extend(function() for _ in range(count))

  monkeypatch.setattr(
    search.wandb, "sweep", lambda *_, **__: swept.append(_) or "id"
  )
  monkeypatch.setattr(search.wandb, "agent", agent)
  search.main(num_runs=1, steps=5)
  assert swept == [(search.SWEEP,)]
  assert [len(losses) for losses in found] == [5]
  worse = iter(range(100))
  monkeypatch.setattr(
    loopjax.Model, "evaluate", lambda *_: {"loss": float(next(worse))}
  )
  search.main(num_runs=1, steps=5)
  assert found[1] == [0.0, 1.0, 2.0]  # Two evaluations without a better one.
