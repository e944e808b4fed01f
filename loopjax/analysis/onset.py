"""The loss at which layers begin to loop.

Figure 3 of "Adaptive Loops and Memory" (arXiv 2603.08391) draws the expected
number of iterations over the loss of the same evaluations, and says that it
rises rapidly once the loss is below 3.27 +- 0.59 nats per token. It does not
say what the spread measures or how it is determined from the curves.
"""

import numpy as np

from loopjax.analysis.plots import series

LEAST_RISE = 0.1  # Iterations; a layer that rises less has no onset.


def losses(rows: series.Rows) -> np.ndarray:
  """Validation loss at which each layer begins to loop, f64 [L].

  Expected iterations fall at first. A layer's onset is where they first reach,
  after the minimum, half-way from the minimum to the last evaluation; the loss
  is interpolated between the adjacent evaluations. NaN without a loss, and for
  a layer that rises by less than LEAST_RISE.
  """
  expected, loss = _evaluated(rows)
  return np.array([_of_layer(layer, loss) for layer in expected.T])


def shuffled(
  rows: series.Rows, draws: int, rng: np.random.Generator
) -> np.ndarray:
  """A control for `losses`: iterations in random order, f64 [draws, L].

  With a falling loss, any rise after a minimum is at a lower loss. Results of
  `losses` are therefore meaningful only as far as they differ from these. The
  layers of a draw share one order.
  """
  expected, loss = _evaluated(rows)
  orders = [rng.permutation(len(loss)) for _ in range(draws)]
  onset_losses = [
    [_of_layer(x[order], loss) for x in expected.T] for order in orders
  ]
  return np.array(onset_losses)


def _evaluated(rows: series.Rows) -> tuple[np.ndarray, np.ndarray]:
  """Iterations [E, L] and the loss [E] of the evaluations that have both."""
  return series.together(
    series.by_layer(rows, "validation", "ponder_steps"),
    series.scalar(rows, "validation", "loss"),
  )


def _of_layer(expected: np.ndarray, loss: np.ndarray) -> float:
  if not len(loss):
    return np.nan
  start = int(np.argmin(expected))
  if expected[-1] - expected[start] < LEAST_RISE:
    return np.nan
  half = (expected[start] + expected[-1]) / 2
  after = start + int(np.argmax(expected[start:] >= half))
  around = slice(after - 1, after + 1)
  return float(np.interp(half, expected[around], loss[around]))
