"""Cycles on the page: its questions are the task's, its answers the model's."""

import pathlib

import numpy as np
import pytest
from tests_support import load_config

from loopjax import config as config_lib
from loopjax.data.depo import task as depo
from loopjax.data.depo.task import Config
from loopjax.errors import UserError
from loopjax.play import cycle, load, page
from loopjax.saved import trained

WORDS = Config(
  num_nodes=5, max_hops=3, num_queries=2, word_base=3, max_word=2,
  context_length=22, num_eval_examples=3,
)  # fmt: skip
PASSES = 2


@pytest.mark.parametrize("num", [2, 4, 5])
def test_a_question_is_the_first_one_of_the_tasks_row(num):
  """Names of one and two tokens, cycles of several sizes, every hop."""
  for seed, hops in enumerate(WORDS.eval_hops):
    batch = depo.examples(
      WORDS, seed, np.zeros(1, int), np.array([num]), np.full((1, 2), hops)
    )
    expected = batch["inputs"][0]
    context = expected[: WORDS.context_length].tolist()
    names = "".join(
      "abc"[token % 3] + " " * (token >= 3) for token in context if token < 6
    ).split()
    edges = zip(names[::2], names[1::2], strict=True)
    found = cycle.parse(WORDS, "\n".join(f"{x}>{y}" for x, y in edges))
    assert len(found.nodes) == num
    hop = WORDS.eval_hops.index(hops)
    rows = cycle.rows(WORDS, found)[hop]
    asked = [row.nonzero()[0][-1] + 1 for row in rows != WORDS.padding]
    matches = [
      (row[:size] == expected[:size]).all()
      for row, size in zip(rows, asked, strict=True)
    ]
    assert sum(matches) == 1
    start = batch["weights"][0].nonzero()[0][0]  # Of the first answer.
    assert asked[matches.index(True)] > start + 1


def test_a_random_cycle_is_a_largest_one_of_its_seed():
  prompt = cycle.random_cycle(WORDS, 3)
  assert prompt == cycle.random_cycle(WORDS, 3) != cycle.random_cycle(WORDS, 4)
  assert len(cycle.parse(WORDS, prompt).nodes) == WORDS.num_nodes


@pytest.mark.parametrize(
  ("prompt", "message"),
  [
    ("a>b b", "'b' is not an edge; expected the form a>b"),
    ("a>d d>a", "'d' is not the name of a node; use 1 to 2 of abc"),
    ("a>aaa aaa>a", "'aaa' is not the name"),
    ("", "0 edges; a cycle of this task has 1 to 5"),
    ("a>a b>b", "the 2 edges are not one cycle: from 'a' they reach 1 nodes"),
    ("a>b b>c", "the 2 edges are not one cycle: from 'a' they reach 3 nodes"),
    ("a>b b>a a>b", "the 3 edges are not one cycle"),
    ("a>b b>c c>b", "the 3 edges are not one cycle"),
  ],
)
def test_what_is_no_cycle(prompt, message):
  with pytest.raises(UserError) as error:
    cycle.parse(WORDS, prompt)
  assert message in str(error.value)


def small(arg):
  """A model that sleeps, and names of one and two letters."""
  return load_config(
    "depo_sleep",
    f"smoke,model.num_loops={PASSES},model.window=12,task.num_nodes=5,"
    "task.word_base=3,task.max_word=2,task.context_length=22," + arg,
  )


def test_an_answer_is_all_tokens_of_its_name():
  """With chances of a model that is none."""
  rng = np.random.default_rng(0)
  shape = (PASSES, len(WORDS.eval_hops) * WORDS.num_nodes)
  shape += (depo.answer_length(WORDS), WORDS.padding + 1)
  chances = rng.dirichlet(np.ones(shape[-1]), shape[:-1])

  def forward(inputs):
    after = np.roll(inputs[:, -shape[2] :], -1, axis=1)
    # The right tokens are the most likely ones after the first pass.
    chances[0, *np.indices(after.shape), after] += 1
    right = np.take_along_axis(chances, after[None, ..., None], axis=-1)
    return chances.argmax(-1), chances.max(-1), right[..., 0]

  prompt = "ab>c a>ab c>a"
  found = cycle._inspect(WORDS, lambda place: place, forward, prompt)
  assert found["prompt"] == prompt and found["nodes"] == ["ab", "c", "a"]
  assert found["edges"] == [0, 2, 1]
  assert found["windows"] == [14, 17, 20]  # Of 22 places, eight are used.
  parsed = cycle.parse(WORDS, prompt)
  for hop, steps in enumerate(WORDS.eval_hops):
    for at, node in enumerate(parsed.nodes):
      sink = (at + steps) % 3
      assert found["answers"][0][hop][at] == found["nodes"][sink]
      assert found["chances"][0][hop][at] == found["right"][0][hop][at]
      right = parsed.nodes[sink]
      tokens = 1 + len(node) + np.arange(len(right))
      here = chances[1, hop * WORDS.num_nodes + at, tokens]
      said = found["answers"][1][hop][at]
      same = tuple(here.argmax(-1).tolist()) == right
      assert (said == found["nodes"][sink]) == same
      for name, chance in (
        ("chances", here.max(axis=-1).prod()),
        ("right", here[np.arange(len(right)), np.array(right)].prod()),
      ):
        assert abs(found[name][1][hop][at] - 1000 * chance) <= 0.52


