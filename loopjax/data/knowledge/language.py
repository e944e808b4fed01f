"""Sentences and questions about people, in a vocabulary of words.

Every value of an attribute is one token; a birth date is three. A sentence is a
subject (a full name or a pronoun), a phrase, a value and a full stop. A
question is a full name between words, and its answer is the value.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from loopjax.data.multihop.language import NAMES


def _pairs(
  starts: str, ends: str, num: int, between: str = ""
) -> tuple[str, ...]:
  """The first `num` pairs; neighbours differ in both parts."""
  first, second = starts.split(), ends.split()
  pairs = [
    start + between + second[(index + shift) % len(second)]
    for shift in range(len(second))
    for index, start in enumerate(first)
  ]
  return tuple(pairs[:num])


# The texts of the tokens of each kind. The numbers of values are from bioS
# (arXiv 2404.05405).
VALUES: dict[str, tuple[str, ...]] = {
  "first name": NAMES[:400],
  "middle name": NAMES[400:800],
  "last name": tuple(name + "son" for name in NAMES[800:1800]),
  "month": (
    "January", "February", "March", "April", "May", "June", "July", "August",
    "September", "October", "November", "December",
  ),
  "day": tuple(str(day) for day in range(1, 29)),
  "year": tuple(str(year) for year in range(1900, 2100)),
  "city": _pairs(
    "Ash Birch Bright Cold Copper Crow East Elm Fair Fox Glen Gold Green High"
    " King Long North Oak Red River Rose Silver South Stone West",
    "bridge brook burg bury dale field ford gate ham haven hill mouth port"
    " stead ton ville",
    200,
  ),
  "university": tuple(
    f"University of {place}"
    for place in _pairs(
      "Alder Amber Arch Bay Bell Black Briar Clear Cliff Deer Dun Eagle Fern"
      " Flint Frost Harrow Hazel Iron Lake Linden Maple Marble Moor Pine Wolf",
      "bank borough cliff cross crest fall grove land mere moor point ridge"
      " side wick wood worth",
      300,
    )
  ),
  "major": _pairs(
    "Applied Comparative Computational Experimental General Historical Modern"
    " Quantitative Social Theoretical",
    "Anthropology Biology Chemistry Economics Geography Linguistics Mathematics"
    " Philosophy Physics Psychology",
    100,
    " ",
  ),
  "employer": _pairs(
    "Aero Agri Astro Bio Cargo Data Delta Electro Euro Geo Hydro Inter Macro"
    " Medi Micro Nano Neuro Omni Opti Poly Quanta Solar Techno Terra Trans"
    " Ultra Vita",
    "com corp dyne gen graph kinetics lab line logic mark matic media metrics"
    " net nova plex scape soft sphere star sys tec tron works",
    263,
  ),
}  # fmt: skip


ABSENT = -1  # Marks unused positions in arrays of tokens.


class Attribute(NamedTuple):
  """An attribute of a person, with its phrases and question.

  Attributes:
    kinds: kinds of the tokens of a value, keys of VALUES.
    phrases: possible texts between the subject and the value.
    question: texts before and after the name.
  """

  kinds: tuple[str, ...]
  phrases: tuple[str, ...]
  question: tuple[str, str]


ATTRIBUTES = {
  "birth_date": Attribute(
    ("month", "day", "year"),
    (
      "was born on",
      "came into the world on",
      "has a birthday on",
      "began life on",
      "entered the world on",
    ),
    ("When was", "born"),
  ),
  "birth_city": Attribute(
    ("city",),
    (
      "was born in",
      "spent the first years in",
      "comes from",
      "grew up in",
      "is a native of",
    ),
    ("Where was", "born"),
  ),
  "university": Attribute(
    ("university",),
    (
      "studied at",
      "graduated from",
      "received a degree from",
      "was a student at",
      "completed an education at",
    ),
    ("Where did", "study"),
  ),
  "major": Attribute(
    ("major",),
    (
      "studied",
      "majored in",
      "specialised in",
      "took courses in",
      "earned a degree in",
    ),
    ("What did", "study"),
  ),
  "employer": Attribute(
    ("employer",),
    (
      "works for",
      "is employed by",
      "has a position at",
      "joined the staff of",
      "built a career at",
    ),
    ("Who employs", ""),
  ),
  "work_city": Attribute(
    ("city",),
    (
      "works in",
      "has an office in",
      "is employed in",
      "pursues a career in",
      "goes to work in",
    ),
    ("Where does", "work"),
  ),
}
NAME = ("first name", "middle name", "last name")
NUM_PHRASES = 5  # Phrases of every attribute.
NUM_VALUE_TOKENS = 3  # Maximum tokens of a value.
PRONOUNS = ("He", "She")
# Tokens of the longest sentence and of the shortest question with its answer.
MAX_SENTENCE = (
  len(NAME)
  + max(len(p.split()) for a in ATTRIBUTES.values() for p in a.phrases)
  + NUM_VALUE_TOKENS
  + 1
)
MIN_QUESTION = (
  len(NAME)
  + min(len(" ".join(a.question).split()) for a in ATTRIBUTES.values())
  + 2
)


class Vocabulary(NamedTuple):
  """Token ids: values by kind, other words, the end of a document, padding.

  Attributes:
    texts: texts of all ids before the end of a document.
    starts: the first id of each kind of value.
    words: the id of each other word.
    size: including padding, a multiple of 128.
  """

  texts: tuple[str, ...]
  starts: dict[str, int]
  words: dict[str, int]
  size: int

  @property
  def end(self) -> int:
    """Id of the end token, which ends every document and precedes the first."""
    return len(self.texts)

  @property
  def padding(self) -> int:
    """The first id that is not a token."""
    return len(self.texts) + 1


@functools.lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
  """The vocabulary, the same for all settings."""
  texts: list[str] = []
  starts = {}
  for kind, values in VALUES.items():
    starts[kind] = len(texts)
    texts += values
  used = {".": None, "?": None, **dict.fromkeys(PRONOUNS)}
  for attribute in ATTRIBUTES.values():
    for phrase in (*attribute.phrases, *attribute.question):
      used.update(dict.fromkeys(phrase.split()))
  ids = {word: len(texts) + i for i, word in enumerate(used)}
  texts += used
  return Vocabulary(
    tuple(texts), starts, ids, -(-(len(texts) + 2) // 128) * 128
  )


def sentences(
  subjects: np.ndarray,
  attributes: np.ndarray,
  phrases: np.ndarray,
  values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Sentences that state values.

  Args:
    subjects: token ids int [N, 3], ABSENT after a pronoun.
    attributes: int [N].
    phrases: int [N], below NUM_PHRASES.
    values: token ids int [N, 3], ABSENT where a value is shorter.

  Returns:
    Token ids int [N, W], ABSENT where a sentence is shorter; and which
    positions belong to the value, bool [W].
  """
  phrase = _tables()[0][attributes, phrases]
  stop = np.full((len(subjects), 1), vocabulary().words["."])
  tokens = np.concatenate([subjects, phrase, values, stop], axis=1)
  width = tokens.shape[1]
  place = np.arange(width)
  return tokens, (place >= width - 1 - NUM_VALUE_TOKENS) & (place < width - 1)


