"""What an entry of the zoo consists of, and its score on a sample."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

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
    raise UserError(f"NAME={name!r} is a path; --root says where to write")
  run = trained.read(workdir)
  summary = workdir_lib.read_summary(workdir)
  if summary.get("status") != "completed" or summary["steps"] != run.step:
    raise UserError(f"{workdir} is not the directory of a complete run")
  num_bytes = summary["parameters"] * jnp.dtype(DTYPES[dtype]).itemsize
  if num_bytes > MAX_BYTES:
    raise UserError(
      f"{workdir}: {num_bytes:,} bytes of parameters are more than"
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
  (folder / "README.md").write_text(card.card(name, about, summary))
  zoo.write(folder, run.params, DTYPES[dtype])
  return folder


def score(name: str, num_examples: int) -> dict[str, float]:
  """Scores of an entry on the first examples of its test split.

  Raises:
    UserError: there is no such entry, or its data are not there.
  """
  run = trained.read(pathlib.Path(f"{zoo.PREFIX}{name}"))
  program = program_lib.make_program(run.settings, jax.local_devices()[:1])
  datasets = train.make_datasets(run.settings, program.mesh, ["test"])
  evaluator = evaluate.make_evaluator(program, datasets)
  return {
    key: value
    for split, scores in evaluator(run.params, "test", num_examples).items()
    for key, value in metrics.named(split, scores).items()
  }
