"""Searches a learning rate and a number of loops with a sweep of W&B.

  pip install wandb && wandb login
  python docs/howto/search_wandb.py

Runs are compared by the validation split, and end when it no longer improves.
Score the run that you choose on the test split, once. Minutes on one CPU core.
"""

import optax
import wandb

import loopjax

BOARDS = {"box_rows": 2, "box_cols": 2}
DEFAULTS = {"learning_rate": 3e-3, "num_loops": 3}  # The sweep replaces them.
SWEEP = {
  "method": "bayes",
  "metric": {"name": "validation/loss", "goal": "minimize"},
  "parameters": {
    "learning_rate": {
      "distribution": "log_uniform_values",
      "min": 1e-4,
      "max": 3e-2,
    },
    "num_loops": {"values": [1, 2, 3, 4]},
  },
}


def run_once(data, steps, patience=2):
  """Trains with the settings that the sweep gives; logs the losses."""
  with wandb.init(config=DEFAULTS) as run:
    model = loopjax.build(
      "utm",
      "sudoku",
      width=32,
      num_heads=4,
      num_loops=run.config["num_loops"],
      **{f"task__{name}": value for name, value in BOARDS.items()},
    )
    losses = []

    def on_log(step, metrics, model):
      losses.append(model.evaluate(data["validation"])["loss"])
      run.log(
        {"train/loss": metrics["loss"], "validation/loss": losses[-1]},
        step=step,
      )
      best = losses.index(min(losses))
      return len(losses) - 1 - best >= patience  # True ends training.

    adamw = optax.inject_hyperparams(optax.adamw)
    model.fit(
      data["train"],
      steps=steps,
      tx=adamw(learning_rate=run.config["learning_rate"]),
      every=max(steps // 10, 1),
      on_log=on_log,
      quiet=True,
    )
    run.summary["validation/best_loss"] = min(losses)
    return losses


def main(num_runs=12, steps=300):
  """Makes the sweep, and runs part of it here."""
  data = loopjax.datasets("sudoku", batch_size=64, **BOARDS)
  sweep_id = wandb.sweep(SWEEP, project="loopjax-search")
  wandb.agent(sweep_id, lambda: run_once(data, steps), count=num_runs)


if __name__ == "__main__":
  main()
