"""The files of a folder of the Hub that have its tokenizer and its settings."""

import pathlib
import shutil

from loopjax.errors import UserError

TOKENIZER = "tokenizer.json"
_END = "<|end_of_document|>"  # Of models whose tokenizer has no such token.
FILES = (
  TOKENIZER,
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "generation_config.json",
)


def copy(path: pathlib.Path, folder: pathlib.Path) -> None:
  """Copies a tokenizer and, of an imported one, the files that go with it."""
  for name in FILES if path.name == TOKENIZER else ():
    if (path.parent / name).is_file():
      shutil.copyfile(path.parent / name, folder / name)
  shutil.copyfile(path, folder / TOKENIZER)


def add_end(path: pathlib.Path, end: int) -> None:
  """Adds the id that ends documents, which the tokenizer did not have.

  Raises:
    UserError: the next id of the tokenizer is another one.
  """
  import tokenizers

  file = tokenizers.Tokenizer.from_file(str(path))
  file.add_special_tokens([_END])
  if file.token_to_id(_END) != end:
    raise UserError(
      f"{path.name} cannot have an id {end} for {_END}, the end of a document"
    )
  file.save(str(path))
