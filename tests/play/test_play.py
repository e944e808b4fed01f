"""The page that shows a model's loops: its content is the model's output."""

import base64
import itertools
import pathlib
import re
import socket
import sys
import threading
import time
import types
from concurrent import futures

import jax
import numpy as np
import pytest
from flax import nnx
from play_examples import data_of
from tests_support import load_config, smoke, untrained

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.analysis import halting
from loopjax.commands import hosts
from loopjax.data.sudoku import board as board_lib
from loopjax.data.sudoku import solver
from loopjax.errors import UserError
from loopjax.optim import chain
from loopjax.play import __main__ as command
from loopjax.play import load, page, puzzle
from loopjax.run import workdir as workdir_lib
from loopjax.saved import trained

PUZZLE = "1..4..1..1..4..1"  # Breaks no rule, without a unique solution.
LOOPS = 3
TELEPHONE = {"viewport": {"width": 360, "height": 740}}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  config = smoke(
    model__router_bias=0.0, model__epsilon=0.3, model__num_loops=LOOPS
  )
  return untrained(tmp_path_factory.mktemp("runs") / "four", config)


@pytest.fixture(scope="module")
def inspector(workdir):
  return load.load(workdir, num_loops=LOOPS)


@pytest.fixture(scope="module")
def inspection(inspector):
  return inspector.inspect(PUZZLE)


@pytest.mark.long
def test_thoughts_are_what_the_model_did(workdir, inspection):
  run = trained.read(workdir)
  inputs = np.array([[0 if c == "." else int(c) for c in PUZZLE]]) + 1

  @jax.jit
  def forward(params):
    model = nnx.merge(run.graphdef, params)
    names = ("prediction", "confidence", "weight", "attention")
    return model(inputs, trace=names)

  output = forward(run.params)
  trace = {name: np.asarray(x[:, 0]) for name, x in output.trace.items()}
  digits = [*trace["prediction"], np.argmax(output.logits[0], -1)]
  assert inspection["digits"] == [(row - 1).tolist() for row in digits]
  certain = 100 * trace["confidence"]
  assert np.abs(np.array(inspection["certain"][:-1]) - certain).max() <= 0.51
  assert inspection["halted"] == halting.steps_taken(trace["weight"]).tolist()
  assert len(set(inspection["halted"])) > 1
  size = len(inspection["halted"])
  raw = base64.b64decode(inspection["attention"])
  looks = np.frombuffer(raw, np.uint8).reshape(LOOPS, size, size)
  weights = trace["attention"].mean(axis=1)
  expected = 255 * weights / weights.max(axis=-1, keepdims=True)
  assert np.abs(looks - expected).max() <= 0.51


@pytest.mark.long
def test_a_run_with_kernels_is_read_anywhere(tmp_path, monkeypatch):
  config = smoke()
  workdir = untrained(tmp_path / "run", config)
  config.loop.kernels = "tpu"
  plain = config_lib.to_dict(config)
  workdir_lib.write_json(workdir / "config.json", plain)
  settings = trained.read(workdir).settings
  assert settings.plain["loop"]["kernels"] == "tpu"
  assert settings.loop.kernels == "xla"
  monkeypatch.setattr(program_lib, "have_kernels", lambda *_: True)
  assert trained.read(workdir).settings.loop.kernels == "xla"
  kept = trained.read(workdir, kernels=True).settings
  assert kept.loop.kernels == "tpu"


def test_a_model_is_read_without_what_trains_it(workdir, monkeypatch):
  monkeypatch.setattr(program_lib, "make_program", pytest.fail)
  monkeypatch.setattr(chain, "make_optimizer", pytest.fail)
  assert trained.read(workdir).settings.model.num_loops == LOOPS


def test_more_loops_than_trained(workdir):
  """A puzzle's slider goes to twice the loops of training by default."""
  inspector = load.load(workdir)
  assert len(inspector.inspect(PUZZLE)["digits"]) == 2 * LOOPS + 1
  assert inspector.facts["trainedLoops"] == LOOPS


