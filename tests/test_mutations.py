"""The breaks on purpose of `benchmarks/mutations.py`, without breaking ours."""

import sys

import pytest
from tests_support import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import mutations

PROJECT = {
  "tests/test_add.py": (
    "import add\ndef test_three():\n  assert add.add(1, 2) == 3\n"
    "def test_anything():\n  add.add(1, 2)\n"
    "def test_four():\n  assert add.add(1, 2) == 4\n"
  ),
  "add.py": "def add(a, b):\n  return a + b\n",
}


def row(**changes):
  return mutations.Mutation(
    **{
      "name": "add/sign", "file": "add.py", "before": "a + b",
      "after": "a - b", "tests": ["tests/test_add.py::test_three"],
      "why": "sums are differences", **changes,
    }
  )  # fmt: skip


@pytest.fixture
def project(tmp_path):
  for name, text in PROJECT.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  return tmp_path


def test_every_row_fits_the_code():
  """Whoever changes a line that is listed changes its row, too."""
  rows = mutations.load()
  assert [reason for row in rows if (reason := mutations.stale(row))] == []
  names = [row.name for row in rows]
  assert len(set(names)) == len(names) > 86
  assert not [row.name for row in rows if row.before == row.after]
  assert not [row.name for row in rows if not row.tests or not row.why]


@pytest.mark.long  # All files of tests are imported.
def test_rows_without_a_quick_test_are_few_and_say_so():
  rows = mutations.load()
  found = mutations.without_quick_tests(rows)
  assert found == [row.name for row in rows if row.tier == "long"]
  assert len(found) <= 0.05 * len(rows)
  assert {row.tier for row in rows} <= {"", "long"}


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"before": "a * b"}, "add.py has 'a * b' 0 times"),
    ({"before": "a"}, "add.py has 'a' 3 times"),
    ({"file": "sub.py"}, "sub.py has 'a + b' 0 times"),
    ({"tests": ["tests/test_add.py::test_five"]}, "no test tests/test_add.py"),
    ({"tests": ["tests/test_sub.py::test_three"]}, "no test tests/test_sub.py"),
  ],
)
def test_a_row_that_does_not_fit_is_stale(project, changes, reason):
  assert mutations.stale(row(), project) == ""
  assert reason in mutations.stale(row(**changes), project)


@pytest.mark.long
def test_who_notices(project):
  """One test does and one does not; one fails without a change as well."""
  three, anything, four = (
    [f"tests/test_add.py::test_{name}"]
    for name in ("three", "anything", "four")
  )
  assert mutations.judge(row(), project, 60) == "caught"
  assert mutations.judge(row(tests=anything), project, 60) == "missed"
  assert "not done" in mutations.judge(row(), project, 0.01)
  assert (project / "add.py").read_text() == PROJECT["add.py"]
  assert mutations.control([three, four], project, 60) == {
    tuple(four): "failed"
  }
  gone = mutations.run_tests(["tests/test_sub.py"], project, 60)
  assert "pytest ended with 4" in gone