@pytest.mark.long
def test_answers_are_those_of_so_many_passes():
  """The model of the zoo needs its passes."""
  workdir = pathlib.Path("zoo:depo")
  inspector = load.load(workdir, num_loops=PASSES)
  found = inspector.random(0, "")
  run = trained.read(workdir)
  parsed = cycle.parse(run.settings.task, found["prompt"])
  rows = cycle.rows(run.settings.task, parsed)
  inputs = rows.reshape(-1, rows.shape[-1])
  logits = run.model()(inputs, num_loops=PASSES).logits[:, 2]
  said = np.asarray(logits).argmax(axis=-1).reshape(rows.shape[:2])
  places = {node: at for at, node in enumerate(parsed.nodes)}
  shown = [
    [found["nodes"].index(x) for x in row] for row in found["answers"][1]
  ]
  assert shown == [[places[(x,)] for x in row] for row in said.tolist()]
  assert found["answers"][0] != found["answers"][1]
  assert inspector.facts["sleeps"] and inspector.facts["trainedLoops"] == 4


def test_edges_are_in_the_window_that_reads_them():
  """24 tokens of the context, in windows of 12."""
  window_of = cycle._windows(
    config_lib.resolve(small("task.context_length=24"))
  )
  assert [window_of(place) for place in (0, 11, 12, 23, 24)] == [0, 0, 1, 1, -1]
  plain = load_config("depo_sleep", "smoke,model.name=looped")
  assert cycle._windows(config_lib.resolve(plain))(0) == -1


def test_a_reader_walks_along_a_cycle(tmp_path, browser):
  """With the keyboard and the mouse, at a phone's width."""
  names = ["a", "b", "ca"]
  found = {
    "prompt": "a>b ca>a b>ca", "nodes": names, "edges": [0, 2, 1],
    "windows": [0, 0, 1],
    "answers": [[["b", "b", "a"], ["b", "a", "?…"]], [["b", "ca", "a"],
      ["ca", "a", "b"]]],
    "chances": [[[900, 400, 800], [500, 600, 300]], [[990, 980, 970],
      [960, 950, 940]]],
    "right": [[[900, 100, 800], [100, 600, 100]], [[990, 980, 970],
      [960, 950, 940]]],
  }  # fmt: skip
  facts = {
    "run": "depo", "step": 7, "loops": PASSES, "trainedLoops": PASSES,
    "levels": [], "family": "sleep", "sleeps": True, "hops": (1, 2),
  }  # fmt: skip
  inspector = page.Inspector("cycle", facts, pytest.fail, pytest.fail)
  path = tmp_path / "page.html"
  path.write_text(page.make(inspector, [found], served=False))
  tab = browser.new_page(
    viewport={"width": 360, "height": 740}, reduced_motion="reduce"
  )
  mistakes = []
  tab.on("pageerror", lambda error: mistakes.append(str(error)))
  tab.goto(path.as_uri())
  status, asks = tab.locator("#status"), tab.locator("#asks")
  assert status.inner_text() == (
    "Right answers after 2 passes: 1 step 3 of 3, 2 steps 3 of 3."
  )
  assert tab.locator("#edges .dropped").count() == 3
  tab.keyboard.press("ArrowLeft")
  assert status.inner_text() == (
    "Right answers after 1 pass: 1 step 2 of 3, 2 steps 1 of 3."
  )
  assert tab.locator("#edges .asleep").count() == 3
  assert tab.locator("#edges").inner_text().split() == (
    ["a→b", "ca→a", "|", "b→ca"]
  )
  # An answer that is no node has no arrow.
  assert tab.locator("#ring .said").count() == 2
  assert tab.locator("#ring .said.wrong").count() == 1
  tab.locator("#ring .node").nth(2).click()
  assert asks.inner_text() == "2 steps after ca is …"
  rows = tab.locator("#answers tr:visible")
  assert rows.all_inner_texts() == ["pass 1\t?…, wrong (30 %)"]
  tab.keyboard.press("ArrowRight")
  tab.keyboard.press("-")
  tab.keyboard.press("Shift+ArrowLeft")
  assert asks.inner_text() == "1 step after b is …"
  way = tab.locator("#meaning")
  assert way.inner_text() == "The edges say: b → ca."
  tab.keyboard.press("+")
  assert way.inner_text() == "The edges say: b → ca → a."
  tab.keyboard.press("-")
  assert [row.split("\t")[1] for row in rows.all_inner_texts()] == [
    "b, wrong (40 %)", "ca, right (98 %)",
  ]  # fmt: skip
  bars = tab.locator("#charts rect")
  high = [float(bar.get_attribute("height")) for bar in bars.all()]
  np.testing.assert_allclose(high, [52, 78, 26, 78], rtol=1e-5)
  tab.reload()  # The address has the state.
  assert asks.inner_text() == "1 step after b is …"
  assert tab.evaluate("document.documentElement.scrollWidth") <= 360
  assert not mistakes
