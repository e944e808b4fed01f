"""Rules of the code base that a machine can check."""

import ast
import configparser
import functools
import graphlib
import pathlib
import re
import subprocess
import sys
from importlib import metadata

import pytest
from tests_support import ROOT

import loopjax
from loopjax.data import TASKS

FILES = sorted((ROOT / "loopjax").rglob("*.py"))
ALLOWED_NNX = {
  "Module", "Param", "Rngs", "List", "data", "split", "merge", "state",
  "to_pure_dict", "eval_shape", "GraphDef", "Linear", "Embed", "RMSNorm",
  "LayerNorm", "initializers",
}  # fmt: skip
# Files and folders of loopjax/, lowest first: each imports only from earlier
# rows, and folders from themselves.
LAYERS = (
  ("__init__", "errors"), ("sections",), ("types",), ("checks",), ("sharding",),
  ("kernels",), ("losses",), ("nn",), ("loop",), ("protocols", "optim", "run"),
  ("models", "data"), ("config",), ("program",), ("train",), ("commands",),
  ("hub",), ("saved",), ("generate",), ("analysis",),
  ("report", "sweep"),
  ("main", "eval", "fit", "library", "play", "zoo"),
  ("describe", "score", "serve"), ("__main__",),
)  # fmt: skip


def name_of(path):
  """("loopjax", "run", "workdir") of a file; of a package its own name."""
  parts = path.relative_to(ROOT).with_suffix("").parts
  return parts[:-1] if parts[-1] == "__init__" else parts


@functools.cache
def imports():
  """{module: modules of loopjax that it imports, in functions as well}."""
  modules = {name_of(path): path for path in FILES}
  graph = {}
  for module, path in modules.items():
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}: relative import"
        base = tuple((node.module or "").split("."))
        for alias in node.names:
          inner = (*base, alias.name)
          found.add(inner if inner in modules else base)
      elif isinstance(node, ast.Import):
        found.update(tuple(alias.name.split(".")) for alias in node.names)
    graph[module] = (found & modules.keys()) - {module}
  return graph


def test_no_file_imports_itself_through_others():
  graph = imports()
  assert len(graph) == len(FILES)
  assert ("loopjax", "train") in graph["loopjax", "main"]
  graphlib.TopologicalSorter(graph).prepare()  # Raises CycleError.


def test_no_layer_imports_a_higher_one():
  layers = {name: at for at, row in enumerate(LAYERS) for name in row}
  wrong = []
  for module, found in imports().items():
    here = (*module, "__init__")[1]
    for other in found:
      there = (*other, "__init__")[1]
      if here != there and layers[there] >= layers[here]:
        wrong.append(f"{'.'.join(module)} -> {'.'.join(other)}")
  assert not wrong


def without_encoding(node):
  """Whether a call reads or writes text in the encoding of the machine."""
  if {"encoding", None} & {keyword.arg for keyword in node.keywords}:
    return False
  name = getattr(node.func, "attr", getattr(node.func, "id", ""))
  if name == "open":  # Of a path, too; others open no text.
    where = getattr(node.func, "value", None)
    values = (*node.args, *(keyword.value for keyword in node.keywords))
    modes = {getattr(x, "value", "") for x in values}
    is_other = getattr(where, "id", "") in ("Image", "os", "tarfile")
    return not is_other and not {"rb", "wb", "ab", "xb", "r+b"} & modes
  number = {"read_text": 0, "write_text": 1}.get(name)
  return len(node.args) == number


