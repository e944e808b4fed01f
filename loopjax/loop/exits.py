"""When to exit a loop, from a gate's logits after every loop.

After loop t the gate exits with chance lambda_t = sigmoid(logit_t), so that

  p_t = lambda_t prod_{s<t} (1 - lambda_s),  p_K = prod_{s<K} (1 - lambda_s):

the last loop takes what is left, whatever its own gate says (Ouro, arXiv
2510.25741, section 3.2; truncated PonderNet). All sums are of logarithms in
float32, which a gate that is almost sure does not round to 0 or 1.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopjax.types import Array

RULES = ("fixed", "gate", "change", "entropy")
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


def first_loop(logits: Array, threshold: float | Array) -> Array:
  """The first loop by which an exit has at least a chance of `threshold`.

  Args:
    logits: of the gate, [K, ...].
    threshold: in (0, 1]; at 1 no loop but the last one is an exit, however sure
      the gate is.

  Returns:
    Its index from 0, i32 [...]; K - 1 if there is none.
  """
  left = jnp.log1p(-jnp.asarray(threshold, jnp.float32))  # -inf at 1.
  done = (log_survival(logits) <= left).at[-1].set(True)
  return jnp.argmax(done, axis=0).astype(jnp.int32)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("threshold", "num_loops"),
  meta_fields=("rule", "kept"),
)
@dataclasses.dataclass(frozen=True)
class Exits:
  """When rows that read one token each leave the loop.

  Attributes:
    threshold: f32 [B] in (0, 1]; at 1 a row leaves after its last loop. The
      first loop is the last for which `rule` holds.
    num_loops: i32 [B], the most that a row runs.
    rule: "fixed", whatever the threshold is; "gate", the chance of an exit so
      far is at least the threshold; "change", the loop has changed the state by
      at most 1 - threshold of its norm; "entropy", that of the read-out is at
      most 1 - threshold of what it can be.
    kept: of the loops that a row skips, for later tokens, where a cache keeps
      every loop's keys and values: "copy" those of its last loop; "state", what
      its last state gives, without running a layer; "computed", which skips
      nothing: an exit chooses what is read out (published code of Ouro, arXiv
      2510.25741).
  """

  threshold: Any
  num_loops: Any
  rule: str = "fixed"
  kept: str = "copy"


class Running(NamedTuple):
  """Which rows still run.

  Attributes:
    live: bool [B].
    loops: i32 [B], loops of each row so far.
    log_left: f32 [B], log of the chance that the gate has not left yet.
  """

  live: Array
  loops: Array
  log_left: Array


def start(there: Array) -> Running:
  """Before the first loop; `there`, bool [B], are rows that read a token."""
  return Running(
    live=there,
    loops=jnp.zeros(there.shape, jnp.int32),
    log_left=jnp.zeros(there.shape, jnp.float32),
  )


def after_loop(
  exits: Exits, rule: str, running: Running, evidence: Array
) -> Running:
  """Rows that still run after a loop.

  Args:
    exits: when they leave.
    rule: that is in force, that of `exits` or "fixed".
    running: before the loop.
    evidence: f32 [B]: the gate's logit, `relative_change` or
      `relative_entropy`, by the rule.
  """
  log_left, leaves = running.log_left, jnp.zeros_like(running.live)
  if rule == "gate":
    log_left = log_left + log_survival(evidence[None])[0]
    leaves = log_left <= jnp.log1p(-exits.threshold)  # -inf at 1.
  elif rule != "fixed":
    leaves = (evidence <= 1 - exits.threshold) & (exits.threshold < 1)
  loops = running.loops + running.live
  return Running(
    live=running.live & ~leaves & (loops < exits.num_loops),
    loops=loops,
    log_left=log_left,
  )


def relative_change(before: Array, after: Array) -> Array:
  """Norm of the change by the norm of what it leads to; [...] of [..., D]."""
  norm = jnp.linalg.norm(after, axis=-1)
  change = jnp.linalg.norm(after - before, axis=-1)
  return change / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)


def relative_entropy(logits: Array) -> Array:
  """Entropy of logits [..., V] by that of V equal chances; [...]."""
  log_chance = jax.nn.log_softmax(logits, axis=-1)
  entropy = -jnp.sum(jnp.exp(log_chance) * log_chance, axis=-1)
  return entropy / math.log(logits.shape[-1])
