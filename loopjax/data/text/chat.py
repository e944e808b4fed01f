"""Conversations: messages, and chat templates, which make texts of them.

Templates are rendered by `transformers`, for which they are written.
"""

import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from loopjax.errors import UserError, needing, one_line
from loopjax.run import workdir as workdir_lib

CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
# The names by which chat templates know special tokens.
_NAMES = (
  "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
  "mask_token",
)  # fmt: skip
ROLES = ("system", "developer", "user", "assistant")
KEYS = ("role", "content", "name")
MARKS = ("\u27e6", "\u27e7")  # Around what is predicted, see `shown`.
# Of turns in files. Templates write a tool's answers; nothing predicts them.
TURN_ROLES = (*ROLES, "tool")
# Roles in other conventions.
_ALSO = {"human": "user", "gpt": "assistant", "model": "assistant"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# A text in parts, and whether each is predicted.
Segments = list[tuple[str, bool]]
Messages = Sequence[Mapping[str, Any]]


def message(
  given: Any,
  roles: Collection[str] = ROLES,
  is_read: Callable[[str], object] = KEYS.__contains__,
) -> dict[str, Any]:
  """A message as templates read it: a role, a text and perhaps a name.

  Other keys, such as `tool_calls`, must be empty unless they are read.

  Args:
    given: from JSON. The content may be a list of parts of type "text".
    roles: the roles that it may have.
    is_read: whether something reads a key.

  Raises:
    UserError: it has another form or another key.
  """
  whole = given if isinstance(given, dict) else {}
  content = whole.get("content")
  if isinstance(content, list) and all(
    isinstance(part, dict)
    and part.get("type") == "text"
    and isinstance(part.get("text"), str)
    for part in content
  ):
    content = "".join(part["text"] for part in content)
  role = whole.get("role")
  if content is None and whole.get("tool_calls") and is_read("tool_calls"):
    content = ""  # An assistant may call without a word.
  if role not in roles or not isinstance(content, str):
    raise UserError(
      f"{_short(given)} is not a message with a role ({', '.join(roles)}) and a"
      " string as content"
    )
  found = {"role": role, "content": content}
  for key, value in whole.items():
    if key in found or value in (None, "", [], {}):
      continue
    if not is_read(key):
      raise UserError(f"{_short(key)} of a message is unsupported")
    found[key] = value
  if not isinstance(found.get("name", ""), str):
    raise UserError(f"the name {_short(found['name'])} is not a string")
  return found


def turn(given: Any, template: "Template | None") -> dict[str, Any]:
  """One turn of a conversation in a file, as a message.

  It may have a "weight", 0 for a turn that is not predicted, and what the
  template reads, such as "tool_calls".

  Args:
    given: from JSON: "role" and "content", or "from" and "value".
    template: what writes the conversation, if something does.

  Raises:
    UserError: it has another form, another role or another key.
  """
  names = {"from": "role", "value": "content"}
  whole = given if isinstance(given, dict) else {}
  if names.keys() <= whole.keys():
    whole = {names.get(key, key): value for key, value in whole.items()}
  if {"role", "content"} - whole.keys():
    raise UserError(
      f"{_short(given)} is not a turn of a conversation; each has 'from' and"
      " 'value', or 'role' and 'content'"
    )
  if isinstance(whole["role"], str):
    whole = {**whole, "role": _ALSO.get(whole["role"], whole["role"])}
  found = message(
    whole,
    TURN_ROLES,
    lambda key: key == "weight" or (template and template.reads(key)),
  )
  if found.get("weight", 1) not in (0, 1):
    raise UserError(f"the weight {_short(found['weight'])} is not 0 or 1")
  return found


def prompt(turns: Messages) -> str:
  """What decides the split of a conversation: its prompt, or else its text.

  The prompt is what others than the system say before the first turn that is
  predicted, of which all answers are in one split. Where all conversations have
  one system's message or begin with the assistant, there is none.
  """
  first = _said(turns).index(True) if any(_said(turns)) else len(turns)
  before = "".join(
    turn["content"]
    for turn in turns[:first]
    if turn["role"] not in ("system", "developer")
  )
  return before.strip() or "".join(turn["content"] for turn in turns)


def _said(turns: Messages) -> list[bool]:
  """Whether each turn is one of the assistant that is predicted."""
  return [
    turn["role"] == "assistant" and turn.get("weight", 1) != 0 for turn in turns
  ]


def segments(
  turns: Messages, template: "Template | None", separator: str
) -> Segments:
  """The text of turns up to the last that is predicted.

  The template writes them; without it, the separator ends every turn but the
  last. A text without predicted parts is empty.
  """
  said = _said(turns)
  if template and any(said):
    found = template.segments(turns)
  else:
    found = [
      (turn["content"], predicted)
      for turn, predicted in zip(turns, said, strict=True)
    ]
  while found and not (found[-1][1] and found[-1][0]):
    found.pop()
  if template:
    return found
  *first, last = found or [("", False)]
  found = [(text + separator, predicted) for text, predicted in first]
  return [*found, last] if last[1] else []


def between(found: Segments, begin: str, end: str) -> Segments:
  """A conversation without the begin and end tokens that documents have."""
  texts = [text for text, _ in found]
  texts[0] = texts[0].removeprefix(begin)
  texts[-1] = texts[-1].removesuffix(end)
  return [
    (text, predicted) for text, (_, predicted) in zip(texts, found, strict=True)
  ]


def shown(found: Segments, begin: str, end: str) -> str:
  """A document in full, its predicted parts between MARKS; "" if it is one."""
  if all(predicted for _, predicted in found):
    return ""
  *before, (last, _) = found  # The last is predicted, and then the end.
  return begin + "".join(
    f"{MARKS[0]}{text}{MARKS[1]}" if predicted else text
    for text, predicted in (*before, (last + end, True))
  )


def _short(value: Any, most: int = 80) -> str:
  shown = repr(value)
  return shown if len(shown) <= most else f"{shown[:most]}..."


class Template(NamedTuple):
  """A chat template: from messages to the text of a prompt.

  Templates are untrusted programs: they run in Jinja's sandbox.

  Attributes:
    folder: where it is, for messages.
    source: the program.
    names: the special tokens by the names that it may use.
  """

  folder: str
  source: str
  names: tuple[tuple[str, str], ...]

  def __call__(self, messages: Messages, *, continued: bool = False) -> str:
    """The text up to the next message, or within the last one if `continued`.

    Raises:
      UserError: the template refuses the messages, or changes the text of a
        message that is to be continued.
    """
    return self._rendered(
      messages,
      add_generation_prompt=not continued,
      continue_final_message=continued,
    )[0]

  def reads(self, key: str) -> bool:
    """Whether the program names a key of messages."""
    return bool(re.search(rf"\b{re.escape(key)}\b", self.source))

  def segments(self, messages: Messages) -> Segments:
    """The text of a whole conversation; what the assistant writes is predicted.

    That is what `{% generation %}` marks. In templates without these marks, it
    is what follows the prompt for an answer, to the end of the message without
    the space after its end mark.

    Args:
      messages: as in `message`; "weight" 0 if it is not predicted.

    Raises:
      UserError: the template refuses the messages, or writes a message in
        another way if others follow.
    """
    plain = [{k: m[k] for k in m if k != "weight"} for m in messages]
    turns = [n for n, m in enumerate(plain) if m["role"] == "assistant"]
    if _GENERATION.search(self.source):
      text, spans = self._rendered(plain, return_assistant_tokens_mask=True)
      if len(spans) != len(turns):
        raise UserError(
          f"{self.folder}: the chat template marks {len(spans)} of"
          f" {len(turns)} messages of the assistant"
        )
    else:
      text, _ = self._rendered(plain)
      spans = [self._span(plain, turn, text) for turn in turns]
    found: Segments = []
    at = 0
    for (start, stop), turn in zip(spans, turns, strict=True):
      found.append((text[at:start], False))
      found.append((text[start:stop], messages[turn].get("weight", 1) != 0))
      at = stop
    return [*found, (text[at:], False)]

  def _span(self, messages: Messages, turn: int, text: str) -> tuple[int, int]:
    """Where an assistant's message is in the text of the conversation."""
    before = self(messages[:turn])
    whole, _ = self._rendered(messages[: turn + 1])
    if not (whole.startswith(before) and text.startswith(whole)):
      raise UserError(
        f"{self.folder}: the chat template writes message {turn + 1} in another"
        " way in a longer conversation; mark what the assistant writes by"
        " {% generation %}"
      )
    ended = whole.rstrip()
    said = messages[turn]["content"].rstrip()
    if said and ended.endswith(said):
      ended = whole  # The space is all that marks the end.
    return len(before), len(ended)

  def _rendered(
    self, messages: Messages, **options: Any
  ) -> tuple[str, list[tuple[int, int]]]:
    """The text, and where the parts are that the template marks, if asked."""
    with needing("transformers", "chat", "chat templates need"):
      # Otherwise the package says at each import that PyTorch is missing.
      os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
      from transformers.utils import chat_template_utils
    options |= {"chat_template": self.source, **dict(self.names)}
    rendered: Any
    try:
      rendered = chat_template_utils.render_jinja_template(
        [[dict(one) for one in messages]], **options
      )
    except Exception as error:  # Templates may raise anything.
      raise UserError(
        f"{self.folder}: chat template: {one_line(error)}"
      ) from error
    (text,), spans = rendered
    return text, spans[0] if spans else []


def template(folder: pathlib.Path) -> Template:
  """The chat template of a folder.

  Args:
    folder: has tokenizer_config.json or chat_template.jinja.

  Raises:
    UserError: there is no template, or a file cannot be read.
  """
  source = template_source(folder)
  if source is None:
    raise UserError(
      f"{folder}: has no chat template, which --chat needs; add it as"
      f" {TEMPLATE}"
    )
  return Template(str(folder), source, tuple(special_tokens(folder).items()))


def of_tokenizer(tokenizer: str) -> Template | None:
  """The template beside the file of a tokenizer; None if there is none."""
  folder = pathlib.Path(os.path.expanduser(tokenizer)).parent
  if tokenizer == "bytes" or template_source(folder) is None:
    return None
  return template(folder)


def template_source(folder: pathlib.Path) -> str | None:
  """The source of a folder's chat template; None if there is none.

  Raises:
    UserError: a file cannot be read.
  """
  beside = folder / TEMPLATE
  try:
    source: Any = beside.read_text("utf-8") if beside.is_file() else None
  except (OSError, ValueError) as error:
    raise UserError(f"{beside}: cannot be read: {one_line(error)}") from error
  if source is None:
    source = settings(folder).get("chat_template")
  if isinstance(source, list):  # Several, by name.
    named = {x.get("name"): x for x in source if isinstance(x, dict)}
    source = named.get("default", {}).get("template")
  return source if isinstance(source, str) else None


def settings(folder: pathlib.Path) -> dict[str, Any]:
  """tokenizer_config.json; {} if there is none.

  Raises:
    UserError: it cannot be read.
  """
  path = folder / CONFIG
  return workdir_lib.read_json(path) if path.is_file() else {}


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
  """The special tokens of a folder: "bos_token" and so on.

  Raises:
    UserError: a file cannot be read.
  """
  given = settings(folder)
  path = folder / SPECIAL
  if "added_tokens_decoder" not in given and path.is_file():
    given = {**given, **workdir_lib.read_json(path)}
  found = {}
  for name in _NAMES:
    token = given.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
      found[name] = token
  return found
