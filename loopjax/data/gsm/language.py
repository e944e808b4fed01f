"""Writes quantities, statements, questions and answers as tokens.

A quantity is "the barrels in Gullwick" or "all goods in Gullwick". A statement
says that it equals a number, an unknown, or a function of one to three
operands: "the barrels in Gullwick equal the ropes in Codmole plus 1 2 .".
Numbers are digits without a leading zero.
Three themes have words for the items counted and for their places.
"""

import re
import typing
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Theme(typing.NamedTuple):
  """Words of a theme.

  Attributes:
    everything: the word for all items together.
    items: 40 kinds of items.
    places: 64 names of places.
  """

  everything: str
  items: tuple[str, ...]
  places: tuple[str, ...]


def _compounds(starts: str, ends: str) -> tuple[str, ...]:
  return tuple(start + end for start in starts.split() for end in ends.split())


_HARBOURS = Theme(
  "goods",
  (
    "anchors", "bales", "barrels", "beams", "bells", "bricks", "buckets",
    "buoys", "cables", "candles", "carpets", "casks", "chains", "chests",
    "compasses", "crates", "drums", "engines", "flags", "hammers", "hooks",
    "kegs", "ladders", "lanterns", "masts", "nets", "oars", "pipes", "planks",
    "pulleys", "ropes", "rudders", "sacks", "sails", "saws", "shovels", "tents",
    "tiles", "whistles", "winches",
  ),
  _compounds(
    "Gull Tern Cod Foam Tide Salt Keel Mast",
    "wick haven mole quay ness port cove strand",
  ),
)  # fmt: skip

_LIBRARIES = Theme(
  "books",
  (
    "almanacs", "annuals", "atlases", "ballads", "catalogues", "chronicles",
    "codices", "comics", "cookbooks", "diaries", "dictionaries", "digests",
    "dramas", "elegies", "epics", "essays", "fables", "folios", "gazettes",
    "glossaries", "grammars", "guidebooks", "handbooks", "hymnals", "journals",
    "ledgers", "legends", "letters", "manuals", "manuscripts", "memoirs",
    "monographs", "novels", "pamphlets", "psalters", "romances", "sagas",
    "satires", "scrolls", "sonnets",
  ),
  _compounds(
    "Ink Quill Vellum Page Script Lore Verse Rune",
    "hall court gate house keep yard tower loft",
  ),
)  # fmt: skip

_ORCHARDS = Theme(
  "fruits",
  (
    "apples", "apricots", "bananas", "brambles", "cherries", "cranberries",
    "currants", "damsons", "dates", "elderberries", "figs", "gooseberries",
    "grapefruits", "grapes", "guavas", "kiwis", "kumquats", "lemons", "limes",
    "lychees", "mandarins", "mangoes", "medlars", "melons", "mulberries",
    "nectarines", "olives", "oranges", "papayas", "peaches", "pears",
    "persimmons", "plums", "pomegranates", "pomelos", "quinces", "raspberries",
    "satsumas", "strawberries", "tangerines",
  ),
  _compounds(
    "Bee Dew Sun Moss Fern Lark Clover Thistle",
    "field dale croft hill brook mead dell grove",
  ),
)  # fmt: skip

THEMES = (_HARBOURS, _LIBRARIES, _ORCHARDS)
NUM_ITEMS, NUM_PLACES = 40, 64


ABSENT, CONSTANT, EQUAL, PLUS, TIMES, SUM, DIFFERENCE, TOTAL, UNKNOWN = range(9)
NUM_DIGITS = 3
MAX_OPERANDS = 3

_DIGITS = tuple("0123456789")  # Their ids are their values.
_FUNCTION_WORDS = (
  "END", "ANS", "the", "all", "in", "equal", "plus", "minus", "times",
  "something", ".", "how", "many", "are", "?", "only", "named", "here", "count",
)  # fmt: skip
_THEME_WORDS = tuple((t.everything, *t.items, *t.places) for t in THEMES)
_TEXTS = (
  *_DIGITS,
  *_FUNCTION_WORDS,
  *(w for part in _THEME_WORDS for w in part),
)
_FIRST_THEME = len(_DIGITS) + len(_FUNCTION_WORDS)
_NUM_THEME_WORDS = len(_THEME_WORDS[0])
PADDING = len(_TEXTS)


class Statements(NamedTuple):
  """Statements about S quantities of each of B examples.

  Attributes:
    kinds: ABSENT, ..., UNKNOWN, int [B, S]; ABSENT ones have no statement, and
      neither has a TOTAL, which follows from its items.
    numbers: number of a CONSTANT, PLUS or TIMES, int [B, S].
    num_operands: int [B, S].
    operands: indices of the operands' quantities, int [B, S, 3].
  """

  kinds: np.ndarray
  numbers: np.ndarray
  num_operands: np.ndarray
  operands: np.ndarray