def test_another_start_is_noise_that_its_number_decides(inspector, inspection):
  first, again, second = (inspector.again(PUZZLE, n) for n in (1, 1, 2))
  assert first == again
  paths = [tuple(map(tuple, x["certain"])) for x in (inspection, first, second)]
  assert len(set(paths)) == 3
  assert first["prompt"] == PUZZLE and first["confidence"] < 0


def test_a_solution_is_told_only_if_there_is_one(inspector, inspection):
  assert inspection["solution"] == ""
  cells, again, other = (
    inspector.random(seed, "hard")["prompt"] for seed in (7, 7, 8)
  )
  assert cells == again != other
  solution = inspector.inspect(cells)["solution"]
  assert sorted(solution) == sorted("1234" * 4)
  assert all(c in (".", s) for c, s in zip(cells, solution, strict=True))


def test_a_long_search_for_solutions_ends(inspector, monkeypatch):
  monkeypatch.setattr(puzzle, "_MAX_NODES", 1)
  found = inspector.inspect("." * 16)
  assert found["solution"] == ""
  assert found["solutions"].startswith("an unknown number of solutions")


@pytest.mark.long
def test_harder_puzzles_have_fewer_clues_or_need_guesses():
  board = board_lib.Board(3, 3)
  found = [
    puzzle.parse(board, puzzle.random_puzzle(board, 1, level))
    for level in puzzle.LEVELS
  ]
  guesses = solver.solve(board, np.array(found, np.uint8)).guesses.tolist()
  clues = np.count_nonzero(found, axis=1).tolist()
  assert list(puzzle.LEVELS) == ["easy", "medium", "hard", "hardest"]
  assert guesses[:3] == [0, 0, 0] < guesses[3:]
  assert clues[0] > clues[1] > clues[2]


@pytest.mark.parametrize(
  ("cells", "message"),
  [
    ("123", "3 cells; this board has 16"),
    ("5" + 15 * ".", "'5' is not a cell; use 1-4, or . for a blank"),
    ("x" + 15 * ".", "'x' is not a cell"),
  ],
)
def test_what_is_no_puzzle(cells, message):
  with pytest.raises(UserError, match=message):
    puzzle.parse(board_lib.Board(2, 2), cells)


def test_blanks_and_spaces_are_read():
  board = board_lib.Board(2, 2)
  text = "1.04 " * 4
  assert puzzle.characters(puzzle.parse(board, text)) == "1..4" * 4


def test_a_run_here_has_a_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  model = types.SimpleNamespace(num_loops=2)
  settings = types.SimpleNamespace(model=model, model_name="utm")
  source = page.Source(pathlib.Path("."), settings, 2, None)
  assert page.facts(source, 1)["run"] == tmp_path.name


def test_the_page_has_its_data_and_loads_nothing(inspector, inspection):
  facts = inspector.facts | {"run": "</script><b>&"}
  text = page.make(inspector._replace(facts=facts), [inspection], served=False)
  assert data_of(text) == {
    "facts": facts, "thoughts": [inspection], "served": False,
  }  # fmt: skip
  assert text.count("</script>") == 2  # The view's and the page's.
  assert not re.search(r"src=|https?://|@import|url\(", text)


