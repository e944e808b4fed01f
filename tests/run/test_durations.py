"""Durations as text."""

import pytest

from loopjax.run import durations


@pytest.mark.parametrize(
  ("seconds", "said"),
  [
    (0.2, "a few seconds"),
    (10.0, "10 s"),
    (119.0, "119 s"),
    (120.0, "2 minutes"),
    (7199.0, "120 minutes"),
    (9001.0, "2.5 hours"),
    (63 * 86_400.0, "63 days"),
    (1e9 * 365 * 86_400.0, "1,000,000,000 years"),
  ],
)
def test_durations_are_as_people_say_them(seconds, said):
  assert durations.text(seconds) == said
