"""Draws random mutants of the numerical modules; how many do tests notice?

  pip install mutmut==3.8.1
  nice python benchmarks/mutants.py --out=ROWS [--number=200] [--seed=0]

A mutant is the committed code with one place changed: an operator, a number, a
truth value, a comparison, a condition (changes of mutmut), an argument left out
or exchanged with its neighbour, a statement left out. Places are drawn
uniformly, then one of the changes of a place. Text, annotations, assertions and
what is raised are left as they are.

The tests of the first tier run file by file, the closest to the place first
(see `closest`), until one fails or `--seconds` of CPU time are spent. Each
mutant runs in a fork of a process that has imported JAX, and is never written
to a file. Rows are written one by one; the same command continues with the
rest, and `--only=INDEX,...` runs some again. Whoever judges that a change means
nothing writes "equivalent" for "escaped" into its row.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import functools
import importlib.machinery
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
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = (
  "models", "loop", "nn", "losses", "optim", "program", "data", "kernels",
  "generate", "eval", "hub",
)  # fmt: skip
_CHANGES = {
  "number", "name", "augmented_assignment", "remove_unary_ops", "keywords",
  "swap_op", "if_exp",
}  # fmt: skip
_SHOWN = ("result", "seconds", "tests", "file", "line", "change", "by")
_HANGS = 60  # Seconds of CPU time past the limit, in one test.


def places(source: str) -> list[list[tuple[int, str, Any]]]:
  """Every place of a module that can change, with all its changes.

  Returns:
    The line, the kind of change, and a function that returns the new source.
  """
  import libcst as cst
  from mutmut.mutation import mutators

  wrapper = cst.MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
  positions = wrapper.resolve(cst.metadata.PositionProvider)
  operators = [
    (types, operator, name)
    for types, operator in mutators.mutation_operators
    if (name := operator.__name__.removeprefix("operator_")) in _CHANGES
  ]

  def changes(node: Any) -> Iterator[tuple[str, Any]]:
    for types, operator, name in operators:
      if isinstance(node, types):
        yield from ((name, new) for new in operator(node))
    # To leave out the only assignment to a name is an error for certain.
    if isinstance(node, cst.Assign):
      target = node.targets[0].target
      code = wrapper.module.code_for_node(node.value)
      if not isinstance(target, cst.Name | cst.Tuple) or (
        isinstance(target, cst.Name)
        and re.search(rf"(?<![.\w]){target.value}\b", code)
      ):
        yield "statement", cst.Pass()
    elif isinstance(node, cst.AugAssign) or (
      isinstance(node, cst.Expr)
      and isinstance(node.value, cst.Call)
      and "assert" not in wrapper.module.code_for_node(node.value.func)
    ):
      yield "statement", cst.Pass()
    if isinstance(node, cst.Call):
      given = list(node.args)
      for i in range(len(given) if len(given) > 1 else 0):
        yield "argument", node.with_changes(args=given[:i] + given[i + 1 :])
      for i, (one, two) in enumerate(itertools.pairwise(given)):
        if not (one.keyword or one.star or two.keyword or two.star):
          pair = (
            one.with_changes(value=two.value),
            two.with_changes(value=one.value),
          )
          yield (
            "order",
            node.with_changes(args=[*given[:i], *pair, *given[i + 2 :]]),
          )

  found = []
  stack: list[tuple[Any, int]] = [(wrapper.module, 1)]
  while stack:
    node, line = stack.pop()
    if not isinstance(node, cst.Annotation | cst.Assert | cst.Raise):
      line = positions[node].start.line if node in positions else line
      stack += [(child, line) for child in reversed(node.children)]
      here = [
        (line, name, functools.partial(_replaced, wrapper.module, node, new))
        for name, new in changes(node)
      ]
      found += [here] if here else []
  return found


def _replaced(module: Any, old: Any, new: Any) -> str:
  return module.deep_replace(old, new).code


def draw(tree: pathlib.Path, number: int, seed: int) -> list[dict[str, Any]]:
  """Mutants of places drawn uniformly, as rows without a result."""
  files = [
    path
    for package in PACKAGES
    for path in sorted((tree / "loopjax" / package).rglob("*.py"))
  ]
  total = [
    (path, i) for path in files for i in range(len(places(path.read_text())))
  ]
  print(f"{len(total)} places in {len(files)} modules", flush=True)
  rng = random.Random(seed)
  rows = []
  for index, (path, i) in enumerate(rng.sample(total, number)):
    source = path.read_text()
    line, change, replaced = rng.choice(places(source)[i])
    new = replaced()
    lines = [x.splitlines() for x in (source, new)]
    difference = list(difflib.unified_diff(*lines, n=0, lineterm=""))[2:]
    rows.append(
      {
        "index": index, "file": str(path.relative_to(tree)), "line": line,
        "change": change, "difference": "\n".join(difference),
        "before": source, "after": new, "result": "",
      }
    )  # fmt: skip
  return rows


class Imports:
  """Who imports what below `tree`, in `loopjax` and `tests`."""

  def __init__(self, tree: pathlib.Path):
    self._sources = {
      str(path.relative_to(tree)): path.read_text()
      for folder in ("loopjax", "tests")
      for path in (tree / folder).rglob("*.py")
    }
    helpers = {
      pathlib.Path(file).stem: file
      for file in self._sources
      if file.startswith("tests/")
    }
    self._users = collections.defaultdict(set)
    for user, source in self._sources.items():
      for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
          names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
          names = [node.module]
          names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
          at = name.replace(".", "/")
          helper = helpers.get(name.partition(".")[0], "")
          for used in (f"{at}.py", f"{at}/__init__.py", helper):
            self._users[used].add(user)

  def closest(self, file: str, line: int) -> list[str]:
    """Files of tests that import a module, those first that are about a line.

    First those that import the module themselves or are called like it, then
    others by the number of imports between; among equals, those that name the
    function or class, those of the same package, and small ones.
    """
    distance = {file: 0}
    queue = collections.deque([file])
    while queue:
      used = queue.popleft()
      for user in sorted(self._users[used] - distance.keys()):
        distance[user] = distance[used] + 1
        queue.append(user)
    names = [
      node.name
      for node in ast.walk(ast.parse(self._sources[file]))
      if isinstance(node, ast.FunctionDef | ast.ClassDef)
      and node.lineno <= line <= (node.end_lineno or 0)
      and not node.name.startswith("_")
    ]
    package, *parts = pathlib.PurePath(file).with_suffix("").parts[1:]

    def key(test: str) -> tuple[Any, ...]:
      source = self._sources[test]
      called = any(part in pathlib.Path(test).stem for part in parts)
      near = called or distance[test] == 1
      return (
        not near,
        0 if near else distance[test],
        not called and not any(name in source for name in names),
        not test.startswith(f"tests/{package}/"),
        len(source),
      )

    tests = [x for x in distance if pathlib.Path(x).name.startswith("test_")]
    return sorted(tests, key=key)


def attempt(row: dict[str, Any], tests: list[str], seconds: float) -> dict:
  """Runs tests with a mutant in a fork; says the result and what caught it."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    code = 99
    try:
      os.setsid()
      os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
      os.dup2(1, 2)
      os.close(reading)
      code = _run(row, tests, seconds, writing)
    finally:
      os._exit(code)
  os.close(writing)
  with open(reading) as stream:
    said = stream.read().splitlines()  # Ends with the child.
  _, status, used = os.wait4(child, 0)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child, signal.SIGKILL)  # What its tests have started.
  code = os.waitstatus_to_exitcode(status)
  result = {0: "escaped", 1: "caught", -signal.SIGXCPU: "timeout"}
  return {
    "result": result.get(code, "crash" if code < 0 else f"error {code}"),
    "by": said[-1] if said and code else "",
    "tests": len(said),
    "seconds": round(used.ru_utime + used.ru_stime, 1),
  }


