"""The documentation: its names exist, and its claims were run."""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest
from docs_examples import (
  NAMES,
  PAGES,
  RESULTS,
  RETROFITTED,
  anchors_of,
  commands_of,
  links_of,
  prose_of,
  spans_of,
)
from tests_support import CONFIGS, ROOT, load_config, namespace

from loopjax import config as config_lib
from loopjax import sections, sharding
from loopjax.config import settings as settings_lib
from loopjax.data import TASKS
from loopjax.models import MODELS
from loopjax.optim import chain
from loopjax.report.runs import VERDICTS
from loopjax.types import LoopOptions

HOSTS = {"arxiv.org", "github.com", "ui.perfetto.dev"}
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs/index.md").read_text()
every_page = pytest.mark.parametrize("path", PAGES, ids=NAMES)


@pytest.mark.parametrize(
  "path", [*PAGES, ROOT / "CHANGELOG.md", *RESULTS], ids=lambda p: p.stem
)
def test_links_lead_somewhere(path):
  for link in links_of(path.read_text()):
    if link.startswith("http"):
      assert urllib.parse.urlparse(link).hostname in HOSTS, link
      continue
    place, _, anchor = link.partition("#")
    target = path.parent / place if place else path
    assert target.exists(), link
    if anchor:
      assert anchor in anchors_of(target.read_text()), link


@every_page
def test_commands_are_understood(path):
  """Modules, scripts, configs with presets, sweeps, settings and flags."""
  for command in commands_of(path.read_text()):
    if command.module:
      assert _is_a_program(command.module), command.words
    for word in command.words:
      if re.fullmatch(r"(benchmarks|launch|tests|docs)/[\w./]+", word):
        assert (ROOT / word).exists(), word
    if command.config:
      _check_config(command)
    for flag in _flags(command):
      assert _knows(command.module, flag), (flag, command.words)


def _is_a_program(module: str) -> bool:
  found = importlib.util.find_spec(module)
  if found and found.submodule_search_locations:
    found = importlib.util.find_spec(f"{module}.__main__")
  return found is not None and "__main__" in pathlib.Path(
    found.origin
  ).read_text(encoding="utf-8")


def _check_config(command) -> None:
  file, argument = command.config
  if file in ("FILE", "..."):
    return
  path = pathlib.Path(file)
  if (ROOT / "docs" / "howto" / path.name).exists():
    return  # A task outside loopjax, with its own test.
  assert (ROOT / path).exists(), file
  argument = re.sub("import=[^,]+", "import=zoo:novels", argument)
  config = load_config(path.stem, argument)
  if "--sweep=retrofit" in command.words:
    config_lib.override(config, RETROFITTED)
  for word in command.words:
    if found := re.match(r"--config\.([\w.]+)=(.*)", word):
      key, text = found.groups()
      old = sections.flatten(config).get(key)
      value = text if isinstance(old, str) else ast.literal_eval(text)
      config_lib.override(config, {key: value})
  for sweep in command.values("sweep"):
    assert sweep in namespace(path.stem)["sweeps"](config), sweep


def _flags(command) -> list[str]:
  words = [word.partition("=")[0] for word in command.words]
  flags = [word.removeprefix("--") for word in words if word.startswith("--")]
  own = bool(command.module) and command.module != "loopjax.eval.harness"
  return [flag for flag in flags if own and not flag.startswith("config")]


def _knows(module: str, flag: str) -> bool:
  """Whether a module or the shared command code defines a flag."""
  path = ROOT / module.replace(".", "/")
  own = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
  shared = ["loopjax/commands/command_line.py", "loopjax/run/processes.py"]
  if module in ("loopjax.generate", "loopjax.serve"):
    shared.append("loopjax/generate/source.py")
  files = [*own, *(ROOT / file for file in shared)]
  # Some flags are the fields of a record.
  pattern = rf'"--{flag}"|\n  {flag}: \w+ = '
  return any(re.search(pattern, file.read_text()) for file in files)


RECORDS = {
  "model": [family.Config for family in MODELS.values()],
  "task": [task.Config for task in TASKS.values()],
  "optim": [chain.Config],
  "loop": [LoopOptions],
  "mesh": [sharding.Config],
  "run": [settings_lib.Run],
  "eval": [settings_lib.Eval],
}


