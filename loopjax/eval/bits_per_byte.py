"""Bits per byte and accuracy of a task, and comparisons of two runs.

The bits of an item are -log-likelihood / ln 2 of the gold continuation given
its prompt; its bytes are the continuation's in UTF-8. The variants:

  bits_per_byte         mean over items; spaces before the continuation count,
                        those at the end of the prompt too (OLMES' "v2"; the
                        metric of Frey et al., arXiv 2603.08391)
  bits_per_byte_v1      the same without the first byte (earlier OLMES)
  bits_per_byte_corpus  sum of bits / sum of bytes (the aggregation of
                        lm-evaluation-harness, which uses whole documents)

The prediction of a multiple-choice question is the choice with the highest
log-likelihood ("accuracy"), the highest per character, including the leading
space ("accuracy_per_char"), or the highest per token ("accuracy_per_token").
For questions without choices, "greedy_match" is the fraction whose continuation
greedy decoding produces.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from loopjax.eval.requests import EvalItem, EvalTask
from loopjax.eval.scorer import Score, Scorer, ScoringRequest
from loopjax.run import statistics


class Values(NamedTuple):
  """One score of every item of a task.

  Attributes:
    values, weights: f64 [n]; the task's score is their weighted mean.
  """

  values: np.ndarray
  weights: np.ndarray


def score(tasks: Sequence[EvalTask], scorer: Scorer) -> list[list[list[Score]]]:
  """Scores every choice of every item of every task.

  Contexts and continuations are encoded by `Tokenizer.encode_pairs`.

  Raises:
    UserError: see `Scorer.__call__`.
  """
  pairs = [
    pair
    for task in tasks
    for item in task.items
    for pair in zip(item.contexts, item.continuations, strict=True)
  ]
  encoded = scorer.language_model.tokenizer.encode_pairs(pairs)
  rest = iter(scorer([ScoringRequest(*pair) for pair in encoded]))
  return [
    [[next(rest) for _ in item.continuations] for item in task.items]
    for task in tasks
  ]


def measure(
  items: Sequence[EvalItem], scores: Sequence[Sequence[Score]]
) -> dict[str, Values]:
  """Every metric of every item, by metric name."""
  gold = [of[item.gold] for item, of in zip(items, scores, strict=True)]
  bits = -np.array([one.log_likelihood for one in gold]) / math.log(2)
  num_bytes = np.array(
    [float(len(item.continuations[item.gold].encode())) for item in items]
  )
  ones = np.ones(len(items))
  results = {
    "bits_per_byte": Values(bits / num_bytes, ones),
    "bits_per_byte_corpus": Values(bits / num_bytes, num_bytes),
  }
  if num_bytes.min() > 1:
    results["bits_per_byte_v1"] = Values(bits / (num_bytes - 1), ones)
  if not all(item.is_choice for item in items):
    greedy = np.array([float(one.is_greedy) for one in gold])
    return results | {"greedy_match": Values(greedy, ones)}
  sizes = {
    "accuracy": lambda text, one: 1,
    "accuracy_per_char": lambda text, one: len(text),
    "accuracy_per_token": lambda text, one: len(one.log_probs),
  }
  for name, size in sizes.items():
    right = [
      float(
        item.gold
        == np.argmax(
          [
            one.log_likelihood / size(text, one)
            for text, one in zip(item.continuations, of, strict=True)
          ]
        )
      )
      for item, of in zip(items, scores, strict=True)
    ]
    results[name] = Values(np.array(right), ones)
  return results


def summarise(measured: dict[str, Values]) -> dict[str, float]:
  """Mean and standard error of every metric, and the number of items, "n"."""
  summary: dict[str, float] = {}
  for name, (values, weights) in measured.items():
    mean, error = statistics.mean(weights * values, weights)
    summary[name] = float(mean)
    if len(values) > 1:
      summary[f"{name}/standard_error"] = float(error)
    summary["n"] = len(values)
  return summary


def compare(
  ours: dict[str, Values], reference: dict[str, Values]
) -> dict[str, statistics.Difference]:
  """Differences of scores on the same items, by metric."""
  return {
    name: statistics.compare(values, reference[name].values, weights)
    for name, (values, weights) in ours.items()
  }


def rows(
  items: Sequence[EvalItem], scores: Sequence[Sequence[Score]]
) -> list[dict[str, Any]]:
  """A JSON object per continuation."""
  return [
    {
      "doc_id": item.doc_id,
      "idx": index,
      "gold": index == item.gold,
      "log_likelihood": one.log_likelihood,
      "is_greedy": one.is_greedy,
      "num_tokens": len(one.log_probs),
      "num_cut": one.num_cut,
      "num_parts": one.num_parts,
      "num_bytes": len(item.continuations[index].encode()),
    }
    for item, of in zip(items, scores, strict=True)
    for index, one in enumerate(of)
  ]
