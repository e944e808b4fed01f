"""Chat templates: from a conversation to a prompt.

Templates are rendered as in `transformers`, with the same names defined.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from loopjax.errors import UserError, one_line
from loopjax.hub import tokenizer_files

_TEMPLATE = "chat_template.jinja"
Messages = Sequence[Mapping[str, str]]


def template(folder: pathlib.Path) -> Callable[[Messages], str]:
  """A function from messages, with "role" and "content", to a prompt's text.

  Templates are untrusted programs: they run in Jinja's sandbox.

  Args:
    folder: has tokenizer_config.json or chat_template.jinja.

  Raises:
    UserError: there is no template, or it has an error. The function raises it
      for errors at run time.
  """
  source, names = _source(folder), tokenizer_files.special_tokens(folder)
  environment, error_type = _environment()
  try:
    compiled = environment.from_string(source)
  except error_type as error:
    raise UserError(f"{folder}: chat template: {one_line(error)}") from error

  def prompt(messages: Messages) -> str:
    try:
      return compiled.render(
        messages=[dict(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **names,
      )
    except Exception as error:  # Templates may raise anything.
      raise UserError(f"{folder}: chat template: {one_line(error)}") from error

  return prompt


def _environment() -> tuple[Any, type[Exception]]:
  """Jinja's environment for templates, and the type of errors in them."""
  try:
    import jinja2
    from jinja2 import ext, sandbox
  except ImportError:
    raise UserError(
      "chat templates need the package jinja2; install it with"
      " pip install 'loopjax[chat]'"
    ) from None

  class Generation(ext.Extension):
    """{% generation %}, around what an assistant wrote, which it leaves."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
      # A block with names of its own, as there.
      call = self.call_method("_written")
      return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
      return caller()

  def to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      x,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = refuse
  environment.globals["strftime_now"] = lambda format_: (
    datetime.datetime.now().strftime(format_)
  )
  return environment, jinja2.TemplateError


def _source(folder: pathlib.Path) -> str:
  """The template's source."""
  beside = folder / _TEMPLATE
  try:
    source = beside.read_text("utf-8") if beside.is_file() else None
  except (OSError, ValueError) as error:
    raise UserError(f"{beside}: cannot be read: {one_line(error)}") from error
  if source is None:
    source = _default(tokenizer_files.settings(folder).get("chat_template"))
  if not isinstance(source, str):
    raise UserError(f"{folder}: has no chat template, which --chat needs")
  return source


def _default(given: Any) -> Any:
  """The template, or the one named "default" if there are several."""
  if not isinstance(given, list):
    return given
  named = {x.get("name"): x for x in given if isinstance(x, dict)}
  return named.get("default", {}).get("template")