@every_page
def test_settings_are_settings(path):
  """`model.num_loops`, and without a config --config.model.num_loops=3."""
  for span in spans_of(path.read_text()):
    found = re.match(r"(?:--config\.)?(\w+)\.(\w+)(?:=|$)", span)
    section, key = found.groups() if found else ("", "")
    if section in RECORDS and key not in ("name", "safetensors"):
      records = [make() for make in RECORDS[section]]
      assert any(hasattr(record, key) for record in records), span


@every_page
def test_files_are_there(path):
  starts = ("loopjax", "configs", "docs", "tests", "benchmarks", "launch")
  for span in spans_of(path.read_text()):
    if not re.fullmatch(r"[\w./-]+", span) or re.search("[A-Z]{3}", span):
      continue
    if span.split("/")[0] in starts and "/" in span:
      assert (ROOT / span).exists(), span


@pytest.mark.parametrize("name", CONFIGS)
def test_every_sweep_is_on_the_page_of_its_family(name):
  config = load_config(name, "tiny")
  config.run.init_from = "runs/vanilla"  # Some start from a trained run.
  family = config.model.name
  page = "peers" if family in ("hrm", "trm", "urm") else family
  page = (ROOT / f"docs/families/{page}.md").read_text()
  assert f"configs/{name}.py" in page
  for sweep in namespace(name).get("sweeps", lambda config: {})(config):
    assert f"`{sweep}`" in page, sweep


def _defined(path: pathlib.Path) -> set[str]:
  """Names of a file: functions, classes, their members, assignments."""
  names = set()
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    inner = getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []
    for item in (node, *inner):
      before = f"{node.name}." if item is not node else ""
      targets = getattr(item, "targets", None) or [
        getattr(item, "target", None)
      ]
      own = [getattr(item, "name", None)]
      own += [getattr(target, "id", None) for target in targets]
      names |= {f"{before}{name}" for name in own if name}
  return names


def test_equations_have_their_functions_and_tests():
  """docs/papers.md: `FILE: NAME` and `test_NAME`."""
  tests = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in _defined(file)
  }
  file, checked = None, 0
  for span in spans_of((ROOT / "docs/papers.md").read_text()):
    path, _, name = span.partition(": ")
    if re.fullmatch(r"[\w/]+\.py", path):
      places = [ROOT / part / path for part in ("loopjax", "tests", ".")]
      # A file beside the one before, such as `chains.py` after `graph.py`.
      places += [file.parent / path] if file else []
      places += list((ROOT / "tests").rglob(path))
      found = [place for place in places if place.exists()]
      assert found, span
      file = found[0]
      if name:
        assert name in _defined(file), span
        checked += 1
    elif span.startswith("test_"):
      assert span in tests, span
      checked += 1
  assert checked > 100


def test_every_paper_is_on_one_page():
  """Pages of families link to the sections of docs/papers.md."""
  papers = (ROOT / "docs/papers.md").read_text()
  sections = re.findall(r"(?m)^## .*$", papers)
  linked = []
  for path in (ROOT / "docs/families").glob("*.md"):
    text = path.read_text()
    assert "```{" not in text, path  # GitHub shows a directive as it is.
    linked += re.findall(r"\]\(\.\./papers\.md#([^)]*)\)", text)
  assert sorted(linked) == sorted(anchors_of("\n".join(sections)))


@pytest.mark.parametrize(
  ("family", "tables", "figures"),
  [  # Without pictures of a design, and MELT's lists of data and licences.
    ("utm", range(1, 10), range(2, 10)),
    ("adaptive", range(1, 6), range(2, 5)),
    ("disco", range(1, 3), range(2, 8)),
    ("sleep", (), range(2, 7)),
    ("melt", range(1, 8), (1,)),
  ],
)
def test_every_table_and_figure_is_named_or_said_to_be_missing(
  family, tables, figures
):
  page = (ROOT / f"docs/families/{family}.md").read_text()
  [anchor] = re.findall(r"papers\.md#([^)]*)\)", page)
  _, *sections = (ROOT / "docs/papers.md").read_text().split("\n## ")
  [section] = [x for x in sections if anchor in anchors_of(f"## {x}")]
  text = page + section
  for kind, numbers in (("Table", tables), ("Figure", figures)):
    named = set()
    for listed in re.findall(rf"{kind}s? ((?:\d+(?:, | and | to )?)+)", text):
      ends = [int(x) for x in re.findall(r"\d+", listed)]
      named |= set(range(*ends[-2:])) if " to " in listed else set()
      named |= set(ends)
    assert set(numbers) <= named, kind


