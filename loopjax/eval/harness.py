"""A run as a model for lm-evaluation-harness, and the harness's command.

  python -m loopjax.eval.harness run --model=loopjax \
    --model_args=workdir=runs/lm --tasks=olmes_arc_easy --metadata=folder=DIR

is the command `lm_eval` (`pip install 'loopjax[eval]'`) with the model
"loopjax" and the additional tasks in `loopjax/eval/tasks`. Other model_args:
num_loops, exit_threshold, checkpoint, batch_tokens, bos, cache_kind. From
Python: `lm_eval.simple_evaluate(model=Model(workdir=...), ...)`.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loopjax.errors import UserError, leave, one_line_errors, print_error

try:  # Fills the registry first.
  import lm_eval.models  # noqa: F401
except ModuleNotFoundError as error:
  if __name__ != "__main__":
    raise
  print_error(f"{error}: pip install 'loopjax[eval]'")
  sys.exit(2)
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.eval import scorer
from loopjax.eval.scorer import ScoringRequest
from loopjax.generate import engine as generate
from loopjax.generate import source
from loopjax.generate import text as text_lib
from loopjax.generate.engine import Engine
from loopjax.generate.sampling import Sampling
from loopjax.saved import language_model

TASKS = pathlib.Path(__file__).parent / "tasks"
_MAX_TOKENS = 256  # Default limit of generated text.
_CACHE_TOKENS = 8192  # Total cache size of the texts generated at once.


class _Options(NamedTuple):
  """How the texts of a task are generated.

  Attributes:
    stops: stop strings.
    max_tokens: maximum number of new tokens.
    sampling: how tokens are sampled; the seed is not used.
  """

  stops: tuple[str, ...]
  max_tokens: int
  sampling: Sampling


@register_model("loopjax")
class Model(TemplateLM):
  """A trained language model, scored by `scorer.Scorer`."""

  def __init__(
    self,
    workdir: str,
    num_loops: int | None = None,
    exit_threshold: float | None = None,
    checkpoint: int | None = None,
    batch_tokens: int = scorer.BATCH_TOKENS,
    bos: str | None = "",
    cache_kind: str | None = None,
    **others: Any,
  ):
    """Loads the run.

    Args:
      workdir, num_loops, exit_threshold, checkpoint: see `language_model.load`.
      batch_tokens: see `scorer.Scorer`.
      bos: begin token of texts; None or "none" for none, "" for the model's
        own. The harness converts bos=none to None.
      cache_kind: see `Engine`; only for tasks that generate.
      **others: batch_size, max_batch_size and device, which the harness passes
        to every model; ignored.

    Raises:
      UserError: see `language_model.load`; or another argument is given.
    """
    super().__init__()
    unknown = others.keys() - {"batch_size", "max_batch_size", "device"}
    if unknown:
      raise UserError(
        f"--model_args: unknown argument {', '.join(sorted(unknown))}"
      )
    self._language_model = language_model.load(
      pathlib.Path(workdir),
      num_loops=num_loops,
      exit_threshold=exit_threshold,
      checkpoint=checkpoint,
      bos=tokenizer_lib.NOTHING if bos is None else str(bos) or None,
    )
    self._scorer = scorer.Scorer(self._language_model, batch_tokens)
    self._cache_kind = cache_kind
    self._engine: Engine | None = None  # For tasks that generate.

  def get_model_info(self) -> dict[str, Any]:
    """Metadata to store with the results."""
    return dict(self._language_model.facts)

  @property
  def tokenizer_name(self) -> str:
    return self._language_model.facts["tokenizer"]

  @property
  def eot_token_id(self) -> int:
    return self._language_model.tokenizer.end

  @property
  def prefix_token_id(self) -> int:
    """The begin token of a text whose first token is predicted."""
    return self._language_model.tokenizer.begin

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Token ids of a text, without a begin token."""
    del add_special_tokens, kwargs
    return self._language_model.tokenizer.encode([string])[0].tolist()

  def _encode_pair(
    self, context: str, continuation: str
  ) -> tuple[list[int], list[int]]:
    """See `Tokenizer.encode_pairs`."""
    tokenizer = self._language_model.tokenizer
    ((before, after),) = tokenizer.encode_pairs([(context, continuation)])
    return before.tolist(), after.tolist()

  def _loglikelihood_tokens(
    self,
    requests: list[tuple[tuple[str, str], list[int], list[int]]],
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    del kwargs  # Options of progress bars; ours show on terminals only.
    scores = self._scorer(
      [
        ScoringRequest(*map(_ids, (before, after)))
        for _, before, after in requests
      ]
    )
    results = [(one.log_likelihood, one.is_greedy) for one in scores]
    for (texts, _, _), result in zip(requests, results, strict=True):
      self.cache_hook.add_partial("loglikelihood", texts, result)
    return results

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihoods of whole texts, scored in disjoint windows."""
    del disable_tqdm
    length = self._language_model.context_length
    parts = []
    for request in requests:
      windows = utils.get_rolling_token_windows(
        self.tok_encode(request.args[0]), self.prefix_token_id, length, 1
      )
      parts.append([utils.make_disjoint_window(one) for one in windows])
    scores = iter(
      self._scorer(
        [ScoringRequest(*map(_ids, pair)) for part in parts for pair in part]
      )
    )
    results = [sum(next(scores).log_likelihood for _ in part) for part in parts]
    for request, total in zip(requests, results, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return results

  def generate_until(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[str]:
    """Continuations of texts, up to a stop string.

    Samples of a text differ; the random numbers depend on its place among the
    requests.

    Raises:
      UserError: a task requests more tokens than the context length.
    """
    del disable_tqdm
    generated: dict[int, str] = {}
    by_options: dict[_Options, list[int]] = {}
    for number, request in enumerate(requests):
      by_options.setdefault(_options(request.args[1]), []).append(number)
    for options, numbers in by_options.items():
      contexts = {number: requests[number].args[0] for number in numbers}
      texts = self._written(contexts, options)
      for number, text in zip(numbers, texts, strict=True):
        generated[number] = text
        self.cache_hook.add_partial(
          "generate_until", requests[number].args, text
        )
    return [generated[number] for number in range(len(requests))]

  def _written(
    self, contexts: Mapping[int, str], options: _Options
  ) -> list[str]:
    """Continuations; contexts, by seed, are truncated from the left to fit."""
    stops, max_tokens, sampling = options
    tokenizer, length = (
      self._language_model.tokenizer,
      self._language_model.context_length,
    )
    if "exit_threshold" in self._language_model.call:
      raise UserError("exit_threshold: has no effect on generation tasks")
    if max_tokens > length:
      raise UserError(
        f"max_gen_toks={max_tokens} exceeds the model's context length of"
        f" {length} tokens"
      )
    if self._engine is None:
      self._engine = source.make_engine(
        self._language_model,
        num_slots=max(1, _CACHE_TOKENS // length),
        max_tokens=length,
        cache_kind=self._cache_kind,
      )
    return [
      one.text
      for one in text_lib.generate_texts(
        self._engine,
        tokenizer,
        [
          generate.GenerationRequest(
            prompt=tokenizer.encode_prompt(context)[max_tokens - 1 - length :],
            max_new_tokens=max_tokens,
            sampling=dataclasses.replace(sampling, seed=seed),
            stop_tokens=self._language_model.stop_tokens,
          )
          for seed, context in contexts.items()
        ],
        stops,
      )
    ]


def _options(options: dict[str, Any]) -> _Options:
  """The options of a task's generation_kwargs."""
  stops = options.get("until") or ()
  temperature = options.get("temperature", 1.0 * bool(options.get("do_sample")))
  return _Options(
    (stops,) if isinstance(stops, str) else tuple(stops),
    int(options.get("max_gen_toks", _MAX_TOKENS)),
    Sampling(
      temperature=temperature if options.get("do_sample", True) else 0,
      top_k=options.get("top_k", 0),
      top_p=options.get("top_p", 1.0),
    ),
  )


def _ids(tokens: Sequence[int]) -> np.ndarray:
  return np.array(tokens, np.int64)


@one_line_errors
def main() -> int:
  """Runs the command `lm_eval`; returns the exit status."""
  arguments = sys.argv[1:]
  if arguments[:1] == ["run"] and not any(
    flag.startswith("--include_path") for flag in arguments
  ):
    sys.argv += ["--include_path", str(TASKS)]
  cli_evaluate()
  return 0


if __name__ == "__main__":
  leave(main())
