"""The documentation as a site.

  pip install -e '.[docs]' && sphinx-build -W -c docs . build/site

The source is the whole repository, so that pages link to results and to the
files they speak of; the first page is docs/index.md.
"""

import re

from docutils import nodes
from latex2mathml.converter import convert

import loopjax

project = "loopjax"
author = "The loopjax authors"
version = release = loopjax.__version__

extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
  "docs/**",
  "benchmarks/*.md",
  "benchmarks/report/*.md",
  "benchmarks/results/*.md",
  "CHANGELOG.md",
  "CONTRIBUTING.md",
  "notebooks/*.ipynb",
  "notebooks/README.md",
]
exclude_patterns = ["docs/_templates"]
templates_path = ["_templates"]

# Notebooks have formulas, which browsers set themselves: no script is fetched.
html_math_renderer = "mathml"
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # Their outputs are in them.

html_theme = "furo"
html_title = "loopjax"
html_static_path = ["_static"]
html_css_files = ["width.css"]
html_additional_pages = {"index": "to_first_page.html"}
html_show_copyright = False
html_copy_source = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
# What a field's default is made by belongs to the page of another module.
viewcode_follow_imported_members = False
# A record's fields are documented once, in its docstring.
napoleon_use_ivar = True
# A name of a field is not a reference.
suppress_warnings = ["ref.python"]


def _plain(app, what, name, obj, options, lines):
  """Takes a docstring's words as they are; it is no reStructuredText.

  What is indented after a blank line, an equation or a table, stays so.
  """
  taken, before, as_it_is = lines[:], "", False
  lines.clear()
  for line in taken:
    if line.strip():
      starts = line.startswith(" ") and not before.strip()
      if starts and not as_it_is:
        lines += ["::", ""]
      as_it_is = line.startswith(" ") and (starts or as_it_is)
    lines.append(line if as_it_is else _escaped(line))
    before = line


def _escaped(line):
  for mark in "\\*|":
    line = line.replace(mark, f"\\{mark}")
  line = re.sub(r"(?<=: )([A-Z])\.$", r"\1\\.", line)  # No list from "H.".
  return line.replace("_ ", "\\_ ")


def _skip(app, what, name, obj, skip, options):
  """Leaves out what nobody has written a docstring for."""
  documentation = getattr(obj, "__doc__", None) or ""
  return True if documentation.startswith("Alias for field") else None


def _in_place(app, pagename, templatename, context, doctree):
  """A link to a page of play opens it, instead of saving it."""
  if "body" in context:
    link = r' download=""(?= href="[^"]*\.html")'
    context["body"] = re.sub(link, "", context["body"])


def _mathml(display):
  """What writes a formula."""

  def visit(writer, node):
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode

  return visit, None


def setup(app):
  """Connects the functions to Sphinx."""
  app.add_html_math_renderer("mathml", _mathml("inline"), _mathml("block"))
  app.connect("html-page-context", _in_place)
  app.connect("autodoc-process-docstring", _plain, priority=0)
  app.connect("autodoc-skip-member", _skip)
