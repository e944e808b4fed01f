"""Compares two trained models on the same examples."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.run import statistics, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.train import evaluate, score


class Comparison(NamedTuple):
  """A score of two models.

  Attributes:
    ours, reference: the means over the examples.
    difference: ours - reference, of the same examples.
  """

  ours: float
  reference: float
  difference: statistics.Difference


def compare_models(
  config: ml_collections.ConfigDict,
  source: pathlib.Path,
  reference: pathlib.Path,
  overrides: Mapping[str, Any],
  limit: int = 0,
) -> dict[str, Comparison]:
  """Scores both on the examples of `config.eval.split`; {score: comparison}.

  The comparisons are written to `evaluation/compared.json` in the first model's
  work directory, for zoo:NAME in runs/NAME.

  Args:
    config: the first model's config, as for `score.score_model`.
    source: its work directory, or zoo:NAME.
    reference: the other model's.
    overrides: settings of the evaluation that hold for both. The other model
      has the first one's data; its other settings are its own.
    limit: as for `score.score_model`.

  Raises:
    UserError: as by `score.score_model`, or the models have no examples in
      common.
  """
  settings = config_lib.resolve(config)
  # The config as resolved: what the user's settings make moot is reset.
  theirs = config_lib.config_of_run(reference, str(reference))
  if theirs.task.name != config.task.name:
    raise UserError(
      f"{reference}: its task.name={theirs.task.name!r}, that of {source}"
      f" {config.task.name!r}: they have no examples in common"
    )
  with theirs.unlocked():
    theirs.task = config.task.copy_and_resolve_references()
  evaluation = {f"eval.{x}": config.eval[x] for x in ("split", "batch_size")}
  config_lib.override(theirs, {**evaluation, **overrides})
  other_settings = config_lib.resolve(theirs)
  with workdir_lib.locked(zoo.output(source)):
    facts, scores = _of_examples(settings, source, limit)
    other_facts, other_scores = _of_examples(other_settings, reference, limit)
    found = {}
    for name in (x for x in scores if x in other_scores):
      values, weights = scores[name]
      others, other_weights = other_scores[name]
      if facts != other_facts or not np.array_equal(weights, other_weights):
        raise UserError(
          f"{reference}: its examples are not those of {source}: their lengths"
          " or tokenizers differ"
        )
      counted = weights > 0
      if counted.any():
        both = values[counted], others[counted]
        for model, one in zip((source, reference), both, strict=True):
          if not np.isfinite(one).all():
            raise UserError(f"{model}: {name} of an example is not finite")
        ours, reference_mean = (
          float(np.average(x, weights=weights[counted])) for x in both
        )
        difference = statistics.compare(*both, weights[counted])
        found[name] = Comparison(ours, reference_mean, difference)
    _write(zoo.output(source) / "evaluation", reference, found)
  return found


def _of_examples(
  settings: config_lib.Settings, source: pathlib.Path, limit: int
) -> tuple[Mapping[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
  """The facts about a model's data, and its scores of every example."""
  program, dataset = score.prepare(settings, source, limit)
  _, params = score.chosen_params(program, source)
  return dataset.facts, evaluate.score_examples(program, dataset, params)


def _write(
  directory: pathlib.Path,
  reference: pathlib.Path,
  found: Mapping[str, Comparison],
) -> None:
  """Writes compared.json."""
  directory.mkdir(exist_ok=True)
  scores = {
    name: {
      "ours": one.ours,
      "reference": one.reference,
      **one.difference._asdict(),
    }
    for name, one in found.items()
  }
  content = {"reference": str(reference), "scores": scores}
  workdir_lib.write_json(directory / "compared.json", content)
