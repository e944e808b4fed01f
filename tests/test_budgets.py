"""Counts of compiled steps stay within benchmarks/budgets.toml."""

import pytest
from tests_support import ROOT, script


def load():
  """benchmarks/budgets.py as a module."""
  return script(ROOT / "benchmarks" / "budgets.py")


KNOWN = load().budgets()
CPU = [name for name in KNOWN if KNOWN[name]["machine"].startswith("cpu")]
# Of which a step is compiled in seconds.
SLOW = ("cpu-adaptive", "cpu-sleep")


@pytest.mark.long
@pytest.mark.parametrize("name", [
  pytest.param(name, marks=pytest.mark.manual) if name in SLOW else name
  for name in CPU
])  # fmt: skip
def test_a_step_counts_no_more_than_its_budget(name):
  module = load()
  assert not module.over(KNOWN[name], module.counts(KNOWN[name]))


def test_counts_are_printed_beside_budgets_and_what_is_over_is_named(capsys):
  entry = {"name": "some", "most": {"launches": 10, "memory": 2}}
  counted = {"launches": 11.0, "memory": 2.0, "traffic": 3.0}
  assert load().over(entry, counted) == ["launches"]
  out = capsys.readouterr().out
  assert "launches               11  of 10" in out and "traffic" in out


def test_help_is_no_budget(capsys):
  with pytest.raises(SystemExit) as ended:
    load().main(["--help"])
  assert ended.value.code == 0
  assert "python benchmarks/budgets.py all" in capsys.readouterr().out


def test_a_budget_that_does_not_exist_is_named(capsys):
  assert load().main(["some"]) == 2
  assert "'some'; there are cpu-looped" in capsys.readouterr().out
