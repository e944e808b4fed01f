"""What a run prints at its end: its scores in a line, and what to do next."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.run import durations

_ERROR = "/standard_error"
_SPLITS = 4  # Most lines of scores.


def lines(
  summary: Mapping[str, Any],
  headline: Sequence[str],
  workdir: pathlib.Path,
  mode: str,
) -> list[str]:
  """The lines; none for a run that is not complete.

  Args:
    summary: what `train.run` returns.
    headline: names of the scores that matter, of the task and the family.
    mode: "train", "eval" or "train_and_eval".
  """
  if summary["status"] != "completed":
    return []
  directory = workdir / "evaluation" if mode == "eval" else workdir
  texts = scores(summary["metrics"], headline, every=mode == "eval")
  time = durations.text(summary["wall_seconds"])
  parameters = f"{summary['parameters']:,} parameters, {time}"
  if texts:
    texts[0] += f"; {parameters}"
  else:
    texts = [f"trained: {parameters}"]
  pictures = directory / "figures"
  if pictures.is_dir():
    texts.append(f"figures: {pictures}; all scores: {directory}/summary.json")
  if mode != "eval":
    texts.append(f"next: loopjax report {shlex.quote(str(workdir))}")
  return texts


def scores(
  found: Mapping[str, float], headline: Sequence[str], every: bool = False
) -> list[str]:
  """A line for each split that counts, at most a few.

  Args:
    found: the metrics of a run's summary.
    headline: names of the scores that matter, of the task and the family.
    every: of validation and training as well.
  """
  counted = [key for key in found if key.endswith("/count") and "=" not in key]
  splits = [
    key.removesuffix("/count")
    for key in counted
    if every or not key.startswith(("train", "validation"))
  ]
  texts = [_scores(found, split, headline) for split in splits[:_SPLITS]]
  more = len(splits) - _SPLITS
  return [*texts, f"and {more} more splits"] if more > 0 else texts


def _scores(
  found: Mapping[str, float], split: str, headline: Sequence[str]
) -> str:
  """`test: exact_match 0.959 ± 0.003, loss 0.015 ± 0.001 on 3,941 examples`."""
  texts = []
  for name in dict.fromkeys((*headline, "loss")):
    key = f"{split}/{name}"
    if key in found:
      error = found.get(key + _ERROR)
      more = f" ± {error:.1g}" if error else ""
      texts.append(f"{name} {found[key]:.4g}{more}")
  count = found[f"{split}/count"]
  return f"{split}: {', '.join(texts)} on {count:,.0f} examples"
