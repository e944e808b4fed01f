"""Searches a learning rate and a number of loops with Optuna.

  pip install optuna
  python docs/howto/search_optuna.py

Trials are compared, and hopeless ones ended, by the validation split. The test
split is scored once, with the best trial's settings. Minutes on one CPU core.
"""

import optax
import optuna

import loopjax

BOARDS = {"box_rows": 2, "box_cols": 2}


def train(data, settings, steps, on_log=None):
  """Trains a model with the settings of a trial."""
  model = loopjax.build(
    "utm",
    "sudoku",
    width=32,
    num_heads=4,
    num_loops=settings["num_loops"],
    **{f"task__{name}": value for name, value in BOARDS.items()},
  )
  # The rate is a number in the optimizer's state, not in the compiled program.
  adamw = optax.inject_hyperparams(optax.adamw)
  tx = adamw(learning_rate=settings["learning_rate"])
  return model.fit(
    data["train"],
    steps=steps,
    tx=tx,
    every=max(steps // 5, 1),
    on_log=on_log,
    quiet=True,
  )


def objective(trial, data, steps):
  """The validation loss after training, or of the step at which it ended."""
  settings = {
    "learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-2, log=True),
    "num_loops": trial.suggest_int("num_loops", 1, 4),
  }
  losses = []

  def on_log(step, metrics, model):
    losses.append(model.evaluate(data["validation"])["loss"])
    trial.report(losses[-1], step)
    return step < steps and trial.should_prune()  # True ends training.

  train(data, settings, steps, on_log)
  if len(losses) < 5:
    raise optuna.TrialPruned
  return losses[-1]


def main(num_trials=12, steps=300):
  """Searches; prints the best settings and their score on the test split."""
  data = loopjax.datasets("sudoku", batch_size=64, **BOARDS)
  pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
  sampler = optuna.samplers.TPESampler(seed=0)
  study = optuna.create_study(sampler=sampler, pruner=pruner)
  study.optimize(lambda trial: objective(trial, data, steps), num_trials)
  best = train(data, study.best_params, steps)
  score = best.evaluate(data["test"])["exact_match"]
  print(f"best: {study.best_params}; test/exact_match {score:.3f}")
  return study


if __name__ == "__main__":
  main()
