"""Draws random mutants of the numerical modules and counts those caught.

  pip install mutmut==3.8.1
  nice python benchmarks/mutants.py --out=ROWS [--number=200] [--seed=0]

A mutant is the committed code with one change: an operator, a number, a truth
value, a comparison or a condition (mutmut's changes), an argument omitted or
swapped with its neighbour, or a statement omitted. Draws a place uniformly,
then one of its changes. Text, annotations, assertions and raised errors are not
changed.

The tests of the first tier run file by file, the most relevant first, until one
fails or `--seconds` of CPU time are spent. Each mutant runs in a fork of a
process that has imported JAX, and is never written to a file. Results are
written one by one, and the same command resumes; `--only=INDEX,...` repeats
some, `--tests=NODE,...` with other tests. If a change turns out to make no
difference, replace "escaped" by "equivalent" by hand.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import functools
import importlib.machinery
import inspect
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = (
  "models", "loop", "nn", "losses", "optim", "program", "data", "kernels",
  "generate", "eval", "hub",
)  # fmt: skip
# The changes used from mutmut, which also changes text and replaces values by
# None.
_CHANGES = (
  "number", "name", "augmented_assignment", "remove_unary_ops", "keywords",
  "swap_op", "if_exp",
)  # fmt: skip
_HANGS = 60  # Seconds of CPU time past the limit, in one test.
# No wall time limit: other work on the machine must not fail a test.
_PYTEST = ("-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")
Row = dict[str, Any]


def places(source: str) -> list[list[tuple[int, str, Callable[[], str]]]]:
  """Every place of a module that can change, with all its changes.

  Returns:
    The line, the kind of change, and a function that returns the new source.
  """
  import libcst as cst
  from mutmut.mutation import mutators

  wrapper = cst.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
  module = wrapper.module
  positions = wrapper.resolve(cst.metadata.PositionProvider)

  def changes(node: Any) -> Iterator[tuple[str, Any]]:
    for types, operator in mutators.mutation_operators:
      name = operator.__name__.removeprefix("operator_")
      if name in _CHANGES and isinstance(node, types):
        yield from ((name, new) for new in operator(node))
    # Omitting the only assignment to a name would only raise a NameError.
    if isinstance(node, cst.Assign):
      target = node.targets[0].target
      if isinstance(target, cst.Name):
        used = rf"(?<![.\w]){target.value}\b"
        left_out = re.search(used, module.code_for_node(node.value))
      else:
        left_out = not isinstance(target, cst.Tuple)
    elif isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
      left_out = "assert" not in module.code_for_node(node.value.func)
    else:
      left_out = isinstance(node, cst.AugAssign)
    if left_out:
      yield "statement", cst.Pass()
    if isinstance(node, cst.Call):
      given = list(node.args)
      for i in range(len(given) if len(given) > 1 else 0):
        yield "argument", node.with_changes(args=given[:i] + given[i + 1 :])
      for i, (one, two) in enumerate(itertools.pairwise(given)):
        by_name = one.keyword or one.star or two.keyword or two.star
        if not by_name and not one.value.deep_equals(two.value):
          pair = [one.with_changes(value=two.value)]
          pair += [two.with_changes(value=one.value)]
          yield (
            "order",
            node.with_changes(args=given[:i] + pair + given[i + 2 :]),
          )

  def changed(old: Any, new: Any) -> str:
    return module.deep_replace(old, new).code

  found = []
  stack: list[tuple[Any, int]] = [(module, 1)]
  while stack:
    node, line = stack.pop()
    if not isinstance(node, cst.Annotation | cst.Assert | cst.Raise):
      line = positions[node].start.line if node in positions else line
      stack += [(child, line) for child in reversed(node.children)]
      if here := list(changes(node)):
        found.append(
          [
            (line, kind, functools.partial(changed, node, new))
            for kind, new in here
          ]
        )
  return found


def draw(tree: pathlib.Path, number: int, seed: int) -> list[Row]:
  """Mutants of places drawn uniformly, as rows without a result."""
  files = [
    path
    for package in PACKAGES
    for path in sorted((tree / "loopjax" / package).rglob("*.py"))
  ]
  total = [
    (path, i, len(here))
    for path in files
    for i, here in enumerate(places(path.read_text(encoding="utf-8")))
  ]
  print(f"{len(total)} places in {len(files)} modules", flush=True)
  rng = random.Random(seed)
  rows: list[Row] = []
  for path, i, num_changes in rng.sample(total, number):
    before = path.read_text(encoding="utf-8")
    line, change, changed = places(before)[i][rng.randrange(num_changes)]
    after = changed()
    both = before.splitlines(), after.splitlines()
    difference = "\n".join([*difflib.unified_diff(*both, n=0, lineterm="")][2:])
    rows.append(
      {
        "index": len(rows), "result": "", "file": str(path.relative_to(tree)),
        "line": line, "change": change, "difference": difference,
        "before": before, "after": after,
      }
    )  # fmt: skip
  return rows


def words(source: str, file: str, line: int) -> list[str]:
  """Names that tests of a line may mention: its module, class and function."""
  definitions = [
    node.name
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and node.lineno <= line <= (node.end_lineno or 0)
  ]
  return [*pathlib.PurePath(file).with_suffix("").parts[2:], *definitions]


def num_named(source: str, names: Iterable[str]) -> int:
  """Number of these words in a text."""
  return sum(bool(re.search(rf"(\b|_){name}(\b|_)", source)) for name in names)


def closest(tree: pathlib.Path, file: str, names: Sequence[str]) -> list[str]:
  """All test files, ordered by relevance to a module.

  First the same package, within it files named like the module; then by number
  of names mentioned, then by size.
  """
  tests = {
    str(path.relative_to(tree)): path.read_text(encoding="utf-8")
    for path in (tree / "tests").rglob("test_*.py")
  }
  package = pathlib.PurePath(file).parts[1]

  def key(test: str) -> tuple[Any, ...]:
    return (
      not test.startswith(f"tests/{package}/"),
      not num_named(pathlib.Path(test).stem, names),
      -num_named(tests[test], names),
      len(tests[test]),
    )

  return sorted(tests, key=key)


def attempt(
  row: Row, tests: Sequence[str], names: Sequence[str], seconds: float
) -> Row:
  """Runs tests with a mutant in a fork; returns the result and its catcher."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    code = 99
    try:
      os.setsid()
      os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
      os.dup2(1, 2)
      code = _run(row, tests, names, seconds, writing)
    finally:
      os._exit(code)
  os.close(writing)
  with open(reading, encoding="utf-8") as stream:
    said = stream.read().splitlines()  # Until the child exits.
  _, status, used = os.wait4(child, 0)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)  # Also kills its tests' children.
  code = os.waitstatus_to_exitcode(status)
  result = {0: "escaped", 1: "caught", -signal.SIGXCPU: "timeout"}
  return {
    "result": result.get(code, "crash" if code < 0 else f"error {code}"),
    "by": said[-1] if said and code else "",
    "tests": len(said),
    "seconds": round(used.ru_utime + used.ru_stime, 1),
  }


