"""What an entry of the zoo consists of."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.commands import document
from loopjax.commands.document import plain
from loopjax.errors import UserError, writing
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo

# Of stored parameters, with the bytes of a number.
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
MAX_BYTES = 1_000_000  # Of the parameters of an entry.
# Settings that name files and other runs.
_PLACES = (
  ("task", "train_files"), ("task", "test_files"), ("task", "train_csv"),
  ("task", "test_csv"), ("task", "tokenizer"), ("run", "init_from"),
  ("run", "teacher"),
)  # fmt: skip
_SPLITS = ("validation", "test")  # With what follows, as in "test_ood_2".


def export(
  workdir: pathlib.Path, name: str, about: str, dtype: str, root: pathlib.Path
) -> pathlib.Path:
  """Makes an entry of a complete run; returns its folder.

  Args:
    about: what the model does, in a sentence or two, for its card.
    dtype: of the stored parameters, a key of DTYPES.
    root: the folder of entries.

  Raises:
    UserError: the run is not complete, the newest checkpoint is not its last
      step, the parameters are too many, or the entry exists.
  """
  from loopjax.saved import trained  # Imports JAX: not needed to list.

  folder = root / name
  if folder.name != name:
    raise UserError(f"NAME={name!r} is a path; set the folder with --root")
  run = trained.read(workdir)
  summary = workdir_lib.read_summary(workdir)
  if summary.get("status") != "completed" or summary["steps"] != run.step:
    raise UserError(f"{workdir} is not the directory of a complete run")
  num_bytes = summary["parameters"] * DTYPES[dtype]
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
      config[section][key] = portable(value)
  summary |= {
    "command": portable(summary["command"]).partition(" --workdir")[0],
    "dtype": dtype,
    "metrics": {
      key: value
      for key, value in summary["metrics"].items()
      if key.startswith(_SPLITS) and "=" not in key
    },
  }
  settings = run.settings
  tokenizer = getattr(settings.task, "tokenizer", "")
  workdir_lib.keep_hub_files(workdir, folder, tokenizer)
  workdir_lib.write_json(folder / "config.json", config)
  workdir_lib.write_json(folder / "summary.json", summary)
  headline = (*settings.task_module.HEADLINE, *settings.family.headline)
  task = config["task"]["name"]
  text = card(name, about, task, headline, summary)
  (folder / "README.md").write_text(text, encoding="utf-8")
  zoo.write(folder, run.params, dtype)
  return folder


_ERROR = "/standard_error"
# What can be done with a model, by its task; all have scores.
COMMANDS: Mapping[str, tuple[str, ...]] = {
  "sudoku": ("play",),
  "text": ("play", "generate"),
  "multihop": ("play",),
  "depo": ("play",),
}
_FLAGS = {"generate": " --prompt=TEXT"}


def card(
  name: str,
  about: str,
  task: str,
  headline: Sequence[str],
  summary: Mapping[str, Any],
) -> str:
  """The text of the card of `zoo:NAME`.

  Args:
    about: what it does, in a sentence or two.
    task: name of its task.
    headline: names of the scores that matter, of the task and the family.
    summary: the entry's summary.json.
  """
  metrics = summary["metrics"]
  names = {*headline, "loss"}
  scores = [x for x in metrics if x.rpartition("/")[2] in names]
  scores.sort(key=lambda score: not score.startswith("test"))
  commands = "\n".join(
    f"loopjax {command} zoo:{name}{_FLAGS.get(command, '')}"
    for command in COMMANDS.get(task, ())
  )
  rows = [
    [plain(score), f"{value:.4g}", f"{metrics[score + _ERROR]:.2g}"]
    for score in scores
    for value in [metrics[score]]
    if score + _ERROR in metrics
  ]
  versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
  blocks = [
    document.heading(1, f"zoo:{name}"),
    plain(about),
    document.code(commands or f"loopjax score zoo:{name}"),
    document.bullets(
      [
        f"parameters: {summary['parameters']:,}, stored as {summary['dtype']}",
        f"trained: {summary['steps']:,} steps, {summary['devices']},"
        f" {summary['wall_seconds'] / 60:.0f} minutes",
        f"revision: {summary['revision']}; {versions}",
        f"run digest: {summary['digest']}",
        "licence: Apache-2.0",
      ]
    ),
    document.heading(2, "Training"),
    document.code(summary["command"]),
    document.heading(2, "Scores"),
    plain(
      "Measured at the end of training, before the parameters were cast, with"
      " standard errors over examples; summary.json has all scores."
    ),
    document.table(["score", "mean", "error"], rows),
  ]
  return document.text(blocks)


def portable(command: str) -> str:
  """A command without the places of files of one machine."""
  return re.sub(r"(?:(?<=[=,'\"])|^)/[^\s,'\"]*/", "", command)