def test_text_has_one_encoding_on_every_machine():
  """Paths included whose type the linter does not know."""
  found = []
  for folder in ("loopjax", "benchmarks", "launch", "notebooks", "docs"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      tree = ast.parse(path.read_text(encoding="utf-8"))
      calls = (x for x in ast.walk(tree) if isinstance(x, ast.Call))
      found += [f"{path}:{x.lineno}" for x in calls if without_encoding(x)]
  assert not found


def test_nnx_stays_in_its_subset():
  used = {
    name
    for path in FILES
    for name in re.findall(r"\bnnx\.([A-Za-z_]+)", path.read_text())
  }
  assert used <= ALLOWED_NNX


def test_libraries_are_used_through_public_modules():
  found = set()
  for path in FILES:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
      names = []
      if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
      elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      place = str(path.relative_to(ROOT / "loopjax"))
      for name in names:
        private = any(
          part.startswith("_") and not part.startswith("__")
          for part in name.split(".")[1:]
        )
        if private and not name.startswith("loopjax"):
          found.add((place, name))
        if name.startswith(("jax.extend", "jax.interpreters")):
          found.add((place, name))
    # Attributes of a library's module, such as splash._splash_attention_bwd.
    aliases = {
      alias.asname or alias.name.split(".")[0]
      for node in ast.walk(tree)
      if isinstance(node, ast.Import | ast.ImportFrom)
      and not (getattr(node, "module", "") or "").startswith("loopjax")
      for alias in node.names
      if not alias.name.startswith("loopjax")
    }
    for node in ast.walk(tree):
      if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in aliases
        and re.match("_[a-z]", node.attr)
        and (node.value.id, node.attr) != ("os", "_exit")  # Documented.
      ):
        found.add((str(path.relative_to(ROOT)), node.attr))
  assert not found


def test_versions_that_are_tested_are_those_that_are_asked_for():
  """The range in the import warning equals setup.cfg's over all Pythons."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  for name, (first, end) in loopjax._TESTED.items():
    rows = re.findall(
      rf"^{name}>=([\d.]+),<([\d.]+);",
      setup["options"]["install_requires"],
      re.M,
    )
    numbers = [tuple(map(loopjax._numbers, row)) for row in rows]
    assert len(rows) == 2
    assert min(numbers)[0] == loopjax._numbers(first)
    assert max(numbers)[1] == loopjax._numbers(end)


def test_an_untested_version_is_named(monkeypatch):
  versions = {"jax": "0.13.1.dev2", "flax": "0.12.8"}
  monkeypatch.setattr(loopjax.metadata, "version", versions.__getitem__)
  with pytest.warns(UserWarning, match="jax >=0.10.2,<0.13; 0.13.1.dev2 is"):
    loopjax._warn_if_untested()


def test_windows_is_refused():
  with pytest.raises(ImportError, match="WSL"):
    loopjax._check_platform("nt")


# Modules that need an extra, including modules that import them at the top.
OPTIONAL = {
  ROOT / "loopjax" / name
  for name in (
    "eval/harness.py",
    "play/server.py",
    "serve/app.py",
    "serve/command.py",
    "serve/protocol.py",
    "serve/metrics.py",
    "serve/streams.py",
  )
}


def test_what_is_imported_is_what_an_installation_asks_for():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  lines = setup["options"]["install_requires"].split("\n")
  asked = {re.split(r"[^\w.-]", line)[0].lower() for line in lines}
  names = {
    name.partition(".")[0]
    for path in set(FILES) - OPTIONAL
    for node in ast.parse(path.read_text()).body  # Excludes optional imports.
    if isinstance(node, ast.Import | ast.ImportFrom)
    for name in (
      [node.module]
      if isinstance(node, ast.ImportFrom)
      else [alias.name for alias in node.names]
    )
  }
  foreign = names - set(sys.stdlib_module_names) - {"loopjax"}
  packages = metadata.packages_distributions()
  for name in foreign:
    assert asked & {package.lower() for package in packages[name]}, name


def test_an_editable_installation_is_a_folder_in_the_path():
  """Otherwise `import loopjax` beside a clone is the clone's empty folder.

  `package_dir` decides: setuptools writes a finder without it.
  """
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  assert setup["options"]["package_dir"].split() == ["=", "."]


def test_a_wheel_has_every_file():
  """Files other than modules are packaged only if setup.cfg names them."""
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  known = {
    path
    for package, patterns in setup["options.package_data"].items()
    for pattern in patterns.split(", ")
    for path in ROOT.joinpath(*package.split(".")).glob(pattern)
  }
  there = {
    path
    for path in (ROOT / "loopjax").rglob("*")
    if path.is_file() and path.suffix not in (".py", ".pyc")
  }
  assert known == there
  assert setup["options.data_files"]["share/loopjax/configs"] == "configs/*.py"


def test_one_place_calls_the_optimizer():
  calls = [
    str(path.relative_to(ROOT))
    for path in FILES
    for _ in re.finditer(r"\btx\.update\(", path.read_text())
  ]
  assert calls == ["loopjax/program/step.py"]


def test_files_and_functions_stay_short():
  long = []
  for path in FILES:
    text = path.read_text()
    of_function = 100 if "kernels" in path.parts else 90
    if text.count("\n") > 600:
      long.append(str(path))
    long += [
      f"{path}: {node.name}"
      for node in ast.walk(ast.parse(text))
      if isinstance(node, ast.FunctionDef)
      and node.end_lineno - node.lineno >= of_function
    ]
  assert not long


def test_comparisons_of_tests_have_a_margin():
  """`pytest --margin` sees those of `np.testing.assert_allclose`."""
  unseen = re.compile(r"assert \w+\.(allclose|isclose)\(")
  files = (ROOT / "tests").rglob("*.py")
  assert not [str(path) for path in files if unseen.search(path.read_text())]


def test_public_things_say_what_they_are():
  silent = []
  for path in FILES:
    tree = ast.parse(path.read_text())
    things = [tree] + [
      node
      for node in tree.body
      if isinstance(node, ast.FunctionDef | ast.ClassDef)
      and not node.name.startswith("_")
    ]
    silent += [
      f"{path}: {getattr(node, 'name', 'module')}"
      for node in things
      if not ast.get_docstring(node)
    ]
  assert not silent


def test_models_and_programs_need_no_reader_of_data_and_no_kernel():
  """Grain imports Orbax; either takes half as long to import as JAX."""
  says = """
