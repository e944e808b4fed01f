"""Batches whose rows are in different loops: texts are as without batches."""

import dataclasses

import numpy as np
import pytest
from generate_examples import PROMPTS, engine_of, ids, shared

from loopjax.generate.programs import sizes, slots
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling

GREEDY = Sampling(temperature=0)
LOOPS = 3
# Greedy and sampled; all loops, fewer loops, and exits per row.
MIXED = [
  GenerationRequest(PROMPTS[0], 13, Sampling(seed=7), exit_threshold=0.6),
  GenerationRequest(PROMPTS[1], 14, GREEDY, num_loops=1),
  GenerationRequest(PROMPTS[2], 5, Sampling(0.7, 5, 0.9, 0.01, 1.3, seed=8)),
  GenerationRequest(PROMPTS[3], 12, GREEDY, exit_threshold=0.4),
  GenerationRequest(PROMPTS[0], 7, Sampling(seed=9), exit_threshold=0.5),
  GenerationRequest(PROMPTS[3], 9, Sampling(0.5, seed=2**32 - 1), num_loops=2),
]
OF_MELT = [dataclasses.replace(one, num_loops=0) for one in MIXED]


@pytest.fixture(autouse=True)
def always(monkeypatch):
  """All decoding is by depth, whether it saves time or not."""
  monkeypatch.setattr(sizes, "_SHARE_BY_DEPTH", 2.0)


def spied(engine, calls):
  """The engine; `calls` gets (rows, depth, generated tokens) of each call."""
  decode = engine._programs.decode

  def spy(params, state, rows, **options):
    state, generated = decode(params, state, rows, **options)
    calls.append((rows, options["depth"], slots.fetched(generated)))
    return state, generated

  engine._programs = engine._programs._replace(decode=spy)
  return engine


def alike(text, other):
  assert ids(text) == ids(other)
  assert [one.loops for one in text] == [one.loops for one in other]
  assert [one.finish for one in text] == [one.finish for one in other]
  np.testing.assert_allclose(
    [one.log_probability for one in text],
    [one.log_probability for one in other],
    atol=1e-4,
  )


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [
  pytest.param("looped", {}, marks=pytest.mark.manual),
  pytest.param("looped", {"exit_kept": "state"}, marks=pytest.mark.manual),
  ("looped", {"exit_rule": "stable"}),
  pytest.param("looped", {"cache_kind": "mean"}, marks=pytest.mark.manual),
  pytest.param("looped", {"cache_kind": "first_loop", "prompt_tokens": 20,
                          "max_tokens": 36}, marks=pytest.mark.manual),
  # Larger parameters amplify rounding from loop to loop.
  ("melt", {"changes": {"exit_gate": "unused", "num_loops": 3,
                        "init_std": 0.2}}),
], ids=str)  # fmt: skip
def test_a_text_by_depth_is_what_it_is_alone(name, options):
  """In reused slots, and with the rest decoded in lockstep."""
  asked, calls = MIXED if name == "looped" else OF_MELT, []
  engine = spied(engine_of(name, num_slots=3, **options), calls)
  found = engine.generate([*asked, *reversed(asked)])
  depths = [depth for _, depth, _ in calls]
  assert depths.count(slots.BY_DEPTH) > 3
  assert {one.loops for text in found for one in text} > {LOOPS}
  for request, first, again in zip(asked, found, found[::-1], strict=False):
    (alone,) = shared(name, num_slots=1, **options).generate([request])
    alike(first, alone)
    alike(again, alone)


@pytest.mark.long
def test_no_row_waits_for_another():
  """A row has a token after its own loops, and no call ends before one has."""
  calls = []
  engine = spied(engine_of("looped", num_slots=4), calls)
  loops = (1, 2, 3, 3)
  found = engine.generate(
    [
      GenerationRequest(prompt, 12, GREEDY, num_loops=num)
      for prompt, num in zip(PROMPTS[:2] * 2, loops, strict=True)
    ]
  )
  assert [len(text) for text in found] == [12] * 4
  passes = [[] for _ in loops]
  for rows, depth, generated in calls:
    if depth != slots.BY_DEPTH or set(rows.tolist()) != {0, 1, 2, 3}:
      break
    ran = np.flatnonzero(np.any(generated.valid, axis=1))[-1] + 1
    for each in generated.valid[:ran]:
      for slot, valid in zip(rows, each, strict=True):
        passes[slot].append(valid)
  # Slots are assigned from the first; all rows advance in every pass.
  for num, row in zip(loops, passes, strict=True):
    at = np.flatnonzero(row)
    assert at[0] == num - 1 and set(np.diff(at)) == {num}
  # A call has as many passes as its tokens could need, and the first call ends
  # when a row has twice as many.
  assert np.any(calls[0][2].valid, axis=1).sum() == 8