def word(text: str) -> int:
  """Id of a token."""
  return _TEXTS.index(text)


END, ANSWER = word("END"), word("ANS")
# Tokens of a question with the remark on totals, of the longest statement with
# one operation, and of a constant or given total without its digits.
QUESTION_LENGTH = 14
EQUAL_LENGTH = 10
CONSTANT_LENGTH = 6
# Tokens of a statement about two quantities, the longest of a distractor, and
# of the shortest statement.
PAIR_LENGTH = 15
SHORTEST_LENGTH = CONSTANT_LENGTH + 1


def quantities(
  themes: np.ndarray, items: np.ndarray, places: np.ndarray
) -> np.ndarray:
  """Names of quantities.

  Args:
    themes: number of each example's theme, int [B].
    items: numbers of items, int [B, S]; -1 for all items of the place.
    places: numbers of places, int [B, S].

  Returns:
    Token ids i32 [B, S, 4].
  """
  first = (_FIRST_THEME + _NUM_THEME_WORDS * themes)[:, None]
  parts = [
    np.where(items < 0, word("all"), word("the")),
    first + 1 + items,  # The word for all items precedes them.
    np.full(items.shape, word("in")),
    first + 1 + NUM_ITEMS + places,
  ]
  return np.stack(parts, axis=2).astype(np.int32)


def questions(themes: np.ndarray, quantities: np.ndarray) -> np.ndarray:
  """A question, with the remark that totals cover what the text mentions.

  Args:
    themes: int [B].
    quantities: names of quantities, i32 [B, 4].

  Returns:
    Token ids i32 [B, 14].
  """
  everything = _FIRST_THEME + _NUM_THEME_WORDS * themes[:, None]

  def column(text):
    return np.full_like(everything, word(text))

  before = [column(text) for text in ("how", "many", "are")]
  rule = [column(text) for text in ("named", "here", "count", ".")]
  parts = [*before, quantities, column("?"), column("only"), everything, *rule]
  return np.concatenate(parts, axis=1).astype(np.int32)


def statements(stated: Statements, names: np.ndarray) -> np.ndarray:
  """Tokens of statements, each in W positions, enough for the longest.

  Args:
    stated: the contents of the statements.
    names: names of the quantities that the statements are about, i32 [B, S, 4].

  Returns:
    Token ids i32 [B, S, W]; `present` gives the ones used.
  """
  shape = stated.kinds.shape
  operators = np.array([word("plus")] * (UNKNOWN + 1))
  operators[[TIMES, DIFFERENCE]] = word("times"), word("minus")
  operator = operators[stated.kinds][..., None]
  digits, _ = number(stated.numbers)
  digits[stated.kinds == UNKNOWN] = word("something")
  rows = np.arange(len(names))[:, None]
  tokens = [names, np.full((*shape, 1), word("equal"))]
  for place in range(MAX_OPERANDS):
    tokens += [names[rows, stated.operands[:, :, place]], operator]
  tokens += [digits, np.full((*shape, 1), word("."))]
  return np.concatenate(tokens, axis=2).astype(np.int32)


def present(stated: Statements) -> np.ndarray:
  """Which tokens of `statements` are used, bool [B, S, W]."""
  kinds, num_operands = stated.kinds, stated.num_operands
  shape = kinds.shape
  _, has_digit = number(stated.numbers)
  has_digit &= np.isin(kinds, (CONSTANT, PLUS, TIMES))[..., None]
  has_digit[..., -1] |= kinds == UNKNOWN
  has_number = has_digit[..., -1] & (num_operands > 0)
  parts = [np.ones((*shape, 5), bool)]
  for place in range(MAX_OPERANDS):
    is_there = num_operands > place
    continues = (num_operands > place + 1) | (has_number & (place == 0))
    parts += [np.repeat(is_there[..., None], 4, axis=2), continues[..., None]]
  parts += [has_digit, np.ones((*shape, 1), bool)]
  is_stated = (kinds != ABSENT) & (kinds != TOTAL)
  return np.concatenate(parts, axis=2) & is_stated[..., None]


def number(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Digits of numbers below 1000.

  Returns:
    Token ids i32 [..., 3], and which are used (not leading zeros), bool.
  """
  powers = 10 ** np.arange(NUM_DIGITS)[::-1]
  digits = values[..., None] // powers % 10
  return digits.astype(np.int32), values[..., None] >= powers * (powers > 1)


def text(tokens: Iterable[int]) -> str:
  """Tokens as text without padding, one sentence per line."""
  plain = " ".join(_TEXTS[i] for i in map(int, tokens) if i < PADDING)
  joined = re.sub(r"(?<=\d) (?=\d)", "", plain)
  return re.sub(r"(?<=[.?]) ", "\n", joined)