def test_the_server_answers(inspector, inspection, client_of):
  client = client_of(inspector, [inspection])
  assert data_of(client.get("/").text)["served"]
  assert client.post("/think", content=PUZZLE).json() == inspection
  for prompt, message in (
    ("12", "2 cells"), (200_000 * ".", "200000 cells"), (b"\xff", "not UTF-8"),
  ):  # fmt: skip
    wrong = client.post("/think", content=prompt)
    assert wrong.status_code == 400
    assert message in wrong.json()["error"]
  started = client.post("/think?start=2", content=PUZZLE).json()
  assert started == inspector.again(PUZZLE, 2) != inspection
  for start in ("0", "x", "-1", "1" * 10):
    wrong = client.post(f"/think?start={start}", content=PUZZLE)
    assert wrong.status_code == 400
    assert "is not a start" in wrong.json()["error"]
  assert client.get("/random", params={"level": "easy"}).json()["solution"]
  for query in ("", "?level=none"):
    refused = client.get(f"/random{query}")
    assert refused.status_code == 400
    assert "one of easy, medium, hard, hardest" in refused.json()["error"]
  export = client.get("/export", params={"prompt": PUZZLE})
  assert data_of(export.text)["thoughts"] == [inspection]
  assert not data_of(export.text)["served"]
  assert "four.html" in export.headers["content-disposition"]
  other = inspector._replace(facts={**inspector.facts, "run": "vier für"})
  export = client_of(other, [inspection]).get(f"/export?prompt={PUZZLE}")
  assert "vier%20f%C3%BCr.html" in export.headers["content-disposition"]


def test_other_sites_cannot_ask_the_server(inspector, inspection, client_of):
  """By DNS rebinding, or by a page whose script only sends."""
  client = client_of(inspector, [inspection])
  named = client_of(inspector, [inspection], tuple, ["play.example"])
  mine, other = "http://localhost:8000", "http://evil.example:8000"
  for path in ("/", "/begin", "/random?level=easy", f"/export?prompt={PUZZLE}"):
    assert client.get(path, headers={"host": "127.0.0.1"}).is_success
    refused = client.get(path, headers={"host": "evil.example:8000"})
    assert refused.status_code == 400
    assert "unknown host 'evil.example:8000'" in refused.json()["error"]
    assert named.get(path).status_code == 400
    assert named.get(path, headers={"host": "Play.example"}).is_success
  for origin, status in ((mine, 200), (other, 400), ("null", 400)):
    headers = {"origin": origin}
    found = client.post("/think", content=PUZZLE, headers=headers)
    assert found.status_code == status


def test_the_page_comes_before_what_it_begins_with(
  inspector, inspection, client_of
):
  made = []
  begin = lambda: made.append(1) or [inspection]  # noqa: E731
  client = client_of(inspector, [], begin)
  assert data_of(client.get("/").text)["thoughts"] == [] and not made
  for _ in range(2):
    assert client.get("/begin").json() == [inspection]
  assert len(made) == 1


def test_an_inspector_has_one_caller(inspector, inspection, client_of):
  """Several visitors, and one who reloads: its engine is not for two."""
  calls, lock = [], threading.Lock()

  def alone(*arguments):
    assert lock.acquire(blocking=False), "called while it was busy"
    try:
      calls.append(arguments)
      time.sleep(0.05)
      return {**inspection, "prompt": str(arguments)}
    finally:
      lock.release()

  facts = inspector.facts | {"levels": []}
  only = inspector._replace(facts=facts, inspect=alone, random=alone)
  client = client_of(only, [], lambda: [alone()])
  refused = client.get("/random?level=easy")
  assert "'easy' has no effect: this task has no" in refused.json()["error"]
  with futures.ThreadPoolExecutor() as threads:
    asked = [
      *(threads.submit(client.post, "/think", content=x) for x in "abc"),
      *(threads.submit(client.get, x) for x in ("/random", "/begin", "/begin")),
    ]
  assert [x.result().status_code for x in asked] == [200] * 6
  assert len(calls) == 5  # It begins once.


