"""Tokenizers in the metadata of GGUF files: from and to tokenizer.json.

They mean what llama.cpp's `src/llama-vocab.cpp` says: "gpt2" is byte-level
BPE, "llama" SentencePiece's BPE. What tokenizer.json could not express exactly,
or the metadata, is refused.
"""

import contextlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopjax.data.text import chat
from loopjax.errors import UserError
from loopjax.hub import tokenizer_files
from loopjax.run import workdir as workdir_lib

_NORMAL, _UNKNOWN, _CONTROL, _USER, _PADDING, _BYTE = range(1, 7)
_SPACE = "\u2581"
_REFUSED = "; put its tokenizer.json beside the file"


class _Splits(NamedTuple):
  """How a byte-level tokenizer splits a text before it merges bytes.

  Attributes:
    before: a pre-tokenizer of tokenizer.json before the one of bytes.
    by_bytes: whether that one splits as GPT-2's.
    normalizer: of tokenizer.json.
    is_llama3: whether words of the vocabulary need no merges, and a begin token
      is added by default.
  """

  before: Mapping[str, Any] | None = None
  by_bytes: bool = True
  normalizer: Mapping[str, Any] | None = None
  is_llama3: bool = False


def _by(digits: str) -> dict[str, Any]:
  pattern = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
  )
  return {
    "type": "Split",
    "pattern": {"Regex": pattern},
    "behavior": "Isolated",
    "invert": False,
  }


# By `tokenizer.ggml.pre`.
_SPLITS: Mapping[str, _Splits] = {
  "gpt-2": _Splits(),
  "smollm": _Splits({"type": "Digits", "individual_digits": True}),
  "llama-bpe": _Splits(_by(r"\p{N}{1,3}"), False, is_llama3=True),
  "qwen2": _Splits(_by(r"\p{N}"), False, {"type": "NFC"}),
}


def id_key(name: str) -> str:
  """The key of the id of a special token, as "eos"."""
  return f"tokenizer.ggml.{_key(name)}"


def _key(name: str) -> str:
  return f"{name}_token_id"


def token_of(found: Mapping[str, Any], name: str) -> str | None:
  """A special token; None if it has no id, or there are no tokens."""
  tokens, index = found.get("tokenizer.ggml.tokens"), found.get(id_key(name))
  if tokens is None or index is None:
    return None
  if not 0 <= index < len(tokens):
    raise UserError(f"{id_key(name)}={index} is not the id of a token")
  return tokens[index]


def tokenizer(found: Mapping[str, Any]) -> dict[str, Any]:
  """The tokenizer.json of metadata."""
  given: dict[str, Any] = {
    key.removeprefix("tokenizer.ggml."): value for key, value in found.items()
  }
  get, model, name = given.get, given.get("model"), given.get("pre", "")
  tokens: Sequence[str] = get("tokens") or ()
  if get("add_eos_token"):
    raise UserError(f"tokenizer.ggml.add_eos_token is not supported{_REFUSED}")
  if model == "gpt2" and name in _SPLITS:
    parts = _byte_level(_SPLITS[name], get("merges") or ())
    begins = _SPLITS[name].is_llama3
  elif model == "llama":
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
      if get(key):
        raise UserError(f"tokenizer.ggml.{key} is not supported{_REFUSED}")
    if len(get("scores") or ()) != len(tokens):
      raise UserError(f"tokenizer.ggml.scores is incomplete{_REFUSED}")
    parts = _sentencepiece(get, token_of(found, "unknown"))
    begins = True
  else:
    raise UserError(
      f"tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={name!r} is not"
      f" supported{_REFUSED}"
    )
  parts["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
  types = get("token_type") or [_NORMAL] * len(tokens)
  post: dict[str, Any] | None = None
  if get("add_bos_token", begins):
    token = token_of(found, "bos")
    if token is None:
      raise UserError(f"{id_key('bos')} is missing{_REFUSED}")
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    ids = {"id": token, "ids": [get("bos_token_id")], "tokens": [token]}
    post = {
      "type": "TemplateProcessing",
      "single": [first, text],
      "pair": [first, text, first, other],
      "special_tokens": {token: ids},
    }
  flags = dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
  )
  added = [
    {"id": i, "content": token, **flags, "special": kind != _USER}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
    if kind in (_CONTROL, _USER, _UNKNOWN)
  ]
  whole = {"version": "1.0", "truncation": None, "padding": None}
  return {**whole, "added_tokens": added, **parts, "post_processor": post}


def _byte_level(splits: _Splits, merges: Sequence[str]) -> dict[str, Any]:
  """Parts of a tokenizer.json of GPT-2's kind."""
  split: dict[str, Any] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": splits.by_bytes,
  }
  if splits.before:
    split = {"type": "Sequence", "pretokenizers": [splits.before, split]}
  return {
    "normalizer": splits.normalizer,
    "pre_tokenizer": split,
    "decoder": {
      "type": "ByteLevel",
      "add_prefix_space": True,
      "trim_offsets": True,
      "use_regex": True,
    },
    "model": {
      "type": "BPE",
      "merges": [merge.split(" ") for merge in merges],
      "ignore_merges": splits.is_llama3,
    },
  }


