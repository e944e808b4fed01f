"""Texts and questions on the page: its content equals the model's outputs."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from play_examples import data_of
from tests_support import load_config, untrained

from loopjax import config as config_lib
from loopjax.data.multihop import task as multihop
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate import source
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.play import load, page, questions
from loopjax.play import text as text_view
from loopjax.saved import language_model, trained

LOOPS = 3
PROMPT = "(3+4)*2=\n1"
SMALL = (
  "tiny,model.width=16,model.num_layers=2,model.num_heads=2,model.init_std=0.5,"
  f"model.num_loops={LOOPS},task.sequence_length=64"
)


def make(folder, name, arg):
  return untrained(folder / name, load_config(name, arg))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs")
  slots = ",model.num_local_slots=4,model.num_global_slots=4"
  return {
    "looped": make(folder, "lm_looped", SMALL),
    "adaptive": make(folder, "lm_adaptive", SMALL + slots),
    "questions": make(
      folder, "multihop_disco", "smoke,model.name=looped,model.num_loops=3"
    ),
  }


@pytest.fixture(scope="module")
def inspectors(runs):
  return {name: load.load(workdir) for name, workdir in runs.items()}


@pytest.fixture(scope="module")
def gated(inspectors):
  return inspectors["looped"].inspect(PROMPT)


def ids_of(prompt):
  return jnp.array([[256, *prompt.encode()]])  # 256 begins a document.


def merged(workdir):
  run = trained.read(workdir)
  return jax.jit(
    lambda inputs, num_loops, names, **more: nnx.merge(
      run.graphdef, run.params
    )(inputs, num_loops=num_loops, trace=names, **more),
    static_argnums=(1, 2),
  ), run


@pytest.mark.long
def test_a_text_is_read_out_where_the_gate_leaves(runs, gated):
  forward, run = merged(runs["looped"])
  ids = ids_of(PROMPT)  # Later tokens do not affect them.
  num = ids.shape[1]
  hidden = forward(ids, LOOPS, ("hidden",)).trace["hidden"][:, 0]
  leave = 1 / (1 + np.exp(-np.asarray(run.model().exit_logits(hidden))))
  stay = np.cumprod(1 - leave, axis=0)  # [K, T]
  assert stay.std(axis=1).min() > 0.001
  tokens = range(ids.shape[1])
  for k in range(LOOPS):
    log_chances = np.asarray(
      jax.nn.log_softmax(forward(ids, k + 1, ()).logits[0])
    )
    chances, losses = (
      np.exp(log_chances),
      -log_chances[tokens[:-1], np.asarray(ids)[0, 1:]],
    )
    found = np.array(gated["surprise"][k])[: num - 1]
    assert np.abs(found - 100 * losses).max() <= 0.52
    first = [pairs[0][1] for pairs in gated["candidates"][k][:num]]
    assert np.abs(np.array(first) - 1000 * chances.max(axis=1)).max() <= 0.52
    for q, threshold in enumerate(text_view.THRESHOLDS):
      expected = [
        next((n for n in range(k) if 1 - stay[n, t] >= threshold), k)
        for t in tokens
      ]
      assert gated["readout"][k][q][:num] == expected
      assert gated["depth"][k][q][:num] == [100 * (n + 1) for n in expected]
  assert len(set(gated["readout"][-1][3][:num])) > 1
  assert gated["tokens"][: gated["start"]] == ["", *PROMPT]
  assert len(gated["tokens"]) > gated["start"]  # The model continued.


@pytest.mark.long
def test_spent_mass_is_a_choice_of_loops_and_threshold(runs, inspectors):
  found = inspectors["adaptive"].inspect(PROMPT)
  forward, _ = merged(runs["adaptive"])
  k, q = LOOPS - 1, text_view.THRESHOLDS.index(0.5)
  ids = ids_of(PROMPT)
  num = ids.shape[1]
  output = forward(ids, k + 1, ("halting",), exit_threshold=jnp.float32(0.5))
  halting = np.asarray(output.trace["halting"])[:, 0]  # [N, T, L]
  steps = np.arange(1, k + 2)[:, None, None]
  expected = 100 * (steps * halting).sum(axis=0).mean(axis=-1)
  depth = np.array(found["depth"][k][q])[:num]
  assert np.abs(depth - expected).max() <= 0.52
  readout = found["lens"][k][q]
  assert found["readout"][k][q][:num] == [readout] * num
  chances = jax.nn.softmax(output.logits[0])
  first = [pairs[0][1] for pairs in found["candidates"][readout][:num]]
  assert np.abs(np.array(first) - 1000 * chances.max(axis=1)).max() <= 0.52
  depth = np.array(found["depth"])
  assert (np.diff(depth[k], axis=0) <= 0).all() and (depth[0] == 100).all()
  assert depth[k, 0].mean() > depth[k, q].mean()


@pytest.mark.long
def test_without_a_gate_a_readout_is_a_run_of_so_many_loops(runs):
  run = trained.read(runs["looped"])
  ids = ids_of(PROMPT)

  @jax.jit
  def both(params):
    model = nnx.merge(run.graphdef, params)
    return (
      text_view.by_gate(model, ids, LOOPS),
      text_view.by_loop(model, ids, LOOPS),
    )

  gate, plain = both(run.params)
  np.testing.assert_allclose(gate.logits, plain.logits, atol=1e-5)
  assert plain.depth[:, 0, 0].tolist() == [1, 2, 3]
  assert (plain.readout[..., 0] == plain.lens).all()


@pytest.mark.long
def test_candidates_are_legible(gated):
  """Of bytes that are no text alone, their number."""
  shown = {
    text for c in gated["candidates"] for place in c for text, _ in place
  }
  assert any(text.startswith("<0x") for text in shown)
  assert not any("\ufffd" in text for text in shown)


@pytest.mark.long
def test_a_text_of_its_own_is_of_its_seed(inspectors):
  random = inspectors["looped"].random
  assert random(1, "") == random(1, "") != random(2, "")


def test_a_text_of_its_own_has_the_tokens_that_it_wrote(runs, inspectors):
  """Its bytes are not valid UTF-8."""
  found = inspectors["looped"].random(1, "")
  model = language_model.load(runs["looped"])
  engine = source.make_engine(model, num_slots=1, max_tokens=64)
  sampling = Sampling(temperature=0.8, seed=1)
  request = GenerationRequest((256,), 63, sampling, model.stop_tokens)
  tokens = [x.token for x in engine.generate([request])[0] if x.token != 256]
  assert found["prompt"] == bytes(tokens).decode(errors="replace")
  assert "\ufffd" in found["prompt"] and len(tokens) > 1
  assert len(found["tokens"]) == 1 + len(tokens)
  assert found["tokens"][-1]
  forward, _ = merged(runs["looped"])
  logits = forward(jnp.array([[256, *tokens]]), LOOPS, ()).logits[0, :-1]
  losses = -jax.nn.log_softmax(logits)[
    jnp.arange(len(tokens)), jnp.array(tokens)
  ]
  assert np.abs(np.array(found["surprise"][-1]) - 100 * losses).max() <= 0.52


@pytest.mark.parametrize(
  ("text", "right"),
  [
    ("3+4+8=7,15", "3+4+8=7,15"),
    ("3+4+8=7,1", "3+4+8=7,15"),
    ("3+4+8=15", "3+4+8=15"),
    ("3+4+8=", "3+4+8=15"),
    ("12+9=20\n", "12+9=21"),
    ("3+4", ""),
    ("1+" + "9" * 5000 + "=", ""),
    ("x=3+4=7", ""),
  ],
)
def test_a_sum_has_one_right_text(text, right):
  assert text_view.answer_of(text) == right


def test_a_text_that_is_too_long_is_refused(inspectors):
  with pytest.raises(
    UserError, match="65 tokens, more than the model's context length of 64"
  ):
    inspectors["looped"].inspect("x" * 64)


@pytest.mark.long
def test_a_question_is_decoded_everywhere_in_every_loop(runs, inspectors):
  inspector = inspectors["questions"]
  level = "never composed in training"
  assert inspector.facts["levels"][-1] == level
  question = inspector.random(3, level)["prompt"]
  assert question == inspector.random(3, level)["prompt"]
  found = inspector.inspect(question)
  assert found["split"].startswith("test_ood") and len(found["entities"]) > 2
  run = trained.read(runs["questions"])
  task = run.settings.task
  data = multihop.make_dataset(task, "test", batch_size=512, seed=0)
  batch = data.batches[0]
  words = np.array([*questions.names_of(task), ""])
  named = [" ".join(words[row]).strip() for row in batch["inputs"]]
  row = named.index(question)
  forward, _ = merged(runs["questions"])
  inputs = batch["inputs"][row][None]
  for k in range(LOOPS):
    chances = jax.nn.softmax(forward(inputs, k + 1, ()).logits[0])
    for t, pairs in enumerate(found["candidates"][k]):
      best = int(np.argmax(chances[t]))
      assert pairs[0][0] == words[best]
      assert abs(pairs[0][1] - 1000 * chances[t, best]) <= 0.52
  after = [x for x in batch["bridges"][row].tolist() if x >= 0]
  assert found["entities"][1:] == words[after].tolist()
  assert found["entities"][0] == found["tokens"][0]
  assert found["split"] == data.groups["split"][batch["group/split"][row]]
  assert found["places"] == list(range(1, len(found["tokens"])))
  assert found["asks"] == "'s ".join(found["tokens"])


def test_what_is_no_question(runs):
  config = config_lib.of_run(runs["questions"], "").task
  facts = multihop.make_graph(config)
  size = config.vocabulary.padding
  names = [multihop.decode(config, [token]) for token in range(size)]
  for words, message in (
    ("<e1> <r0x>", "'<r0x>' is not a word of this task; did you mean '<r0>'?"),
    ("<r0> <e1>", "is not a question; expected the form ENTITY RELATION1"),
  ):
    with pytest.raises(UserError) as error:
      questions.parse(config, facts, names, words)
    assert message in str(error.value)


def test_english_questions_hold_their_line_end():
  arg = "smoke,task.format=reverse"
  config = config_lib.resolve(load_config("multihop_disco", arg)).task
  facts = multihop.make_graph(config)
  size = config.vocabulary.padding
  names = [
    multihop.decode(config, [token]).replace("\n", "↵") for token in range(size)
  ]
  fact = facts.relations[0] + config.vocabulary.num_entities
  words = f"Who is the {names[fact]} of the {names[fact]} of {names[0]} ? ↵"
  parsed = questions.parse(config, facts, names, f"{words} Answer:")
  assert parsed.entities[:2] == (0, facts.tails[0])
  assert parsed.places == (8, 8)


def test_a_text_of_its_own_is_saved_as_it_was_shown(
  inspectors, gated, client_of
):
  client = client_of(inspectors["looped"], [gated])
  found = client.get("/random").json()
  export = client.get("/export", params={"prompt": found["prompt"]})
  assert data_of(export.text)["thoughts"] == [found]


@pytest.fixture
def opened(browser, tmp_path):
  """Opens a model's page at a phone's width."""

  def open_page(inspector, found):
    path = tmp_path / "page.html"
    path.write_text(page.make(inspector, found, served=False))
    assert data_of(path.read_text())["thoughts"] == found
    tab = browser.new_page(
      viewport={"width": 360, "height": 740}, reduced_motion="reduce"
    )
    mistakes = []
    tab.on("pageerror", lambda error: mistakes.append(str(error)))
    tab.goto(path.as_uri())
    assert not mistakes
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    return tab

  return open_page


def test_a_reader_moves_the_sliders(inspectors, gated, opened):
  gated = copy.deepcopy(gated)
  gated["candidates"][1][4][0][0] = "\r"
  tab = opened(inspectors["looped"], [gated])
  tokens = tab.locator("#tokens .token")
  assert tokens.count() == len(gated["tokens"])
  assert tab.locator("#leaves").inner_text() == "exit gate at 0.5"  # At first.
  for loops, threshold in ((3, 0), (3, 3), (2, 6)):
    tab.locator("#loop").fill(str(loops))
    tab.locator("#threshold").fill(str(threshold))
    depth = gated["depth"][loops - 1][threshold]
    shown = [x.get_attribute("title") for x in tokens.all()]
    assert shown == [f"{x / 100:g} loops" for x in depth]
    read = gated["readout"][loops - 1][threshold][:-1]
    losses = [gated["surprise"][c][t] for t, c in enumerate(read)]
    status = tab.locator("#status").inner_text()
    assert status.startswith(f"{np.mean(depth) / 100:.2f} of 3 loops")
    number = float(status.split("; ")[1].split(" ")[0])
    assert abs(number - np.mean(losses) / 100) <= 0.0051
  tokens.nth(4).click()
  rows = tab.locator("#lens tr")
  said = gated["readout"][1][6][4]
  assert [x.get_attribute("class") for x in rows.all()] == [
    "read" if c == said else "" for c in range(LOOPS)
  ]
  cell = rows.nth(1).locator("td").first.inner_text()
  share = gated["candidates"][1][4][0][1] / 10
  assert cell.startswith("␍")  # Control characters have signs.
  assert cell.endswith(f"{share:.1f} %" if share < 10 else f"{share:.0f} %")
  tab.keyboard.press("Escape")
  last = len(gated["tokens"]) - 1
  assert f"({last} of {last})" in tab.locator("#chosen").inner_text()


def test_a_model_writes_before_the_eyes(inspectors, gated, browser, tmp_path):
  """Loops predict one after another; errors in a sum are marked."""
  found = dict(gated, tokens=["", *"3+4=9"], start=5, answer="3+4=7")
  for name in ("depth", "readout"):
    found[name] = [[row[:6] for row in rows] for rows in gated[name]]
  found["candidates"] = [rows[:6] for rows in gated["candidates"]]
  found["surprise"] = [row[:5] for row in gated["surprise"]]
  path = tmp_path / "page.html"
  path.write_text(page.make(inspectors["looped"], [found], served=False))
  tab = browser.new_page(reduced_motion="no-preference")
  tab.add_init_script("setInterval = step => { window.step = step; return 1; }")
  tab.goto(path.as_uri())
  tokens, rows = tab.locator("#tokens .token:visible"), tab.locator("#lens tr")
  loops = found["depth"][-1][3][4] // 100  # At the initial threshold.
  for k in range(loops):
    assert tokens.count() == 5  # The last one is not shown yet.
    assert rows.nth(k).get_attribute("class").endswith(" now")
    best = found["candidates"][found["lens"][k][3]][4][0][0].strip("\n")
    assert tab.locator("#guess").text_content() in (best, "¶", "␣", "↵", "⇥")
    tab.evaluate("step()")
  assert tokens.count() == 6 and not tab.locator("#guess").count()
  assert tab.locator("#tokens .given").count() == found["start"]
  assert tab.locator("#tokens .wrong").all_inner_texts() == ["9"]
  assert tab.locator("#status").inner_text() == "wrong: 7 is right"
  heights = tab.locator("#difficulty rect").count()
  assert heights == len({sum(100 * e <= x for e in (0.5, 1, 2, 4)) for x in
    found["surprise"][-1]})  # fmt: skip


def test_a_reader_looks_into_a_question(inspectors, opened):
  inspector = inspectors["questions"]
  levels = inspector.facts["levels"]
  found = [inspector.random(1, level) for level in levels[-2:]]
  tab = opened(inspector, found)
  cells = tab.locator("#grid button")
  count = len(found[0]["tokens"])
  first = [x[0][0] for places in found[0]["candidates"] for x in places]
  assert [x.split()[0] for x in cells.all_inner_texts()] == first
  for key in ("ArrowRight", "+", "ArrowRight"):
    tab.keyboard.press(key)
  assert "chosen" in cells.nth(count + 1).get_attribute("class")
  chances = [x[0][1] for places in found[0]["candidates"] for x in places]
  for text, chance in zip(cells.all_inner_texts(), chances, strict=True):
    percent = float(text.split()[-2])  # Chances are in thousandths.
    assert abs(percent - chance / 10) <= 0.5
  listed = tab.locator("#candidates li").all_inner_texts()
  names = [name for name, _ in found[0]["candidates"][1][1]]
  assert [x.split()[0] for x in listed] == names
  tab.keyboard.press("ArrowDown")
  assert " → ".join(found[1]["entities"]) in tab.locator("#truth").inner_text()
  best = found[1]["candidates"][-1][-1][0][0]  # At the answer's position.
  assert tab.locator("#candidates li").first.inner_text().startswith(best)


def test_half_a_character_at_the_end_is_shown():
  ids = [*"aü".encode(), 256, 0xC3]
  texts = text_view.token_texts(Tokenizer("bytes"), ids)
  assert texts == ["a", "", "ü", "¶", "\ufffd"]
