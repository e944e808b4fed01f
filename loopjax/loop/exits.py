"""When to exit a loop, from a gate's logits after every loop.

After loop t the gate exits with probability lambda_t = sigmoid(logit_t), and
the probability of exiting after loop t is

  p_t = lambda_t prod_{s<t} (1 - lambda_s),  p_K = prod_{s<K} (1 - lambda_s):

the last loop gets the remaining probability, whatever its gate says (Ouro,
arXiv 2510.25741, section 3.2; truncated PonderNet). All products are computed
as sums of logarithms in float32: probabilities close to 0 or 1 are not rounded
to 0 or 1.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

RULES = ("fixed", "gate", "change", "entropy", "kl", "stable")
READ_OUT = ("entropy", "kl", "stable")  # Need logits after every loop.
KEPT = ("copy", "state", "computed")


def log_distribution(logits: Array) -> Array:
  """log p_t from the gate's logits [K, ...]; f32 [K, ...], all finite."""
  logits = logits.astype(jnp.float32)
  stay = log_survival(logits)
  before = jnp.concatenate([jnp.zeros_like(stay[:1]), stay[:-1]])
  leave = jax.nn.log_sigmoid(logits)
  return before + jnp.concatenate([leave[:-1], jnp.zeros_like(leave[:1])])


def log_survival(logits: Array) -> Array:
  """log prod_{s<=t} (1 - lambda_s) of logits [K, ...]; f32 [K, ...]."""
  stay = jax.nn.log_sigmoid(-logits.astype(jnp.float32))
  return jnp.cumsum(stay, axis=0)


def first_exit(logits: Array, threshold: float | Array) -> Array:
  """The first loop whose cumulative exit probability reaches `threshold`.

  Args:
    logits: the gate's logits, [K, ...].
    threshold: in (0, 1]; at 1 the exit is always after the last loop.

  Returns:
    The loop's index, from 0, i32 [...]; K - 1 if none reaches the threshold.
  """
  log_threshold = jnp.log1p(-jnp.asarray(threshold, jnp.float32))  # -inf at 1.
  done = (log_survival(logits) <= log_threshold).at[-1].set(True)
  return jnp.argmax(done, axis=0).astype(jnp.int32)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("threshold", "num_loops"),
  meta_fields=("rule", "kept", "fills"),
)
@dataclasses.dataclass(frozen=True)
class ExitPolicy:
  """When rows exit the loop, one token per row.

  A row exits after the first loop for which the condition of `rule` holds, at
  the latest after `num_loops` loops.

  Attributes:
    threshold: f32 [B] in (0, 1]; at 1 no row exits early.
    num_loops: i32 [B], maximum number of loops.
    rule: "fixed": no early exits, for any threshold; "gate": the gate's
      cumulative exit probability is at least the threshold; "change": the loop
      changed the state by at most 1 - threshold of its norm; "entropy": the
      entropy of the output distribution is at most 1 - threshold of its
      maximum; "kl": its divergence from the previous loop's, KL(new || old), is
      at most 1 - threshold nats; "stable": the most likely token has been the
      same after 1 / (1 - threshold) consecutive loops (Huginn, arXiv
      2502.05171, and its published code).
    kept: the keys and values of skipped loops to which later tokens attend, if
      the cache has separate ones for every loop. "copy": from the row's last
      loop; "state": projections of its last state, computed without running the
      layers; "computed": no loop is skipped, an exit only selects the loop
      whose logits are used (published code of Ouro, arXiv 2510.25741).
    fills: whether `kept` also fills the loops after `num_loops` for tokens that
      exit by no rule, because later tokens run more loops.
  """

  threshold: Any
  num_loops: Any
  rule: str = "fixed"
  kept: str = "copy"
  fills: bool = False

  def skips(self, rule: str) -> bool:
    """Whether cache slots of skipped loops are to be filled.

    Args:
      rule: the rule to apply, `rule` or "fixed".
    """
    return (rule != "fixed" or self.fills) and self.kept != "computed"


class ExitState(NamedTuple):
  """The progress of every row.

  Attributes:
    live: bool [B], rows that have not exited.
    loops: i32 [B], number of loops that each row has executed.
    log_left: f32 [B], log-probability that the gate has not exited yet.
  """

  live: Array
  loops: Array
  log_left: Array


