"""Planted faults and random mutants, without planting them here."""

import subprocess
import sys

import pytest
from tests_support import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import mutants
import mutations

PROJECT = {
  "tests/test_add.py": (
    "import add\ndef test_three():\n  assert add.add(1, 2) == 3\n"
    "def test_anything():\n  add.add(1, 2)\n"
  ),
  "add.py": "def add(a, b):\n  return a + b\n",
}


def row(**changes):
  return mutations.Mutation(
    **{
      "breaks": "sums are differences", "file": "add.py", "before": "a + b",
      "after": "a - b", "tests": ["tests/test_add.py::test_three"], **changes,
    }
  )  # fmt: skip


@pytest.fixture
def project(tmp_path):
  for name, text in PROJECT.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
  return tmp_path


def test_every_row_fits_the_code():
  """If you change a listed line, change its row too."""
  rows = mutations.load()
  assert [reason for row in rows if (reason := mutations.stale(row))] == []
  assert not [row for row in rows if row.before == row.after or not row.tests]


def test_the_table_is_small():
  """Changes of one operator, constant or statement belong to `mutants.py`."""
  assert 50 <= len(mutations.load()) <= 100
  files = mutations.TABLE, mutations.TABLE.with_suffix(".py")
  assert sum(len(file.read_text().splitlines()) for file in files) <= 1000


@pytest.mark.manual  # Imports all test files.
def test_nine_rows_of_ten_have_a_test_of_the_first_tier():
  rows = mutations.load()
  files = {test.partition("::")[0] for row in rows for test in row.tests}
  command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only"]
  listed = subprocess.run(
    [*command, *sorted(files)],
    cwd=ROOT, check=True, capture_output=True, text=True,
  ).stdout.splitlines()  # fmt: skip
  quick = {
    name
    for test in listed
    for name in (test, test.partition("[")[0], test.partition("::")[0])
  }
  late = [row.breaks for row in rows if not quick.intersection(row.tests)]
  assert len(late) <= len(rows) / 10, late


@pytest.mark.parametrize(("changes", "reason"), [
  ({"before": "a * b"}, "add.py has 'a * b' 0 times"),
  ({"before": "a"}, "add.py has 'a' 3 times"),
  ({"file": "sub.py"}, "sub.py has 'a + b' 0 times"),
  ({"tests": ["tests/test_add.py::test_five"]}, "no test tests/test_add.py"),
  ({"tests": ["tests/test_sub.py::test_three"]}, "no test tests/test_sub.py"),
])  # fmt: skip
def test_a_row_that_does_not_fit_is_stale(project, changes, reason):
  assert mutations.stale(row(), project) == ""
  assert reason in mutations.stale(row(**changes), project)
  assert "stale" in mutations.judge(row(**changes), project, 60)


@pytest.mark.long
def test_who_notices(project):
  """One test does, one does not."""
  anything = ["tests/test_add.py::test_anything"]
  assert mutations.judge(row(), project, 60) == "caught"
  assert mutations.judge(row(tests=anything), project, 60) == "missed"
  assert "not done" in mutations.judge(row(), project, 0.01)
  assert (project / "add.py").read_text() == PROJECT["add.py"]
  gone = mutations.run_tests(["tests/test_sub.py"], project, 60)
  assert "pytest ended with 4" in gone


def test_tests_of_a_mutant_begin_with_those_about_it():
  file = "loopjax/nn/rope.py"
  source = (ROOT / file).read_text()
  line = 1 + source[: source.index("angle = ")].count("\n")
  names = mutants.words(source, file, line)
  assert names[:2] == ["rope", "rope_tables"]
  found = mutants.closest(ROOT, file, names)
  assert found[0] == "tests/nn/test_nn.py"  # No file is named test_rope.
  assert set(found) == {
    str(x.relative_to(ROOT)) for x in ROOT.glob("tests/**/test_*.py")
  }
  assert mutants.num_named("def test_rope(): rope_table()", names) == 1


def test_the_interval_is_wilsons():
  """Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263."""
  low, high = mutants.interval(81, 263)
  assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_places_change_one_thing_each():
  pytest.importorskip("mutmut")
  source = "def f(x: int = 1):\n  y = g(x, 2)\n  y += h(x, x) < 3\n  assert y\n"
  changed = [new() for place in mutants.places(source) for *_, new in place]
  assert len({source, *changed}) == 1 + len(changed)
  for fault in (
    "g(2, x)",
    "g(x, )",
    "y = h(x, x) < 3",
    "x) <= 3",
    "g(x, 3)",
    "= 2)",
  ):
    assert sum(fault in new for new in changed) == 1, fault
