"""The tokenizer files and settings of a Hub folder.

They are interpreted as in `transformers` 5.
"""

import pathlib
import shutil
from typing import Any, NamedTuple

from loopjax.data.text.tokenizer import BYTES, Tokenizer
from loopjax.errors import UserError, needing, one_line
from loopjax.run import workdir as workdir_lib

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
# The names by which chat templates know special tokens.
_NAMES = (
  "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
  "mask_token",
)  # fmt: skip
_END = "<|end_of_document|>"  # Of models whose tokenizer has no such token.
_TEMPLATE = "chat_template.jinja"
FILES = (
  TOKENIZER,
  CONFIG,
  _SPECIAL,
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  _TEMPLATE,
  "generation_config.json",
)


class Beginning(NamedTuple):
  """The begin token, see `data.text.config.Config`."""

  begin_token: str
  add_begin_token: bool


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
  path = folder / _SPECIAL
  if "added_tokens_decoder" not in given and path.is_file():
    given = {**given, **workdir_lib.read_json(path)}
  found = {}
  for name in _NAMES:
    token = given.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
      found[name] = token
  return found


def chat_template(folder: pathlib.Path) -> str | None:
  """The source of a folder's chat template; None if there is none.

  Raises:
    UserError: a file cannot be read.
  """
  beside = folder / _TEMPLATE
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


def beginning(folder: pathlib.Path) -> Beginning:
  """The begin token of a folder's model.

  The post-processor of tokenizer.json decides whether a token is added to
  texts; like `transformers`, this ignores `add_bos_token`. If nothing is added,
  documents begin with the folder's begin token.

  Raises:
    UserError: a file cannot be read, or more is added than one token at the
      beginning.
  """
  path = folder / TOKENIZER
  tokenizer = Tokenizer(str(path))
  before, after = tokenizer.added()
  if len(before) > 1 or after:
    raise UserError(
      f"{path}: adds {[tokenizer.token(x) for x in (*before, *after)]} to a"
      " text; only one token at its beginning is supported"
    )
  if before:
    return Beginning(tokenizer.token(before[0]) or "", True)
  named = special_tokens(folder).get("bos_token")
  for name in ("generation_config.json", "config.json"):
    if named is None and (folder / name).is_file():
      id_ = workdir_lib.read_json(folder / name).get("bos_token_id")
      named = tokenizer.token(id_) if type(id_) is int else None
  return Beginning(named or "", False)


def end_tokens(folder: pathlib.Path) -> tuple[int, ...]:
  """The ids that end a text, of config.json and generation_config.json.

  Chat models have several, the first for documents. Empty without files.

  Raises:
    UserError: a file cannot be read, or something in it is not an id.
  """
  found: list[int] = []
  for name in ("config.json", "generation_config.json"):
    if (folder / name).is_file():
      given = workdir_lib.read_json(folder / name).get("eos_token_id")
      if given is None:
        continue
      ids = given if isinstance(given, list) else [given]
      if not all(type(one) is int for one in ids):
        raise UserError(f"{folder / name}: eos_token_id={given!r} is not an id")
      found += ids
  return tuple(dict.fromkeys(found))


def end_token(folder: pathlib.Path) -> str:
  """The token that ends a text: the first that config.json names.

  If it names none, that of generation_config.json or of the tokenizer.
  """
  path, file = folder / TOKENIZER, folder / "config.json"
  tokenizer = Tokenizer(str(path))
  given = workdir_lib.read_json(file).get("eos_token_id")
  if given is None and (other := folder / "generation_config.json").is_file():
    file, given = other, workdir_lib.read_json(other).get("eos_token_id")
  if given is None:
    token = special_tokens(folder).get("eos_token")
    if token is not None:
      return token
  first = given[0] if isinstance(given, list) and given else given
  token = tokenizer.token(first) if type(first) is int else None
  if token is None:
    raise UserError(
      f"{file}: eos_token_id={given!r} is not a token id of {path}"
    )
  for one in end_tokens(folder):
    if tokenizer.token(one) is None:
      raise UserError(
        f"{folder}: eos_token_id={one} is not a token id of {path}"
      )
  return token


def copy(path: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies a tokenizer and, for an imported one, its companion files."""
  for name in FILES if path.name == TOKENIZER else ():
    if (path.parent / name).is_file():
      shutil.copyfile(path.parent / name, folder / name)
  shutil.copyfile(path, folder / TOKENIZER)


def write_bytes(folder: pathlib.Path) -> None:
  """Writes the tokenizer of bytes, which are their own ids, as files.

  Raises:
    UserError: the package tokenizers is missing.
  """
  with needing("tokenizers", "lm", "the export of a model of bytes needs"):
    import tokenizers
  ids = {character: byte[0] for character, byte in BYTES.items()}
  file = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
  file.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  file.decoder = tokenizers.decoders.ByteLevel()
  file.save(str(folder / TOKENIZER))
  # Of an architecture's own class, `transformers` would change the splits.
  workdir_lib.write_json(
    folder / CONFIG,
    {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END},
  )


def write_ends(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
  """Writes the end and begin tokens to a folder's files.

  Adds the end-of-document id if tokenizer.json lacks it.

  Args:
    folder: has the tokenizer's files.
    tokenizer: the tokenizer of the run.

  Raises:
    UserError: the tokenizer's next id differs from it.
  """
  import tokenizers

  path = folder / TOKENIZER
  file = tokenizers.Tokenizer.from_file(str(path))
  if file.id_to_token(tokenizer.end) is None:
    file.add_special_tokens([_END])
    if file.token_to_id(_END) != tokenizer.end:
      raise UserError(
        f"{path.name} cannot have an id {tokenizer.end} for {_END}, the end of"
        " a document"
      )
    file.save(str(path))
  token, is_added = file.id_to_token(tokenizer.begin), bool(tokenizer.start)
  there = beginning(folder)
  named = there.begin_token or file.id_to_token(tokenizer.end)
  if (named, there.add_begin_token) == (token, is_added):
    return
  if is_added:
    file.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{token} $A",
      pair=f"{token} $A {token} $B:1",
      special_tokens=[(token, tokenizer.begin)],
    )
  else:
    file.post_processor = None
  file.save(str(path))
  given = settings(folder) | {"add_bos_token": is_added, "bos_token": token}
  workdir_lib.write_json(folder / CONFIG, given)
  special = folder / _SPECIAL
  if special.is_file():
    tokens = workdir_lib.read_json(special) | {"bos_token": token}
    workdir_lib.write_json(special, tokens)
