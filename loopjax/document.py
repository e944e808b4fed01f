"""A small document, written as one HTML file or as Markdown."""

import base64
import html
import re
import urllib.parse
from collections.abc import Sequence
from typing import NamedTuple


class Heading(NamedTuple):
  """Level 1 is the title."""

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
  """One cell, with small print below; kind is "ours", "paper" or ""."""

  text: str
  small: str = ""
  kind: str = ""


class Table(NamedTuple):
  """A header and rows of cells; the first cell of a row names it."""

  header: Sequence[Cell]
  rows: Sequence[Sequence[Cell]]


class Image(NamedTuple):
  """A PNG: its bytes, its path relative to the document, and a caption."""

  data: bytes
  path: str
  text: str


class Fold(NamedTuple):
  """Blocks that can be expanded."""

  title: str
  blocks: Sequence["Block"]


Block = Heading | Paragraph | Bullets | Code | Table | Image | Fold

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1f23;
  --soft: #5c6570; --line: #d9dee4; --shade: #f5f7f9; --ours: #0b61a4;
  --paper: #8a5a00; --paper-shade: #fdf6e7; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c;
  --text: #e4e7ea; --soft: #9aa4af; --line: #343b43; --shade: #1e2329;
  --ours: #7cbcf5; --paper: #e5b65c; --paper-shade: #2a2418; } }
body { margin: 0 auto; max-width: 80rem; padding: 2rem 1.25rem 5rem;
  background: var(--page); color: var(--text); line-height: 1.5;
  font-family: system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1.25rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .4rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .38rem .7rem; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; }
thead th { vertical-align: bottom; border-bottom-width: 2px; }
th:first-child, td:first-child { text-align: left; }
tbody th { font-weight: 500; }
.paper { background: var(--paper-shade); }
.mark { display: block; font-size: .72rem; font-weight: 600; }
.ours .mark { color: var(--ours); } .paper .mark { color: var(--paper); }
.small { display: block; font-size: .76rem; color: var(--soft);
  font-weight: 400; }
ul { padding-left: 1.2rem; margin: .5rem 0; } li { color: var(--soft);
  font-size: .9rem; }
pre { background: var(--shade); border: 1px solid var(--line);
  border-radius: 6px; padding: .6rem .8rem; overflow-x: auto;
  font-size: .82rem; }
details { border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .9rem; margin: .75rem 0; }
summary { cursor: pointer; font-weight: 500; }
img { max-width: 100%; background: #fff; border-radius: 6px; }
figure { margin: 1rem 0; }
figcaption { color: var(--soft); font-size: .85rem; }
"""


def to_html(title: str, blocks: Sequence[Block]) -> str:
  """One self-contained page, with styles and pictures embedded."""
  body = "\n".join(_html(block) for block in blocks)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
    f"<body>\n{body}\n</body>\n</html>\n"
  )


def to_markdown(blocks: Sequence[Block]) -> str:
  """The same with links to the pictures, relative to the document."""
  return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _html(block: Block) -> str:
  text = html.escape
  match block:
    case Heading(level, words):
      return f"<h{level}>{text(words)}</h{level}>"
    case Paragraph(words):
      return f"<p>{text(words)}</p>"
    case Bullets(items):
      points = "".join(f"<li>{text(item)}</li>" for item in items)
      return f"<ul>{points}</ul>"
    case Code(words):
      return f"<pre>{text(words)}</pre>"
    case Image(data, _, words):
      encoded = base64.b64encode(data).decode()
      return (
        f'<figure><img alt="{text(words)}" src="data:image/png;base64,'
        f'{encoded}"><figcaption>{text(words)}</figcaption></figure>'
      )
    case Fold(title, blocks):
      inside = "\n".join(_html(inner) for inner in blocks)
      return f"<details><summary>{text(title)}</summary>\n{inside}\n</details>"
    case Table(header, rows):
      head = "".join(_html_cell("th", cell, True) for cell in header)
      lines = "\n".join(
        "<tr>"
        + "".join(
          _html_cell("td" if place else "th", cell, False)
          for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
      )
      return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>"
      )


def _html_cell(tag: str, cell: Cell, marked: bool) -> str:
  """A cell; one in the header marks whose numbers are below."""
  kind = f' class="{cell.kind}"' if cell.kind else ""
  mark = f'<span class="mark">{cell.kind}</span>' if marked and kind else ""
  small = html.escape(cell.small)
  below = f'<span class="small">{small}</span>' if small else ""
  return f"<{tag}{kind}>{mark}{html.escape(cell.text)}{below}</{tag}>"


def _markdown(block: Block) -> str:
  match block:
    case Heading(level, words):
      return f"{'#' * level} {_plain(words)}"
    case Paragraph(words):
      return _plain(words)
    case Bullets(items):
      return "\n".join(f"- {_plain(item)}" for item in items)
    case Code(words):
      fence = "`" * max(
        3, 1 + max(map(len, re.findall("`+", words)), default=0)
      )
      return f"{fence}\n{words}\n{fence}"
    case Image(_, path, words):
      return f"![{_plain(words)}]({urllib.parse.quote(path)})"
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


def _markdown_cell(cell: Cell, marked: bool) -> str:
  text = _plain(cell.text)
  if marked and cell.kind:
    text = f"{text} ({cell.kind})"
  return f"{text} ({_plain(cell.small)})" if cell.small else text


def _plain(text: str) -> str:
  """Text escaped for Markdown and HTML."""
  text = html.escape(re.sub(r"[ \t\r\n]+", " ", text), quote=False)
  return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text)
