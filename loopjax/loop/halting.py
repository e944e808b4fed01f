"""Halting rules: the weight of each loop step, and when a token stops.

A rule is a frozen record with two functions over states shaped like the halting
probabilities, one entry per token (or cell, or sequence: any shape):

  init(shape) -> state
  update(state, probability, is_last) -> (weight, state)

`weight` is the weight of the step's output; over all steps it sums to one, or
less if a rule does not force an entry to stop at the last step. `state.halted`
marks the entries that have stopped: their later weights are 0. `state.cost` is
the differentiable ponder cost (steps). All in float32.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from loopjax.types import Array


class HaltingState(NamedTuple):
  """The state of a halting rule; every field has the same shape.

  Attributes:
    spent: probability assigned so far, f32 in [0, 1].
    steps: steps taken so far (expected steps for `PonderNet`), f32.
    remainder: weight of the stopping step (`ACT`), f32.
    halted: bool.
  """

  spent: Array
  steps: Array
  remainder: Array
  halted: Array

  @property
  def cost(self) -> Array:
    """Ponder cost N + R in steps (Graves 2016, equation 12)."""
    return self.steps + self.remainder


def _fresh(shape: tuple[int, ...]) -> HaltingState:
  zeros = jnp.zeros(shape, jnp.float32)
  return HaltingState(zeros, zeros, zeros, jnp.zeros(shape, bool))


@dataclasses.dataclass(frozen=True)
class ACT:
  """Adaptive computation time (Graves 2016, section 2.1; UTM, section 2.2).

  An entry stops at the first step at which the sum of its probabilities reaches
  1 - epsilon; that step gets the remainder, one minus the weights of the
  earlier steps. The remainder has a gradient; the number of steps does not.

  Attributes:
    epsilon: in [0, 1), f32 scalar or a number.
    forced: the last step gets the remainder of entries still running, and the
      weights always sum to one.
  """

  epsilon: float | Array
  forced: bool = True

  def init(self, shape: tuple[int, ...]) -> HaltingState:
    return _fresh(shape)

  def update(
    self, state: HaltingState, probability: Array, is_last: Array
  ) -> tuple[Array, HaltingState]:
    running = ~state.halted
    probability = jnp.where(running, probability, 0.0)
    spent = state.spent + probability
    reached = spent >= 1.0 - self.epsilon
    stops = running & (reached | is_last if self.forced else reached)
    remainder = jnp.where(stops, 1.0 - state.spent, 0.0)
    weight = jnp.where(stops, remainder, probability)
    return weight, HaltingState(
      spent=jnp.where(stops, 1.0, spent),
      steps=state.steps + running.astype(jnp.float32),
      remainder=state.remainder + remainder,
      halted=state.halted | stops,
    )


@dataclasses.dataclass(frozen=True)
class PonderNet:
  """Probabilistic halting (arXiv 2107.05407, equations 6-7), truncated.

  Step n has weight lambda_n prod_{m<n} (1 - lambda_m), the last step the
  remaining weight. No entry stops before the last step; the cost is the
  expected number of steps, with an exact gradient.
  """

  def init(self, shape: tuple[int, ...]) -> HaltingState:
    return _fresh(shape)

  def update(
    self, state: HaltingState, probability: Array, is_last: Array
  ) -> tuple[Array, HaltingState]:
    alive = 1.0 - state.spent
    weight = jnp.where(is_last, alive, alive * probability)
    return weight, HaltingState(
      spent=state.spent + weight,
      steps=state.steps + alive,
      remainder=state.remainder,
      halted=state.halted | is_last,
    )


@dataclasses.dataclass(frozen=True)
class FixedSteps:
  """No halting: every entry takes all steps, and the last one is the output."""

  def init(self, shape: tuple[int, ...]) -> HaltingState:
    return _fresh(shape)

  def update(
    self, state: HaltingState, probability: Array, is_last: Array
  ) -> tuple[Array, HaltingState]:
    del probability
    weight = jnp.broadcast_to(is_last.astype(jnp.float32), state.spent.shape)
    return weight, HaltingState(
      spent=state.spent + weight,
      steps=state.steps + 1.0,
      remainder=state.remainder,
      halted=state.halted | is_last,
    )