def _sentencepiece(get: Any, unknown: str | None) -> dict[str, Any]:
  """Parts of a tokenizer.json of SentencePiece's BPE.

  It merges the two neighbours whose whole has the highest score.
  """
  tokens, scores = get("tokens"), get("scores")
  types = get("token_type") or [_NORMAL] * len(tokens)
  pieces = {
    token: score
    for token, score, kind in zip(tokens, scores, types, strict=True)
    if kind == _NORMAL
  }
  merges = sorted(
    (-score, -at, token[:at], token[at:])
    for token, score in pieces.items()
    for at in range(1, len(token))
    if token[:at] in pieces and token[at:] in pieces
  )
  wholes = {left + right: score for score, _, left, right in merges}
  if len({*wholes.values()}) < len(wholes):
    raise UserError(f"tokenizer.ggml.scores are not distinct{_REFUSED}")
  is_prefixed = get("add_space_prefix", True)
  to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
  from_space = {**to_space, "pattern": {"String": _SPACE}, "content": " "}
  prefix = {"type": "Prepend", "prepend": _SPACE}
  strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
  return {
    "normalizer": {
      "type": "Sequence",
      "normalizers": [prefix, to_space] if is_prefixed else [to_space],
    },
    "pre_tokenizer": None,
    "decoder": {
      "type": "Sequence",
      "decoders": [
        from_space, {"type": "ByteFallback"}, {"type": "Fuse"},
        *([strip] if is_prefixed else []),
      ],
    },
    "model": {
      "type": "BPE",
      "unk_token": unknown,
      "fuse_unk": True,
      "byte_fallback": _BYTE in types,
      "merges": [list(pair) for _, _, *pair in merges],
    },
  }  # fmt: skip


def metadata(
  folder: pathlib.Path, vocab_size: int, ends: Sequence[int]
) -> dict[str, Any]:
  """The metadata of a folder's tokenizer, and tokenizer.json itself.

  Args:
    folder: has the files of a tokenizer.
    vocab_size: number of ids of the model; tokens that the tokenizer lacks are
      padding.
    ends: ids of the tokens that end a text.

  Raises:
    UserError: llama.cpp would encode texts in another way.
  """
  import tokenizers

  path = folder / tokenizer_files.TOKENIZER
  content = workdir_lib.read_json(path)
  library = tokenizers.Tokenizer.from_file(str(path))
  words = {i: word for word, i in library.get_vocab().items()}
  model, begin = content["model"], tokenizer_files.beginning(folder)
  types = [_NORMAL if i in words else _PADDING for i in range(vocab_size)]
  for i, word in words.items():
    if model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", word):
      types[i] = _BYTE
  for one in content["added_tokens"]:
    is_unknown = one["content"] == model.get("unk_token")
    kind = _CONTROL if one["special"] else _USER
    types[one["id"]] = _UNKNOWN if is_unknown else kind
  common: dict[str, Any] = {
    "tokens": [words.get(i, f"[PAD{i}]") for i in range(vocab_size)],
    "token_type": types,
    "add_bos_token": begin.add_begin_token,
    **dict(zip(map(_key, ("eos", "eot", "eom")), ends, strict=False)),
    **{
      _key(name): library.token_to_id(word)
      for name, word in (
        ("bos", begin.begin_token), ("unknown", model.get("unk_token"))
      )
      if word
    },
  }  # fmt: skip
  merges = _merges(content)
  ranks = {"".join(pair): -i for i, pair in reversed([*enumerate(merges)])}
  scores = [float(ranks.get(x, -len(merges))) for x in common["tokens"]]
  pairs = [" ".join(pair) for pair in merges]
  kinds: list[dict[str, Any]] = [
    *({"model": "gpt2", "pre": x, "merges": pairs} for x in _SPLITS),
    {"model": "llama", "scores": scores},
  ]
  for own in kinds:
    found = {f"tokenizer.ggml.{k}": v for k, v in {**common, **own}.items()}
    with contextlib.suppress(UserError):
      if _essence(tokenizer(found)) == _essence(content):
        whole = json.dumps(content, ensure_ascii=False)
        template = chat.template_source(folder)
        said = {"tokenizer.chat_template": template} if template else {}
        return {**found, **said, "tokenizer.huggingface.json": whole}
  raise UserError(
    "its tokenizer cannot be expressed in a GGUF file exactly: only byte-level"
    f" BPE that splits texts as {', '.join(_SPLITS)}, and SentencePiece's BPE"
  )


def _merges(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
  merges = content["model"].get("merges") or ()
  return [tuple(x.split(" ") if isinstance(x, str) else x) for x in merges]


def _essence(content: Mapping[str, Any]) -> Any:
  """What decides how a tokenizer.json encodes, besides its vocabulary."""

  def plain(part: Any) -> Any:
    if not isinstance(part, Mapping):
      return part
    for name in ("pretokenizers", "normalizers"):
      if len(part.get(name) or ()) == 1:
        return plain(part[name][0])
      if name in part:
        return [plain(one) for one in part[name]]
    default = {"use_regex": True} if part.get("type") == "ByteLevel" else {}
    kept = {k: v for k, v in part.items() if k != "trim_offsets"}
    return {**default, **kept}

  model = content["model"]
  return (
    model["type"],
    plain(content.get("normalizer")),
    plain(content.get("pre_tokenizer")),
    _merges(content),
    *(bool(model.get(x)) for x in ("ignore_merges", "byte_fallback")),
  )