def test_a_slot_begins_with_the_first_loop_of_its_text():
  """Not affected by a text that was cancelled within a token."""
  asked = [
    GenerationRequest(prompt, 12, GREEDY, num_loops=loops)
    for prompt, loops in zip(PROMPTS[:2] * 2, (2, 3, 1), strict=False)
  ]
  engine = engine_of("looped", num_slots=3)
  numbers = [engine.add(one) for one in asked]
  while not engine.idle:
    engine.step()
    within = np.asarray(engine._state.slots.progress.state.loops)
    if within.any():
      break
  assert within[1]  # The row with three loops.
  engine.cancel(numbers[1])
  last = engine.add(asked[1])
  text = []
  while not engine.idle:
    text += [one for one in engine.step() if one.request_id == last]
  (alone,) = shared("looped", num_slots=1).generate([asked[1]])
  alike(text, alone)


@pytest.mark.long
def test_a_token_that_lockstep_ends_is_not_gone_on_with(monkeypatch):
  """By depth, in lockstep and by depth again, within the same texts."""
  asked = [
    GenerationRequest(prompt, 16, GREEDY, num_loops=loops)
    for prompt, loops in zip(PROMPTS[:2], (1, 3), strict=True)
  ]
  calls = []
  engine = spied(engine_of("looped", num_slots=2), calls)
  numbers, found = [engine.add(one) for one in asked], {}
  while not engine.idle:
    share = -1.0 if len(calls) == 1 else 2.0
    monkeypatch.setattr(sizes, "_SHARE_BY_DEPTH", share)
    for one in engine.step():
      found.setdefault(one.request_id, []).append(one)
  depths = [depth for _, depth, _ in calls]
  assert depths[:3] == [slots.BY_DEPTH, slots.LOOPS, slots.BY_DEPTH]
  for number, request in zip(numbers, asked, strict=True):
    (alone,) = shared("looped", num_slots=1).generate([request])
    alike(found[number], alone)


def test_rows_wait_for_each_other_where_that_is_faster(monkeypatch):
  """By depth only if exits are early on average; never a single row."""
  monkeypatch.undo()
  assert sizes.by_depth([1, 4], 4) and sizes.by_depth([2.0] * 8, 4)
  assert not sizes.by_depth([1], 4) and not sizes.by_depth([3.2] * 8, 4)
  early, late = (
    [
      GenerationRequest(prompt, 9, GREEDY, num_loops=loops)
      for prompt, loops in zip(PROMPTS[:2], each, strict=True)
    ]
    for each in ((1, 3), (2, 2))
  )
  for asked, expected in ((early, slots.BY_DEPTH), (late, slots.LOOPS)):
    calls = []
    spied(engine_of("looped", num_slots=2), calls).generate(asked)
    assert calls[0][1] == expected
  calls, leaving = [], dataclasses.replace(early[0], num_loops=0)
  leaving = dataclasses.replace(leaving, max_new_tokens=12, exit_threshold=0.2)
  spied(engine_of("looped", num_slots=2), calls).generate([leaving] * 2)
  # Exits are known only afterwards.
  assert [depth for _, depth, _ in calls][:2] == [slots.EXITS, slots.BY_DEPTH]


@pytest.mark.long
def test_others_stay_in_lockstep():
  """Families whose loops need more than a state, or without exits."""
  asked = [
    GenerationRequest(prompt, 5, GREEDY, num_loops=loops)
    for prompt, loops in zip(PROMPTS[:2], (1, 3), strict=True)
  ]
  calls = []
  spied(engine_of("recurrent", num_slots=2), calls).generate(asked)
  assert {depth for _, depth, _ in calls} == {slots.LOOPS}
  assert not engine_of("disco").limits.by_depth
  # All loops run anyway: nothing to save.
  assert not engine_of("looped", exit_kept="computed").limits.by_depth