def test_random_prompts_are_remembered_but_not_forever(
  inspector, inspection, client_of, monkeypatch
):
  """A public page runs for weeks; an old prompt is parsed as if typed."""
  monkeypatch.setattr("loopjax.play.server._MAX_SHOWN", 2)
  names, parsed = itertools.count(), []
  facts = inspector.facts | {"levels": []}
  made = inspector._replace(
    facts=facts,
    inspect=lambda prompt: parsed.append(prompt) or inspection,
    random=lambda *_: {**inspection, "prompt": f"random {next(names)}"},
  )
  client = client_of(made, [])
  shown = [client.get("/random").json()["prompt"] for _ in range(3)]
  for prompt in shown:
    assert client.get("/export", params={"prompt": prompt}).is_success
  assert parsed == shown[:1]


def test_refusals_are_short(inspector, inspection, client_of):
  """They may quote what was sent, which can be long."""

  def refuse(prompt):
    raise UserError(f"{prompt}: unknown")

  client = client_of(inspector._replace(inspect=refuse), [inspection])
  long = 5_000 * "x"
  for refused in (
    client.post("/think", content=long),
    client.get("/export", params={"prompt": long}),
    client.get("/random", params={"level": long}),
  ):
    assert refused.status_code == 400
    assert len(refused.json()["error"]) == 200


@pytest.mark.long
def test_a_model_without_halting_is_shown(tmp_path):
  config = load_config("sudoku_urm", "smoke")
  inspector = load.load(untrained(tmp_path / "urm", config))
  facts = inspector.facts
  assert not facts["stops"] and not facts["attends"]
  found = inspector.random(1, "easy")
  assert len(found["digits"]) == facts["loops"] + 1
  assert {"halted", "attention"}.isdisjoint(found)


def test_the_command_writes_a_page(workdir, tmp_path, capsys):
  path = tmp_path / "page.html"
  flags = [str(workdir), f"--export={path}", f"--prompt={PUZZLE}"]
  assert command.main(flags) == 0
  assert capsys.readouterr().out.strip() == str(path)
  [inspection] = data_of(path.read_text())["thoughts"]
  assert inspection["prompt"] == PUZZLE


def test_random_prompts_are_harder_one_after_another(
  inspector, tmp_path, monkeypatch
):
  """The first is a level above the middle."""
  drawn = []

  def random(seed, level):
    drawn.append((seed, level))
    return inspector.random(seed, level)

  one = inspector._replace(random=random)
  monkeypatch.setattr(load, "load", lambda *_: one)
  flags = ["unused", "--random=4", f"--export={tmp_path / 'page.html'}"]
  assert command.main(flags) == 0
  levels = inspector.facts["levels"]
  first = len(levels) // 2
  assert drawn == [*enumerate([*levels[first:], *levels[:first]][:4])]


def test_mistakes_are_one_line(workdir, tmp_path, refusal, monkeypatch):
  other = tmp_path / "automaton"
  other.mkdir()
  config = config_lib.to_dict(load_config("automaton_sleep", "smoke"))
  workdir_lib.write_json(other / "config.json", config)
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  for flags, message in (
    ([str(tmp_path / "nowhere")], "contains no run"),
    ([str(other)], "'automaton' has no view"),
    ([str(workdir), "--num_loops=0"], "--num_loops=0 must be at least 1"),
    ([str(workdir), "--random=0"], "--random=0 must be"),
    ([str(workdir), "--allowed_hosts=*.b"], "--allowed_hosts=*.b is not a"),
    ([str(workdir), "--prompt=12"], "2 cells"),
    ([str(workdir), "--prompt=\udcff"], "--prompt is not UTF-8"),
    ([str(workdir), f"--export={tmp_path}"], "cannot be written"),
    ([str(workdir)], "uvicorn"),
  ):
    assert message in refusal(command.main, flags)


def test_a_port_that_cannot_be_used_is_one_line(workdir, refusal):
  pytest.importorskip("uvicorn")
  pytest.importorskip("starlette")
  with socket.create_server(("127.0.0.1", 0)) as taken:
    for port in (taken.getsockname()[1], -1, 99999):
      said = refusal(command.main, [str(workdir), f"--port={port}"])
      assert said.startswith(f"error: --port={port}")


