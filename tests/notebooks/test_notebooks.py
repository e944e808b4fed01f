"""Notebooks: equal to their text versions, small, and executable."""

import ast
import os
import re
import runpy
import shutil

import pytest
from tests_support import ROOT

jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 300 * 1024
every_notebook = pytest.mark.parametrize(
  "path", PATHS, ids=[path.stem for path in PATHS]
)


def cells(notebook, kind):
  return [cell for cell in notebook.cells if cell.cell_type == kind]


def committed(path):
  return nbformat.read(path, as_version=4)


def test_every_text_is_a_notebook():
  names = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.py")}
  assert names == {path.stem for path in PATHS}
  readme = (ROOT / "notebooks" / "README.md").read_text()
  assert all(f"({name}.ipynb)" in readme for name in names)


@every_notebook
def test_the_notebook_says_what_its_text_says(path):
  text = jupytext.read(path.with_suffix(".py"))
  both = [
    [(cell.cell_type, cell.source) for cell in notebook.cells]
    for notebook in (text, committed(path))
  ]
  assert both[0] == both[1]


@every_notebook
def test_a_cell_is_read_at_a_glance(path):
  """20 lines, or one function of slightly more."""
  for cell in cells(committed(path), "code"):
    num = len(cell.source.splitlines())
    whole = num > 20 and len(ast.parse(cell.source).body) == 1
    assert num <= (28 if whole else 20), cell.source


@every_notebook
def test_all_start_alike(path):
  notebook, first = committed(path), committed(PATHS[0])
  starts = [cells(one, "code")[0].source for one in (notebook, first)]
  assert starts[0] == starts[1]
  assert cells(notebook, "markdown")[0].source.startswith("# ")


def test_the_address_has_one_place(tmp_path):
  notebooks = tmp_path / "notebooks"
  shutil.copytree(ROOT / "notebooks", notebooks, ignore=lambda *_: ["runs"])
  citation = (ROOT / "CITATION.cff").read_text()
  files = sorted(notebooks.glob("[0-9]*"))
  main = runpy.run_path(str(ROOT / "notebooks" / "address.py"))["main"]
  before = [path.read_text() for path in files]
  given = re.search("github.com/(.*)/loopjax", citation)[1]
  for owner in (given, "someone"):
    changed = citation.replace(f"/{given}/", f"/{owner}/")
    (tmp_path / "CITATION.cff").write_text(changed)
    main(notebooks)
    texts = [path.read_text() for path in files]
    old, new = f"/{given}/loopjax", f"/{owner}/loopjax"
    assert texts == [text.replace(old, new) for text in before]
  assert all(text.count("/someone/loopjax") == 1 for text in texts)
  (tmp_path / "CITATION.cff").write_text("title: x")
  with pytest.raises(SystemExit, match="no repository-code"):
    main(notebooks)


@every_notebook
def test_outputs_are_of_one_clean_run_and_small(path):
  assert path.stat().st_size <= MAX_BYTES
  code = cells(committed(path), "code")
  count = list(range(1, len(code) + 1))
  assert [cell.execution_count for cell in code] == count
  outputs = [output for cell in code for output in cell.outputs]
  kinds = {output.output_type for output in outputs}
  assert kinds <= {"stream", "display_data", "execute_result"}
  assert any("image/png" in output.get("data", {}) for output in outputs)
  printed = [output for output in outputs if output.output_type == "stream"]
  assert {output.name for output in printed} == {"stdout"}
  text = "".join(output.text for output in printed)
  assert not re.search(r"(?<!\w)/(home|root|tmp|work|Users|content)/", text)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
  """One for all notebooks: importing JAX takes longer than most notebooks."""
  nbclient = pytest.importorskip("nbclient")
  pytest.importorskip("ipykernel")
  client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=250)
  environment = {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "1",
    "LOOPJAX_SMOKE": str(tmp_path_factory.mktemp("runs")),
    "PYTHONPATH": str(ROOT),
    "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
  }
  with client.setup_kernel(env=environment, cwd=str(ROOT / "notebooks")):
    yield client


@pytest.mark.parametrize(
  "path",
  [
    # The others take up to a minute each, most of it compiling.
    pytest.param(path, id=path.stem, marks=() if quick else pytest.mark.manual)
    for path in PATHS
    for quick in [path.stem in ("6_ouro", "7_your_own")]
  ],
)
@pytest.mark.long
def test_it_runs_at_smoke_size(path, kernel):
  kernel.nb = jupytext.read(path.with_suffix(".py"))
  kernel.nb.cells.append(nbformat.v4.new_code_cell("%reset -f"))
  for index, cell in enumerate(kernel.nb.cells):
    kernel.execute_cell(cell, index)  # Raises the cell's errors.
  outputs = [out for cell in cells(kernel.nb, "code") for out in cell.outputs]
  assert any("image/png" in output.get("data", {}) for output in outputs)
