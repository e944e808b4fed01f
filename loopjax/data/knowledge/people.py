"""Made-up people: their names and the values of their attributes.

The values of a person are drawn independently and uniformly, except that the
employer determines the work city (bioS, arXiv 2404.05405).
"""

import math
from typing import NamedTuple

import numpy as np

from loopjax.data import pipeline
from loopjax.data.knowledge import language, words

NUM_NAMES = math.prod(len(words.VALUES[kind]) for kind in language.NAME)
_NAMES, _VALUES, _WORK_CITIES = range(3)  # Streams of random numbers.


class People(NamedTuple):
  """N people, as token ids.

  Attributes:
    names: int [N, 3].
    pronouns: int [N].
    values: values of all attributes, int [N, attributes, 3], ABSENT where a
      value is shorter.
  """

  names: np.ndarray
  pronouns: np.ndarray
  values: np.ndarray


def draw(seed: int, numbers: np.ndarray) -> People:
  """The people with these numbers, int [N], below NUM_NAMES; names differ."""
  names = np.empty((len(numbers), len(language.NAME)), np.int64)
  rest = pipeline.shuffled(numbers, NUM_NAMES, _NAMES, seed)
  for column, kind in enumerate(language.NAME):
    rest, name = np.divmod(rest, len(words.VALUES[kind]))
    names[:, column] = _token(kind, name)
  attributes = [a for n, a in language.ATTRIBUTES.items() if n != "work_city"]
  kinds = [kind for attribute in attributes for kind in attribute.kinds]
  chosen = pipeline.uniforms(
    pipeline.stream_seed(_VALUES, seed), numbers, len(kinds) + 1
  )
  shape = (len(numbers), len(language.ATTRIBUTES), language.NUM_VALUE_TOKENS)
  values = np.full(shape, language.ABSENT)
  column = 0
  for number, attribute in enumerate(attributes):
    for place, kind in enumerate(attribute.kinds):
      index = _index(chosen[:, column], kind)
      values[:, number, place] = _token(kind, index)
      column += 1
  values[:, -1, 0] = _token("city", work_cities(seed)[index])
  pronoun = (chosen[:, -1] * len(language.PRONOUNS)).astype(np.int64)
  ids = [language.vocabulary().words[word] for word in language.PRONOUNS]
  return People(names, np.array(ids)[pronoun], values)


def work_cities(seed: int) -> np.ndarray:
  """The city of every employer, int [employers]."""
  employers = np.arange(len(words.VALUES["employer"]))
  stream = pipeline.stream_seed(_WORK_CITIES, seed)
  return _index(pipeline.uniforms(stream, employers, 1)[:, 0], "city")


def bits() -> dict[str, float]:
  """Information that a biography contains, in bits, by attribute.

  This is the base-2 logarithm of the number of values, and 0 for the work city,
  which the employer determines. The paper's attributes sum to 47.6 bits.
  """
  found = {
    name: math.log2(math.prod(len(words.VALUES[k]) for k in attribute.kinds))
    for name, attribute in language.ATTRIBUTES.items()
  }
  pronoun = math.log2(len(language.PRONOUNS))
  return {**found, "work_city": 0.0, "pronoun": pronoun}


def _index(uniform: np.ndarray, kind: str) -> np.ndarray:
  return (uniform * len(words.VALUES[kind])).astype(np.int64)


def _token(kind: str, index: np.ndarray) -> np.ndarray:
  return language.vocabulary().starts[kind] + index
