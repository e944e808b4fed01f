"""The engine against full forward passes, one per token."""

import dataclasses
import functools

import generate_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generate_examples import (
  LENGTH,
  NUM_TOKENS,
  PROMPTS,
  SPEC,
  engine_of,
  ids,
  logits_after,
  requests,
  shared,
  written_out,
)
from tests_support import causal, crossing

from loopjax import sharding
from loopjax.errors import UserError
from loopjax.generate import batching
from loopjax.generate.engine import Engine
from loopjax.generate.programs import decoding, slots
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.scheduler import Scheduler
from loopjax.losses.tokens import token_scores

GREEDY = Sampling(temperature=0)


# The engine reads them as it reads looped; test_reading.py reads all families.
ALIKE = ("disco", "loopformer", "ponderlm", "transformer")


@crossing("name", causal(), manual=ALIKE)
def test_greedy_text_is_that_of_full_forward_passes(name):
  """In reused slots: four prompts and two slots."""
  prompts = [prompt for prompt in PROMPTS if len(prompt) < 16]
  asked = [GenerationRequest(one, 6, GREEDY) for one in (*prompts, (5, 4, 3))]
  engine = engine_of(name, num_slots=2)
  for request, found in zip(asked, engine.generate(asked), strict=True):
    expected = written_out(name, request)
    assert ids(found) == [token for token, _ in expected]
    np.testing.assert_allclose(
      [one.log_probability for one in found],
      [value for _, value in expected],
      atol=1e-4,
    )


# Requests of all kinds, each alone in an engine and all in one.
MIXED = [
  GenerationRequest(PROMPTS[0], 9, Sampling(seed=7)),
  GenerationRequest(PROMPTS[1], 5, GREEDY, num_loops=1),
  GenerationRequest(PROMPTS[2], 5, Sampling(0.7, 5, 0.9, 0.01, 1.3, seed=8)),
  GenerationRequest(PROMPTS[3], 12, GREEDY, exit_threshold=0.4),
  GenerationRequest(PROMPTS[0], 7, Sampling(seed=9), exit_threshold=0.6),
  GenerationRequest(PROMPTS[3], 12, Sampling(0.5, seed=2**32 - 1), num_loops=2),
]


@pytest.mark.long
@crossing(("name", "options"), [
  ("looped", {}), ("melt", {}), ("looped", {"cache_kind": "mean"}),
], ids=["looped", "melt", "mean"], manual=[("melt", {})])  # fmt: skip
def test_attention_looks_at_no_more_places_than_are_needed(
  monkeypatch, name, options
):
  """The text is the same, whether the last place is its last token's or not."""
  asked = [
    GenerationRequest((*PROMPTS[3], 1, 2), 14, GREEDY),
    GenerationRequest(PROMPTS[1], 3, GREEDY),
  ]
  expected = engine_of(name, **options).generate(asked)
  monkeypatch.setattr(batching, "SMALLEST_SPAN", 4)
  engine, spans = engine_of(name, **options), []
  decode = engine._programs.decode

  def spied(*arguments, span, **more):
    spans.append(span)
    return decode(*arguments, span=span, **more)

  engine._programs = engine._programs._replace(decode=spied)
  found = engine.generate(asked)
  for text, same in zip(found, expected, strict=True):
    assert ids(text) == ids(same)
    np.testing.assert_allclose(
      [one.log_probability for one in text],
      [one.log_probability for one in same],
      atol=1e-5,
    )
  # Nine prompt tokens and four new ones: one more than twelve places.
  assert spans[:3] == [16, None, None]


