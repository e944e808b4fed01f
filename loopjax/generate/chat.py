"""Chat templates: from a conversation to a prompt.

Templates are rendered as in `transformers`, with the same names defined.
"""

import datetime
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from loopjax.errors import UserError, needing, one_line
from loopjax.hub import tokenizer_files

# Marks where the text of the last message ends; the space after it shows
# whether a template strips texts. As long as the mark of `transformers`, for
# templates that use the length of a message.
_MARK = "end_of_the_final_assistant "
Messages = Sequence[Mapping[str, str]]


class Template(Protocol):
  """From messages, with "role" and "content", to the text of a prompt."""

  def __call__(self, messages: Messages, *, continued: bool = False) -> str:
    """The text up to the next message, or within the last one if `continued`.

    Raises:
      UserError: the template refuses the messages, or changes the text of a
        message that is to be continued.
    """


def template(folder: pathlib.Path) -> Template:
  """The chat template of a folder.

  Templates are untrusted programs: they run in Jinja's sandbox.

  Args:
    folder: has tokenizer_config.json or chat_template.jinja.

  Raises:
    UserError: there is no template, or it has an error. The function raises it
      for errors at run time.
  """
  source = tokenizer_files.chat_template(folder)
  if source is None:
    raise UserError(
      f"{folder}: has no chat template, which --chat needs; add it as"
      " chat_template.jinja"
    )
  names = tokenizer_files.special_tokens(folder)
  environment, error_type = _environment()
  try:
    compiled = environment.from_string(source)
  except error_type as error:
    raise UserError(f"{folder}: chat template: {one_line(error)}") from error

  def prompt(messages: Messages, *, continued: bool = False) -> str:
    copies = [dict(message) for message in messages]
    if continued:
      copies[-1]["content"] += _MARK
    try:
      text = compiled.render(
        messages=copies,
        tools=None,
        documents=None,
        add_generation_prompt=not continued,
        **names,
      )
    except Exception as error:  # Templates may raise anything.
      raise UserError(f"{folder}: chat template: {one_line(error)}") from error
    return _within_last(text, folder) if continued else text

  return prompt


def _within_last(text: str, folder: pathlib.Path) -> str:
  """The rendered text up to the mark in its last message."""
  before, mark, after = text.rpartition(_MARK.strip())
  if not mark:
    raise UserError(f"{folder}: the chat template changes the last message")
  return before if after.startswith(" ") else before.rstrip()


def _environment() -> tuple[Any, type[Exception]]:
  """Jinja's environment for templates, and the type of errors in them."""
  with needing("jinja2", "chat", "chat templates need"):
    import jinja2
    from jinja2 import ext, sandbox

  class Generation(ext.Extension):
    """{% generation %}, around what an assistant wrote, which it leaves."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
      # Names set inside the block stay local, as in `transformers`.
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