def _run(
  row: Row,
  tests: Sequence[str],
  names: Sequence[str],
  seconds: float,
  writing: int,
) -> int:
  import pytest

  limit = int(seconds) + _HANGS
  resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 9))
  path = str(pathlib.Path(row["file"]).resolve())
  loader = importlib.machinery.SourceFileLoader
  get_code = loader.get_code

  def get_changed(self: Any, name: str) -> Any:
    if self.path == path:
      return compile(row["after"], path, "exec")
    return get_code(self, name)

  # Every import of this fork; mypy has no type for a method that is replaced.
  loader.get_code = get_changed  # type: ignore[method-assign]

  class Watch:
    failed = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
      items.sort(key=lambda x: -num_named(inspect.getsource(x.function), names))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
      os.write(writing, f"{nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
      self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
      if report.failed:
        self.failed = True
        crash = getattr(report.longrepr, "reprcrash", None)
        said = crash.message.split("\n")[0] if crash else "not imported"
        os.write(writing, f"{report.nodeid}: {said}\n".encode())

    def pytest_runtest_teardown(self, item: Any) -> None:
      if time.process_time() > seconds:
        item.session.shouldstop = "The time is spent."

  for test in tests:
    watch = Watch()
    status = int(pytest.main([*_PYTEST, test], plugins=[watch]))
    if watch.failed:
      return 1
    if status not in (0, 2, 5):  # 2: stopped; 5: no first-tier tests.
      return 10 + status
    if time.process_time() > seconds:
      break
  return 0


def interval(count: int, number: int) -> tuple[float, float]:
  """Wilson's 95% interval of a proportion."""
  z = 1.96
  middle = count + z**2 / 2
  half = z * math.sqrt(count * (number - count) / number + z**2 / 4)
  return (middle - half) / (number + z**2), (middle + half) / (number + z**2)


def report(rows: list[Row]) -> str:
  """A table by package, and the interval of the fraction caught.

  Rows without a result and equivalent mutants do not count.
  """
  counts = collections.defaultdict(collections.Counter)
  for row in rows:
    ends = {"": "not run", "crash": "caught", "timeout": "caught"}
    for package in (row["file"].split("/")[1], "all"):
      counts[package][ends.get(row["result"], row["result"])] += 1
  columns = ("caught", "escaped", "equivalent", "not run")
  lines = [f"| package | {' | '.join(columns)} |", "|---|" + "---:|" * 4]
  for package in sorted(counts, key=(*PACKAGES, "all").index):
    cells = (package, *(counts[package][column] for column in columns))
    lines.append(f"| {' | '.join(map(str, cells))} |")
  caught = counts["all"]["caught"]
  number = caught + counts["all"]["escaped"]
  low, high = interval(caught, number)
  return "\n".join((*lines, f"{caught} of {number}: {low:.1%} to {high:.1%}"))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, required=True, help="rows")
  parser.add_argument("--number", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--seconds", type=float, default=60, help="of CPU time")
  parser.add_argument("--only", default="", help="indices of rows to run again")
  parser.add_argument(
    "--tests", default="", help="other tests than the closest"
  )
  options = parser.parse_args()
  out = options.out.resolve()
  with tempfile.TemporaryDirectory(prefix="loopjax-mutants-") as name:
    tree = pathlib.Path(name).resolve()
    command = ["git", "archive", "HEAD"]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
      archive.extractall(tree, filter="data")
    if not out.exists():
      _write(out, draw(tree, options.number, options.seed))
    rows = [
      json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()
    ]
    only = [int(index) for index in options.only.split(",") if index]
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:0] = [str(tree), str(tree / "tests")]
    import conftest  # noqa: F401, I001  # It sets what JAX reads.
    import flax.nnx, grain, optax, orbax.checkpoint  # noqa: E401, F401

    del sys.modules["conftest"]
    for row in rows:
      if row["index"] not in only if only else row["result"]:
        continue
      if (tree / row["file"]).read_text(encoding="utf-8") != row["before"]:
        parser.error(f"{row['file']} has changed since {out} was drawn")
      tests = list(filter(None, options.tests.split(",")))
      names = words(row["before"], row["file"], row["line"])
      tests = tests or closest(tree, row["file"], names)
      row.update(attempt(row, tests, names, options.seconds))
      _write(out, rows)
      shown = ("index", "result", "seconds", "tests", "file", "line", "by")
      print(*(row[key] for key in shown), flush=True)
  print(report(rows))


def _write(out: pathlib.Path, rows: list[Row]) -> None:
  out.write_text(
    "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
  )


if __name__ == "__main__":
  main()