@pytest.mark.long
@crossing(("name", "options"), [
  ("looped", {}), ("recurrent", {"cache_kind": "continuous"}),
  ("looped", {"cache_kind": "mean"}),
], ids=str, manual=[("looped", {"cache_kind": "mean"})])  # fmt: skip
def test_few_that_are_as_long_write_together(monkeypatch, name, options):
  """Each as alone, for unrolled and for scanned loops."""
  asked = [
    GenerationRequest(prompt, 7, Sampling(temperature, seed=3))
    for prompt, temperature in zip(PROMPTS, (0, 1, 0, 1), strict=True)
  ]
  expected = [
    shared(name, num_slots=1, **options).generate([one])[0] for one in asked
  ]
  monkeypatch.setattr(batching, "_FEW_ROWS", 2)
  engine, calls = engine_of(name, num_slots=4, **options), []
  decode = engine._programs.decode

  def spied(params, state, rows, has_top, **more):
    calls.append((len(rows), more["depth"]))
    return decode(params, state, rows, has_top, **more)

  engine._programs = engine._programs._replace(decode=spied)
  found = engine.generate(asked)
  for text, same in zip(found, expected, strict=True):
    assert ids(text) == ids(same)
    np.testing.assert_allclose(
      [one.log_probability for one in text],
      [one.log_probability for one in same],
      atol=1e-4,
    )
  assert dict(calls) == {
    1: slots.LOOPS, 2: slots.UNROLLED,
  }  # fmt: skip


def test_short_ones_write_together_and_long_ones():
  """In any slots."""
  lengths, scheduler = (9, 2, 8, 1, 3), Scheduler(5)
  for length in lengths:
    scheduler.add(GenerationRequest((1,) * length, 4, GREEDY))
  scheduler.admit()
  for slot, sequence in list(scheduler.prefilling.items()):
    sequence.num_read = len(sequence.request.prompt)
    scheduler.start_generating(slot)
  found = [[one.num_read for one in x.values()] for x in scheduler.parts(2)]
  assert found == [[1, 2], [3, 8], [9]]


def test_all_slots_write_together_where_weights_are_large(monkeypatch):
  monkeypatch.setattr(batching, "_SMALL_WEIGHTS", 0)
  monkeypatch.setattr(batching, "_FEW_ROWS", 2)
  assert engine_of("looped", num_slots=20).row_sizes == [1, 4, 16, 20]
  monkeypatch.undo()
  assert engine_of("looped", num_slots=20).row_sizes == [1, 4, 8]
  # The cache of a model that sleeps has no places.
  assert engine_of("sleep", num_slots=20).row_sizes == [20]


def test_later_parts_of_a_prompt_read_all_before_them(monkeypatch):
  asked = [GenerationRequest(PROMPTS[3] * 2, 4, GREEDY)]
  (expected,) = shared("looped").generate(asked)
  monkeypatch.setattr(batching, "SMALLEST_SPAN", 4)
  (found,) = engine_of("looped", prompt_chunk=4).generate(asked)
  assert ids(found) == ids(expected)
  np.testing.assert_allclose(
    [one.log_probability for one in found],
    [one.log_probability for one in expected],
    atol=1e-5,
  )


def test_in_bfloat16_tokens_are_read_out_as_they_are_scored():
  changes = {"precision": "bfloat16", "init_std": 1.0, "num_loops": 1}
  changes["exit_gate"] = "none"
  _, graphdef, params = examples.model_of("looped", **changes)
  ((found,),) = engine_of("looped", changes=changes).generate(
    [GenerationRequest(PROMPTS[1], 1, GREEDY)]
  )

  @functools.partial(jax.jit, compiler_options=examples.FAST)
  def score(params, dtype_like):
    model = nnx.merge(graphdef, params)
    hidden, table = (
      x.astype(dtype_like.dtype)
      for x in (model(np.array([PROMPTS[1]])).hidden, model.readout_table())
    )
    target = np.array([[found.token]])
    return -token_scores(hidden, table, target, num_padding_tokens=2)[0]

  (expected,) = score(params, jnp.zeros((), jnp.bfloat16))[0]
  (wide,) = score(params, jnp.zeros(()))[0]
  assert abs(wide - expected) > 1e-3
  np.testing.assert_allclose(found.log_probability, expected, atol=1e-4)


@pytest.mark.long
def test_parts_of_a_prompt_are_whole_chunks():
  """Chunk boundaries are those of a whole row, not of parts of 16 tokens."""
  changes = {"chunk_size": 6}
  expected = jax.nn.log_softmax(logits_after("melt", PROMPTS[2], changes))
  ((found,),) = engine_of("melt", changes=changes).generate(
    [GenerationRequest(PROMPTS[2], 1, GREEDY)]
  )
  assert found.token == np.argmax(expected)
  np.testing.assert_allclose(found.log_probability, max(expected), atol=1e-5)


