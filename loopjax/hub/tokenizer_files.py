"""The tokenizer files and settings of a Hub folder.

They are interpreted as in `transformers` 5.
"""

import hashlib
import pathlib
import shutil
from typing import NamedTuple

from loopjax.data.text import chat
from loopjax.data.text.tokenizer import BYTES, Tokenizer
from loopjax.errors import UserError, needing, one_line
from loopjax.run import user_cache
from loopjax.run import workdir as workdir_lib

TOKENIZER, ADDED = "tokenizer.json", "added_tokens.json"
_END = "<|end_of_document|>"  # Of models whose tokenizer has no such token.
FILES = (
  TOKENIZER,
  chat.CONFIG,
  chat.SPECIAL,
  ADDED,
  "vocab.json",
  "merges.txt",
  chat.TEMPLATE,
  "generation_config.json",
)


class Beginning(NamedTuple):
  """The begin token, see `data.text.config.Config`."""

  begin_token: str
  add_begin_token: bool


def completed(folder: pathlib.Path) -> pathlib.Path:
  """The tokenizer.json of a folder, with the tokens that other files add.

  Chat models list their marks in tokenizer_config.json, or before that in
  added_tokens.json. If tokenizer.json lacks some, it is a copy in the user's
  cache.

  Raises:
    UserError: a file cannot be read, or a token would have another id.
  """
  path, beside = folder / TOKENIZER, folder / ADDED
  given = chat.settings(folder).get("added_tokens_decoder")
  if given is None and beside.is_file():
    given = {
      id_: {"content": token, "normalized": False}
      for token, id_ in workdir_lib.read_json(beside).items()
    }
  if not given:
    return path
  Tokenizer(str(path))  # Says what is wrong with the file.
  import tokenizers

  file = tokenizers.Tokenizer.from_file(str(path))
  there = {one.content for one in file.get_added_tokens_decoder().values()}
  try:
    listed = sorted((int(id_), dict(token)) for id_, token in given.items())
    missing = {
      id_: tokenizers.AddedToken(**token)
      for id_, token in listed
      if token["content"] not in there
    }
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise UserError(
      f"{folder}: its list of added tokens is malformed: {one_line(error)}"
    ) from error
  if not missing:
    return path
  for id_, token in missing.items():
    file.add_tokens([token])
    if file.token_to_id(token.content) != id_:
      raise UserError(
        f"{folder}: the added token {token.content!r} would have the id"
        f" {file.token_to_id(token.content)}, not {id_}"
      )
  content = file.to_str()

  def write(entry: pathlib.Path) -> None:
    (entry / TOKENIZER).write_text(content, encoding="utf-8")

  key = hashlib.sha256(content.encode()).hexdigest()
  return user_cache.entry("tokenizer", key, write) / TOKENIZER


def beginning(folder: pathlib.Path) -> Beginning:
  """The begin token of a folder's model.

  The post-processor of tokenizer.json decides whether a token is added to
  texts; like `transformers`, this ignores `add_bos_token`. If nothing is added,
  documents begin with the folder's begin token.

  Raises:
    UserError: a file cannot be read, or more is added than one token at the
      beginning.
  """
  path = completed(folder)
  tokenizer = Tokenizer(str(path))
  before, after = tokenizer.added()
  if len(before) > 1 or after:
    raise UserError(
      f"{path}: adds {[tokenizer.token(x) for x in (*before, *after)]} to a"
      " text; only one token at its beginning is supported"
    )
  if before:
    return Beginning(tokenizer.token(before[0]) or "", True)
  named = chat.special_tokens(folder).get("bos_token")
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
  path, file = completed(folder), folder / "config.json"
  tokenizer = Tokenizer(str(path))
  given = workdir_lib.read_json(file).get("eos_token_id")
  if given is None and (other := folder / "generation_config.json").is_file():
    file, given = other, workdir_lib.read_json(other).get("eos_token_id")
  if given is None:
    token = chat.special_tokens(folder).get("eos_token")
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
    folder / chat.CONFIG,
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
  given = chat.settings(folder) | {
    "add_bos_token": is_added,
    "bos_token": token,
  }
  workdir_lib.write_json(folder / chat.CONFIG, given)
  special = folder / chat.SPECIAL
  if special.is_file():
    tokens = workdir_lib.read_json(special) | {"bos_token": token}
    workdir_lib.write_json(special, tokens)
