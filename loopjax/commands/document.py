"""Pieces of a Markdown text, a page of HTML of it, and columns of plain text.

Functions return Markdown. Cells and summaries of folds that they take are
Markdown as well: `plain` escapes text.
"""

import base64
import html
import itertools
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Sequence

import markdown_it
from markdown_it import token as token_lib

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1f23;
  --soft: #5c6570; --line: #d9dee4; --shade: #f5f7f9;
  --paper-shade: #fdf6e7; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c;
  --text: #e4e7ea; --soft: #9aa4af; --line: #343b43; --shade: #1e2329;
  --paper-shade: #2a2418; } }
body { margin: 0 auto; max-width: 80rem; padding: 2rem 1.25rem 5rem;
  background: var(--page); color: var(--text); line-height: 1.5;
  font-family: system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1.25rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .4rem; }
table { display: block; overflow-x: auto; margin: .75rem 0;
  border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { vertical-align: bottom; border-bottom-width: 2px; }
.paper { background: var(--paper-shade); }
small, em { color: var(--soft); font-weight: 400; font-style: normal; }
td small, th small { display: block; font-size: .76rem; }
ul { padding-left: 1.2rem; margin: .5rem 0; } li { color: var(--soft);
  font-size: .9rem; }
pre { background: var(--shade); border: 1px solid var(--line);
  border-radius: 6px; padding: .6rem .8rem; overflow-x: auto;
  font-size: .82rem; }
details { border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .9rem; margin: .75rem 0; }
summary { cursor: pointer; font-weight: 500; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
@media (max-width: 30rem) { body { padding: 1rem .75rem 3rem; }
  th, td { padding: .3rem .4rem; } p:has(> img) { overflow-x: auto; }
  img { max-width: none; width: max(100%, .6 * var(--drawn)); } }
@media print { body { max-width: none; padding: 0; font-size: 9pt; }
  h2 { break-after: avoid; } tr, img, pre { break-inside: avoid; }
  table { display: table; font-size: 7.5pt; } th, td { padding: .15rem .3rem; }
  pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; display: block; } }
"""


def plain(text: str) -> str:
  """Text escaped for Markdown and HTML, in one line."""
  text = html.escape(re.sub(r"[ \t\r\n]+", " ", text), quote=False)
  return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)


def cell(text: str, small: str = "") -> str:
  """A cell of escaped text, with small print below."""
  more = f" <small>{plain(small)}</small>" if small else ""
  return plain(text) + more


def heading(level: int, text: str) -> str:
  """A heading; level 1 is the title."""
  return f"{'#' * level} {plain(text)}"


def link(text: str) -> str:
  """A link to the heading of this text."""
  return f"[{plain(text)}](#{_anchor(text)})"


def bullets(items: Iterable[str]) -> str:
  """A list of escaped sentences; "" without any."""
  return "\n".join(f"- {plain(item)}" for item in items)


def code(text: str) -> str:
  """Preformatted text; its fence is longer than any backticks in it."""
  fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
  return f"{fence}\n{text}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table of cells; the first cell of a row names it."""
  ruler = [":---", *["---:"] * (len(header) - 1)]
  lines = (header, ruler, *rows)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def image(path: pathlib.PurePath, text: str) -> str:
  """A picture with a caption, by its path relative to the text."""
  there = urllib.parse.quote(path.as_posix())
  return f"![{plain(text)}]({there})\n\n*{plain(text)}*"


def fold(title: str, *parts: str) -> str:
  """Parts that can be expanded."""
  summary = f"<details>\n<summary>{html.escape(title)}</summary>"
  return "\n\n".join([summary, *parts, "</details>"])


def text(parts: Iterable[str]) -> str:
  """The whole text; empty parts are left out."""
  return "\n\n".join(filter(None, parts)) + "\n"


def to_html(title: str, markdown: str, folder: pathlib.Path) -> str:
  """One self-contained page, with its style, and pictures of the folder."""
  reader = markdown_it.MarkdownIt("commonmark").enable("table")
  tokens = reader.parse(markdown)
  _embed(tokens, folder)
  _mark_columns(tokens)
  for token, inside in itertools.pairwise(tokens):
    if token.type == "heading_open":
      words = "".join(child.content for child in inside.children or ())
      token.attrSet("id", _anchor(words))
  body = reader.renderer.render(tokens, reader.options, {})
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
    f"<body>\n{body}</body>\n</html>\n"
  )


def _embed(tokens: Sequence[token_lib.Token], folder: pathlib.Path) -> None:
  """Replaces links to PNGs by the PNGs themselves."""
  for token in tokens:
    for inner in token.children or ():
      if inner.type == "image":
        path = folder / urllib.parse.unquote(str(inner.attrs["src"]))
        png = path.read_bytes()
        data = base64.b64encode(png).decode()
        inner.attrSet("src", f"data:image/png;base64,{data}")
        # Its width, with which labels stay legible on narrow screens.
        inner.attrSet("style", f"--drawn: {int.from_bytes(png[16:20])}px")


def _mark_columns(tokens: Sequence[token_lib.Token]) -> None:
  """Marks the columns whose header is "paper" or begins with "paper: "."""
  column, of_paper = 0, list[bool]()
  for token, inside in itertools.pairwise(tokens):
    if token.type == "table_open":
      of_paper = []
    if token.type == "tr_open":
      column = 0
    if token.type == "th_open":
      of_paper.append(bool(re.match("paper(: |$)", inside.content)))
    if token.type in ("th_open", "td_open"):
      if of_paper[column]:
        token.attrSet("class", "paper")
      column += 1


def _anchor(heading: str) -> str:
  """The name of a heading in links, as GitHub and Sphinx make it."""
  return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def aligned(lines: Sequence[Sequence[str]], num_left: int | None = None) -> str:
  """Lines of cells with aligned columns, two spaces apart.

  Args:
    lines: each with as many cells.
    num_left: number of first columns that are aligned on the left, as text is;
      the others are aligned on the right, as numbers are. None for all.
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  num_left = len(widths) if num_left is None else num_left
  return "\n".join(
    "  ".join(
      cell.ljust(width) if place < num_left else cell.rjust(width)
      for place, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