def test_the_page_says_how_small_adaptive_models_differ_from_the_paper():
  page = (ROOT / "docs/families/adaptive.md").read_text()
  paper = load_config("lm_adaptive", "paper").model
  for preset in ("tiny", "gpu"):
    model = load_config("lm_adaptive", preset).model
    for name in ("loop_update", "scale_from_step", "loop_scale"):
      value = model[name]
      value = value if isinstance(value, str) else int(value)
      assert model[name] != paper[name]
      assert f"`model.{name}={value}`" in page, (preset, name)


def test_modules_of_the_reference_exist():
  pages = (ROOT / "docs/api").glob("*.md")
  named = [
    module
    for page in pages
    for module in re.findall(r"automodule:: ([\w.]+)", page.read_text())
  ]
  assert len(named) > 50
  assert len(set(named)) == len(named)
  for module in named:
    assert importlib.util.find_spec(module), module


def test_the_readme_is_short_and_has_its_commands():
  read = re.sub(r"<[^>]*>|\]\([^)]*\)|[|#*-]", " ", README)
  assert len(read.split()) <= 700
  assert len(re.findall(r"\d+(?:[.,]\d+)*", prose_of(read))) <= 60
  start = re.findall(r"(?m)^    (.*)$", README)
  assert start[:4] == [
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    "pip install -e '.[serve]'",
    "loopjax play zoo:sudoku_nine",
  ]
  assert "loopjax train --config=configs/sudoku_utm.py" in start
  assert "pip install -e '.[test]' && pytest" in start
  assert f"\n    {start[0]}\n    {start[1]}\n" in INDEX
  library = (ROOT / "docs/library.md").read_text()
  python = README.partition("## [In Python]")[2].partition("\n## ")[0]
  for line in python.split("\n    ")[1:]:  # Another test runs that page.
    assert line.strip().rstrip(")") in library, line
  results = README.partition("## Results")[2].partition("\n## ")[0]
  _, *verdicts = re.findall(r"(?m)^\| .* \| ([a-z ]+) \|$", results)
  assert verdicts == sorted(verdicts, key=VERDICTS.index)  # Findings first.
  assert len(verdicts) == 8
  assert all(f"*{word.capitalize()}*:" in results for word in verdicts)


@pytest.mark.parametrize("page", NAMES)
def test_results_are_those_of_their_pages(page):
  """The decimals of a result's row are on a page linked in the row."""
  checked = 0
  path = ROOT / page
  for row in re.findall(r"(?m)^\|.*\|$", prose_of(path.read_text())):
    linked = [link for link in links_of(row) if "benchmarks/results" in link]
    for number in re.findall(r"\b\d+\.\d{3,}\b", row) if linked else []:
      files = [path.parent / link.partition("#")[0] for link in linked]
      texts = [file.read_text() for file in files]
      assert any(number in text for text in texts), (number, linked)
      checked += 1
  assert checked > 5 or page != "README.md"


