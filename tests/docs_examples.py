"""The documentation's pages, links, commands and code spans."""

import itertools
import re
import shlex
from typing import NamedTuple

from tests_support import ROOT

from loopjax import __main__ as console

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))
# Pages about the current code; results and changes are history.
PAGES = [
  ROOT / "README.md",
  ROOT / "CONTRIBUTING.md",
  ROOT / "benchmarks/README.md",
  ROOT / "benchmarks/device/PLAN.md",
  ROOT / "notebooks/README.md",
  *sorted((ROOT / "docs").rglob("*.md")),
]
# Settings of a model that `hub retrofit` made, which one sweep imports.
RETROFITTED = {
  "model.name": "recurrent", "model.update": "gate", "model.depth": "fixed",
}  # fmt: skip
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]


class Command(NamedTuple):
  """A line of code with one of our programs or flags.

  Attributes:
    words: as a shell splits them.
    module: of `python -m`, or of the word after `loopjax`; "" if there is none.
    arguments: the words after it, up to the next command of the line.
    config: the value of --config=, and the argument after its colon.
  """

  words: list[str]
  module: str
  arguments: list[str]
  config: tuple[str, str] | None

  def values(self, flag: str) -> list[str]:
    """The values of a flag."""
    start = f"--{flag}="
    return [w.removeprefix(start) for w in self.words if w.startswith(start)]


def prose_of(text: str) -> str:
  """A page without fenced and indented code."""
  text = re.sub(r"(?ms)^(```+).*?^\1", "", text)
  return re.sub(r"(?m)^ {4}.*$", "", text)


def spans_of(text: str) -> list[str]:
  """The code within sentences, each on one line."""
  spans = re.findall(r"(?s)`([^`]+)`", prose_of(text))
  return [" ".join(span.split()) for span in spans]


def links_of(text: str) -> list[str]:
  """The targets of all links and pictures."""
  text = re.sub(r"`[^`]*`", "", prose_of(text))
  return re.findall(r"\]\(([^()\s]+)\)", text)


def anchors_of(text: str) -> set[str]:
  """The anchors of a page's headings, as on GitHub."""
  heads = re.findall(r"(?m)^#+ (.*)$", prose_of(text))
  kept = [re.sub(r"[^\w\- ]", "", head.lower()) for head in heads]
  return {head.replace(" ", "-") for head in kept}


def commands_of(text: str) -> list[Command]:
  """The commands in code blocks and in sentences."""
  fenced = re.findall(r"(?ms)^```(?:bash|sh|console)?\n(.*?)^```", text)
  indented = re.findall(r"(?m)^ {4}(.*)$", text)
  blocks = "\n".join([*fenced, *indented]).replace("\\\n", " ")
  lines = [*blocks.splitlines(), *spans_of(text)]
  return [found for line in lines if (found := _command(line))]


def _command(line: str) -> Command | None:
  ours = r"--\w|python -m loopjax|(benchmarks|launch)/|^(\S*/)?loopjax \w"
  if not re.search(ours, line):
    return None
  try:
    words = shlex.split(line.removeprefix("$ "), comments=True)
  except ValueError:  # An apostrophe in a sentence.
    return None
  module, arguments = _program(words)
  configs = [w.partition("=")[2] for w in words if w.startswith("--config=")]
  named = [config.partition(":") for config in configs if "$" not in config]
  config = (named[0][0], named[0][2]) if named else None
  return Command(words, module, arguments, config)


def _program(words: list[str]) -> tuple[str, list[str]]:
  """The module that a command runs, and its arguments."""
  for place, (word, following) in enumerate(itertools.pairwise(words)):
    rest = itertools.takewhile(lambda x: x != "&&", words[place + 2 :])
    if word == "-m" and following.startswith("loopjax"):
      return following, list(rest)
    if word.rpartition("/")[2] == "loopjax" and following in console._WORDS:
      module, *implied = console._WORDS[following]
      return module.removesuffix(".__main__"), [*implied, *rest]
  return "", []
