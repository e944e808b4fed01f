"""Answers from several starts of one example: thinking more than once.

A start adds noise to the embedded tokens, once, before the first loop, and in
families with a random initial state it also draws this. All starts of an
example run the same loops; a rule that does not know the solution chooses one
of their answers (Equilibrium Reasoners, arXiv 2605.21488: breadth, beside depth
by more loops). Draws depend on the seed, the example's tokens and the number of
the start, not on the batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    num: N.
    noise: standard deviation of the noise, before its truncation at three, in
      units of the RMS of the row's embedded tokens.
    answer: a name of RULES.
    seed: seed of all draws.
    draws_state: whether the model's initial state is drawn, too.
    check: the task's check of an answer, or None.
    headline: the scores that are reported by rule and by number of starts;
      larger is better.
  """

  num: int
  noise: float
  answer: str
  seed: int
  draws_state: bool
  check: Check | None
  headline: tuple[str, ...]


class Answers(NamedTuple):
  """The answers of N starts of B examples, and what rules read of them.

  Attributes:
    predicted: the answers, i32 [N, B, S].
    counted: which of the S tokens are part of an answer, bool [B, S].
    confidence: log-probability of these, summed, f32 [N, B].
    residual: relative change of the state, mean over the last loops, f32
      [N, B]; None if the model's loops do not record it.
    margin: of the halting head after the last loop, f32 [N, B], or None.
    passed: of the task's check, f32 [N, B], or None.
  """

  predicted: Array
  counted: Array
  confidence: Array
  residual: Array | None = None
  margin: Array | None = None
  passed: Array | None = None


def _votes(answers: Answers) -> Array:
  """How many starts give the same whole answer, f32 [N, B]."""

  def votes(one: Array) -> Array:
    same = (answers.predicted == one[None]) | ~answers.counted[None]
    return jnp.sum(jnp.all(same, axis=-1), axis=0, dtype=jnp.float32)

  return jax.lax.map(votes, answers.predicted)


# What a rule maximizes, f32 [N, B]; None if the answers lack it. The most
# confident of equal ones answers.
RULES: dict[str, Callable[[Answers], Array | None]] = {
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
  if options.num_starts == 1 and not options.start_noise:
    return None
  name, task_name = settings.model_name, settings.plain["task"]["name"]
  if settings.spec.predicts_next and not settings.spec.num_answer_tokens:
    raise UserError(
      f"eval.num_starts={options.num_starts}, eval.start_noise="
      f"{options.start_noise}: task.name={task_name!r} has no answers to choose"
      " from"
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


def values(
  run: Callable[[Array], tuple[Any, Output, Mapping[str, Any]]],
  batch: Batch,
  starts: Starts,
) -> dict[str, Any]:
  """The scores of a batch, of the answers that are chosen.

  The starts run one after another, each for the whole batch, in the memory of
  one evaluation.

  Args:
    run: the keys of the rows [B] -> (model, output, scores), of one start.
    batch: the batch.
    starts: how many starts, and which one answers.

  Returns:
    The scores of the answers chosen by `starts.answer`; and, of several starts,
    for every score S in `starts.headline` "S/by=RULE" for each rule that the
    model and the task support, "S/by=any", the best of all starts (pass@N), and
    "S/starts=n", what `starts.answer` chooses from the first n starts only.
  """

  def one(_: None, number: Array) -> tuple[None, Any]:
    keys = keys_of(starts.seed, batch["inputs"], number)
    model, output, scores = run(keys)
    return None, (scores, _measured(model, output, batch, starts.check))

  _, (scores, answers) = jax.lax.scan(one, None, jnp.arange(starts.num))
  weights = batch["weights"][:, -answers.predicted.shape[2] :]
  answers = answers._replace(counted=weights > 0)
  found = at(scores, chosen(answers, starts.answer))
  if starts.num == 1:
    return found
  headline = {name: scores[name] for name in starts.headline}
  for rule in supported(answers):
    by_rule = at(headline, chosen(answers, rule))
    found |= {f"{name}/by={rule}": x for name, x in by_rule.items()}
  for name, score in headline.items():
    value = score[0] if isinstance(score, tuple) else score
    best = at({name: score}, jnp.argmax(value, axis=0))
    found[f"{name}/by=any"] = best[name]
  for num in numbers(starts.num):
    few = at(headline, chosen(first(answers, num), starts.answer))
    found |= {f"{name}/starts={num}": x for name, x in few.items()}
  return found


def numbers(num: int) -> tuple[int, ...]:
  """The numbers of starts that are scored apart: 1, 2, 4, ... below N."""
  return tuple(2**power for power in range(num.bit_length()) if 2**power < num)


def supported(answers: Answers) -> list[str]:
  """The rules that have what they need."""
  return [name for name, rule in RULES.items() if rule(answers) is not None]


def chosen(answers: Answers, rule: str) -> Array:
  """The number of the start whose answer a rule chooses, i32 [B]."""
  value = RULES[rule](answers)
  assert value is not None, rule
  best = value == jnp.max(value, axis=0, keepdims=True)
  confidence = jnp.where(best, answers.confidence, -jnp.inf)
  return jnp.argmax(confidence, axis=0).astype(jnp.int32)


def first(answers: Answers, num: int) -> Answers:
  """The answers of the first starts."""
  counted = answers.counted
  return jax.tree.map(lambda x: x[:num], answers)._replace(counted=counted)


def at(values: Mapping[str, Any], start: Array) -> dict[str, Any]:
  """Of values [N, B] by name those of one start of each example, [B]."""
  rows = jnp.arange(len(start))
  return jax.tree.map(lambda x: x[start, rows], dict(values))


def keys_of(seed: int, inputs: Array, number: Array) -> Array:
  """A key for each row of tokens, [B], of the start with this number."""
  return _folded(keys_lib.by_content(jax.random.key(seed), inputs), number)


def _folded(keys: Array, number: Array | int) -> Array:
  return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def _measured(
  model: Any, output: Output, batch: Batch, check: Check | None
) -> Answers:
  """The answers of one start, [B, ...]."""
  predicted = token_losses.scores(output, batch["targets"]).predicted
  if output.hidden is not None:
    losses = token_losses.read_out(model, output.hidden, predicted).losses
  else:
    losses = token_losses.token_cross_entropy(output.logits, predicted)
  weights = batch["weights"][:, -predicted.shape[1] :]
  change, margin = (output.trace.get(name) for name in TRACES)
  return Answers(
    predicted=predicted,
    counted=jnp.zeros((), bool),  # Of the batch, not of a start.
    confidence=-jnp.sum(losses * (weights > 0), axis=1),
    residual=None if change is None else jnp.mean(change[-_LAST:], axis=0),
    margin=None if margin is None else margin[-1],
    passed=check and check(batch, predicted),
  )