def test_every_verdict_has_a_page_with_its_evidence():
  """Numbers rest on stored runs, which a table at the page's end names."""
  results = ROOT / "docs/results.md"
  verdicts = prose_of(results.read_text()).partition("## Verdicts")[2]
  words: dict[str, set[str]] = {}
  for row in re.findall(r"(?m)^\|.*\|$", verdicts.partition("\n## ")[0]):
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    _, here, _, _, _, verdict, named = cells
    if re.search(r"\d\.\d", here):  # A number rests on stored runs.
      assert spans_of(named), row
    for cell in cells:
      read = re.sub(r"`[^`]*`|\]\([^)]*\)", "", cell)
      assert len(re.findall(r"\b\d[\d.,]*\b", read)) <= 3, cell
      assert len(read) <= 75, cell
    claims = ""
    for link in links_of(named):
      page = (results.parent / link.partition("#")[0]).read_text()
      *_, evidence = page.partition("\n## Evidence\n")
      head, _, *rows = evidence.strip().splitlines()
      assert head.startswith("| claim | refuted by | settings and seeds |")
      assert all(line.count(" | ") == 4 for line in rows), link
      claims += evidence
    for name in spans_of(named):
      assert f"`{name}`" in claims, name
      words.setdefault(name, set()).add(verdict)
  assert len(words) > 20
  for path in (ROOT / "benchmarks/runs").glob("*.runs.json"):
    kept = re.search(r'^ "verdict": "(.*)",$', path.read_text(), re.MULTILINE)
    said = words.get(path.name.removesuffix(".runs.json"), {"–"})
    # A file may answer several questions.
    assert (kept[1] if kept else "–") in said, path.name


# Idioms that cost a second reading: "is no run", "goes on", "bits a byte".
DIALECT = re.compile(
  r"\b(at hand|likewise|namely|one's own|of yours|(goes|go|went) on)\b"
  r"|\b(first of all|as if not|is one of none|(is|are) none of|can be \w+ so)\b"
  r"|(?<![Tt]here )\b(is|are) no (?!longer|better|worse|faster)\w"
  r"|\b(is|are) (that|those) of\b"
  r"|\b(bits|nats|bytes|loops|tokens|steps) a (byte|token|second|step|row)\b"
)


def _words(path: pathlib.Path) -> str:
  """The strings, docstrings and comments of a module, or a page's text."""
  text = path.read_text(encoding="utf-8")
  if path.suffix != ".py":
    return text
  nodes = ast.walk(ast.parse(text))
  strings = [str(x.value) for x in nodes if isinstance(x, ast.Constant)]
  comments = re.findall(r"(?m)(?:^ *|  )# (.*)$", text)
  return "\n".join([*strings, *comments])


def test_sources_and_pages_are_in_plain_english():
  for path in [*PAGES, *(ROOT / "loopjax").rglob("*.py")]:
    found = DIALECT.search(" ".join(_words(path).split()))
    assert not found, (path, found[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_a_section_with_its_sweeps(name):
  page = (ROOT / "docs/configs.md").read_text()
  found = re.search(rf"(?ms)^## {name}$(.*?)(?=^## |\Z)", page)
  assert found, f"docs/configs.md has no section {name}"
  section = found[1]
  config = load_config(name, "tiny")
  assert f"task: `{config.task.name}`" in section
  assert f"{{literalinclude}} ../configs/{name}.py" in section
  sweeps = namespace(name).get("sweeps", lambda config: {})(config)
  listed = section.partition("Sweeps:")[2].partition("```")[0]
  assert re.findall(r"`(\w+)`", listed) == sorted(sweeps)


def test_every_page_of_the_site_is_in_its_contents():
  """Sphinx reports this too, but its test is slow."""
  pages = {path for path in PAGES if path.is_relative_to(ROOT / "docs")}
  listed = {ROOT / "docs/index.md"}
  for path in pages:
    trees = re.findall(r"(?ms)^```\{toctree\}\n(.*?)^```", path.read_text())
    for entry in re.findall(r"(?m)^[\w./*-]+$", "\n".join(trees)):
      found = path.parent.glob(f"{entry}.md")
      listed |= {place.resolve() for place in found}
  assert pages <= listed


@pytest.mark.long
@pytest.mark.parametrize(
  "builder", ["dummy", pytest.param("html", marks=pytest.mark.manual)]
)
def test_the_site_builds_without_a_warning(builder, tmp_path):
  """ "dummy" reads and resolves all pages, and writes none."""
  for package in (
    "sphinx",
    "myst_nb",
    "furo",
    "sphinx_copybutton",
    "latex2mathml",
  ):
    pytest.importorskip(package)
  build = ["-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
  done = subprocess.run(
    [sys.executable, *build, "-b", builder, ".", str(tmp_path)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  written = (tmp_path / "docs/families/utm.html").exists()
  assert written == (builder == "html")
