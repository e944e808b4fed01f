"""Chat templates: from a conversation to a prompt."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from loopjax.errors import UserError, one_line

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
Messages = Sequence[Mapping[str, str]]


def template(folder: pathlib.Path) -> Callable[[Messages], str]:
  """A function from messages, with "role" and "content", to a prompt's text.

  Templates are untrusted programs: they run in Jinja's sandbox, with the names
  that the ecosystem defines for them.

  Args:
    folder: has tokenizer_config.json or chat_template.jinja.

  Raises:
    UserError: there is no template, or it has an error. The function raises it
      for errors at run time.
  """
  source, names = _read(folder)
  try:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
  except ImportError:
    raise UserError(
      "chat templates need the package jinja2; install it with"
      " pip install 'loopjax[chat]'"
    ) from None

  def refuse(message: str) -> NoReturn:
    raise TemplateError(message)

  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols"],
  )
  environment.filters["tojson"] = lambda x, **options: json.dumps(
    x, ensure_ascii=False, **options
  )
  environment.globals["raise_exception"] = refuse
  try:
    compiled = environment.from_string(source)
  except TemplateError as error:
    raise UserError(f"{folder}: chat template: {one_line(error)}") from error

  def prompt(messages: Messages) -> str:
    try:
      return compiled.render(
        messages=list(messages), add_generation_prompt=True, **names
      )
    except Exception as error:  # Templates may raise anything.
      raise UserError(f"{folder}: chat template: {one_line(error)}") from error

  return prompt


def _read(folder: pathlib.Path) -> tuple[str, dict[str, Any]]:
  """The template's source, and the special tokens by name."""
  path = folder / _CONFIG
  config: Any = {}
  try:
    if path.is_file():
      config = json.loads(path.read_text())
    beside = folder / _TEMPLATE
    source = beside.read_text() if beside.is_file() else None
  except (OSError, ValueError) as error:
    raise UserError(f"{folder}: cannot be read: {one_line(error)}") from error
  if not isinstance(config, dict):
    raise UserError(f"{path}: is not a JSON object")
  source = source or _default(config.get("chat_template"))
  if not isinstance(source, str):
    raise UserError(f"{folder}: has no chat template; it cannot --chat")
  names = {}
  for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
      names[name] = token
  return source, names


def _default(given: Any) -> Any:
  """The template, or the one named "default" if there are several."""
  if not isinstance(given, list):
    return given
  named = {x.get("name"): x for x in given if isinstance(x, dict)}
  return named.get("default", {}).get("template")
