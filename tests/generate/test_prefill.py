"""Prefill with fewer loops than decoding."""

import dataclasses
import functools

import generate_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generate_examples import PROMPTS, engine_of, ids, shared
from tests_support import crossing

from loopjax.errors import UserError
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.loop import exits

GREEDY = Sampling(temperature=0)
FAMILIES = ("looped", "recurrent", "melt", "disco", "ponderlm")
# One chunk and its last token alone; chunks of 16 tokens, and an empty one.
LENGTHS = (1, 17, 19)
new = GenerationRequest


def asked(loops, num=5, **options):
  return [
    new(tuple((3 * n + 1) % 21 for n in range(length)), num, GREEDY,
        prefill_loops=loops, **options)
    for length in LENGTHS
  ]  # fmt: skip


def same(found, expected, exact=False):
  for text, other in zip(found, expected, strict=True):
    assert ids(text) == ids(other)
    scores, others = ([one.log_probability for one in x] for x in (text, other))
    if exact:
      assert scores == others
    np.testing.assert_allclose(scores, others, atol=1e-5)


# They write to its cache.
LIKE_LOOPED = [("disco", "copy"), ("ponderlm", "copy")]


@functools.cache
def token_by_token(name, kept):
  """Logits after texts whose first tokens exit like generated tokens."""
  family, graphdef, params = examples.model_of(name)

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def run(text, loops):
    model = nnx.merge(graphdef, params)
    cache = family.reading.empty_cache(model, 1, examples.LENGTH)

    def one(cache, token_and_loops):
      token, loops = token_and_loops
      policy = exits.ExitPolicy(jnp.ones(1), loops[None], "change", kept)
      output, cache = family.reading.read(
        model, token[None, None], cache, exit_policy=policy
      )
      return cache, output.logits[0, 0]

    return jax.lax.scan(one, cache, (text, loops))[1]

  return run


def expected_scores(name, request, tokens, kept="copy"):
  """Log-probabilities of a text: prompt tokens except the last run m loops."""
  text, held = (*request.prompt, *tokens), len(request.prompt) - 1
  padded = np.zeros(examples.LENGTH, np.int32)
  padded[: len(text)] = text
  loops = np.where(np.arange(len(padded)) < held, request.prefill_loops, 99)
  logits = token_by_token(name, kept)(padded, np.minimum(loops, 3))
  scores = jax.nn.log_softmax(logits, axis=-1)
  return [float(scores[held + n, token]) for n, token in enumerate(tokens)]


@pytest.mark.long
@crossing(("name", "kept"), [
  ("looped", "copy"), ("looped", "state"), ("recurrent", "copy"),
  ("melt", "copy"), *LIKE_LOOPED,
], manual=LIKE_LOOPED)  # fmt: skip
def test_the_prompt_leaves_what_tokens_leave_that_exit(name, kept):
  """As token by token with the rule of early exits; the last token runs all."""
  requests = asked(1)
  found = engine_of(name, exit_kept=kept).generate(requests)
  changed = 0.0
  for request, text in zip(requests, found, strict=True):
    scores = [one.log_probability for one in text]
    expected = expected_scores(name, request, ids(text), kept)
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    whole = dataclasses.replace(request, prefill_loops=3)
    usual = expected_scores(name, whole, ids(text), kept)
    changed = max(changed, np.abs(np.subtract(scores, usual)).max())
    assert {one.loops for one in text} == {examples.SMALL[name]["num_loops"]}
  assert changed > 1e-3


