"""Tokenizers: bytes, and any `tokenizer.json`.

Two ids are added to the tokenizer's: the end token, which also precedes every
document, and padding. None are added if documents end with a token of the
tokenizer, as in published models; that token then also serves as padding.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from loopjax.errors import UserError, one_line

_BATCH = 1 << 20  # Characters at a time; encodings are far larger than text.


class Tokenizer:
  """Text to token ids.

  Attributes:
    name: "bytes" or the path of a file.
    key: checksum of the file's content, and the token that ends documents.
    end, padding: ids of the end of a document and of padding.
    num_ids: number of ids, including end and padding.
    num_real: number of ids that a model may predict; they precede an added
      padding id.
    num_bytes: int64 [num_ids], the UTF-8 bytes that an id stands for; 0 for
      end and padding. Approximate if the tokenizer normalises text.
  """

  def __init__(self, name: str, end_token: str = ""):
    """Raises UserError if the file cannot be read or lacks `end_token`."""
    self.name = name
    self._library: Any = None
    if name == "bytes":
      self.key, sizes = "bytes", np.ones(256, np.int64)
    else:
      content = _content(name)
      self.key = hashlib.sha256(content).hexdigest()
      self._library = _load(name, content)
      sizes = _sizes(self._library)
    if not end_token:
      self.end, self.padding = len(sizes), len(sizes) + 1
      self.num_ids, self.num_real = len(sizes) + 2, len(sizes) + 1
      self.num_bytes = np.append(sizes, [0, 0])
      return
    end = self._library.token_to_id(end_token) if self._library else None
    if end is None:
      raise UserError(f"task.end_token={end_token!r} is no token of {name}")
    self.key += f"-{end}"
    self.end = self.padding = end
    self.num_ids = self.num_real = len(sizes)
    self.num_bytes = np.where(np.arange(len(sizes)) == end, 0, sizes)

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text, int [n], without end tokens."""
    if self._library is None:
      return [np.frombuffer(text.encode(), np.uint8) for text in texts]
    encoded = []
    start = size = 0
    for stop, text in enumerate(texts, 1):
      size += len(text)
      if size >= _BATCH or stop == len(texts):
        batch = self._library.encode_batch_fast(
          list(texts[start:stop]), add_special_tokens=False
        )
        encoded += [np.array(one.ids, np.int64) for one in batch]
        start, size = stop, 0
    return encoded

  def token(self, index: int) -> str | None:
    """The token string of an id; None if the tokenizer has no such id."""
    return self._library.id_to_token(index) if self._library else None

  def count_bytes(self, ids: np.ndarray) -> int:
    """UTF-8 bytes that encoded text stands for: the sum of `num_bytes`."""
    if self._library is None:
      return len(ids)
    return int(self.num_bytes[ids].sum())

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes ids, dropping added ones; invalid UTF-8 becomes U+FFFD."""
    if self._library is None:
      return bytes(one for one in ids if one < 256).decode(errors="replace")
    return self._library.decode(list(ids), skip_special_tokens=False)


def _content(path: str) -> bytes:
  try:
    return pathlib.Path(path).read_bytes()
  except OSError as error:
    raise UserError(
      f"task.tokenizer={path}: cannot be read ({error.strerror}); give"
      " 'bytes' or the path of a tokenizer.json"
    ) from None


@functools.lru_cache(maxsize=2)
def _load(path: str, content: bytes) -> Any:
  """The library's tokenizer of a `tokenizer.json`."""
  try:
    import tokenizers
  except ImportError:
    raise UserError(
      f"task.tokenizer={path}: needs the package tokenizers; install it with"
      " pip install 'loopjax[lm]', or set task.tokenizer=bytes"
    ) from None
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # The library raises nothing narrower.
    raise UserError(
      f"task.tokenizer={path}: is not a tokenizer.json ({one_line(error)})"
    ) from None
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer


def _sizes(tokenizer: Any) -> np.ndarray:
  """UTF-8 bytes that each id of a tokenizer stands for, int64 [ids]."""
  words = tokenizer.get_vocab(with_added_tokens=True)
  settings = json.loads(tokenizer.to_str())
  added = {token["id"] for token in settings["added_tokens"]}
  by_byte = '"ByteLevel"' in json.dumps(settings["decoder"])
  sizes = np.zeros(1 + max(words.values()), np.int64)
  for word, index in words.items():
    if by_byte and index not in added:
      sizes[index] = len(word)  # One character per byte.
    elif len(word) == 6 and word.startswith("<0x"):
      sizes[index] = 1  # Byte fallback.
    else:
      sizes[index] = len(word.replace("\u2581", " ").encode())
  return sizes