def _run(row: dict[str, Any], tests: list[str], seconds: float, to: int) -> int:
  import pytest

  limit = int(seconds) + _HANGS
  resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 9))
  path = str(pathlib.Path(row["file"]).resolve())
  loader = importlib.machinery.SourceFileLoader
  get_code = loader.get_code

  def changed(self: Any, name: str) -> Any:
    if self.path == path:
      return compile(row["after"], path, "exec")
    return get_code(self, name)

  loader.get_code = changed  # type: ignore[method-assign]

  class Watch:
    def pytest_runtest_logstart(self, nodeid: str) -> None:
      os.write(to, f"{nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
      self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
      if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else str(report.longrepr)).split("\n")
        os.write(
          to, f"{report.nodeid}: {message[0 if crash else -1]}\n".encode()
        )

    def pytest_runtest_teardown(self, item: Any) -> None:
      if time.process_time() > seconds:
        item.session.shouldstop = "The time is spent."

  # A test that waits for other work on the machine is not wrong.
  options = ("-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0")
  for test in tests:
    status = int(pytest.main([*options, test], plugins=[Watch()]))
    spent = time.process_time() > seconds
    if status == 1 or (status == 2 and not spent):  # Failed, or not imported.
      return 1
    if status not in (0, 2, 5):  # 5: the first tier has none of these tests.
      return 10 + status
    if spent:
      break
  return 0