@pytest.mark.long
@crossing("name", FAMILIES, manual=FAMILIES[3:])
def test_as_many_loops_as_the_text_are_none_fewer(name):
  """Bitwise, of the engine, and of the cache if nothing is skipped."""
  most = examples.SMALL[name]["num_loops"]
  plain = shared(name).generate(asked(0))
  same(shared(name).generate(asked(most)), plain, exact=True)
  family, graphdef, params = examples.model_of(name)

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def caches():
    model = nnx.merge(graphdef, params)
    tokens = jnp.asarray([PROMPTS[0], PROMPTS[3][:5]])
    cache = family.reading.empty_cache(model, 2, 8)
    loops, none = jnp.full(2, most), jnp.ones(2)
    return [
      family.reading.read(
        model, tokens, cache,
        exit_policy=exits.ExitPolicy(none, loops, fills=fills),
      )[1]
      for fills in (False, True)
    ]  # fmt: skip

  jax.tree.map(np.testing.assert_array_equal, *caches())


@pytest.mark.long
@crossing("name", FAMILIES, manual=FAMILIES[1:])
def test_a_text_is_what_it_is_alone(name):
  """For any loops of its neighbours, and any chunk length."""
  requests = [*asked(1), *asked(0), *asked(0, num_loops=1)]
  together = engine_of(name, num_slots=3).generate(requests)
  parts = engine_of(name, num_slots=2, prompt_chunk=24).generate(requests)
  for request, text, other in zip(requests, together, parts, strict=True):
    alone = shared(name).generate([request])
    same([text], alone)
    same([other], alone)


@pytest.mark.long
def test_exits_after_such_prompts():
  engine = shared("looped")
  early = engine.generate(asked(1, exit_threshold=0.4))
  assert {one.loops for text in early for one in text[1:]} > {1}
  assert {text[0].loops for text in early} == {3}  # As without early exits.


@pytest.mark.long
@crossing(
  "kind",
  ["mean", "last_loop", "continuous"],
  manual=("last_loop", "continuous"),
)
def test_other_caches_take_them_too(kind):
  """If loops share keys, there is nothing to fill in."""
  name = "recurrent" if kind == "continuous" else "looped"
  texts = [
    engine_of(name, cache_kind=kind).generate(asked(loops)) for loops in (1, 0)
  ]
  assert [[one.loops for one in text] for text in texts[0]] == [
    [one.loops for one in text] for text in texts[1]
  ]


@pytest.mark.long
def test_prefixes_are_of_the_same_loops():
  """Only of tokens processed alike, not of a prompt's last one."""
  made = engine_of("looped", max_tokens=56, num_slots=1, prefix_mib=1)
  prompt = tuple(n % 7 for n in range(40))

  def copied(loops, length=40):
    (text,) = made.generate(
      [new(prompt[:length], 2, GREEDY, prefill_loops=loops)]
    )
    return text[0].copied

  assert [copied(n) for n in (0, 1, 2, 0, 1, 3)] == [0, 0, 0, 32, 32, 32]
  made.prefixes.clear()
  assert [copied(1, 32), copied(1), copied(1)] == [0, 16, 32]


@pytest.mark.parametrize(("name", "options", "loops", "says"), [
  ("looped", {}, 4, r"prefill_loops=4 is not in \[1, 3\]"),
  ("looped", {}, -1, "prefill_loops=-1 is not"),
  ("looped", {"exit_kept": "computed"}, 1, "exit_kept='computed' runs all"),
  ("transformer", {}, 1, "prefill_loops: this model family"),
  ("plt", {}, 1, "prefill_loops: this model family"),
  ("sleep", {}, 1, "prefill_loops: this model family"),
  ("adaptive", {}, 1, "prefill_loops: this model family"),
])  # fmt: skip
def test_what_cannot_be_read_so_is_refused(name, options, loops, says):
  engine = engine_of(name, **options)
  with pytest.raises(UserError, match=says) as error:
    engine.add(new((1,), 1, GREEDY, prefill_loops=loops))
  assert "\n" not in str(error.value) and engine.idle


@pytest.mark.long
def test_a_damped_loop_depends_on_how_many_follow():
  engine = engine_of("recurrent", changes={"update": "damped"})
  with pytest.raises(UserError, match="a loop depends on how many follow"):
    engine.add(new((1,), 1, GREEDY, prefill_loops=1))