def test_a_program_is_compiled_once_whatever_holds_the_parameters():
  """A run's parameters have the sharding of a mesh, even with one device."""
  family, graphdef, params = examples.model_of("looped")
  mesh = sharding.make_mesh(sharding.Config(), jax.local_devices()[:1])
  params = jax.device_put(params, sharding.replicated(mesh))
  engine = Engine(family, graphdef, params, num_slots=1, max_tokens=LENGTH)
  for _ in range(2):
    engine.generate([GenerationRequest(PROMPTS[0], 9, GREEDY)])
  assert engine._programs.prefill._cache_size() == 1
  assert engine._programs.decode._cache_size() == 1


@pytest.mark.long
def test_a_compiled_engine_compiles_nothing_more():
  """For any requests: all lengths, together, scores, and any loops."""
  small = {"num_layers": 1, "num_loops": 2}  # Loops are copied if few write.
  engine = engine_of(
    "looped", changes=small, num_slots=2, max_tokens=60, prompt_chunk=16
  )

  def compiled():
    return [one._cache_size() for one in engine._programs]

  assert engine.compile(prefill_loops=True) == sum(compiled())
  before = compiled()
  engine.generate(
    [
      GenerationRequest(
        (1,) * length, 80, GREEDY, top_log_probabilities=top, **more
      )
      for length in (1, 16, 17, 60)
      for top in (0, 3)
      for more in (
        {}, {"exit_threshold": 0.3}, {"num_loops": 1}, {"prefill_loops": 1},
      )
    ]
  )  # fmt: skip
  assert compiled() == before and min(before) > 1


def test_the_most_likely_tokens_are_those_of_the_request():
  """Also where a neighbour asks for none, or for more."""
  asked = [
    GenerationRequest(PROMPTS[n], 3, GREEDY, top_log_probabilities=top)
    for n, top in enumerate((0, 2, 20))
  ]
  together = engine_of("looped", num_slots=3).generate(asked)
  for request, text in zip(asked, together, strict=True):
    ((*expected,),) = shared("looped").generate([request])
    num_top = min(request.top_log_probabilities, SPEC.num_tokens)
    for one, same in zip(text, expected, strict=True):
      assert [x for x, _ in one.top] == [x for x, _ in same.top]
      assert len(one.top) == num_top
      if num_top:
        assert one.top[0] == (one.token, one.log_probability)


def test_all_ways_to_write_are_compiled_of_models_that_have_them():
  """Fewer loops, and exits; plain models have none."""

  def ways(name, size):
    return {*engine_of(name).limits.depths(size)}

  assert ways("looped", 1) == {"loops", "exits"}
  assert ways("looped", 3) == {"unrolled", "exits"}
  assert ways("transformer", 3) == {"loops"}


# The cache of "mean" with other numbers in it; no exit is copied.
RESEMBLING = [{"cache_kind": "last_loop"}, {"exit_kept": "computed"}]


def test_programs_are_compiled_for_all_lengths():
  """Every number of places that a call can need."""
  limits = engine_of("looped", max_tokens=200).limits
  asked = dict.fromkeys(limits.span(num) for num in range(1, 201))
  assert limits.spans == [*asked] == [64, 96, 128, 192, None]


@crossing("options", [
  {}, {"exit_kept": "state"}, {"cache_kind": "mean"},
  {"cache_kind": "first_loop"},
  *RESEMBLING,
], ids=str, manual=RESEMBLING)  # fmt: skip
def test_a_text_is_what_it_is_alone(options):
  """For any neighbours, slot, and previous user of the slot."""
  together = engine_of("looped", **options)
  found = together.generate([*MIXED, *reversed(MIXED)])
  assert len({one.loops for text in found for one in text}) == 3
  leaving = [
    bool({one.loops for one in text} - {request.num_loops or 3})
    for request, text in zip(MIXED, found, strict=False)
  ]
  assert leaving[3] and not any([*leaving[:3], leaving[5]])
  single = shared("looped", **options)
  for request, first, again in zip(MIXED, found, found[::-1], strict=False):
    (alone,) = single.generate([request])
    for text in (first, again):
      assert [one[1:2] + one[4:] for one in text] == [
        one[1:2] + one[4:] for one in alone
      ]
      np.testing.assert_allclose(
        [one.log_probability for one in text],
        [one.log_probability for one in alone],
        atol=1e-4,
      )


