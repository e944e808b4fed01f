"""Prompts with a common prefix: copied or prefilled, the text is the same."""

import numpy as np
import pytest
from generate_examples import engine_of, ids, shared
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.generate.prefixes import BLOCK
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling

GREEDY = Sampling(temperature=0)
ONE = tuple(n % 7 for n in range(40))  # Two and a half blocks.
OTHER = (*ONE[:20], *(n % 5 for n in range(20)))  # Shares a block with it.
OPTIONS = {"max_tokens": 56, "num_slots": 1}


def engine(name="looped", **options):
  return engine_of(name, **{**OPTIONS, "prefix_mib": 1, **options})


def ask(made, prompt, **options):
  """(the text of a prompt, how much of the prompt was copied)."""
  asked = {"sampling": GREEDY, "max_new_tokens": 6, **options}
  (text,) = made.generate([GenerationRequest(prompt, **asked)])
  assert not any(one.copied for one in text[1:])
  return text, text[0].copied


def scores(text):
  return [one.log_probability for one in text]


@pytest.mark.long
@crossing("name", ["looped", "recurrent"])
def test_a_text_after_a_copied_prompt_is_the_same_to_the_bit(name):
  """If the rest of the prompt has the same chunks."""
  made, plain = engine(name), shared(name, **OPTIONS)
  for prompt, copied in ((ONE, 0), (ONE, 32), (OTHER, 16), (OTHER, 32)):
    (text, number), (expected, _) = ask(made, prompt), ask(plain, prompt)
    assert number == copied
    assert ids(text) == ids(expected) and scores(text) == scores(expected)


@pytest.mark.long
@crossing(
  "name",
  ["adaptive", "disco", "ponderlm", "transformer"],
  manual=("ponderlm", "transformer"),  # The cache of disco.
)
def test_every_cache_of_every_loop_is_copied(name):
  """The rest has other chunks than the whole: equal up to rounding."""
  made, plain = (
    engine(name, prompt_chunk=40), engine_of(name, **OPTIONS, prompt_chunk=40)
  )  # fmt: skip
  for prompt, copied in ((ONE, 0), (OTHER, 16), (ONE, 32)):
    (text, number), (expected, _) = ask(made, prompt), ask(plain, prompt)
    assert number == copied and ids(text) == ids(expected)
    np.testing.assert_allclose(scores(text), scores(expected), atol=1e-5)


def test_a_whole_prompt_is_never_copied():
  """Its last token is prefilled, to predict the text's first token."""
  made = engine()
  for prompt, copied in ((ONE[:32], 16), (ONE[:33], 32), (ONE[:16], 0)):
    ask(made, prompt)
    assert ask(made, prompt)[1] == copied


def test_only_what_began_alike_is_copied():
  made = engine()
  ask(made, ONE)
  assert ask(made, (*ONE[:2], 9, *ONE[3:]))[1] == 0
  assert ask(made, (9, *ONE))[1] == 0  # The same tokens elsewhere.
  assert ask(made, ONE[:2])[1] == 0
  end = tuple(range(16))
  ask(made, (*OTHER[16:32], *end, 1))
  assert ask(made, (*ONE[:16], *end, 1))[1] == 16  # Another beginning.
  assert ask(made, ONE, num_loops=2)[1] == 0  # Prefilled with fewer loops.
  assert ask(made, ONE, num_loops=2)[1] == 32
  assert ask(made, ONE)[1] == 32


def test_the_penalty_knows_the_copied_tokens():
  """And not an earlier prompt's in the same slot."""
  penalised = {
    "sampling": Sampling(0.0, repetition_penalty=50.0), "max_new_tokens": 16,
  }  # fmt: skip
  made, plain = engine(), shared("looped", **OPTIONS)
  prompt = (*(n % 10 + 10 for n in range(32)), 1, 2, 3)
  ask(made, prompt), ask(made, (20, 9, 8))
  text, copied = ask(made, prompt, **penalised)
  assert copied == 32 and ids(text) == ids(ask(plain, prompt, **penalised)[0])


def test_what_was_not_used_for_longest_makes_room():
  """A prompt's end first, without which its beginning is still useful."""
  made, plain = engine(), shared("looped", **OPTIONS)
  made.prefixes._free = [0, 1, 2]
  shifted = [tuple((n + more) % 21 for n in ONE) for more in (3, 9)]
  ask(made, ONE), ask(made, shifted[0][:16])
  assert ask(made, ONE)[1] == 32  # Now the other one is the oldest.
  ask(made, shifted[1][:16])
  assert ask(made, ONE)[1] == 32
  ask(made, shifted[1][:16])
  ask(made, shifted[0][:16])
  text, copied = ask(made, ONE)
  assert copied == 16
  assert ids(text) == ids(ask(plain, ONE)[0])
  assert len(made.prefixes._found) == 3


@pytest.mark.long
def test_neighbours_change_nothing():
  asked = [
    GenerationRequest(prompt, 9, sampling)
    for prompt in (ONE, OTHER, ONE[:20], ONE)
    for sampling in (GREEDY, Sampling(seed=3))
  ]
  made, plain = engine(num_slots=2), shared("looped", **OPTIONS)
  found, expected = made.generate(asked), plain.generate(asked)
  assert [ids(text) for text in found] == [ids(text) for text in expected]
  assert {text[0].copied for text in found} == {0, 16, 32}


def test_a_cancelled_prompt_is_not_kept():
  made = engine()
  number = made.add(GenerationRequest(ONE, 6, GREEDY))
  assert not made.step()  # A chunk of the prompt.
  made.cancel(number)
  assert ask(made, ONE)[1] == 0


@pytest.mark.long
def test_a_compiled_engine_compiles_no_copies():
  """Of a family that has few other programs."""
  made = engine("transformer")
  made.compile()
  prefixes = made.prefixes
  compiled = prefixes._load._cache_size(), prefixes._save._cache_size()
  assert compiled == (2, 2) and not prefixes._found
  for length in (1, 16, 17, 33, 49, 56):
    for _ in range(2):
      ask(made, (ONE + ONE)[:length], max_new_tokens=1)
  assert compiled == (
    prefixes._load._cache_size(), prefixes._save._cache_size(),
  )  # fmt: skip


@pytest.mark.parametrize(("name", "options", "says"), [
  ("melt", {}, "cache of kind 'latent'"),
  ("sleep", {}, "cache of kind 'fast_weights'"),
  ("looped", {"cache_kind": "mean"}, "cache of kind 'mean'"),
  ("recurrent", {"cache_kind": "continuous"}, "cache of kind 'continuous'"),
  ("looped", {"prefix_mib": -1}, "prefix_mib=-1"),
])  # fmt: skip
def test_caches_that_depend_on_what_is_read_together_are_refused(
  name, options, says
):
  with pytest.raises(UserError, match=says) as error:
    engine(name, **options)
  assert "\n" not in str(error.value)


def test_no_room_is_said():
  with pytest.raises(UserError, match="no room for 16 prompt tokens"):
    engine(changes={"num_loops": 100, "num_layers": 9})


@pytest.mark.long
def test_a_prompt_that_has_no_block_shares_nothing():
  assert engine(max_tokens=BLOCK - 1).prefixes is None
