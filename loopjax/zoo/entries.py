"""What an entry of the zoo consists of, and its score on a sample."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.errors import UserError, writing
from loopjax.run import metrics, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.saved import trained
from loopjax.train import evaluate
from loopjax.zoo import card

DTYPES: Mapping[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MAX_BYTES = 1_000_000  # Of the parameters of an entry.
# Settings that name files and other runs.
_PLACES = (
  ("task", "train_files"), ("task", "test_files"), ("run", "init_from"),
  ("run", "teacher"),
)  # fmt: skip
_SPLITS = ("validation", "test")  # With what follows, as in "test_ood_2".


def export(
  workdir: pathlib.Path, name: str, about: str, dtype: str, root: pathlib.Path
) -> pathlib.Path:
  """Makes an entry of a complete run; returns its folder.

  Args:
    workdir: the run's work directory.
    name: the name of the entry.
    about: what the model does, in a sentence or two, for its card.
    dtype: of the stored parameters, a key of DTYPES.
    root: the folder of entries.

  Raises:
    UserError: the run is not complete, the newest checkpoint is not its last
      step, the parameters are too many, or the entry exists.
  """
  folder = root / name
  if folder.name != name:
    raise UserError(f"NAME={name!r} is a path; set the folder with --root")
  run = trained.read(workdir)
  summary = workdir_lib.read_summary(workdir)
  if summary.get("status") != "completed" or summary["steps"] != run.step:
    raise UserError(f"{workdir} is not the directory of a complete run")
  num_bytes = summary["parameters"] * jnp.dtype(DTYPES[dtype]).itemsize
  if num_bytes > MAX_BYTES:
    raise UserError(
      f"{workdir}: {num_bytes:,} bytes of parameters exceed the maximum of"
      f" {MAX_BYTES:,}"
    )
  with writing(folder):
    folder.mkdir(parents=True)
  config = workdir_lib.read_json(workdir / "config.json")
  for section, key in _PLACES:
    if value := config[section].get(key):
      config[section][key] = card.portable(value)
  summary |= {
    "command": card.portable(summary["command"]).partition(" --workdir")[0],
    "dtype": dtype,
    "metrics": {
      key: value
      for key, value in summary["metrics"].items()
      if key.startswith(_SPLITS) and "=" not in key
    },
  }
  workdir_lib.write_json(folder / "config.json", config)
  workdir_lib.write_json(folder / "summary.json", summary)
  settings = run.settings
  headline = (*settings.task_module.HEADLINE, *settings.family.HEADLINE)
  task = config["task"]["name"]
  text = card.card(name, about, task, headline, summary)
  (folder / "README.md").write_text(text)
  zoo.write(folder, run.params, DTYPES[dtype])
  return folder


def score(
  name: str, num_examples: int, num_loops: int | None = None
) -> dict[str, float]:
  """Scores of an entry on the first examples of its test split.

  Args:
    name: of the entry.
    num_examples: how many; 0 for all.
    num_loops: loops to run; those of its evaluation if None.

  Raises:
    UserError: there is no such entry, its data are not there, or its model
      cannot run so many loops.
  """
  run = trained.read(pathlib.Path(f"{zoo.PREFIX}{name}"))
  settings = run.settings
  if num_loops is not None:
    if num_loops < 1:
      raise UserError(f"--num_loops={num_loops} must be at least 1")
    config_lib.check_loops(settings, num_loops, f"--num_loops={num_loops}")
    evaluation = dataclasses.replace(settings.eval, num_loops=num_loops)
    settings = settings._replace(eval=evaluation)
  program = program_lib.make_program(settings, jax.local_devices()[:1])
  datasets = train.make_datasets(settings, program.mesh, ["test"])
  evaluator = evaluate.make_evaluator(program, datasets)
  return {
    key: value
    for split, scores in evaluator(run.params, "test", num_examples).items()
    for key, value in metrics.named(split, scores).items()
  }