@pytest.mark.parametrize("trained", [LOOPS, LOOPS + 2])
def test_a_page_says_what_it_shows(inspector, tmp_path, browser, trained):
  facts = inspector.facts | {"trainedLoops": trained, "step": 12_345}
  one = inspector._replace(facts=facts)
  path = tmp_path / "page.html"
  path.write_text(page.make(one, [inspector.inspect(PUZZLE)], served=False))
  tab = browser.new_page()
  tab.goto(path.as_uri())
  about = tab.locator("#about").inner_text()
  assert about.startswith("four, step 12,345: utm")
  more = "" if trained == LOOPS else f" (trained with {trained})"
  assert about.endswith(f", {LOOPS} loops{more}")


@pytest.mark.parametrize("display", [True, False])
def test_the_page_is_opened_where_it_can_be_seen(
  workdir, monkeypatch, capsys, display
):
  """On the next free port; a terminal without a display only prints it."""
  if sys.platform != "linux":
    pytest.skip("other systems have a display")
  pytest.importorskip("starlette")
  for name in ("DISPLAY", "WAYLAND_DISPLAY"):
    monkeypatch.delenv(name, raising=False)
  if display:
    monkeypatch.setenv("DISPLAY", ":0")
  opened, ports = [], []

  def run(sockets):
    ports.append(sockets[0].getsockname()[1])

  server = types.SimpleNamespace(
    Config=lambda app, **options: None,
    Server=lambda config: types.SimpleNamespace(run=run),
  )
  monkeypatch.setitem(sys.modules, "uvicorn", server)
  monkeypatch.setattr("webbrowser.open_new_tab", opened.append)
  with socket.create_server(("127.0.0.1", 0)) as taken:
    monkeypatch.setattr(hosts, "PORT", taken.getsockname()[1])
    assert command.main([str(workdir)]) == 0
    assert command.main([str(workdir), "--no_browser"]) == 0
  addresses = capsys.readouterr().out.split()
  assert addresses == [f"http://127.0.0.1:{port}" for port in ports]
  assert len(ports) == 2
  assert opened == addresses[:1] * display


def test_a_reader_steps_through_the_loops(inspector, tmp_path, browser):
  """With the keyboard and the mouse, at a phone's width."""
  found = [inspector.random(seed, "hard") for seed in (1, 2)]
  path = tmp_path / "page.html"
  path.write_text(page.make(inspector, found, served=False))
  tab = browser.new_page(**TELEPHONE, reduced_motion="reduce")
  mistakes = []
  tab.on("pageerror", lambda error: mistakes.append(str(error)))
  tab.goto(path.as_uri())
  cells = tab.locator("#board button")

  def board():
    return "".join(text or "." for text in cells.all_inner_texts())

  def shown(of, k):  # Given digits stay, whatever the model predicts.
    pairs = zip(found[of]["prompt"], found[of]["digits"][k], strict=True)
    return "".join(
      given if given != "." else str(d) if d > 0 else "." for given, d in pairs
    )

  def underlined(of, k):
    rows = found[of]["digits"][k], found[of]["solution"]
    return [d != int(right) for d, right in zip(*rows, strict=True)]

  assert board() == found[0]["prompt"]
  for k in range(LOOPS + 1):
    tab.keyboard.press("ArrowRight")
    assert board() == shown(0, k)
    classes = [cell.get_attribute("class").split() for cell in cells.all()]
    assert ["wrong" in names for names in classes] == underlined(0, k)
    stopped = sum(loop <= k + 1 for loop in found[0]["halted"][2:])
    assert f"{stopped} of 16 cells have" in tab.locator("#status").inner_text()
  assert tab.locator("#now").inner_text() == "output"
  tab.locator("#loop").fill("1")
  assert tab.locator("#now").inner_text() == f"loop 1 of {LOOPS}"
  tab.keyboard.press("ArrowDown")
  assert board() == shown(1, 0)
  cells.nth(5).click()
  looks = base64.b64decode(found[1]["attention"])[7 * 18 :][
    :18
  ]  # Two memories.
  for token, share in enumerate(looks):
    square = (
      cells.nth(token - 2)
      if token > 1
      else tab.locator("#memory span").nth(token)
    )
    style = square.get_attribute("style")
    assert f"{round(90 * share / 255)}%" in style
  assert "attends here" in tab.locator("#legend").inner_text()
  tab.keyboard.press("Escape")
  tab.keyboard.press("h")
  assert tab.locator("[value=halting]").is_checked()
  stops = [int(text) for text in tab.locator("#memory span").all_inner_texts()]
  stops += [int(text) for text in cells.all_inner_texts()]
  assert stops == found[1]["halted"]
  assert tab.locator("#legend").inner_text() == f"stops after loop 1{LOOPS}"
  tab.keyboard.press("t")
  assert tab.evaluate("document.documentElement.style.colorScheme") == "dark"
  assert not tab.locator("#ask").is_visible()
  wide = tab.evaluate("document.documentElement.scrollWidth")
  assert wide <= 360
  assert not mistakes


