"""Which evaluation items the training text contains."""

import gzip
import json

import numpy as np
import pytest
from tests_support import refused
from text_examples import jsonl, table

from loopjax.data.text import overlap, preparation, task
from loopjax.errors import UserError

pytestmark = pytest.mark.usefixtures("user_cache")
JOB = preparation.Job(task.Config(), "bytes", validation=0.1, test=0.1)


def words(first, num, between=" "):
  return between.join(f"w{n}" for n in range(first, first + num))


def runs(*texts):
  hashes, text = overlap.hash_runs(texts)
  return [set(hashes[text == n].tolist()) for n in range(len(texts))]


def plain_runs(text):
  """Runs of 13 words, the slow way."""
  clean = "".join(c if c.isalnum() else " " for c in text.lower()).split()
  return {" ".join(clean[i : i + 13]) for i in range(len(clean) - 12)}


def test_runs_are_those_of_13_words_in_a_row():
  rng = np.random.default_rng(0)
  some = ["a", "Bee", "see,", "-", "Ähre", "日本", "x_y", "1", "\n"]
  texts = [" ".join(rng.choice(some, n)) for n in (0, 5, 12, 13, 14, 60, 300)]
  expected = [plain_runs(text) for text in texts]
  found = runs(*texts)
  assert list(map(len, found)) == list(map(len, expected))
  assert len(set.union(*found)) == len(set.union(*expected))
  for one, other in ((4, 5), (5, 6), (6, 3)):
    common = expected[one] & expected[other]
    assert len(found[one] & found[other]) == len(common)
  # Anywhere, alone or among others, in any spelling.
  assert runs(texts[6])[0] == found[6]
  run = words(7, 13)
  written = f"So: “{words(7, 13, between=', ')}”!".upper()
  assert runs(run)[0] < runs(written)[0]
  assert runs(run)[0].isdisjoint(runs(words(7, 12), "w19")[0])
  assert runs(*[run] * 2)[0] == runs(run)[0]
  assert runs() == [] and runs("", "") == [set(), set()]


ITEMS = {
  "requests.jsonl.gz": gzip.compress(
    jsonl(
      {
        "doc": {"query": words(100 * n, 20), "choices": ["yes", "no"]},
        "request": {"context": words(0, 20), "continuation": choice},
        "idx": idx,
      }
      for n in (1, 2, 3)
      for idx, choice in enumerate((" yes", " no"))
    )
  ),
  "problems.jsonl": jsonl(
    [
      {"question": words(400, 8), "answer": words(408, 8)},
      {"question": words(500, 13), "answer": "42"},
    ]
  ),
  "table.parquet": table([{"turns": [{"value": words(600, 15)}]}]),
  "text.txt": words(700, 40).encode(),
}


@pytest.fixture
def items(tmp_path):
  for name, content in ITEMS.items():
    (tmp_path / name).write_bytes(content)
  return {name: str(tmp_path / name) for name in ITEMS}


@pytest.fixture
def config(tmp_path, items):
  """A corpus of single-line documents with some of the items."""

  def make(*texts, **kwargs):
    path = tmp_path / "corpus.jsonl"
    # Documents of the other splits are not compared.
    others = [f"other {n} {words(300, 13)}" for n in range(300)]
    held_out = [t for t in others if JOB.split_of([(t, True)]) != "train"]
    fill = [t for n in range(300) if (t := f"text number {n}")]
    rows = [{"text": t} for t in (*texts, *held_out, *fill)]
    path.write_bytes(jsonl(rows))
    for text in texts:
      assert JOB.split_of([(text, True)]) == "train", text
    settings = {
      "train_files": str(path),
      "overlap_files": ",".join(items.values()),
      "validation_share": 0.1,
      "test_share": 0.1,
      "sequence_length": 64,
    }
    return task.Config(**{**settings, **kwargs})

  return make


def facts(config, split="train"):
  return task.make_dataset(config, split, batch_size=4, seed=0).facts


def of_training(*texts):
  """The same, with endings that put them into training."""
  return [
    next(
      text
      for n in range(100)
      if JOB.split_of([(text := f"{start} e{n}", True)]) == "train"
    )
    for start in texts
  ]


def test_items_are_rows_without_repetition(items):
  """The requests for one item count once; a prompt's examples do not count."""
  found = overlap.read_items(list(items.values()))
  assert found.names == tuple(items.values())
  assert np.bincount(found.file).tolist() == [3, 2, 1, 1]
  assert np.bincount(found.item, minlength=7).tolist() == [8, 8, 8, 0, 1, 3, 28]
  assert (np.diff(found.runs.astype(object)) >= 0).all()
  assert not np.isin(list(runs(words(0, 20))[0]), found.runs).any()


def test_items_in_training_are_counted(config, capsys):
  shared = of_training(
    f"{words(102, 13, ' ')} and",  # Of the first request.
    words(101, 13),  # Repeated.
    words(201, 12),  # One word too short.
    words(500, 13, between=", ").upper(),
    words(720, 20),
  )
  made = config(*shared)
  got = {n: v for n, v in facts(made).items() if n.startswith("overlap")}
  assert got == {
    "overlap_items": 3,
    "overlap_items_compared": 6,
    "overlap_items_short": 1,
    "overlap_documents": 4,
  }
  said = capsys.readouterr().out
  assert said.count("warning: ") == 3
  assert (
    "requests.jsonl.gz: training data contain 13 consecutive words of 1 of 3"
    in (said)
  )
  assert not [n for n in facts(made, "validation") if n.startswith("overlap")]
  facts(made)  # From the cache.
  assert capsys.readouterr().out.count("comparing") == 0


def test_overlap_is_refused_in_one_line(config):
  made = config(*of_training(words(500, 13)), on_overlap="error")
  with pytest.raises(UserError, match="problems.jsonl: .* 1 of 2 items") as got:
    facts(made)
  assert "task.on_overlap=report" in str(got.value)
  assert "\n" not in str(got.value)
  clean = facts(config(*of_training(words(900, 50)), on_overlap="error"))
  assert clean["overlap_items"] == clean["overlap_documents"] == 0


def test_every_source_counts_once(config, tmp_path):
  """An item in two sources is one item in two documents."""
  made = config(*of_training(words(500, 13)))
  other = tmp_path / "other.jsonl"
  texts = [*of_training(f"x {words(500, 13)}", words(710, 14))]
  texts += [f"text {n}" for n in range(99)]
  other.write_bytes(jsonl([{"text": t} for t in texts]))
  both = f"{made.train_files},{other}"
  got = facts(task.Config(**{**vars(made), "train_files": both}))
  assert got["overlap_items"] == 2 and got["overlap_documents"] == 3


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "contains no evaluation items"),
    (b'{"text": "a"}\n{', ":2: is not valid JSON"),
    (b'{"text": "\xff"}', ":1: is not UTF-8"),
    (
      gzip.compress(json.dumps({"t": words(0, 99)}).encode(), mtime=0)[:-9],
      "corrupt",
    ),
    (None, "no such file"),
  ],
)
def test_bad_items_are_one_line(config, tmp_path, content, message):
  path = tmp_path / "bad.jsonl"
  if content is not None:
    path.write_bytes(content)
  with refused(f"bad.jsonl.*{message}"):
    facts(config("text number 0", overlap_files=str(path)))


def test_refusing_needs_something_to_compare_with():
  with pytest.raises(UserError, match="on_overlap has no effect while"):
    task.Config("a.txt", on_overlap="error")