@pytest.mark.long
@crossing("options", [
  {"exit_rule": "stable", "cache_kind": "continuous"}, {"exit_rule": "kl"},
], ids=str, manual=[{"exit_rule": "kl"}])  # fmt: skip
def test_a_text_of_recurrent_depth_is_what_it_is_alone(options):
  """With exits by the read-out; earlier states of slots are not reused."""
  asked = [
    GenerationRequest(prompt, 7, GREEDY, exit_threshold=0.5)
    for prompt in PROMPTS
  ]
  found = engine_of("recurrent", num_slots=2, **options).generate(asked)
  assert len({one.loops for text in found for one in text}) > 1
  for request, text in zip(asked, found, strict=True):
    (alone,) = shared("recurrent", **options).generate([request])
    assert ids(text) == ids(alone)
    assert [one.loops for one in text] == [one.loops for one in alone]


def test_the_penalty_knows_nothing_of_who_had_the_slot_before():
  engine = engine_of("looped", num_slots=1)
  penalised = Sampling(temperature=0.0, repetition_penalty=5.0)
  asked = GenerationRequest(PROMPTS[1], 8, penalised)
  first = ids(engine.generate([asked])[0])
  engine.generate([GenerationRequest(tuple(first), 1, GREEDY)])
  assert ids(engine.generate([asked])[0]) == first


def test_fewer_loops_are_those_of_a_model_with_fewer():
  asked = [
    GenerationRequest(prompt, 6, GREEDY, num_loops=loops)
    for prompt, loops in zip(PROMPTS, (1, 2, 2, 3), strict=True)
  ]
  for request, found in zip(
    asked, shared("looped").generate(asked), strict=True
  ):
    expected = written_out("looped", request, num_loops=request.num_loops)
    assert ids(found) == [token for token, _ in expected]
    assert {one.loops for one in found} == {request.num_loops}


def test_log_probabilities_are_of_the_model_whatever_is_drawn(monkeypatch):
  """Of all tokens, if more are asked for than the model has."""
  for module in (slots, decoding):
    monkeypatch.setattr(module, "MAX_TOP", 30)
  sampling = Sampling(0.5, top_k=3, repetition_penalty=2.0, seed=3)
  request = GenerationRequest(PROMPTS[0], 5, sampling, top_log_probabilities=30)
  text = list(request.prompt)
  # Programs of its own: others are compiled for 20.
  engine = engine_of("looped", tokens_per_dispatch=7)
  for one in engine.generate([request])[0]:
    logits = logits_after("looped", text).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(
      one.log_probability, expected[one.token], atol=1e-4
    )
    best = np.argsort(-expected)[: SPEC.vocab_size - SPEC.num_padding_tokens]
    assert [token for token, _ in one.top] == best.tolist()
    np.testing.assert_allclose(
      [value for _, value in one.top], expected[best], atol=1e-4
    )
    text.append(one.token)


def test_a_stop_token_ends_its_text_and_no_other():
  asked = requests(8, sampling=GREEDY)
  plain = shared("looped").generate(asked)
  stop = ids(plain[0])[2]
  asked[0] = dataclasses.replace(asked[0], stop_tokens=(NUM_TOKENS, stop))
  found = shared("looped").generate(asked)
  end = ids(plain[0]).index(stop) + 1
  assert ids(found[0]) == ids(plain[0])[:end]
  assert [one.finish for one in found[0]] == [None] * (end - 1) + ["stop"]
  assert [ids(text) for text in found[1:]] == [ids(text) for text in plain[1:]]
  assert all(text[-1].finish == "length" for text in plain)


def test_a_text_ends_when_the_cache_is_full():
  request = GenerationRequest(PROMPTS[2], 99, GREEDY)
  (found,) = shared("looped").generate([request])
  assert len(found) == LENGTH - len(request.prompt) + 1
  assert ids(found) == [token for token, _ in written_out("looped", request)]


@pytest.mark.long
def test_a_cache_that_does_not_fill_ends_no_text():
  request = GenerationRequest(PROMPTS[2], 99, GREEDY)
  (endless,) = engine_of("sleep").generate([request])
  assert len(endless) == 99