def test_of_several_solutions_one_is_right(inspector, tmp_path, browser):
  """A repetition is wrong; the page knows the rules."""
  found = dict(inspector.inspect(16 * "."))
  assert found["solutions"] == "several solutions"
  right = [int(c) for c in "1234341221434321"]
  found["digits"] = [right[:-1] + [2], right, right, right]
  path = tmp_path / "page.html"
  path.write_text(page.make(inspector, [found], served=False))
  tab = browser.new_page(**TELEPHONE, reduced_motion="reduce")
  tab.goto(path.as_uri())
  status = tab.locator("#status")
  tab.keyboard.press("ArrowRight")
  wrong = tab.locator("#board .wrong")
  assert status.inner_text().startswith("3 of 16 cells wrong")
  assert wrong.count() == 3
  tab.keyboard.press("ArrowRight")
  assert status.inner_text().startswith("solved: one of several solutions")


def test_the_chart_of_a_puzzle_without_a_solution_is_its_certainty(
  inspector, tmp_path, browser
):
  """Of the blanks, whose mean differs from that of all cells."""
  found = dict(
    inspector.random(1, "hard"), solution="", solutions="no solution"
  )
  blanks = [digit == "." for digit in found["prompt"]]
  found["certain"] = [
    [40 + 10 * (k % 3) if blank else 100 for blank in blanks]
    for k, _ in enumerate(found["certain"])
  ]
  path = tmp_path / "page.html"
  path.write_text(page.make(inspector, [found], served=False))
  tab = browser.new_page()
  tab.goto(path.as_uri())
  bars = tab.locator("#chart rect")
  high = [float(bar.get_attribute("height")) for bar in bars.all()]
  expected = [78 * row[blanks.index(True)] / 100 for row in found["certain"]]
  np.testing.assert_allclose(high, expected, rtol=1e-5)
  label = tab.locator("#chart").get_attribute("aria-label")
  assert label == "Certainty in percent, mean over blanks, by loop"