def interval(count: int, number: int) -> tuple[float, float]:
  """Wilson's 95% interval of a share."""
  z2 = 1.96**2
  middle = (count + z2 / 2) / (number + z2)
  half = math.sqrt(z2 * (count * (number - count) / number + z2 / 4)) / (
    number + z2
  )
  return middle - half, middle + half


def report(rows: list[dict[str, Any]]) -> str:
  """A table by package, and the share caught of those that change anything."""
  counts = collections.defaultdict(collections.Counter)
  for row in rows:
    for package in (row["file"].split("/")[1], "all"):
      result = row["result"]
      caught = result in ("caught", "crash", "timeout")
      counts[package]["caught" if caught else result] += 1
  results = ("caught", "escaped", "equivalent")
  lines = [
    f"| package | drawn | {' | '.join(results)} |",
    "|---|" + "---:|" * 4,
  ]
  for package in sorted(counts, key=(*PACKAGES, "all").index):
    found = counts[package]
    cells = (package, found.total(), *(found[result] for result in results))
    lines.append(f"| {' | '.join(map(str, cells))} |")
  caught, escaped = counts["all"]["caught"], counts["all"]["escaped"]
  if number := caught + escaped:
    low, high = interval(caught, number)
    lines.append(f"\n{caught} of {number}: {low:.1%} to {high:.1%}")
  return "\n".join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, required=True, help="rows")
  parser.add_argument("--number", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--seconds", type=float, default=60, help="of CPU time")
  parser.add_argument("--only", default="", help="indices of rows to run again")
  options = parser.parse_args()
  out = options.out.resolve()
  with tempfile.TemporaryDirectory(prefix="loopjax-mutants-") as name:
    tree = pathlib.Path(name).resolve()
    command = ["git", "archive", "HEAD"]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
      archive.extractall(tree, filter="data")
    if not out.exists():
      write(out, draw(tree, options.number, options.seed))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    only = [int(index) for index in options.only.split(",") if index]
    only = only or [row["index"] for row in rows if not row["result"]]
    for row in rows:
      if (tree / row["file"]).read_text() != row["before"]:
        parser.error(f"{row['file']} is not what {out} is about")
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:0] = [str(tree), str(tree / "tests")]
    import conftest  # noqa: F401, I001  # It sets what JAX reads.
    import flax.nnx, grain, optax, orbax.checkpoint  # noqa: E401, F401

    del sys.modules["conftest"]
    imports = Imports(tree)
    for index in only:
      row = rows[index]
      tests = imports.closest(row["file"], row["line"])
      row.update(attempt(row, tests, options.seconds))
      write(out, rows)
      print(index, *(row[key] for key in _SHOWN), flush=True)
  print(report(rows))


def write(out: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
  main()
