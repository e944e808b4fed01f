"""The loss at which layers begin to loop, on synthetic evaluations."""

import numpy as np
import pytest

from loopjax.analysis import onset


def rows(expected, losses, **more):
  """Evaluations of one layer per row of `expected`."""
  return [
    {
      "step": 10 * number,
      "split": "validation",
      "loss": loss,
      **{f"ponder_steps/layer={i}": x for i, x in enumerate(column)},
      **more,
    }
    for number, (column, loss) in enumerate(
      zip(zip(*expected, strict=True), losses, strict=True), 1
    )
  ]


def test_a_layer_begins_half_way_from_its_lowest_evaluation_to_its_last():
  """Interpolated between evaluations; values before the minimum are ignored."""
  found = onset.losses(
    rows(
      [
        [2.5, 1.0, 1.0, 2.0, 3.0],  # At 2 on an evaluation.
        [1.0, 1.0, 1.5, 3.0, 3.0],  # At 2, a third from 1.5 to 3.
        [3.0, 1.5, 1.2, 1.2, 1.2],  # Only falls.
        [1.0, 1.0, 1.0, 1.0, 1.09],  # Rises too little.
        [1.0, 4.0, 1.0, 1.0, 2.0],  # Half-way early, then back.
      ],
      [4.0, 3.5, 3.0, 2.7, 2.5],
    )
  )
  nan = np.nan
  expected = [2.7, 3.0 - 0.3 / 3, nan, nan, 4.0 - 0.5 / 6]
  np.testing.assert_allclose(found, expected)


def test_only_evaluations_of_both_are_read():
  """Training rows have iterations and losses at other steps."""
  planted = rows([[1.0, 1.0, 3.0]], [4.0, 3.0, 2.0])
  train = [{**row, "split": "train", "loss": 9.0} for row in planted]
  bare = {"step": 25, "split": "validation", "loss": 7.0}
  found = onset.losses([*train, *planted[:2], bare, planted[2]])
  assert found == pytest.approx([2.5])
  assert onset.losses([bare]).size == 0
  for row in planted:  # Non-finite values are not written.
    del row["loss"]
  assert np.isnan(onset.losses(planted)).tolist() == [True]


def test_a_control_has_the_same_iterations_in_another_order():
  falling = np.linspace(4.0, 2.0, 5)
  planted = rows([[1.0, 1.0, 1.0, 1.0, 2.0], [3.0] * 5], falling)
  rng = np.random.default_rng(0)
  found = onset.shuffled(planted, 400, rng)
  assert found.shape == (400, 2) and np.isnan(found[:, 1]).all()
  # It has an onset only if the 2 is last, in a fifth of the orders.
  begins = ~np.isnan(found[:, 0])
  assert 50 < begins.sum() < 110
  np.testing.assert_allclose(found[begins, 0], 2.25)
