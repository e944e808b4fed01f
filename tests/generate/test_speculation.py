"""Drafts by fewer loops: the text is as without drafts."""

import dataclasses
import functools

import generate_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generate_examples import PROMPTS, engine_of, ids, requests, shared
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.generate.programs import sizes
from loopjax.generate.requests import Costs, GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits

GREEDY = Sampling(temperature=0)
ASKED = requests(9, sampling=GREEDY)
# Sampled, truncated, and with a penalty that includes tokens of the same round.
DRAWN = [
  dataclasses.replace(one, sampling=sampling)
  for one, sampling in zip(
    [*ASKED, *ASKED],
    [
      Sampling(seed=7),
      Sampling(0.0, repetition_penalty=3.0),
      Sampling(0.7, 5, 0.9, 0.01, 1.3, seed=8),
      Sampling(0.5, seed=2**32 - 1),
      Sampling(1.5, repetition_penalty=2.0, seed=3),
      Sampling(0.0, repetition_penalty=0.3),
      Sampling(0.8, 3, repetition_penalty=1.5),
      Sampling(seed=11),
    ],
    strict=True,
  )
]
new = GenerationRequest


def drafted(asked, loops):
  return [dataclasses.replace(one, draft_loops=loops) for one in asked]


def same(found, expected):
  """Tokens and ends are equal, scores up to rounding of sums."""
  for text, other in zip(found, expected, strict=True):
    assert ids(text) == ids(other)
    assert [one.finish for one in text] == [one.finish for one in other]
    assert [one.loops for one in text] == [one.loops for one in other]
    for one, like in zip(text, other, strict=True):
      np.testing.assert_allclose(
        one.log_probability, like.log_probability, atol=1e-5
      )


def costs_of(texts):
  costs = Costs()
  for token in (one for text in texts for one in text):
    costs.add(token)
  return costs


CASES = (
  ("looped", 1), ("looped", 2), ("recurrent", 1), ("disco", 2), ("ponderlm", 1),
)  # fmt: skip
THREE = {"changes": {"num_loops": 3}}


@pytest.mark.long
# The greedy texts below are of all.
@crossing(("name", "loops"), CASES, manual=CASES[2:])
def test_drawn_texts_are_those_of_full_forward_passes(name, loops):
  """For any sample; and most drafts equal the samples of all loops."""
  engine = shared(name, num_slots=2, **THREE)
  found = engine.generate(drafted(DRAWN, loops))
  for request, text in zip(DRAWN, found, strict=True):
    written = examples.written_out(name, request, changes=THREE["changes"])
    assert ids(text) == [token for token, _ in written]
    np.testing.assert_allclose(
      [one.log_probability for one in text],
      [value for _, value in written],
      atol=1e-4,
    )
  costs = costs_of(found)
  assert 0.35 < costs.accepted / (costs.accepted + costs.rejected) < 1


@crossing(("name", "loops"), CASES)
def test_greedy_texts_are_those_without_drafts(name, loops):
  """In two reused slots; some drafts are accepted, some rejected."""
  engine = shared(name, num_slots=2, **THREE)
  plain = engine.generate(ASKED)
  found = engine.generate(drafted(ASKED, loops))
  same(found, plain)
  costs = costs_of(found)
  assert costs.accepted and costs.rejected
  assert costs.accepted + costs.rejected == costs.tokens - len(ASKED)
  # All three loops of the first tokens and of tokens verified in rounds.
  assert costs.computed % 6 == 3 * len(ASKED) % 6 and (
    costs.computed > 3 * costs.tokens
  )
  assert costs.loops == 3 * costs.tokens == costs_of(plain).computed


@pytest.mark.long
def test_rows_with_and_without_drafts_wait_for_each_other():
  plain = [dataclasses.replace(one, num_loops=1) for one in ASKED[:2]]
  draft = ASKED[3:4]
  engine = engine_of("looped", num_slots=4)
  assert engine.row_sizes == [1, 4]  # Two of four rows are active.
  found = engine.generate([*plain, *drafted(draft, 1)])
  same(found, engine.generate([*plain, *draft]))
  assert all(one.accepted is None for text in found[:2] for one in text)
  assert all(one.accepted is not None for one in found[2][1:])


MIXED = [
  new(PROMPTS[0], 9, Sampling(seed=7), draft_loops=1),
  new(PROMPTS[1], 9, GREEDY, draft_loops=2),
  new(PROMPTS[2], 5, Sampling(0.7, 5, 0.9, 0.01, 1.3, seed=8), draft_loops=1),
  new(PROMPTS[3], 12, GREEDY, exit_threshold=0.4),
  new(PROMPTS[0], 7, Sampling(0.0, repetition_penalty=3.0), draft_loops=1),
  new(PROMPTS[3], 12, Sampling(0.5, seed=2**32 - 1), draft_loops=1),
  new(PROMPTS[1], 9, GREEDY, num_loops=2, draft_loops=1),
]


@pytest.mark.long
@crossing("name", ["looped", "recurrent"], manual=("recurrent",))
def test_a_drafted_text_is_what_it_is_alone_without_drafts(name):
  """For any neighbours, their drafts, slot, and earlier text in the slot."""
  asked = [one for one in MIXED if name == "looped" or one.exit_threshold == 1]
  found = engine_of(name).generate([*asked, *reversed(asked)])
  for request, *both in zip(asked, found, found[::-1], strict=False):
    alone = shared(name).generate(drafted([request], 0))
    for text in both:
      same([text], alone)


REPEATED = [("looped", 8), *(("recurrent", num) for num in (2, 3, 8))]