import sys
sys.modules["grain"] = None
import loopjax.config, loopjax.fit.measure, loopjax.program
from loopjax.data import TASKS
from loopjax.models import MODELS
assert all(map(MODELS.get, MODELS)) and all(map(TASKS.get, TASKS))
assert "jax.experimental.pallas" not in sys.modules
"""
  subprocess.run([sys.executable, "-c", says], check=True)


def test_the_type_checker_compares_every_task():
  there = {TASKS[name].__name__ for name in TASKS}
  compared = imports()["loopjax", "data"]
  assert there <= {".".join(module) for module in compared}


# Tools around training. `analysis` and `generate` are used after it.
TOOLS = {
  "analysis", "eval", "fit", "generate", "hub", "library", "play", "report",
  "saved", "serve", "sweep", "zoo",
}  # fmt: skip
# Modules that `main` loads for a config, including tools for the end of the
# run.
MAX_MODULES, MAX_LINES = 190, 27_000


def test_training_imports_no_tools_and_no_other_family():
  graph, found = imports(), set()
  new = {("loopjax", "train")}
  while new:
    found |= new
    new = set().union(*(graph[module] for module in new)) - found
  assert not {module[1] for module in found if len(module) > 1} & TOOLS


def test_main_loads_its_own_family_and_task_alone():
  says = """
import runpy, sys
sys.argv = ["describe", "--config=configs/sudoku_utm.py:smoke"]
try:
  runpy.run_module("loopjax.describe", run_name="__main__")
except SystemExit as end:
  assert not end.code
for name, module in sys.modules.items():
  if name.partition(".")[0] == "loopjax":
    print("loaded:", module.__file__)
"""
  done = subprocess.run(
    [sys.executable, "-c", says],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  names = re.findall("^loaded: (.*)$", done.stdout, re.M)
  paths = [pathlib.Path(name).relative_to(ROOT / "loopjax") for name in names]
  lines = sum(
    pathlib.Path(name).read_text(encoding="utf-8").count("\n") for name in names
  )
  assert len(names) <= MAX_MODULES and lines <= MAX_LINES
  families = {
    path.with_suffix("").parts[1] for path in paths if path.parts[0] == "models"
  }
  assert "utm" in families
  assert not {"adaptive", "disco", "hrm", "sleep", "trm", "urm"} & families
  assert pathlib.Path("data/sudoku/task.py") in paths
  assert pathlib.Path("data/maze/task.py") not in paths
