"""Answers from several starts of one example: thinking more than once.

A start adds noise to the embedded tokens, once, before the first loop, and in
families with a random initial state it also draws this. All starts of an
example run the same loops; a rule that does not know the solution chooses one
of their answers (Equilibrium Reasoners, arXiv 2605.21488: breadth, beside depth
by more loops). Draws depend on the seed, the example's tokens and the number of
the start, not on the batch.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from loopjax.errors import UserError
from loopjax.losses import tokens as token_losses
from loopjax.nn import keys as keys_lib
from loopjax.types import Array, Batch, Output

_LAST = 3  # Loops of a mean residual, as in the paper.
TRACES = ("relative_change", "margin")  # What rules need, besides the logits.
# (batch, predicted i32 [B, S]) -> f32 [B], larger is better and 0 is wrong.
Check = Callable[[Batch, Array], Array]


class Starts(NamedTuple):
  """How many starts, and which one answers.

  Attributes:
    num: N, at most.
    noise: standard deviation of the noise, before its truncation at three, in
      units of the RMS of the row's embedded tokens.
    answer: a name of RULES.
    seed: seed of all draws.
    draws_state: whether the model's initial state is drawn, too.
    check: the task's check of an answer, or None.
    headline: the scores that are reported by rule and by number of starts;
      larger is better.
    certain: log-probability of an answer after which no further start is run.
  """

  num: int
  noise: float
  answer: str
  seed: int
  draws_state: bool
  check: Check | None
  headline: tuple[str, ...]
  certain: float = math.inf


class Answers(NamedTuple):
  """Answers, and what rules read of them: of B rows or of N starts, [n].

  Attributes:
    predicted: the answers, i32 [n, S].
    counted: which of the S tokens are part of an answer, bool [n, S].
    confidence: log-probability of these, summed, f32 [n].
    residual: relative change of the state, mean over the last loops, f32 [n];
      None if the model's loops do not record it.
    margin: of the halting head after the last loop, f32 [n], or None.
    passed: of the task's check, f32 [n], or None.
  """

  predicted: Any
  counted: Any
  confidence: Any
  residual: Any = None
  margin: Any = None
  passed: Any = None


def _votes(answers: Answers) -> np.ndarray:
  """How many starts give the same whole answer, i64 [N]."""
  whole = np.where(answers.counted, answers.predicted, 0)
  _, which, votes = np.unique(
    whole, axis=0, return_inverse=True, return_counts=True
  )
  return votes[which]


# What a rule maximizes, [N]; None if the answers lack it. The most confident of
# equal ones answers.
RULES: dict[str, Callable[[Answers], np.ndarray | None]] = {
  "confidence": lambda answers: answers.confidence,
  "residual": lambda answers: (
    None if answers.residual is None else -answers.residual
  ),
  "majority": _votes,
  "halting": lambda answers: answers.margin,
  "check": lambda answers: answers.passed,
}


def of(settings: Any) -> Starts | None:
  """The starts of a run's evaluation; None for a plain forward pass.

  Args:
    settings: `config.Settings`.

  Raises:
    UserError: the model or the task does not support them.
  """
  options, family, task = settings.eval, settings.family, settings.task_module
  if options.num_starts == 1:
    return None
  name, task_name = settings.model_name, settings.plain["task"]["name"]
  if settings.spec.predicts_next and not settings.spec.num_answer_tokens:
    raise UserError(
      f"eval.num_starts={options.num_starts}: task.name={task_name!r} has no"
      " answers to choose from"
    )
  draws_state = bool(family.draws_state and family.draws_state(settings.model))
  if not (draws_state or options.start_noise):
    raise UserError(
      f"eval.num_starts={options.num_starts} needs eval.start_noise above 0:"
      f" without noise all starts of this {name!r} are the same"
    )
  check = getattr(task, "check_answer", None)
  change, margin = (trace in family.traces for trace in TRACES)
  lacking = {
    "residual": "" if change else f"loops of {name!r} record no {TRACES[0]}",
    "halting": "" if margin else f"{name!r} has no halting head",
    "check": "" if check else f"task.name={task_name!r} cannot check an answer",
  }
  if why := lacking.get(options.answer):
    raise UserError(f"eval.answer={options.answer!r}: {why}")
  return Starts(
    options.num_starts,
    options.start_noise,
    options.answer,
    settings.run.seed,
    draws_state,
    check and (lambda *args: check(settings.task, *args)),
    tuple(task.HEADLINE),
    math.log(options.certain) if options.certain else math.inf,
  )


class _Noisy:
  """An embedding whose rows get noise; in all else the table itself."""

  def __init__(self, table: Any, keys: Array, noise: float):
    self._table, self._keys, self._noise = table, keys, noise

  def __getattr__(self, name: str) -> Any:
    return getattr(self._table, name)

  def __call__(self, tokens: Array) -> Array:
    x = self._table(tokens)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = jnp.sqrt(jnp.mean(wide**2, axis=(1, 2), keepdims=True))
    places = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    draws = keys_lib.normal_by_token(self._keys, places, x.shape[2])
    noise = self._noise * size * draws.astype(wide.dtype)
    return (wide + noise).astype(x.dtype)


def begin(model: Any, keys: Array, starts: Starts) -> dict[str, Array]:
  """Lets a model's next call begin at random.

  Args:
    model: the model, whose embedding is replaced.
    keys: a key for each row, [B].
    starts: what is drawn.

  Returns:
    More arguments of the call.
  """
  if starts.noise:
    holder = getattr(model, "ends", model)
    if not hasattr(holder, "token_embedding"):
      raise UserError(
        "eval.start_noise: the model has no `token_embedding`, to whose rows"
        " the noise is added"
      )
    table = holder.token_embedding
    noisy = _Noisy(table, _folded(keys, 0), starts.noise)
    holder.token_embedding = noisy
  return {"keys": _folded(keys, 1)} if starts.draws_state else {}


def keys_of(seed: int, tokens: Array, number: Array) -> Array:
  """A key for each row of tokens, [B], of the start with this number.

  The number is a scalar, or one for each row.
  """
  keys = keys_lib.fold_in(
    keys_lib.by_content(jax.random.key(seed), tokens), number
  )
  assert keys is not None
  return keys


def measured(
  model: Any, output: Output, batch: Batch, starts: Starts
) -> Answers:
  """The answers of a batch of B rows, each from one start."""
  predicted = token_losses.scores(output, batch["targets"]).predicted
  if output.hidden is not None:
    losses = token_losses.read_out(model, output.hidden, predicted).losses
  else:
    losses = token_losses.token_cross_entropy(output.logits, predicted)
  counted = batch["weights"][:, -predicted.shape[1] :] > 0
  change, margin = (output.trace.get(name) for name in TRACES)
  return Answers(
    predicted=predicted,
    counted=counted,
    confidence=-jnp.sum(losses * counted, axis=1),
    residual=None if change is None else jnp.mean(change[-_LAST:], axis=0),
    margin=None if margin is None else margin[-1],
    passed=starts.check and starts.check(batch, predicted),
  )


def combined(
  scores: Mapping[str, Any], answers: Answers, starts: Starts
) -> dict[str, Any]:
  """The scores of an example, of the answer that is chosen.

  Args:
    scores: of its starts, [N] or (values [N], weights [N]) by name.
    answers: its starts' answers, in the order of their numbers. Those after the
      first that is certain do not count.
    starts: how many starts there may be, and which one answers.

  Returns:
    The scores of the answer chosen by `starts.answer`, a number or (value,
    weight) each; for every score S in `starts.headline` "S/by=RULE" for each
    rule that the model and the task support, "S/by=any", the best of all starts
    (pass@N), and "S/starts=n", what `starts.answer` chooses from the first n
    starts only; and, if one can be certain, "starts", how many counted.
  """
  num = num_needed(answers.confidence, starts)
  answers = first(answers, num)
  found = at(scores, chosen(answers, starts.answer))
  if math.isfinite(starts.certain):
    found["starts"] = float(num)
  headline = {name: scores[name] for name in starts.headline}
  for rule in supported(answers):
    by_rule = at(headline, chosen(answers, rule))
    found |= {f"{name}/by={rule}": x for name, x in by_rule.items()}
  for name, score in headline.items():
    value = score[0] if isinstance(score, tuple) else score
    best = at({name: score}, int(np.argmax(value[:num])))
    found[f"{name}/by=any"] = best[name]
  for few in numbers(starts.num):
    of_few = at(headline, chosen(first(answers, few), starts.answer))
    found |= {f"{name}/starts={few}": x for name, x in of_few.items()}
  return found


def num_needed(confidence: np.ndarray, starts: Starts) -> int:
  """The number of starts up to the first that is certain; all if none is."""
  certain = np.flatnonzero(confidence >= starts.certain)
  return int(certain[0]) + 1 if len(certain) else len(confidence)


def numbers(num: int) -> tuple[int, ...]:
  """The numbers of starts that are scored apart: 1, 2, 4, ... below N."""
  return tuple(2**power for power in range(num.bit_length()) if 2**power < num)


def supported(answers: Answers) -> list[str]:
  """The rules that have what they need."""
  return [name for name, rule in RULES.items() if rule(answers) is not None]


def chosen(answers: Answers, rule: str) -> int:
  """The number of the start whose answer a rule chooses."""
  value = RULES[rule](answers)
  assert value is not None, rule
  confidence = np.where(value == np.max(value), answers.confidence, -np.inf)
  return int(np.argmax(confidence))


def first(answers: Answers, num: int) -> Answers:
  """The answers of the first starts."""
  return jax.tree.map(lambda x: x[:num], answers)


def at(values: Mapping[str, Any], start: int) -> dict[str, Any]:
  """Of values [N] by name those of one start."""
  return jax.tree.map(lambda x: float(x[start]), dict(values))


def _folded(keys: Array, number: int) -> Array:
  return jax.vmap(jax.random.fold_in, (0, None))(keys, number)
