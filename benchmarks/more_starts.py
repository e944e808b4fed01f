"""More starts at 9x9 Sudoku: noise, views of the puzzle, both, and how many.

  python benchmarks/more_starts.py --out=DIR --hard=DIR

--hard has train.csv.gz and test.csv.gz, puzzles in the schema of
Sudoku-Extreme. The parts run one after another, each writes DIR/PART.npz after
every round of starts, and the same command resumes where it stopped; settings
of the later ones are chosen from the validation parts, by the rules of
benchmarks/results/2026-11-28_cpu_2cores_more_starts.md. --report prints the
tables of what is there. --solver times a plain backtracking solver instead.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from loopjax.data import pipeline
from loopjax.data.sudoku import board as boards
from loopjax.data.sudoku import symmetry, task
from loopjax.loop import starts as starts_lib
from loopjax.saved import trained

BOARD = boards.Board(3, 3)
LOOPS, ROWS, ROUND = 24, 64, 8
# (the views are random symmetries of the puzzle, noise).
VIEWS = ((False, 0.4), (True, 0.0), (True, 0.2), (True, 0.3), (True, 0.4))
CERTAIN = (-3.0, -1.0, -0.3, -0.1, -0.03, -0.01)
CLUES, FORUM, DIABOLICAL = (
  "puzzles2_17_clue", "puzzles5_forum_hardest_1905_11+", "grantm_diabolical",
)  # fmt: skip


class Thinker:
  """The model, from any start."""

  def __init__(self):
    model = trained.read("zoo:sudoku_nine")
    self._params = model.params

    def think(params, tokens, numbers, noise):
      starts = starts_lib.Starts(1, 1.0, "confidence", 0, False, None, ())
      net = nnx.merge(model.graphdef, params)
      keys = starts_lib.keys_lib.by_content(jax.random.key(0), tokens)
      keys = jax.vmap(jax.random.fold_in)(keys, numbers)
      starts_lib.begin(net, keys, starts._replace(noise=noise))
      logits = net(tokens, num_loops=LOOPS, kind="scan").logits
      return jax.nn.log_softmax(logits)

    self._think = jax.jit(think, static_argnames="noise")

  def __call__(self, questions, numbers, places, turned, noise):
    """Log-probabilities of the cells of puzzles, f32 [n, 81, 11].

    Args:
      questions: [n, 81].
      numbers: of the starts, [n].
      places: of the puzzles in their split, which draw the symmetries, [n].
      turned: whether a view is a symmetry.
      noise: of the start.
    """
    found = np.empty((len(questions), BOARD.num_cells, BOARD.size + 2), "f4")
    for first in range(0, len(questions), ROWS):
      part = np.arange(first, first + ROWS).clip(max=len(questions) - 1)
      cells, own = questions[part], np.minimum(ROWS, len(questions) - first)
      if turned:
        places_by_start = places[part] + numbers[part] * 1_000_003
        draws = pipeline.uniforms(
          7, places_by_start, symmetry.num_uniforms(BOARD)
        )
        view = symmetry.from_uniforms(BOARD, draws)
        cells = symmetry.apply(view, cells)
      out = self._think(
        self._params,
        jnp.asarray(cells.astype(np.int32) + 1),
        jnp.asarray(numbers[part].astype(np.int32)),
        noise=noise,
      )
      out = np.asarray(out)
      if turned:  # Back to the puzzle's own cells and digits.
        tokens = np.pad(view.relabelling.astype(int) + 1, [(0, 0), (1, 0)])
        renamed = np.take_along_axis(out, tokens[:, None, :], axis=2)
        out = np.empty_like(renamed)
        rows = np.arange(ROWS)[:, None]
        out[rows, view.cell_permutation] = renamed
      found[first : first + own] = out[:own]
    return found


def puzzles(split: str, hard: pathlib.Path, source: str, skip: int, num: int):
  """(questions, answers, places) of a split's puzzles in evaluation's order."""
  files = {name: str(hard / f"{name}.csv.gz") for name in ("train", "test")}
  config = task.Config()
  if source:
    config = task.Config(train_csv=files["train"], test_csv=files["test"])
  found = task.make_dataset(config, split, batch_size=256, seed=0)
  questions, answers, places, seen = [], [], [], 0
  for batch in pipeline.iterate(found.batches):
    keep = batch["valid"].copy()
    place = seen + np.arange(len(keep))
    seen += len(keep)
    keep &= place >= skip
    if source:
      keep &= batch["group/source"] == found.groups["source"].index(source)
    questions.append(batch["inputs"][keep] - 1)
    answers.append(batch["targets"][keep] - 1)
    places.append(place[keep])
    if sum(map(len, places)) >= num:
      break
  parts = questions, answers, places
  return tuple(np.concatenate(part)[:num] for part in parts)


def run(path, thinker, data, view, num_starts, certain=np.inf):
  """Thinks until every puzzle has an answer that is certain, or its starts.

  Writes a row for each start and a column for each puzzle: "confidence", nan
  where no start was run; "right"; "answer", a hash; and "mean_right" by number
  of starts, of the mean log-probabilities of the starts so far; and "seconds",
  processor time.
  """
  questions, answers, places = data
  num = len(questions)
  state = {
    "confidence": np.full((0, num), np.nan, "f4"),
    "right": np.zeros((0, num), bool),
    "answer": np.zeros((0, num), np.int64),
    "mean_right": np.zeros((0, num), bool),
    "sums": np.zeros((num, BOARD.num_cells, BOARD.size + 2), "f4"),
    "seconds": np.zeros(()),
  }
  if path.exists():
    state = dict(np.load(path))
  weights = np.random.default_rng(0).integers(1, 2**40, BOARD.num_cells)
  while (done := len(state["right"])) < num_starts:
    started = time.process_time()
    count = min(ROUND, num_starts - done)
    sure = (state["confidence"] >= certain).any(0)
    rows = np.flatnonzero(~sure)
    if not len(rows):
      break
    which = np.tile(rows, count)
    numbers = done + np.repeat(np.arange(count), len(rows))
    logs = thinker(questions[which], numbers, places[which], *view)
    predicted = logs.argmax(-1)
    right = (predicted == answers[which] + 1).all(1)
    new = {
      "confidence": np.full((count, num), np.nan, "f4"),
      "right": np.zeros((count, num), bool),
      "answer": np.zeros((count, num), np.int64),
      "mean_right": np.zeros((count, num), bool),
    }
    at = numbers - done, which
    new["confidence"][at] = logs.max(-1).sum(1)
    new["right"][at] = right
    new["answer"][at] = predicted @ weights
    for index, part in enumerate(
      logs.reshape(count, len(rows), *logs.shape[1:])
    ):
      state["sums"][rows] += part
      mean = state["sums"].argmax(-1)
      new["mean_right"][index] = (mean == answers + 1).all(1)
    for name, array in new.items():
      state[name] = np.concatenate([state[name], array])
    state["seconds"] = state["seconds"] + time.process_time() - started
    with open(path.with_suffix(".tmp"), "wb") as file:
      np.savez(file, **state)
    path.with_suffix(".tmp").rename(path)
    print(path.stem, done + count, len(rows), state["seconds"], flush=True)
  return state


def solved(state, num=None, certain=np.inf):
  """Whether the most confident of the first starts is right, bool [puzzles].

  Starts after the first certain one do not count.
  """
  confidence = np.nan_to_num(state["confidence"][:num], nan=-np.inf)
  sure = confidence >= certain
  after = np.cumsum(sure, axis=0) - sure > 0
  best = np.where(after, -np.inf, confidence).argmax(0)
  return np.take_along_axis(state["right"][:num], best[None], 0)[0]


def used(state, num=None, certain=np.inf):
  """How many of the first starts are run until one is certain, [puzzles]."""
  sure = np.nan_to_num(state["confidence"][:num], nan=-np.inf) >= certain
  return np.where(sure.any(0), sure.argmax(0) + 1, len(sure))


def majority(state, num=None):
  """Whether the most frequent answer is right; the surest of equal ones."""
  answer = state["answer"][:num]
  votes = (answer[:, None] == answer[None]).sum(1)
  score = np.where(votes == votes.max(0), state["confidence"][:num], -np.inf)
  return np.take_along_axis(state["right"][:num], score.argmax(0)[None], 0)[0]


def chosen(parts):
  """(place of the view, least certain confidence), from validation parts."""
  best = max(range(len(VIEWS)), key=lambda i: (solved(parts[i]).sum(), -i))
  whole = solved(parts[best]).sum()
  certain = next(
    (c for c in CERTAIN if solved(parts[best], certain=c).sum() >= whole),
    np.inf,
  )
  return best, certain


def everything(out: pathlib.Path, hard: pathlib.Path):
  """All parts, those that matter most first."""
  thinker = Thinker()
  out.mkdir(parents=True, exist_ok=True)

  def part(name, data, view, num, certain=np.inf):
    return run(out / f"{name}.npz", thinker, data, view, num, certain)

  easy = puzzles("validation", hard, "", 0, 256)
  nine = [part(f"validation_{i}", easy, v, 64) for i, v in enumerate(VIEWS)]
  few = [puzzles("validation", hard, name, 0, 64) for name in (CLUES, FORUM)]
  both = tuple(np.concatenate(arrays) for arrays in zip(*few, strict=True))
  hards = [
    part(f"hard_validation_{i}", both, v, 64) for i, v in enumerate(VIEWS)
  ]
  best, certain = chosen(nine)
  hard_best, hard_certain = chosen(hards)
  print("chosen", VIEWS[best], certain, VIEWS[hard_best], hard_certain)
  view = VIEWS[hard_best]
  for name, source, count, num in (
    ("diabolical", DIABOLICAL, 256, 512),
    ("clues", CLUES, 256, 512),
    ("forum", FORUM, 128, 512),
  ):
    data = puzzles("test", hard, source, 512, count)
    part(f"test_{name}", data, view, num, hard_certain)
  some = puzzles("test", hard, "", 0, 512)
  noisy = max(range(2, 5), key=lambda i: (solved(nine[i]).sum(), -i))
  for index in (0, 1, noisy):
    part(f"test_{index}", some, VIEWS[index], 64)
  data = puzzles("test", hard, "", 0, 10**9)
  part("test_all", data, VIEWS[best], 512, certain)
  data = puzzles("test", hard, FORUM, 512, 128)
  part("test_forum", data, view, 2048, hard_certain)


def solve(cells):
  """Fills a board in by plain backtracking: the tightest cell first."""
  units = [set(unit) for unit in BOARD.units.tolist()]
  peers = [
    sorted(set().union(*(u for u in units if cell in u)) - {cell})
    for cell in range(BOARD.num_cells)
  ]
  free = {cell: set(range(1, 10)) for cell in range(81) if not cells[cell]}
  for cell in free:
    free[cell] -= {cells[peer] for peer in peers[cell]}

  def search():
    if not free:
      return True
    cell = min(free, key=lambda cell: len(free[cell]))
    digits = free.pop(cell)
    for digit in sorted(digits):
      changed = [p for p in peers[cell] if digit in free.get(p, ())]
      for peer in changed:
        free[peer].remove(digit)
      cells[cell] = digit
      if search():
        return True
      for peer in changed:
        free[peer].add(digit)
    free[cell] = digits
    cells[cell] = 0
    return False

  search()
  return cells


def time_solver(hard: pathlib.Path):
  """Prints puzzles per second of processor time, by class."""
  for name, source, count in (
    ("packaged", "", 512), ("diabolical", DIABOLICAL, 256),
    ("17 clues", CLUES, 256), ("forum", FORUM, 128),
  ):  # fmt: skip
    questions, answers, _ = puzzles(
      "test", hard, source, 512 * bool(source), count
    )
    started = time.process_time()
    found = [solve(question.tolist()) for question in questions]
    seconds = time.process_time() - started
    assert (np.array(found) == answers).all()
    print(f"{name}: {count / seconds:.0f} puzzles per second")


def report(out: pathlib.Path):
  """Prints the tables."""
  for path in sorted(out.glob("*.npz")):
    state = dict(np.load(path))
    starts, num = state["right"].shape
    ran = ~np.isnan(state["confidence"])
    print(f"\n{path.stem}: {num} puzzles, {state['seconds']:.0f} s")
    counts = [2**i for i in range(12) if 2**i <= starts]
    rows = {
      "confidence": [solved(state, n) for n in counts],
      "any": [state["right"][:n].any(0) for n in counts],
      "starts run": [ran[:n].sum(0) for n in counts],
    }
    if ran.all():
      rows |= {
        "mean": [state["mean_right"][n - 1] for n in counts],
        "majority": [majority(state, n) for n in counts],
      }
      for c in CERTAIN:
        rows[f"certain {c}"] = [solved(state, n, c) for n in counts]
        rows[f"starts {c}"] = [used(state, n, c) for n in counts]
    print(f"{'starts':14}", *(f"{n:6}" for n in counts))
    for name, values in rows.items():
      print(f"{name:14}", *(f"{np.mean(x):6.3f}" for x in values))


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--hard", type=pathlib.Path, required=True)
  parser.add_argument("--report", action="store_true")
  parser.add_argument("--solver", action="store_true")
  arguments = parser.parse_args()
  if arguments.report:
    report(arguments.out)
  elif arguments.solver:
    time_solver(arguments.hard)
  else:
    everything(arguments.out, arguments.hard)


if __name__ == "__main__":
  main()