@pytest.mark.parametrize(
  ("active", "steps"), [((True, True), 3), ((False, True), 1)]
)
def test_steps_end_with_the_last_sequence(active, steps):
  """In any call: a step that generates nothing takes as long as others."""
  empty = slots.Slots(*[None] * len(slots.Slots._fields))

  def step(state):
    counts, here = state
    left = jnp.maximum(here.num_left - 1, 0)
    here = here._replace(position=here.position + 1, num_left=left)
    return slots.State(counts + 1, here), counts + 1

  state = slots.State(
    jnp.asarray(0),
    empty._replace(position=jnp.asarray([5, 7]), num_left=jnp.asarray([3, 1])),
  )
  state, counts = slots.repeat(step, state, jnp.asarray(active), 4)
  assert state.cache == steps
  assert counts.tolist() == [*range(1, steps + 1), *[0] * (4 - steps)]


def test_cancelled_requests_leave_their_slots():
  """In any state: decoding, in prefill, or waiting."""
  engine = engine_of("looped", num_slots=2)
  writing = engine.add(GenerationRequest(PROMPTS[0], 9, GREEDY))
  long = engine.add(GenerationRequest(PROMPTS[2], 3, GREEDY))
  waiting = engine.add(GenerationRequest(PROMPTS[1], 9, GREEDY))
  assert {one.request_id for one in engine.step()} == {writing}
  for number in (writing, long, waiting):
    engine.cancel(number)
  assert engine.idle
  engine.cancel(writing)  # No error.
  asked = requests(6, sampling=GREEDY)
  for request, found in zip(asked, engine.generate(asked), strict=True):
    expected = written_out("looped", request)
    assert ids(found) == [token for token, _ in expected]


new = GenerationRequest


@pytest.mark.parametrize(("request_of", "says"), [
  (lambda: new((), 1), "the prompt is empty"),
  (lambda: new((1,), 0), "max_new_tokens=0"),
  (lambda: new((1,), 1, top_log_probabilities=21), "top_log_prob"),
  (lambda: new((1,), 1, stop_tokens=tuple(range(9))), "9 stop tokens"),
  (lambda: new((1,), 1, exit_threshold=0.0), "exit_threshold=0.0"),
  (lambda: new((0,) * 25, 1), "room for 24: see --max_tokens"),
  (lambda: new((1, NUM_TOKENS), 1), f"token id {NUM_TOKENS}"),
  (lambda: new((1,), 1, num_loops=4), "num_loops=4"),
])  # fmt: skip
def test_impossible_requests_are_refused(request_of, says):
  engine = shared("looped")
  with pytest.raises(UserError, match=says):
    engine.add(request_of())
  assert engine.idle


@pytest.mark.parametrize(("name", "options", "says"), [
  ("sleep", {"cache_kind": "per_loop"}, "fast_weights"),
  ("transformer", {"cache_kind": "mean"}, "cache_kind='mean'"),
  ("plt", {"cache_kind": "per_loop"}, "'per_loop' is not one of window"),
  ("plt", {"exit_rule": "change"}, "exit_rule='change'"),
  ("plt", {"prefix_mib": 1}, "'window' does not support prefix sharing"),
  ("disco", {"exit_rule": "gate"}, "needs an exit gate, which"),
  ("ponderlm", {"exit_kept": "state"}, "uses more than the last state"),
  ("transformer", {"exit_rule": "change"}, "exit_rule='change'"),
  ("looped", {"exit_rule": "sure"}, "fixed, gate, change, entropy"),
  ("looped", {"exit_kept": "state", "cache_kind": "mean"}, "got 'mean'"),
  ("looped", {"changes": {"exit_gate": "none"}, "exit_rule": "gate"}, "gate"),
  ("looped", {"num_slots": 0}, "num_slots=0"),
  ("looped", {"prompt_chunk": 1}, "prompt_chunk=1"),
  ("transformer", {"num_loops": 3}, "num_loops=3"),
])  # fmt: skip
def test_impossible_engines_are_refused(name, options, says):
  with pytest.raises(UserError, match=says):
    engine_of(name, **options)


def test_the_first_token_does_not_wait_for_the_decoding_program():
  engine = engine_of("looped")
  number = engine.add(GenerationRequest(PROMPTS[0], 4, GREEDY))
  engine._programs = engine._programs._replace(decode=None)
  assert [token.request_id for token in engine.step()] == [number]
