"""A small document that can be written as Markdown or as one HTML page."""

import base64
import html
import itertools
import re
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import markdown_it
from markdown_it import token as token_lib


class Heading(NamedTuple):
  """A heading; level 1 is the title."""

  level: int
  text: str


class Paragraph(NamedTuple):
  """Running text."""

  text: str


class Bullets(NamedTuple):
  """A list of sentences."""

  items: Sequence[str]


class Code(NamedTuple):
  """Preformatted text to copy."""

  text: str


class Cell(NamedTuple):
  """One cell, with small print below; kind is "ours", "paper" or "".

  `to` is the text of the heading that it links to.
  """

  text: str
  small: str = ""
  kind: str = ""
  to: str = ""


class Table(NamedTuple):
  """A header and rows of cells; the first cell of a row names it."""

  header: Sequence[Cell]
  rows: Sequence[Sequence[Cell]]


class Image(NamedTuple):
  """A PNG: its bytes, its path relative to the document, and a caption."""

  data: bytes
  path: str
  text: str


class Shaded(NamedTuple):
  """Running text in pieces: text, shade from 0 to 1, and a note on it."""

  pieces: Sequence[tuple[str, float, str]]


class Fold(NamedTuple):
  """Blocks that can be expanded."""

  title: str
  blocks: Sequence["Block"]


_SHADED = "shaded"  # Info string of the fence of shaded text.
Block = Heading | Paragraph | Bullets | Code | Table | Image | Shaded | Fold
_Kind = TypeVar("_Kind", Image, Shaded)

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
.shaded { white-space: pre-wrap; font-size: .95rem; line-height: 1.7; }
.shaded span { background: color-mix(in srgb, var(--ours)
  calc(var(--shade-of) * 60%), transparent); }
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


def to_html(title: str, blocks: Sequence[Block]) -> str:
  """One self-contained page, with styles and pictures embedded."""
  reader = markdown_it.MarkdownIt("commonmark").enable("table")
  tokens = reader.parse(to_markdown(blocks))
  _embed(tokens, _pictures(blocks))
  _mark_columns(tokens)
  _name_headings(tokens)
  _shade(tokens, _of_kind(blocks, Shaded))
  body = reader.renderer.render(tokens, reader.options, {})
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
    f"<body>\n{body}</body>\n</html>\n"
  )


def _of_kind(blocks: Sequence[Block], kind: type[_Kind]) -> list[_Kind]:
  """The blocks of a kind, in order, including those inside folds."""
  found: list[_Kind] = []
  for block in blocks:
    if isinstance(block, kind):
      found.append(block)
    elif isinstance(block, Fold):
      found += _of_kind(block.blocks, kind)
  return found


def _pictures(blocks: Sequence[Block]) -> dict[str, bytes]:
  """The PNGs of a document, by the path that links to them."""
  images = _of_kind(blocks, Image)
  return {urllib.parse.quote(image.path): image.data for image in images}


def _embed(
  tokens: Sequence[token_lib.Token], pictures: dict[str, bytes]
) -> None:
  """Replaces links to pictures by the pictures themselves."""
  for token in tokens:
    for inner in token.children or ():
      if inner.type == "image":
        png = pictures[str(inner.attrs["src"])]
        data = base64.b64encode(png).decode()
        inner.attrSet("src", f"data:image/png;base64,{data}")
        # Its width, with which labels stay legible on narrow screens.
        inner.attrSet("style", f"--drawn: {int.from_bytes(png[16:20])}px")


def _mark_columns(tokens: Sequence[token_lib.Token]) -> None:
  """Marks the table columns whose header belongs to a paper's numbers."""
  column, kinds = 0, list[str]()
  for place, token in enumerate(tokens):
    if token.type == "table_open":
      kinds = []
    if token.type == "tr_open":
      column = 0
    if token.type == "th_open":
      of_paper = re.match("paper(: |$)", tokens[place + 1].content)
      kinds.append("paper" if of_paper else "")
    if token.type in ("th_open", "td_open"):
      if kinds[column]:
        token.attrSet("class", kinds[column])
      column += 1


def _name_headings(tokens: Sequence[token_lib.Token]) -> None:
  """Gives headings the names by which cells link to them."""
  for token, inside in itertools.pairwise(tokens):
    if token.type == "heading_open":
      words = "".join(child.content for child in inside.children or ())
      token.attrSet("id", _anchor(words))


def _anchor(heading: str) -> str:
  """The name of a heading in links, as GitHub and Sphinx make it."""
  return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _shade(tokens: Sequence[token_lib.Token], texts: Sequence[Shaded]) -> None:
  """Replaces plain texts by shaded ones."""
  plain = [token for token in tokens if token.info == _SHADED]
  for token, text in zip(plain, texts, strict=True):
    spans = "".join(
      f'<span style="--shade-of: {shade:.3f}" title="{html.escape(title)}">'
      f"{html.escape(words)}</span>"
      for words, shade, title in text.pieces
    )
    token.type = "html_block"
    token.content = f'<pre class="shaded">{spans}</pre>\n'


def to_markdown(blocks: Sequence[Block]) -> str:
  """The document as Markdown, with relative links to the pictures."""
  return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
  match block:
    case Heading(level, words):
      return f"{'#' * level} {_plain(words)}"
    case Paragraph(words):
      return _plain(words)
    case Bullets(items):
      return "\n".join(f"- {_plain(item)}" for item in items)
    case Shaded(pieces):  # Markdown has no shades.
      return _fenced("".join(words for words, _, _ in pieces), _SHADED)
    case Code(words):
      return _fenced(words)
    case Image(_, path, words):
      link = f"![{_plain(words)}]({urllib.parse.quote(path)})"
      return f"{link}\n\n*{_plain(words)}*"
    case Fold(title, blocks):
      inside = "\n\n".join(_markdown(inner) for inner in blocks)
      return (
        f"<details>\n<summary>{html.escape(title)}</summary>\n\n{inside}\n\n"
        "</details>"
      )
    case Table(header, rows):
      lines = [
        [_markdown_cell(cell, True) for cell in header],
        [":---", *["---:"] * (len(header) - 1)],
        *([_markdown_cell(cell, False) for cell in row] for row in rows),
      ]
      return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fenced(words: str, kind: str = "") -> str:
  """A fenced block whose fence is longer than any backticks in the text."""
  fence = "`" * max(3, 1 + max(map(len, re.findall("`+", words)), default=0))
  return f"{fence}{kind}\n{words}\n{fence}"


def _markdown_cell(cell: Cell, marked: bool) -> str:
  """A cell; `marked` ones, in the header, say whose numbers the column has."""
  text = _plain(cell.text)
  if cell.to:
    text = f"[{text}](#{_anchor(cell.to)})"
  if marked and cell.kind:
    text = f"{cell.kind}: {text}" if text else cell.kind
  return f"{text} <small>{_plain(cell.small)}</small>" if cell.small else text


def _plain(text: str) -> str:
  """Text escaped for Markdown and HTML."""
  text = html.escape(re.sub(r"[ \t\r\n]+", " ", text), quote=False)
  return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)


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
