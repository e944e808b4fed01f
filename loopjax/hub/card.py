"""The model card of an exported folder, made from what its run wrote.

Every number comes from summary.json, with the settings it depends on; nothing
is filled in by hand. Local paths are omitted.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from loopjax import config as config_lib
from loopjax.commands import document
from loopjax.commands.document import plain
from loopjax.errors import UserError
from loopjax.hub import convert
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo

FILE = "README.md"


def write(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes FOLDER/README.md, replacing an earlier one.

  Args:
    workdir: the run's work directory.
    folder: the folder that the run was exported to.

  Raises:
    UserError: the folder has no export, or the run has no summary, or one of
      another step than the exported parameters.
  """
  text = card(workdir, folder)
  (folder / FILE).write_text(text, encoding="utf-8")


def card(workdir: pathlib.Path, folder: pathlib.Path) -> str:
  """The text of the card; see `write`."""
  settings = config_lib.of_run(workdir, str(workdir))
  summary = workdir_lib.read_summary(zoo.located(workdir))
  if not (folder / "config.json").is_file():
    raise UserError(f"{folder}: is not a folder that loopjax hub export wrote")
  exported = workdir_lib.read_json(folder / "config.json")
  step = exported.get(convert.STEP)
  if step != summary.get("steps"):
    raise UserError(
      f"{folder}: has the parameters of step {step}, but the scores of"
      f" {workdir}/summary.json are for those of step {summary.get('steps')}"
    )
  blocks = [
    document.heading(1, folder.name),
    plain(_about(settings, summary)),
    document.heading(2, "Data"),
    *_data(settings, summary),
    document.heading(2, "Scores"),
    *_scores(settings, summary),
    document.heading(2, "Digests"),
    *_digests(summary, folder),
  ]
  front = ["library_name: loopjax", "pipeline_tag: text-generation"]
  if source := summary.get("imported"):
    front.append(f"base_model: {json.dumps(pathlib.PurePath(source).name)}")
  return "---\n" + "\n".join(front) + "\n---\n\n" + document.text(blocks)


def _about(settings: config_lib.Settings, summary: Mapping[str, Any]) -> str:
  model = settings.plain["model"]
  loops, layers = settings.model.num_loops, model["num_layers"]
  text = (
    f"A looped language model: {summary['parameters']:,} parameters,"
    f" {layers} layer{'' if layers == 1 else 's'} of width {model['width']},"
    f" applied {loops}"
    f" {'time' if loops == 1 else 'times'} to each token. Its context length is"
    f" {settings.spec.sequence_length:,} tokens."
  )
  if "imported" in summary:
    return f"{text} Imported, not trained here."
  run = settings.run
  return (
    f"{text} Trained for {summary['steps']:,} steps of"
    f" {run.batch_size:,} rows with {settings.optim.name}, seed {run.seed}, in"
    f" {summary['wall_seconds']:,.0f} s on {summary['devices']}."
  )


def _data(
  settings: config_lib.Settings, summary: Mapping[str, Any]
) -> list[str]:
  """The file names of the sources, and the counts of every split."""
  task, facts = settings.plain["task"], summary.get("data", {})
  tokenizer = pathlib.PurePath(task["tokenizer"]).name
  if not facts:
    return [plain(f"Tokenizer: {tokenizer}. The data are unknown.")]
  sources = [
    pathlib.PurePath(source.strip()).name
    for source in task["train_files"].split(",")
  ]
  counts = ("documents", "rows", "tokens", "bytes")
  rows = [
    [split, *(f"{facts[f'{split}_{name}']:,}" for name in counts)]
    for split in ("train", "validation", "test")
    if f"{split}_rows" in facts
  ]
  points = [f"Sources: {', '.join(sources)}", f"Tokenizer: {tokenizer}"]
  return [
    document.bullets(points),
    document.table(["split", *counts], rows),
  ]


def _scores(
  settings: config_lib.Settings, summary: Mapping[str, Any]
) -> list[str]:
  """The task's own scores on the validation and test splits."""
  metrics = summary["metrics"]
  rows = [
    [split, plain(name), _value(metrics, f"{split}/{name}")]
    for split in ("validation", "test")
    for name in settings.task_module.HEADLINE
    if f"{split}/{name}" in metrics
  ]
  if not rows:
    return [plain("The run recorded no scores.")]
  protocol = (
    f"On all rows of the split, with {settings.eval_loops} loops and documents"
    " separated; means over tokens (loss, nats) and bytes (bits_per_byte); ± is"
    " a standard error over rows."
  )
  header = ["split", "score", "value"]
  return [plain(protocol), document.table(header, rows)]


def _value(metrics: Mapping[str, float], name: str) -> str:
  error = metrics.get(f"{name}/standard_error")
  text = f"{metrics[name]:.4f}"
  return text if error is None else f"{text} ± {error:.4f}"


def _digests(summary: Mapping[str, Any], folder: pathlib.Path) -> list[str]:
  files = "\n".join(
    f"{_sha256(path)}  {path.name}"
    for path in sorted(folder.glob("*.safetensors"))
  )
  versions = ", ".join(f"{k} {v}" for k, v in summary["versions"].items())
  return [
    document.bullets(
      [
        f"Arrays of the run: {summary['digest']}",
        f"Versions: {versions}; revision {summary['revision'] or 'unknown'}",
      ]
    ),
    document.code(files),
  ]


def _sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
