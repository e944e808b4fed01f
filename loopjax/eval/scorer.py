"""Log-likelihoods of continuations, for all evaluations.

Contexts begin like the model's texts (`Tokenizer.encode_pairs`). The device
returns two numbers per scored token: no [tokens, vocabulary] array is created,
and logits are computed only for scored tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from loopjax.errors import UserError
from loopjax.kernels.vocabulary import MASKED_LOGIT, product
from loopjax.losses.tokens import token_scores
from loopjax.saved.language_model import LanguageModel
from loopjax.types import PRECISIONS, Array

_SHORTEST = 16  # Minimum row length; limits the number of tiny programs.


class ScoringRequest(NamedTuple):
  """A continuation to score, given its context.

  Attributes:
    context: token ids, int [c], c >= 1.
    continuation: token ids, int [n].
  """

  context: np.ndarray
  continuation: np.ndarray


class ScoringWindow(NamedTuple):
  """A span of text whose last tokens are scored.

  Attributes:
    tokens: int [m + 1]: m inputs, then the target of the last input.
    num_scored: number of targets to score, 1 .. m.
  """

  tokens: np.ndarray
  num_scored: int


class WindowBatch(NamedTuple):
  """Windows that are scored together.

  Attributes:
    num_rows, length: shape of the arrays, which may be padded in both
      dimensions.
    members: indices of the windows.
  """

  num_rows: int
  length: int
  members: list[int]


def split_windows(
  request: ScoringRequest, max_length: int
) -> list[ScoringWindow]:
  """Windows of at most `max_length` inputs that score every token once.

  Usually there is one, and contexts that do not fit are truncated from the
  left. A continuation longer than a window is scored half a window at a time,
  each half after as much preceding text as fits.
  """
  tokens = np.concatenate([request.context, request.continuation])
  first, num = len(request.context), len(request.continuation)
  assert first > 0, "the first token needs a context"
  assert num > 0, "nothing to score"
  stride = num if num <= max_length else max(1, max_length // 2)
  windows = []
  for start in range(first, len(tokens), stride):
    stop = min(start + stride, len(tokens))
    low = max(0, stop - 1 - max_length)
    windows.append(ScoringWindow(tokens[low:stop], stop - start))
  return windows


def plan(
  lengths: Sequence[int], max_length: int, batch_tokens: int
) -> list[WindowBatch]:
  """Batches of windows of these lengths, longest first.

  Rows are padded to the next of four lengths per octave (1, 5/4, 6/4 and 7/4
  times a power of two). All batches of one length have the same number of rows,
  the smallest that keeps the number of batches minimal. One program is compiled
  per length.

  Args:
    lengths: window lengths, in tokens.
    max_length: maximum length of a row.
    batch_tokens: maximum tokens of a batch; a single row may exceed it.
  """
  buckets: dict[int, list[int]] = {}
  for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    length = min(rounded(lengths[number]), max_length)
    buckets.setdefault(length, []).append(number)
  batches = []
  for length, members in buckets.items():
    max_rows = max(1, batch_tokens // length)
    num_batches = -(-len(members) // max_rows)
    num_rows = -(-len(members) // num_batches)
    batches += [
      WindowBatch(num_rows, length, members[start : start + num_rows])
      for start in range(0, len(members), num_rows)
    ]
  return batches


def rounded(length: int) -> int:
  """The length rounded up to one of four lengths per octave, at least 16."""
  step = 1 << max(0, (length - 1).bit_length() - 3)
  return max(_SHORTEST, -(-length // step) * step)


BATCH_TOKENS = 8192
_CHUNK = 128  # Scored tokens whose logits are computed together.


class Score(NamedTuple):
  """The scores of a continuation of n tokens.

  Attributes:
    log_probs: f32 [n], of each token given all tokens before it, in nats.
    greedy: bool [n], whether the token is the most likely one.
    num_cut: tokens truncated from the start of the context because they did not
      fit.
    num_parts: number of windows that scored the continuation; several if it is
      longer than the context length.
    top: (ids, log-probabilities), [n, k] each, of the most likely tokens in the
      place of each token, as many as the scorer reports.
  """

  log_probs: np.ndarray
  greedy: np.ndarray
  num_cut: int = 0
  num_parts: int = 1
  top: tuple[np.ndarray, np.ndarray] | None = None

  @property
  def log_likelihood(self) -> float:
    """Sum of the log-probabilities, in nats."""
    return float(np.sum(self.log_probs, dtype=np.float64))

  @property
  def is_greedy(self) -> bool:
    """Whether greedy decoding produces the continuation."""
    return bool(np.all(self.greedy))


class Scorer:
  """Scores continuations, in any order and number.

  Attributes:
    language_model: the model.
    num_tokens, num_padding: totals of tokens and padding processed so far.
  """

  def __init__(
    self,
    language_model: LanguageModel,
    batch_tokens: int = BATCH_TOKENS,
    num_top: int = 0,
  ):
    """Compiles nothing yet: each batch shape is compiled at its first use.

    Args:
      language_model: the model.
      batch_tokens: maximum tokens of a batch.
      num_top: how many of the most likely tokens are reported for each scored
        one.
    """
    self.language_model, self._batch_tokens = language_model, batch_tokens
    self.num_tokens = self.num_padding = 0
    self._run = jax.jit(
      functools.partial(
        score_tokens,
        graphdef=language_model.graphdef,
        call=language_model.call,
        num_top=num_top,
      )
    )

  def __call__(self, requests: Sequence[ScoringRequest]) -> list[Score]:
    """Scores of the requests, in the same order.

    Raises:
      UserError: a log-likelihood is not finite, or is the same for all of
        several requests.
    """
    length = self.language_model.context_length
    parts = [split_windows(request, length) for request in requests]
    windows = [window for part in parts for window in part]
    sizes = [len(window.tokens) - 1 for window in windows]
    planned = plan(sizes, length, self._batch_tokens)
    computed = sum(batch.num_rows * batch.length for batch in planned)
    self.num_tokens += sum(sizes)
    self.num_padding += computed - sum(sizes)
    by_window = self._by_window(planned, windows)
    scores, start = [], 0
    for request, part in zip(requests, parts, strict=True):
      stop = start + len(part)
      log_probs, greedy, *top = (
        np.concatenate(x)
        for x in zip(*(by_window[i] for i in range(start, stop)), strict=True)
      )
      total = len(request.context) + len(request.continuation)
      read = len(part[0].tokens) + sum(one.num_scored for one in part[1:])
      scores.append(
        Score(log_probs, greedy, total - read, len(part), (top[0], top[1]))
      )
      start = stop
    self._check(requests, scores)
    return scores

  def _check(
    self, requests: Sequence[ScoringRequest], scores: Sequence[Score]
  ) -> None:
    """Raises UserError if scores are not finite or are all equal."""
    likelihoods = np.array([score.log_likelihood for score in scores])
    workdir = self.language_model.facts["workdir"]
    bad = np.count_nonzero(~np.isfinite(likelihoods))
    if bad:
      raise UserError(
        f"{workdir}: the log-likelihoods of {bad} of {len(scores)}"
        " continuations are not finite"
      )
    if len(scores) < 2 or np.ptp(likelihoods) > 0:
      return
    texts = {tuple(map(bytes, request)) for request in requests}
    if len(texts) > 1:
      raise UserError(
        f"{workdir}: the log-likelihoods of all {len(scores)} continuations are"
        f" {likelihoods[0]:g}: the model does not distinguish them"
      )

  def _by_window(
    self, planned: Sequence[WindowBatch], windows: Sequence[ScoringWindow]
  ) -> dict[int, list[np.ndarray]]:
    """What `score_tokens` returns, of the scored tokens of each window."""
    scores = {}
    for batch, result in self._results(planned, windows):
      arrays = [np.asarray(array) for array in result]
      ends = np.cumsum([windows[i].num_scored for i in batch.members])
      for member, end in zip(batch.members, ends.tolist(), strict=True):
        span = slice(end - windows[member].num_scored, end)
        scores[member] = [array[span] for array in arrays]
    return scores

  def _results(
    self, planned: Sequence[WindowBatch], windows: Sequence[ScoringWindow]
  ) -> Iterator[tuple[WindowBatch, Any]]:
    """Yields batches with results, while the device computes the next batch."""
    running: list[tuple[WindowBatch, Any]] = []
    is_one = len(planned) == 1 or None  # None: not at a terminal.
    progress = tqdm.tqdm(planned, unit="batch", disable=is_one, leave=False)
    for batch in progress:
      members = [windows[i] for i in batch.members]
      arrays = arrays_of(members, batch, self.language_model.tokenizer.padding)
      running.append((batch, self._run(self.language_model.params, **arrays)))
      if len(running) > 1:
        yield running.pop(0)
    yield from running


def arrays_of(
  windows: Sequence[ScoringWindow], batch: WindowBatch, padding: int
) -> dict[str, Any]:
  """The array arguments of `score_tokens`."""
  inputs = np.full((batch.num_rows, batch.length), padding, np.int32)
  chunk = min(_CHUNK, inputs.size)
  size = -(-inputs.size // chunk) * chunk
  places, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
  num = 0
  for row, (tokens, scored) in enumerate(windows):
    last = len(tokens) - 1
    inputs[row, :last] = tokens[:-1]
    span = slice(num, num + scored)
    places[span] = row * batch.length + np.arange(last - scored, last)
    targets[span] = tokens[-scored:]
    num += scored
  return {
    "inputs": inputs,
    "places": places,
    "targets": targets,
    "num": np.int32(num),
  }


def score_tokens(
  params: Any,
  inputs: Array,
  places: Array,
  targets: Array,
  num: Array,
  *,
  graphdef: nnx.GraphDef,
  call: dict[str, Any],
  num_top: int,
) -> tuple[Array, Array, Array, Array]:
  """Log-probabilities of tokens, and the most likely tokens.

  Args:
    inputs: i32 [B, T].
    places: i32 [N], position in the flattened `inputs` of the token before each
      target; N is a multiple of 128, or B T if that is less.
    targets: i32 [N].
    num: i32 scalar, number of targets to score; the rest is padding.
    call: keyword arguments of the model's call.
    num_top: k, number of the most likely tokens to return; all if there are
      fewer.

  Returns:
    f32 [N] in nats, bool [N], whether each token is the most likely one, i32
    [N, k] and f32 [N, k], the most likely tokens and their log-probabilities,
    in descending order; zeros for padding.
  """
  model: Any = nnx.merge(graphdef, params)
  padding = model.spec.num_padding_tokens
  compute = PRECISIONS[model.config.precision].compute
  hidden = model(inputs, **call).hidden.astype(compute)
  hidden = hidden.reshape(-1, hidden.shape[-1])
  table = model.readout_table().astype(compute)
  size = min(_CHUNK, len(hidden))

  num_tokens = model.spec.num_tokens
  num_top = min(num_top, num_tokens)
  is_real = jnp.arange(len(table)) < num_tokens

  def most_likely(hidden: Array) -> tuple[Array, Array]:
    if not num_top:
      empty = jnp.zeros((len(hidden), 0))
      return empty.astype(jnp.int32), empty
    logits = product("td,vd->tv", hidden, table).astype(jnp.float32)
    scores = jax.nn.log_softmax(jnp.where(is_real, logits, MASKED_LOGIT))
    values, ids = jax.lax.top_k(scores, num_top)
    return ids, values

  def step(chunk: Array, carry: Any) -> Any:
    first = chunk * size
    chunk_places = jax.lax.dynamic_slice(places, (first,), (size,))
    chunk_targets = jax.lax.dynamic_slice(targets, (first,), (size,))
    states = hidden[chunk_places]
    losses, best = token_scores(
      states, table, chunk_targets, num_padding_tokens=padding
    )
    counts = first + jnp.arange(size) < num
    new = (
      jnp.where(counts, -losses.astype(jnp.float32), 0),
      (best == chunk_targets) & counts,
      *most_likely(states),
    )
    return tuple(
      jax.lax.dynamic_update_slice_in_dim(old, part, first, axis=0)
      for old, part in zip(carry, new, strict=True)
    )

  start = (
    jnp.zeros(targets.shape, jnp.float32),
    jnp.zeros(targets.shape, bool),
    jnp.zeros((len(targets), num_top), jnp.int32),
    jnp.zeros((len(targets), num_top), jnp.float32),
  )
  return jax.lax.fori_loop(0, (num + size - 1) // size, step, start)
