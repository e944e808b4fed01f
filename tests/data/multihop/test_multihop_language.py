"""Questions as symbols and as English."""

import numpy as np
import pytest

from loopjax.data.multihop import language

# Relations 0 and 1 are teacher and wife; the entities are Ala, Anan, Arana.
HEADS = np.array([0, 2])


def vocabulary(format):
  return language.Vocabulary(num_entities=4, num_relations=3, format=format)


@pytest.mark.parametrize(
  ("format", "relations", "expected"),
  [
    ("symbolic", [0], "<e0> <r0>"),
    ("symbolic", [0, 1, 2], "<e0> <r0> <r1> <r2>"),
    ("direct", [0], "Ala 's teacher is"),
    ("direct", [0, 1], "Ala 's teacher 's wife is"),
    ("direct", [1, 0, 2], "Ala 's wife 's teacher 's boss is"),
    ("reverse", [0], "Ala 's teacher is"),
    (
      "reverse",
      [0, 1],
      "Who is the wife of the teacher of Ala ? \n Answer:",
    ),
    (
      "reverse",
      [1, 0, 2],
      "Who is the boss of the teacher of the wife of Ala ? \n Answer:",
    ),
  ],
)
def test_questions_read_as_they_should(format, relations, expected):
  tokens = language.questions(
    vocabulary(format), HEADS, np.array([relations, relations])
  )
  assert language.decode(vocabulary(format), tokens[0]) == expected
  other = expected.replace("Ala", "Arana").replace("<e0>", "<e2>")
  assert language.decode(vocabulary(format), tokens[1]) == other


def test_rows_have_their_own_relations():
  tokens = language.questions(
    vocabulary("reverse"), HEADS, np.array([[0, 1], [2, 0]])
  )
  assert language.decode(vocabulary("reverse"), tokens[1]) == (
    "Who is the teacher of the boss of Arana ? \n Answer:"
  )


def test_a_single_fact_with_its_answer():
  tokens = language.questions(vocabulary("direct"), HEADS, np.array([[0], [1]]))
  ids = [*tokens[1], 1]
  assert language.decode(vocabulary("direct"), ids) == "Arana 's wife is Anan"


@pytest.mark.parametrize(
  ("format", "hops", "expected"),
  [
    ("symbolic", 1, (1,)),
    ("symbolic", 3, (1, 2, 3)),
    ("direct", 1, (2,)),
    ("direct", 3, (2, 4, 6)),
    ("reverse", 1, (2,)),
    ("reverse", 2, (8, 8)),
    ("reverse", 3, (11, 11, 11)),
  ],
)
def test_where_a_hop_can_first_be_known(format, hops, expected):
  assert language.hop_positions(format, hops) == expected
  tokens = language.questions(
    vocabulary(format), HEADS[:1], np.arange(hops)[None] % 3
  )
  for position in expected:
    last = int(tokens[0, position])
    # The relation, or in reverse order the last entity.
    assert last < 7 and (last >= 4) == (format != "reverse" or hops == 1)


@pytest.mark.parametrize(
  ("format", "multiple", "padding", "size"),
  [
    ("symbolic", 1, 1050, 1051),
    ("symbolic", 64, 1050, 1088),
    ("symbolic", 1051, 1050, 1051),
    ("direct", 1, 1052, 1053),
    ("reverse", 8, 1058, 1064),
  ],
)
def test_padding_is_what_stands_at_the_end(format, multiple, padding, size):
  got = language.Vocabulary(1000, 50, format, multiple)
  assert (got.padding, got.size) == (padding, size)
  text = language.decode(got, range(padding))
  assert language.decode(got, range(size)) == text
  assert len(set(text.split(" "))) == padding


def test_words_are_enough_and_differ():
  assert len(language.NAMES) >= 1000
  assert len(language.RELATIONS) == 50
  every = [
    *language.NAMES,
    *language.RELATIONS,
    *language.FORMATS["reverse"],
  ]
  assert len({word.lower() for word in every}) == len(every)
  assert all(name.isalpha() and name.istitle() for name in language.NAMES)
  assert all(word.isalpha() and word.islower() for word in language.RELATIONS)
