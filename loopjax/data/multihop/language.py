"""Writes questions as symbols, or in English in two orders.

symbolic: a r1 r2. direct: "Finley 's teacher 's wife is". reverse: "Who is the
wife of the teacher of Finley ? \\n Answer:"; single facts are in the direct
form. The next token is the answer (DiscoLoop, sections 3.1 and 5.2).
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

_STARTS = (
  "Al", "An", "Ar", "Bel", "Ber", "Bran", "Cal", "Car", "Cor", "Dar", "Del",
  "Dor", "El", "Em", "Er", "Fal", "Fen", "Fin", "Gal", "Gar", "Gwen", "Hal",
  "Har", "Hel", "Il", "Is", "Jan", "Jor", "Jul", "Kal", "Kar", "Kel", "Lan",
  "Lor", "Lu", "Mal", "Mar", "Mel", "Nal", "Nor", "Ol", "Or", "Pal", "Per",
  "Quin", "Ral", "Ren", "Ros", "Sal", "Sel", "Sor", "Tal", "Tor", "Ul", "Val",
  "Ver", "Wal", "Wil", "Yor", "Zel",
)  # fmt: skip
_ENDS = (
  "a", "an", "ana", "anne", "ar", "ard", "as", "ea", "ek", "ela", "ella", "en",
  "ena", "er", "eth", "ia", "ian", "ic", "ida", "iel", "ik", "ila", "in", "ina",
  "ira", "is", "ita", "ix", "o", "ola", "on", "ona", "or", "ora", "os", "otta",
  "ric", "us", "wen", "yn",
)  # fmt: skip

# No start is a prefix of another: all names differ. Neighbours differ in both
# start and end.
NAMES = tuple(
  start + _ENDS[(index + shift) % len(_ENDS)]
  for shift in range(len(_ENDS))
  for index, start in enumerate(_STARTS)
)

RELATIONS = (
  "teacher", "wife", "boss", "mentor", "doctor", "neighbour", "landlord",
  "tenant", "coach", "lawyer", "barber", "dentist", "cousin", "uncle", "aunt",
  "nephew", "niece", "brother", "sister", "father", "mother", "son", "daughter",
  "husband", "friend", "rival", "partner", "colleague", "assistant",
  "secretary", "tutor", "student", "apprentice", "client", "patient", "nurse",
  "driver", "gardener", "tailor", "baker", "banker", "editor", "publisher",
  "agent", "manager", "trainer", "guide", "host", "guest", "sponsor",
)  # fmt: skip


_POSSESSIVE = ("'s", "is")
_QUESTION = ("Who", "the", "of", "?", "\n", "Answer:")
FORMATS = {
  "symbolic": (),
  "direct": _POSSESSIVE,
  "reverse": _POSSESSIVE + _QUESTION,
}


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Token ids: entities, relations, the format's words, padding at the end.

  Attributes:
    num_entities: entities of both graphs together.
    num_relations: relations, which both graphs share.
    format: a key of FORMATS.
    multiple: the size is padded to a multiple of this.
  """

  num_entities: int
  num_relations: int
  format: str
  multiple: int = 1

  @property
  def padding(self) -> int:
    """The first id that is not a real token; it pads short questions."""
    return self.num_entities + self.num_relations + len(FORMATS[self.format])

  @property
  def size(self) -> int:
    return -(-(self.padding + 1) // self.multiple) * self.multiple

  def word(self, text: str) -> int:
    """Id of one of the format's words."""
    before = self.num_entities + self.num_relations
    return before + FORMATS[self.format].index(text)


def layout(format: str, hops: int) -> tuple[int | str, ...]:
  """Layout of a question of k hops.

  Returns:
    For every position a word, 0 for the first entity, or j for relation j.
  """
  relations = range(1, hops + 1)
  if format == "symbolic":
    return (0, *relations)
  if format == "direct" or hops == 1:
    return (0, *(what for j in relations for what in ("'s", j)), "is")
  nested = [what for j in reversed(relations) for what in ("the", j, "of")]
  return ("Who", "is", *nested, 0, "?", "\n", "Answer:")


def hop_positions(format: str, hops: int) -> tuple[int, ...]:
  """For each of hops 1, ..., k, the first position that sees all its tokens."""
  places = layout(format, hops)
  need = [[places.index(i) for i in range(j + 1)] for j in range(1, hops + 1)]
  return tuple(max(positions) for positions in need)


def questions(
  vocabulary: Vocabulary, heads: np.ndarray, relations: np.ndarray
) -> np.ndarray:
  """Writes questions.

  Args:
    vocabulary: token ids.
    heads: first entities of the chains, int [N].
    relations: r1 .. rk of each, int [N, k].

  Returns:
    Token ids i32 [N, L]; L = len(layout(format, k)).
  """
  places = layout(vocabulary.format, relations.shape[1])
  tokens = np.empty((len(heads), len(places)), np.int32)
  for position, what in enumerate(places):
    if isinstance(what, str):
      tokens[:, position] = vocabulary.word(what)
    elif what == 0:
      tokens[:, position] = heads
    else:
      tokens[:, position] = vocabulary.num_entities + relations[:, what - 1]
  return tokens


def decode(vocabulary: Vocabulary, ids: Iterable[int]) -> str:
  """Tokens as text, separated by blanks, without padding."""
  texts = _texts(vocabulary)
  return " ".join(texts[i] for i in map(int, ids) if i < vocabulary.padding)


@functools.lru_cache(maxsize=8)
def _texts(vocabulary: Vocabulary) -> tuple[str, ...]:
  """The text of every token except padding."""
  entities = range(vocabulary.num_entities)
  relations = range(vocabulary.num_relations)
  if vocabulary.format == "symbolic":
    return (*(f"<e{i}>" for i in entities), *(f"<r{i}>" for i in relations))
  return (
    *(NAMES[i] for i in entities),
    *(RELATIONS[i] for i in relations),
    *FORMATS[vocabulary.format],
  )