def test_the_path_of_an_answer_is_below_the_slider(
  inspector, tmp_path, browser
):
  """Changes by loop, when it is final, and givens that contradict."""
  found = dict(inspector.inspect("11.." + 12 * "."))
  assert found["solutions"] == "no solution"
  rows = [2, 3, 3, 3]  # The digits of all blanks, by loop and in the output.
  found["digits"] = [[1, 1] + 14 * [digit] for digit in rows]
  still = {**found, "digits": [[1, 1] + 14 * [d] for d in (2, 3, 4, 4)]}
  path = tmp_path / "page.html"
  other = {**found, "digits": [*found["digits"][:-1], still["digits"][-1]]}
  path.write_text(page.make(inspector, [found, still, other], served=False))
  tab = browser.new_page(**TELEPHONE, reduced_motion="reduce")
  tab.goto(path.as_uri())
  label = tab.locator("#moves").get_attribute("aria-label")
  assert label == "Blanks that change, by loop: 14, 14, 0"
  assert "final after loop 2." in tab.locator("#final").inner_text()
  assert tab.locator("#board .wrong").count() == 2
  assert "two of the given 1s" in tab.locator("#status").inner_text()
  tab.keyboard.press("ArrowDown")
  assert "still changes some" in tab.locator("#final").inner_text()
  tab.keyboard.press("ArrowDown")  # The output is not the last loop's answer.
  said = tab.locator("#final").inner_text()
  assert "no longer change after loop 2; the output weighs all loops" in said
  assert "final" not in said
  paths = [text.split("\n")[-1] for text in
    tab.locator("#paths button").all_inner_texts()]  # fmt: skip
  starts = ("final after loop 2", "still changing", "no change after loop 2")
  for text, start in zip(paths, starts, strict=True):
    assert start in text


@pytest.mark.parametrize("loops", [17, 200])
def test_a_picture_of_any_number_of_loops_is_whole(
  inspector, inspection, tmp_path, browser, loops
):
  """Every bar has a width, and no text leaves the picture."""
  found = dict(inspection)
  for name in ("digits", "certain"):
    found[name] = inspection[name][:1] * loops + inspection[name][-1:]
  facts = inspector.facts | {"loops": loops, "trainedLoops": 16}
  facts |= {"stops": False, "attends": False}
  path = tmp_path / "page.html"
  one = inspector._replace(facts=facts)
  path.write_text(page.make(one, [found], served=False))
  tab = browser.new_page(**TELEPHONE, reduced_motion="reduce")
  tab.goto(path.as_uri())
  for name, count in (("moves", loops), ("chart", loops + 1)):
    bars = tab.locator(f"#{name} rect").all()
    widths = [float(bar.get_attribute("width")) for bar in bars]
    assert len(widths) == count and min(widths) > 0
    texts = tab.locator(f"#{name} text")
    places = texts.evaluate_all(
      "all => all.map(x => x.getBBox()).map(box => [box.x, box.x + box.width])"
    )
    assert not [p for p in places if p[0] < 0 or p[1] > 320]
  rule = tab.locator("#moves text").first.text_content()
  assert rule == "beyond training's 16"


def test_a_page_plays_by_itself(inspector, tmp_path, browser):
  """Unless the user prefers reduced motion; its chart has the right values."""
  found = inspector.random(1, "hard")
  path = tmp_path / "page.html"
  path.write_text(page.make(inspector, [found], served=False))
  tab = browser.new_page(**TELEPHONE, reduced_motion="no-preference")
  tab.goto(path.as_uri())
  tab.wait_for_function("document.getElementById('now').value === 'output'")
  tab.wait_for_function(
    "document.getElementById('play').textContent === 'play'"
  )
  assert not tab.locator("#thoughts").is_visible()  # Only one puzzle.
  blanks = [i for i, digit in enumerate(found["prompt"]) if digit == "."]
  right = [
    sum(digits[i] == int(found["solution"][i]) for i in blanks)
    for digits in found["digits"]
  ]
  bars = tab.locator("#chart rect")
  high = [float(bar.get_attribute("height")) for bar in bars.all()]
  expected = [78 * count / len(blanks) for count in right]
  np.testing.assert_allclose(high, expected, rtol=1e-5)
  tab.locator("#chart").click(position={"x": 20, "y": 40})
  assert tab.locator("#now").inner_text() == f"loop 1 of {LOOPS}"
  tab.reload()
  tab.keyboard.press("ArrowRight")  # Stepping stops the animation.
  assert tab.locator("#play").inner_text() == "play"
  assert "without a digit" in tab.locator("#memory").inner_text()
  assert tab.locator("#keys").is_visible()
  tab = browser.new_page(**TELEPHONE, has_touch=True)
  tab.goto(path.as_uri())
  assert not tab.locator("#keys").is_visible()  # No keyboard.