@pytest.mark.long
@crossing(
  ("name", "num"),
  [("looped", 2), ("looped", 3), *REPEATED],
  manual=REPEATED,
)
def test_a_text_does_not_depend_on_the_number_of_drafts(monkeypatch, name, num):
  """Nor on the starts of rounds or their number per call."""
  monkeypatch.setattr(sizes, "NUM_DRAFTS", (num,))
  found = engine_of(name).generate(drafted(DRAWN, 1))
  same(found, shared(name).generate(DRAWN))
  assert costs_of(found).accepted and costs_of(found).rejected


def test_texts_end_where_they_do_without_drafts():
  """At a stop token within a round, and when the cache is full."""
  engine = shared("looped")
  plain = engine.generate(ASKED)
  asked = [
    dataclasses.replace(one, stop_tokens=(ids(text)[3],), max_new_tokens=99)
    for one, text in zip(ASKED, plain, strict=True)
  ]
  expected = engine.generate(asked)
  same(engine.generate(drafted(asked, 2)), expected)
  endless = [new(PROMPTS[2], 99, GREEDY)]
  expected = engine.generate(endless)
  same(engine.generate(drafted(endless, 2)), expected)


@pytest.mark.long
def test_a_cancelled_draft_leaves_no_trace():
  """Nor does one whose row waits while others continue."""
  engine = engine_of("looped", num_slots=1)
  plain = shared("looped", num_slots=1)
  number = engine.add(new(PROMPTS[3], 12, GREEDY, draft_loops=2))
  while not any(one.accepted is not None for one in engine.step()):
    pass
  engine.cancel(number)
  assert engine.idle
  for asked in (ASKED[:1], drafted(ASKED[:1], 2)):
    same(engine.generate(asked), plain.generate(ASKED[:1]))


@functools.cache
def reader(name):
  """Decodes one token after a prompt: (read, its cache, the token)."""
  family, graphdef, params = examples.model_of(name, num_loops=3)
  prompt = jnp.asarray([PROMPTS[0], PROMPTS[3][:5]])

  def read(tokens, cache, loops, resumed=None):
    model = nnx.merge(graphdef, params)
    rows = len(tokens)
    policy = exits.ExitPolicy(jnp.ones(rows), jnp.full(rows, loops))
    return family.reading.read(
      model, tokens, cache, exit_policy=policy, resumed=resumed
    )

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def prompted():
    model = nnx.merge(graphdef, params)
    return family.reading.read(
      model, prompt, family.reading.empty_cache(model, 2, 16)
    )[1]

  return read, prompted(), prompt[:, -1:]


@pytest.mark.long
@crossing(("name", "loops"), CASES, manual=CASES[3:])
def test_loops_that_go_on_are_all_loops_to_the_bit(name, loops):
  """The keys and states after m loops equal the model's."""
  read, cache, token = reader(name)

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def in_two():
    first, half = read(token, cache, loops)
    state = first.trace["state"]
    half = half.cut(jnp.full(2, 5), jnp.ones(2, bool))
    return read(token, half, 3, exits.Resumed(state, loops))

  whole = jax.jit(
    lambda: read(token, cache, 3), compiler_options=examples.FAST
  )()
  output, after = in_two()
  np.testing.assert_array_equal(output.logits, whole[0].logits)
  np.testing.assert_array_equal(output.stats["loops_run"], [3, 3])
  jax.tree.map(np.testing.assert_array_equal, after, whole[1])


def test_only_the_named_rows_are_cut():
  _, cache, _ = reader("recurrent")
  cut = cache.cut(jnp.asarray([3, 3]), jnp.asarray([True, False]))
  for part in (cut.prelude, cut.core, cut.coda):
    assert part.length.tolist() == [3, 5]


def test_drafts_become_as_many_as_are_accepted():
  def drafts(accepted, rejected, share=0.25):
    counts = [(accepted / 2, rejected / 2)] * 2
    return sizes.drafts(counts, share, 8, on_cpu=True)

  assert drafts(0, 40) == (2, 8)
  assert drafts(40, 10)[0] == 4 and drafts(400, 4) == (8, 2)
  assert drafts(40, 10, 0.75)[0] <= drafts(40, 10, 0.1)[0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "request_of", "says"), [
  ("looped", {}, {"draft_loops": 3}, r"draft_loops=3 is not in \[1, 2\]"),
  ("looped", {}, {"draft_loops": -1}, "draft_loops=-1"),
  ("looped", {}, {"draft_loops": 2, "num_loops": 2}, r"not in \[1, 1\]"),
  ("looped", {"cache_kind": "mean"}, {"draft_loops": 1}, "got 'mean'"),
  ("recurrent", {"cache_kind": "continuous"}, {"draft_loops": 1}, "got 'co"),
  ("melt", {}, {"draft_loops": 1}, "draft_loops: this model family"),
  ("sleep", {}, {"draft_loops": 1}, "draft_loops: this model family"),
  ("transformer", {}, {"draft_loops": 1}, "draft_loops: this model family"),
  ("plt", {}, {"draft_loops": 1}, "draft_loops: this model family"),
  ("adaptive", {}, {"draft_loops": 1}, "draft_loops: this model family"),
])  # fmt: skip
def test_impossible_drafts_are_refused(name, options, request_of, says):
  engine = engine_of(name, **options)
  with pytest.raises(UserError, match=says) as error:
    engine.add(new((1,), 1, GREEDY, **request_of))
  assert "\n" not in str(error.value) and engine.idle


@pytest.mark.long
def test_drafts_and_exits_exclude_each_other():
  with pytest.raises(UserError, match="exclude each other"):
    new((1,), 1, exit_threshold=0.5, draft_loops=1)
