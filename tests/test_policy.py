"""Rules of the code base that a machine can check."""

import ast
import configparser
import re
import sys
from importlib import metadata

import pytest
from tests_support import ROOT

FILES = sorted((ROOT / "loopjax").rglob("*.py"))
ALLOWED_NNX = {
  "Module", "Param", "Rngs", "List", "data", "split", "merge", "state",
  "to_pure_dict", "eval_shape", "GraphDef", "Linear", "Embed", "RMSNorm",
  "LayerNorm", "initializers",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nnx_stays_in_its_subset(path):
  used = set(re.findall(r"\bnnx\.([A-Za-z_]+)", path.read_text()))
  assert used <= ALLOWED_NNX


def test_what_is_imported_is_what_an_installation_asks_for():
  setup = configparser.ConfigParser()
  setup.read(ROOT / "setup.cfg")
  lines = setup["options"]["install_requires"].split("\n")
  asked = {re.split(r"[^\w.-]", line)[0].lower() for line in lines}
  names = {
    name.partition(".")[0]
    for path in FILES
    for node in ast.parse(path.read_text()).body  # Not what is optional.
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


def test_one_place_calls_the_optimizer():
  calls = [
    str(path.relative_to(ROOT))
    for path in FILES
    for _ in re.finditer(r"\btx\.update\(", path.read_text())
  ]
  assert calls == ["loopjax/step.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
  text = path.read_text()
  limit = 450 if "kernels" in path.parts else 400
  assert text.count("\n") <= limit
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef):
      assert node.end_lineno - node.lineno < 90, node.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_public_things_say_what_they_are(path):
  tree = ast.parse(path.read_text())
  assert ast.get_docstring(tree), "module"
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      private = node.name.startswith("_")
      assert private or ast.get_docstring(node), node.name
