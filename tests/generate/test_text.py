"""Incremental detokenisation, and stop strings."""

import itertools

import pytest
from generate_examples import engine_of

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate import text as text_lib
from loopjax.generate.requests import GeneratedToken, GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import TextStream

BYTES = Tokenizer("bytes")


def tokens(text, finish=None):
  ids = text.encode() if isinstance(text, str) else text
  found = [GeneratedToken(0, one, 0.0, (), 2, None) for one in ids]
  if finish == "stop":
    return [*found, GeneratedToken(0, BYTES.end, 0.0, (), 2, "stop")]
  return [*found[:-1], found[-1]._replace(finish=finish)]


def split(text, cuts):
  ends = [0, *cuts, len(text)]
  return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("cuts", [(), (1, 2, 3, 4, 5, 6, 7), (4,), (2, 8)])
def test_parts_are_the_whole_without_half_characters(cuts):
  whole = "é日本 lo"
  text = TextStream(BYTES)
  parts = [text.read(part) for part in split(tokens(whole, "stop"), cuts)]
  assert "".join(parts) == text.text == whole
  assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts[:-1])
  assert text.finish == "stop"
  assert text.costs.tokens == len(whole.encode()) + 1
  assert text.costs.loops == 2 * text.costs.tokens


def test_what_is_no_character_at_the_end_is_shown():
  text = TextStream(BYTES)
  assert text.read(tokens([ord("a"), 0xC3])) == "a"
  assert text.read(tokens([0xC3], "length")) == "\N{REPLACEMENT CHARACTER}" * 2


def test_a_text_has_the_space_after_its_prompt(tmp_path):
  """Decoders drop it before the first token, which is not the text's first."""
  hub = pytest.importorskip("hub_examples")
  hub.write_tokenizer(tmp_path / "words.json")
  words = Tokenizer(str(tmp_path / "words.json"), "<end>")
  text = TextStream(words, prompt=(0, 4, 5))
  assert text.read(tokens([6])) + text.read(tokens([7])) == " w5 w6"
  prompt = (BYTES.end, ord("a"))  # One of them has no text.
  assert TextStream(BYTES, prompt=prompt).read(tokens("b")) == "b"


@pytest.mark.parametrize("size", [1, 2, 3, 30])
@pytest.mark.parametrize(("stops", "expected"), [
  (("two",), "one, "),
  (("tree", "three", "two, th"), "one, "),
  (("four", "e!"), "one, two, thre"),
  (("thro", ""), "one, two, three!"),
  (("onetwo", "!!"), "one, two, three!"),
])  # fmt: skip
def test_a_text_ends_before_the_first_stop(stops, expected, size):
  """Text that may begin a stop string is held back."""
  text, given = TextStream(BYTES, stops), ""
  whole = tokens("one, two, three!", "length")
  for start in range(0, len(whole), size):
    given += text.read(whole[start : start + size])
    assert expected.startswith(given)
  assert given == text.text == expected
  stopped = expected != "one, two, three!"
  assert text.finish == ("stop" if stopped else "length")


@pytest.mark.parametrize("size", [1, 2, 30])
@pytest.mark.parametrize(("stops", "expected"), [
  (("two",), "one, "), (("e!", "é"), "one, two, thre"), ((), None),
])  # fmt: skip
def test_tokens_are_those_of_the_text(stops, expected, size):
  """Tokens whose bytes may begin a stop string are held back."""
  text = TextStream(BYTES, stops)
  whole = tokens("one, two, three!", "stop")
  for start in range(0, len(whole), size):
    text.read(whole[start : start + size])
    assert bytes(one.token for one in text.tokens).decode() == text.text
  assert text.text == (expected or "one, two, three!")


def test_a_token_of_which_the_text_has_a_part_is_its_own(tmp_path):
  hub = pytest.importorskip("hub_examples")
  hub.write_tokenizer(tmp_path / "words.json")
  words = Tokenizer(str(tmp_path / "words.json"), "<end>")
  text = TextStream(words, ("5 w6",), prompt=(0, 4))
  text.read(tokens([6, 7, 8], "length"))
  assert text.text == " w" and [one.token for one in text.tokens] == [6]


def test_a_refused_request_takes_the_others_with_it():
  class Engine:
    """Refuses the second request."""

    live = ()

    def add(self, request):
      if self.live:
        raise UserError("the prompt is too long")
      self.live = (7,)
      return 7

    def cancel(self, number):
      self.live = tuple(x for x in self.live if x != number)

  engine = Engine()
  asked = [GenerationRequest((3,), 2)] * 2
  with pytest.raises(UserError, match="too long"):
    text_lib.generate_texts(engine, Tokenizer("bytes"), asked)
  assert not engine.live


@pytest.mark.long
def test_texts_that_stop_make_room_for_others():
  class Letters:
    """A tokenizer with one token per letter."""

    def decode(self, ids):
      return "".join(chr(97 + one) for one in ids)

  engine = engine_of("looped", num_slots=1)
  asked = [
    GenerationRequest((3, one), 12, Sampling(temperature=0)) for one in (1, 9)
  ]
  whole = [
    one.text for one in text_lib.generate_texts(engine, Letters(), asked)
  ]
  assert [len(one) for one in whole] == [12, 12]
  stop = whole[0][1:4]
  cut = [
    one.text
    for one in text_lib.generate_texts(engine, Letters(), asked, (stop,))
  ]
  assert cut[0] == whole[0][: whole[0].index(stop)]
  assert cut[1] == whole[1].partition(stop)[0]
  assert engine.idle