def start(reads: Array) -> ExitState:
  """The initial state; `reads`: bool [B], rows that process a token."""
  return ExitState(
    live=reads,
    loops=jnp.zeros(reads.shape, jnp.int32),
    log_left=jnp.zeros(reads.shape, jnp.float32),
  )


def after_loop(
  policy: ExitPolicy, rule: str, state: ExitState, evidence: Array
) -> ExitState:
  """The exit state after a loop.

  Args:
    policy: thresholds and maximum numbers of loops.
    rule: the rule to apply, `policy.rule` or "fixed".
    state: the state before the loop.
    evidence: what the rule compares with the threshold, f32 [B]: the gate's
      logit, `relative_change`, or the result of `read_out_evidence`.
  """
  log_left, exiting = state.log_left, jnp.zeros_like(state.live)
  if rule == "gate":
    log_left = log_left + log_survival(evidence[None])[0]
    exiting = log_left <= jnp.log1p(-policy.threshold)  # -inf at 1.
  elif rule != "fixed":
    exiting = (evidence <= 1 - policy.threshold) & (policy.threshold < 1)
  loops = state.loops + state.live
  return ExitState(
    live=state.live & ~exiting & (loops < policy.num_loops),
    loops=loops,
    log_left=log_left,
  )


def relative_change(before: Array, after: Array) -> Array:
  """|after - before| / |after| over the last axis; [..., D] to [...]."""
  norm = jnp.linalg.norm(after, axis=-1)
  change = jnp.linalg.norm(after - before, axis=-1)
  return change / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)


def relative_entropy(logits: Array, num_padding_tokens: int = 0) -> Array:
  """Entropy of softmax(logits [..., V]) divided by its maximum; [...].

  The maximum is the logarithm of the vocabulary size without padding ids.
  """
  log_prob = jax.nn.log_softmax(logits, axis=-1)
  entropy = -jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1)
  return entropy / math.log(logits.shape[-1] - num_padding_tokens)


class ReadOutHistory(NamedTuple):
  """What rules of READ_OUT compare a read-out with.

  Attributes:
    logits: the previous loop's, f32 [B, V]; [B, 0] for rules that do not need
      them.
    token: i32 [B], the most likely token; -1 before the first loop.
    times: i32 [B], number of consecutive loops with this token.
  """

  logits: Array
  token: Array
  times: Array


def no_read_outs(rule: str, batch: int, vocab_size: int) -> ReadOutHistory:
  """The value before the first loop."""
  logits = jnp.zeros((batch, vocab_size if rule == "kl" else 0))
  zeros = jnp.zeros(batch, jnp.int32)
  return ReadOutHistory(logits, zeros - 1, zeros)


def read_out_evidence(
  rule: str, history: ReadOutHistory, logits: Array, num_padding_tokens: int
) -> tuple[Array, ReadOutHistory]:
  """The evidence of a rule of READ_OUT, compared with the threshold; f32 [B].

  Args:
    rule: "entropy": `relative_entropy`; "kl": `divergence`, infinite after the
      first loop; "stable": 1 over the number of consecutive loops with the same
      most likely token.
    history: the earlier read-outs.
    logits: f32 [B, V], after this loop.
    num_padding_tokens: number of ids at the end that only pad the vocabulary.
  """
  if rule == "entropy":
    return relative_entropy(logits, num_padding_tokens), history
  if rule == "kl":
    change = divergence(logits, history.logits)
    first = history.token < 0
    history = history._replace(
      logits=logits, token=jnp.zeros_like(history.token)
    )
    return jnp.where(first, jnp.inf, change), history
  assert rule == "stable", rule
  token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  times = jnp.where(token == history.token, history.times + 1, 1)
  # Slightly less: 1 - 0.8 in float32 must not be below a fifth.
  return (1 - 1e-6) / times, history._replace(token=token, times=times)


def divergence(new: Array, old: Array) -> Array:
  """KL(softmax(new) || softmax(old)) in nats; [..., V] to [...]."""
  new, old = (jax.nn.log_softmax(x, axis=-1) for x in (new, old))
  return jnp.sum(jnp.exp(new) * (new - old), axis=-1)
