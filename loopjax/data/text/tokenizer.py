"""Tokenizers (bytes or any `tokenizer.json`) and their begin tokens.

Two ids are added to the tokenizer's: the end token, which also separates a
document from the previous one, and padding. If documents end with one of the
tokenizer's own tokens, as in published models, none are added, and that token
is also the padding.
"""

import copy
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from loopjax import checks
from loopjax.data.text.config import Config
from loopjax.errors import UserError, needing, one_line

NOTHING = "none"  # A begin token of `Tokenizer.beginning_with`.
_BATCH = 1 << 20  # Characters at a time; encodings are far larger than text.
_VERSION = 3  # Version of the ids of texts, and of the bytes of tokens.


class Tokenizer:
  """Text to token ids.

  Attributes:
    name: "bytes" or the path of a file.
    key: checksum of everything that determines the ids of a document.
    end, padding: ids of the end of a document and of padding.
    begin: id at the beginning of documents: a separate token, or the end token,
      which separates a document from the previous one.
    start: the ids at the beginning of prompts: `begin` or none.
    num_ids: number of ids, including end and padding.
    num_real: number of ids that a model may predict; they precede an added
      padding id.
    num_bytes: int64 [num_ids], the UTF-8 bytes that an id stands for; 0 for
      end and padding. Others than the text's where tokens differ from it, as
      with ## or after a normalisation.
  """

  def __init__(
    self,
    name: str,
    end_token: str = "",
    begin_token: str = "",
    add_begin_token: bool = True,
  ):
    """For the last three arguments, see `data.text.config.Config`.

    Raises:
      UserError: the file cannot be read or lacks one of the tokens.
    """
    self.name = name
    self._library: Any = None
    if name == "bytes":
      self.key = "bytes"
      self._pieces = tuple(bytes([one]) for one in range(256))
    else:
      content = _content(name)
      self.key = f"{hashlib.sha256(content).hexdigest()}-{_VERSION}"
      self._library, self._pieces = _load(name, content)
    sizes = np.array([len(piece) for piece in self._pieces], np.int64)
    if end_token:
      end = self._id("task.end_token", end_token)
      self.key += f"-{end}"
      self.end = self.padding = end
      self.num_ids = self.num_real = len(sizes)
      self.num_bytes = np.where(np.arange(len(sizes)) == end, 0, sizes)
    else:
      self.end, self.padding = len(sizes), len(sizes) + 1
      self.num_ids, self.num_real = len(sizes) + 2, len(sizes) + 1
      self.num_bytes = np.append(sizes, [0, 0])
    self.begin = self.end
    if begin_token:
      self.begin = self._id("task.begin_token", begin_token)
      self.key += f"-begin-{self.begin}"
    self.start = (self.begin,) if add_begin_token else ()

  def _id(self, label: str, token: str) -> int:
    """The id of a token; UserError if the tokenizer has no such token."""
    found = self._library.token_to_id(token) if self._library else None
    if found is None:
      raise UserError(f"{label}={token!r} is not a token of {self.name}")
    return found

  def beginning_with(
    self, token: str | None, label: str = "--bos"
  ) -> "Tokenizer":
    """This tokenizer with another begin token.

    Args:
      token: a token, "none" for prompts without one, or None for this
        tokenizer.
      label: the setting's name in messages.

    Raises:
      UserError: the tokenizer has no such token.
    """
    if token is None:
      return self
    found = copy.copy(self)
    if token == NOTHING:
      found.start = ()
    else:
      found.begin = self._id(label, token)
      found.start = (found.begin,)
    return found

  @property
  def beginning(self) -> str:
    """A description of the begin token of prompts, for result files."""
    if not self.start:
      return "nothing"
    if self.begin == self.end:
      return "document separator"
    return self.token(self.begin) or ""

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text, int [n], without added tokens."""
    if self._library is None:
      return [np.frombuffer(text.encode(), np.uint8) for text in texts]
    encode = self._library.encode_batch_fast
    return [np.array(one.ids, np.int64) for one in _batched(encode, texts)]

  def encode_prompt(self, text: str) -> tuple[int, ...]:
    """Token ids of a text to continue, after the prompt's begin token.

    An empty text gives the begin token of documents.
    """
    (ids,) = self.encode([text])
    return tuple(self._begun(ids).tolist())

  def encode_pairs(
    self, pairs: Sequence[tuple[str, str]]
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of contexts, as prompts, and of their continuations.

    As in lm-evaluation-harness, both are encoded together, and the continuation
    consists of the tokens after the context's; spaces at the end of a context
    belong to its continuation. If one token spans the boundary and no token
    follows, the continuation is encoded separately.

    Returns:
      For each pair int [c], int [n], both at least 1.

    Raises:
      UserError: a continuation has no tokens.
    """
    moved = [spaces_moved(*pair) for pair in pairs]
    befores = self.encode([context for context, _ in moved])
    wholes = self.encode(["".join(pair) for pair in moved])
    found = []
    for before, whole, pair in zip(befores, wholes, moved, strict=True):
      after = whole[len(before) :]
      if not len(after):
        after = self._inner(pair[1])
      if not len(after):
        raise UserError(f"{self.name}: {pair[1]!r} has no token")
      # A text that already begins with the token does not get a second one.
      if not len(before) and after[0] == self.begin and len(after) > 1:
        after = after[1:]
      found.append((self._begun(before), after))
    return found

  def encode_parts(
    self, texts: Sequence[Sequence[str]]
  ) -> list[list[np.ndarray]]:
    """Token ids of texts in parts, encoded together; one array for each part.

    A token that spans several parts belongs to the last of them.
    """
    if self._library is None:
      return [self.encode(parts) for parts in texts]
    whole = self.encode(["".join(x) for x in texts if len(x) == 1])
    single = iter(whole)
    several = ["".join(x) for x in texts if len(x) > 1]
    joint = iter(_batched(self._library.encode_batch, several))
    found = []
    for parts in texts:
      if len(parts) == 1:
        found.append([next(single)])
        continue
      one = next(joint)
      ids = np.array(one.ids, np.int64)
      stops = np.cumsum([len(part) for part in parts[:-1]])
      ends = [end for _, end in one.offsets]
      found.append(np.split(ids, np.searchsorted(ends, stops, "right")))
    return found

  def ends(self, text: str) -> np.ndarray:
    """The number of characters of a text up to the end of each token, int [n].

    `encode` returns these tokens; not for bytes.
    """
    encoding = self._library.encode(text, add_special_tokens=False)
    return np.array([end for _, end in encoding.offsets], np.int64)

  def _begun(self, ids: np.ndarray) -> np.ndarray:
    """The ids of a prompt with one begin token, if any; never empty."""
    start = self.start
    if not len(ids):
      start = (self.begin,)
    elif ids[0] in start:
      start = ()
    return np.append(np.array(start, np.int64), ids)

  def _inner(self, text: str) -> np.ndarray:
    """Token ids of a text that follows others, without a leading space."""
    line, whole = self.encode(["\n", f"\n{text}"])
    if np.array_equal(whole[: len(line)], line):
      return whole[len(line) :]
    return self.encode([text])[0]

  def token(self, index: int) -> str | None:
    """The token string of an id; None if the tokenizer has no such id."""
    is_there = self._library and 0 <= index < len(self._pieces)
    return self._library.id_to_token(index) if is_there else None

  def added(self) -> tuple[list[int], list[int]]:
    """The ids that the file itself adds before and after a text."""
    (text,) = self.encode(["a"])
    whole = self._library.encode("a").ids
    places = range(len(whole) - len(text) + 1) if len(text) else ()
    here = [x for x in places if whole[x : x + len(text)] == text.tolist()]
    start = here[0] if here else len(whole)
    return whole[:start], whole[start + len(text) :]

  def piece(self, index: int) -> bytes:
    """The bytes that an id stands for within a text; none for added ids."""
    return self._pieces[index] if index < len(self._pieces) else b""

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes ids, dropping added ones; invalid UTF-8 becomes U+FFFD."""
    if self._library is None:
      return bytes(one for one in ids if one < 256).decode(errors="replace")
    return self._library.decode(list(ids), skip_special_tokens=False)


def spaces_moved(context: str, continuation: str) -> tuple[str, str]:
  """The pair, with spaces at the end of the context in the continuation."""
  kept = context.rstrip()
  return kept, context[len(kept) :] + continuation


def of(config: Config) -> Tokenizer:
  """The tokenizer of a task.

  Raises:
    UserError: see `Tokenizer`.
  """
  return Tokenizer(
    config.tokenizer,
    config.end_token,
    config.begin_token,
    config.add_begin_token,
  )


def _batched(encode: Any, texts: Sequence[str]) -> list[Any]:
  """The library's encodings of texts, without added tokens."""
  encoded = []
  start = size = 0
  for stop, text in enumerate(texts, 1):
    size += len(text)
    if size >= _BATCH or stop == len(texts):
      encoded += encode(list(texts[start:stop]), add_special_tokens=False)
      start, size = stop, 0
  return encoded