def questions(
  names: np.ndarray, attributes: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Questions and their answers; arguments and results as in `sentences`."""
  _, before, after = _tables()
  mark = np.full((len(names), 1), vocabulary().words["?"])
  tokens = np.concatenate(
    [before[attributes], names, after[attributes], mark, values], axis=1
  )
  width = tokens.shape[1]
  return tokens, np.arange(width) >= width - NUM_VALUE_TOKENS


def biographies(
  names: np.ndarray,
  pronouns: np.ndarray,
  values: np.ndarray,
  order: np.ndarray,
  phrases: np.ndarray,
) -> np.ndarray:
  """Texts that state all attributes of a person, the first with the name.

  Args:
    names: token ids int [N, 3].
    pronouns: subjects of the other sentences, token ids int [N].
    values: token ids int [N, attributes, 3].
    order: order of the attributes, int [N, attributes].
    phrases: phrases of each sentence, int [N, attributes].

  Returns:
    Token ids int [N, W], ABSENT where a text is shorter.
  """
  num, num_attributes = order.shape
  subjects = np.full((num, num_attributes, names.shape[1]), ABSENT)
  subjects[..., 0] = pronouns[:, None]
  subjects[:, 0] = names
  stated = np.take_along_axis(values, order[..., None], axis=1)
  tokens, _ = sentences(
    subjects.reshape(-1, names.shape[1]),
    order.ravel(),
    phrases.ravel(),
    stated.reshape(-1, NUM_VALUE_TOKENS),
  )
  return tokens.reshape(num, -1)


def decode(ids: Iterable[int]) -> str:
  """Token ids as text, one document per line, without padding."""
  vocab = vocabulary()
  texts = (*vocab.texts, "\n")
  known = [texts[i] for i in map(int, ids) if i < vocab.padding]
  return " ".join(known).replace(" \n ", "\n").strip()


@functools.lru_cache(maxsize=1)
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Phrases [attributes, phrases, W], and questions before and after the name.

  The latter are [attributes, W]. All are token ids, ABSENT after the last.
  """
  attributes = ATTRIBUTES.values()
  phrases = _ids([p for a in attributes for p in a.phrases])
  before, after = zip(*(a.question for a in attributes), strict=True)
  shape = len(ATTRIBUTES), NUM_PHRASES, -1
  return phrases.reshape(shape), _ids(before), _ids(after)


def _ids(texts: Iterable[str]) -> np.ndarray:
  """Token ids of the words of texts, int [texts, W], ABSENT after the last."""
  rows = [[vocabulary().words[word] for word in text.split()] for text in texts]
  ids = np.full((len(rows), max(map(len, rows))), ABSENT)
  for row, word_ids in zip(ids, rows, strict=True):
    row[: len(word_ids)] = word_ids
  return ids