def test_a_reader_writes_a_puzzle_on_the_board(
  inspector, inspection, browser, client_of
):
  """With the keyboard alone, and with the mouse alone."""
  client = client_of(inspector, [inspection])
  tab = browser.new_page(**TELEPHONE, reduced_motion="reduce")
  mistakes = []
  tab.on("pageerror", lambda error: mistakes.append(str(error)))

  def answer(route):
    path = route.request.url.removeprefix("http://page.test")
    post = route.request.method == "POST"
    content = route.request.post_data_buffer
    found = client.post(path, content=content) if post else client.get(path)
    kind = found.headers["content-type"]
    route.fulfill(status=found.status_code, body=found.text, content_type=kind)

  tab.route("**/*", answer)
  tab.goto("http://page.test/")
  cells, text = tab.locator("#board button"), tab.locator("#text")
  pad = tab.locator("#pad button")

  def holds(puzzle, thoughts):
    tab.wait_for_function(
      f"thoughts.length === {thoughts} && thoughts[current].prompt"
      f" === '{puzzle}'"
    )
    assert text.input_value() == puzzle
    assert "".join(x or "." for x in cells.all_inner_texts()) == puzzle

  # Three clicks on a page that is busy ask once.
  tab.evaluate("again = document.getElementById('again')")
  tab.evaluate("for (let i = 0; i < 3; i++) again.click()")
  tab.wait_for_function("!asking && thoughts.length === 2")
  starts = tab.locator("#paths button")
  assert starts.all_inner_texts()[1].startswith("start 1")
  assert starts.locator("b").all_inner_texts() == ["answers"]
  scores = [inspection["confidence"], inspector.again(PUZZLE, 1)["confidence"]]
  best = starts.nth(int(np.argmax(scores)))
  assert "answers" in best.inner_text()
  tab.evaluate("thoughts.pop(); current = 0; turn(0); view.open()")
  assert not pad.first.is_visible()
  tab.keyboard.press("3")  # No cell is selected yet.
  tab.keyboard.press("Tab")  # The page's theme, then the board.
  tab.keyboard.press("Tab")
  tab.keyboard.press("Enter")
  tab.keyboard.press("Shift+ArrowRight")
  tab.keyboard.press("Shift+ArrowUp")  # Stops at the edge.
  tab.keyboard.press("3")
  holds("13.4..1..1..4..1", 2)
  tab.keyboard.press("Shift+ArrowDown")
  tab.keyboard.press("Shift+ArrowRight")
  tab.keyboard.press("Backspace")
  holds("13.4.....1..4..1", 2)  # Replaces the changed puzzle.
  tab.keyboard.press("5")  # Not a digit of this board.
  tab.keyboard.press("Tab")  # All cells are one tab stop.
  assert tab.evaluate("document.activeElement.textContent") == "1"
  assert tab.evaluate("document.activeElement.parentElement.id") == "pad"
  cells.nth(15).click()
  pad.nth(1).click()
  holds("13.4.....1..4..2", 2)
  pad.nth(4).click()
  holds("13.4.....1..4...", 2)
  tab.reload()  # The URL has the state.
  tab.wait_for_function("thoughts.length === 2")
  assert text.input_value() == "13.4.....1..4..."
  tab.keyboard.press("ArrowUp")  # Back to the earlier state.
  holds(PUZZLE, 2)
  assert "undefined" not in tab.locator("#keys").inner_html()
  tab.locator("[value=answer]").focus()
  tab.keyboard.press("ArrowRight")
  assert tab.locator("[value=halting]").is_checked()
  assert tab.evaluate("document.documentElement.scrollWidth") <= 360
  assert not mistakes