def _content(path: str) -> bytes:
  try:
    return pathlib.Path(path).expanduser().read_bytes()
  except OSError as error:
    raise UserError(
      f"task.tokenizer={path}: cannot be read ({error.strerror}); expected "
      "'bytes' or the path of a tokenizer.json"
    ) from None


@functools.lru_cache(maxsize=2)
def _load(path: str, content: bytes) -> tuple[Any, tuple[bytes, ...]]:
  """The library's tokenizer of a `tokenizer.json`, and `_pieces` of it."""
  if wrong := checks.wrong_file(content):
    raise UserError(f"task.tokenizer={path}: {wrong}")
  what = f"task.tokenizer={path}: needs"
  with needing("tokenizers", "lm", what, "set task.tokenizer=bytes"):
    import tokenizers
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # The library raises nothing more specific.
    raise UserError(
      f"task.tokenizer={path}: is not a tokenizer.json ({one_line(error)})"
    ) from None
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer, _pieces(tokenizer)


def _pieces(tokenizer: Any) -> tuple[bytes, ...]:
  """The bytes that each id of a tokenizer stands for."""
  words = tokenizer.get_vocab(with_added_tokens=True)
  settings = json.loads(tokenizer.to_str())
  added = {token["id"] for token in settings["added_tokens"]}
  by_byte = '"ByteLevel"' in json.dumps(settings["decoder"])
  pieces = [b""] * (1 + max(words.values()))
  for word, index in words.items():
    if by_byte and index not in added:
      pieces[index] = b"".join(BYTES.get(x) or x.encode() for x in word)
    elif found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", word):
      pieces[index] = bytes.fromhex(found[1])  # Byte fallback.
    else:
      pieces[index] = word.replace("\u2581", " ").encode()
  return tuple(pieces)


def _byte_characters() -> dict[str, bytes]:
  """The characters that byte-level tokenizers use for bytes, as in GPT-2."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = sorted(set(range(256)) - set(shown))
  characters = [*map(chr, shown), *(chr(256 + i) for i in range(len(others)))]
  return {
    character: bytes([byte])
    for character, byte in zip(characters, [*shown, *others], strict=True)
  }


BYTES = _byte_characters()
