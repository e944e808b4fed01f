"""Rows of text by position, their splits, and their scores."""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import types

import data_examples
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tests_support import ROOT, refused
from text_examples import jsonl, sentences

from loopjax.data.text import chat, files, preparation, task
from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.run import statistics
from loopjax.types import Output

pytestmark = pytest.mark.usefixtures("user_cache")
END, PADDING = 256, 257
# Of `config`.
CHECKSUM = "df349b1c16f78e595c4d7b59a7f9c1b2f2b565395b5aa10324e92ee5630850cc"
JOB = preparation.Job(task.Config(), "bytes", validation=0.05, test=0.05)


@pytest.fixture
def config(tmp_path):
  """Two sources of documents that all differ."""
  paths = []
  for name, first, num in (("a", 0, 300), ("b", 1000, 200)):
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(jsonl([{"text": t} for t in sentences(num, first)]))
    paths.append(str(path))
  return task.Config(",".join(paths), sequence_length=64)


def change(config, **changes):
  return task.Config(**{**vars(config), **changes})


def batches(config, split, num=None, **options):
  return data_examples.read(task, config, split, num, **options)[1]


joined = functools.partial(data_examples.joined, task)


def texts(rows):
  """The documents of rows that were not split, as text."""
  found = []
  for row in range(len(rows["inputs"])):
    ids = rows["documents"][row]
    for number in range(1, ids.max() + 1):
      inputs = rows["inputs"][row][ids == number]
      targets = rows["targets"][row][ids == number]
      assert (inputs[1:] == targets[:-1]).all()
      if inputs[0] == END and targets[-1] == END:
        found.append(bytes(inputs[1:].tolist()).decode())
  return found


def test_splits_share_no_document_and_lose_none(config):
  """A document's split depends on its text alone."""
  config = change(config, sequence_length=512)
  whole = {*sentences(300), *sentences(200, 1000)}
  seen = {}
  for split in preparation.SPLITS:
    dataset = task.make_dataset(config, split, batch_size=1, seed=0)
    num = dataset.facts[f"{split}_rows"]
    seen[split] = texts(joined(config, split, num, batch_size=1))
    assert len(seen[split]) == dataset.facts[f"{split}_documents"]
  assert sorted(sum(seen.values(), [])) == sorted(whole)
  assert 10 < len(seen["validation"]) < 40 and 10 < len(seen["test"]) < 40
  for split, found in seen.items():
    for text in found:
      assert JOB.split_of(text) == split


def test_documents_may_have_rows_of_their_own(config):
  apart = change(config, packed=False)
  assert task.spec(config).packs_documents
  assert not task.spec(apart).packs_documents
  rows = joined(apart, "validation")
  assert task.abstract_batch(apart, 1).keys() <= rows.keys()
  assert "documents" not in rows
  rows["documents"] = np.int32(rows["targets"] != PADDING)
  found = texts(rows)
  assert len(found) == len({*found}) > 5
  assert {*found} == {*texts(joined(config, "validation"))}


@pytest.mark.parametrize("kind", ["prompt", "conversation"])
def test_what_is_predicted_is_what_is_to_be_said(config, tmp_path, kind):
  """From the file to the batch: targets that count spell the completions."""
  said = [f"é{n}!" * (1 + n % 5) for n in range(60)]
  rows = [{"text": text, "prompt": f"{n}?"} for n, text in enumerate(said)]
  expected = [text.encode() + bytes([0]) for text in said]
  if kind == "conversation":
    rows = [
      {"text": [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["text"]},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
      ]}
      for row in rows
    ]  # fmt: skip
    expected = [f"{text}\n\nNo.".encode() + bytes([0]) for text in said]
  path = tmp_path / "said.jsonl"
  path.write_bytes(jsonl(rows))
  config = change(config, train_files=str(path), validation_share=0.4)
  if kind == "prompt":
    config = change(config, prompt_field="prompt")
  found = []
  for split in preparation.SPLITS:
    dataset = task.make_dataset(config, split, batch_size=1, seed=0)
    num = dataset.facts[f"{split}_rows"]
    rows = joined(config, split, num, batch_size=1)
    for row, ids in enumerate(rows["documents"]):
      for number in range(1, ids.max() + 1):
        here = (ids == number) & (rows["weights"][row] == 1)
        targets = rows["targets"][row][here]
        found.append(bytes(np.where(targets == END, 0, targets).tolist()))
        assert rows["bytes"][row][here].sum() == len(found[-1]) - 1
        assert not rows["bytes"][row][(ids == number) & ~here].any()
  assert sorted(found) == sorted(expected)


def test_completions_of_one_prompt_are_in_one_split():
  job = JOB._replace(validation=0.4, test=0.4)
  rule = {"role": "system", "content": "Be short."}

  def splits(prompts, answers, first="user"):
    roles = (first, "assistant", "user", "assistant")
    return {
      job.split_of(
        chat.prompt(
          [rule]
          + [
            {"role": role, "content": content}
            for role, content in zip(roles, (p, a, "so", "on"), strict=True)
          ]
        )
      )
      for p in prompts
      for a in answers
    }

  words = [str(number) for number in range(30)]
  assert len(splits(["one"], words)) == 1
  assert splits(words, ["one"]) == set(preparation.SPLITS)
  assert splits([" \n"], words) == set(preparation.SPLITS)
  # Conversations that the assistant begins differ by all that is said.
  assert splits(["Hello!"], words, "assistant") == set(preparation.SPLITS)


def test_test_files_are_the_test_split(config, tmp_path):
  path = tmp_path / "held_out.jsonl"
  path.write_bytes(jsonl([{"text": t} for t in sentences(20, 5000)]))
  config = change(config, test_files=str(path), sequence_length=512)
  found = joined(config, "test")
  assert sorted(texts(found)[:20]) == sorted(sentences(20, 5000))
  whole = sentences(300) + sentences(200, 1000)
  for split in ("train", "validation"):
    dataset = task.make_dataset(config, split, batch_size=1, seed=0)
    assert dataset.facts[f"{split}_documents"] > 0
    assert {*texts(joined(config, split, 5))} <= {*whole}


def test_a_test_file_that_is_trained_on_is_refused(config, tmp_path):
  """By its name, in a pattern, or as a copy."""
  there = pathlib.Path(config.sources[0])
  with pytest.raises(UserError, match="test_files=.* is trained on"):
    change(config, test_files=str(there))
  copy = tmp_path / f"copy{there.suffix}"
  copy.write_bytes(there.read_bytes())
  for path in (there.parent / "." / f"[{there.name[0]}]{there.name[1:]}", copy):
    leaks = change(config, test_files=str(path))
    with pytest.raises(UserError, match=f"{there.name} of the training files"):
      task.make_dataset(leaks, "train", batch_size=1, seed=0)
  empty = [tmp_path / name for name in ("a.txt", "b.txt")]
  for path in empty:
    path.touch()
  nothing = types.SimpleNamespace(paths=[str(empty[0])])
  preparation.check_apart([nothing], [str(empty[1])])


def test_every_epoch_has_every_row(config):
  dataset = task.make_dataset(config, "train", batch_size=1, seed=0)
  num = dataset.facts["train_rows"]
  rows = batches(config, "train", 2 * num, batch_size=1)
  epochs = [
    [row["inputs"].tobytes() for row in part]
    for part in (rows[:num], rows[num:])
  ]
  assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
  assert len({*epochs[0]}) > num / 2  # Some rows have the same text.


def test_sources_are_mixed_as_they_weigh():
  """Exact in every 1024 rows; each source has its own epochs."""
  counts = np.array([400, 300, 500])
  positions = np.arange(4 * 1024)
  source, row = task.mixed((0.5, 0.2, 0.3), counts, 0, positions)
  shares = [512, 205, 307]
  for block in source.reshape(4, 1024):
    assert np.bincount(block).tolist() == shares
    assert abs(np.bincount(block[:256])[0] - 128) < 40  # In random order.
  assert (source[:1024] != source[1024:2048]).any()
  for number, count in enumerate(counts.tolist()):
    mine = row[source == number]
    for start in range(0, len(mine) - count + 1, count):
      assert sorted(mine[start : start + count]) == list(range(count))
  order = np.random.default_rng(0).permutation(len(positions))
  again = task.mixed((0.5, 0.2, 0.3), counts, 0, positions[order])
  np.testing.assert_array_equal(again, [source[order], row[order]])


def test_evaluation_names_the_sources(config):
  dataset = task.make_dataset(config, "validation", batch_size=16, seed=0)
  rows = joined(config, "validation")
  assert dataset.groups == {"source": config.sources}
  valid = rows["valid"]
  assert valid.sum() == dataset.facts["validation_examples"]
  for row in np.flatnonzero(valid):
    one = {name: value[row : row + 1] for name, value in rows.items()}
    for text in texts(one):
      first = int(text.partition(":")[0])
      assert (first >= 1000) == one["group/source"][0]


def test_scores_are_those_of_the_corpus(config):
  """An uninformed model needs log2(V) bits per token."""
  rows = joined(config, "test")
  rows = {name: value[rows["valid"]] for name, value in rows.items()}
  logits = jnp.zeros((*rows["inputs"].shape, PADDING + 1))
  scores = task.score(Output(logits, {}, {}, {}, {}), rows)
  facts = task.make_dataset(config, "test", batch_size=1, seed=0).facts
  value, weight = scores["loss"]
  rounding = 32 * np.finfo(np.float32).eps  # Of sums of 258 exponentials.
  np.testing.assert_allclose(value, np.log(258), rtol=rounding)
  assert weight.sum() == facts["test_tokens"] == (rows["documents"] > 0).sum()
  value, weight = scores["bits_per_byte"]
  assert weight.sum() == facts["test_bytes"]
  assert facts["test_bytes"] == facts["test_tokens"] - facts["test_documents"]
  np.testing.assert_allclose(
    np.average(value, weights=weight),
    np.log2(258) * facts["test_tokens"] / facts["test_bytes"],
    rtol=rounding,
  )


def test_ends_of_documents_count_where_a_row_has_nothing_else():
  """Bits of rows without bytes count in the corpus's bits per byte."""
  batch = {
    "targets": np.array([[0, 1], [1, 1]]),
    "weights": np.array([[1.0, 1.0], [1.0, 0.0]], np.float32),
    "bytes": np.array([[4.0, 0.0], [0.0, 0.0]], np.float32),
  }
  logits = jnp.zeros((2, 2, 8))
  scores = task.score(Output(logits, {}, {}, {}, {}), batch)
  value, weight = scores["bits_per_byte"]
  np.testing.assert_allclose(
    np.average(value, weights=weight), 9 / 4, rtol=1e-3
  )


def test_scores_leave_out_what_does_not_count():
  logits = np.random.default_rng(0).normal(size=(1, 3, 5)).astype(np.float32)
  targets = np.array([[1, 2, 4]])
  batch = {
    "targets": targets,
    "weights": np.array([[0.0, 1.0, 1.0]], np.float32),
    "bytes": np.array([[0.0, 3.0, 0.0]], np.float32),
  }
  scores = task.score(Output(jnp.array(logits), {}, {}, {}, {}), batch)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  nats = -(log_p[0, 1, 2] + log_p[0, 2, 4])
  np.testing.assert_allclose(scores["loss"], [[nats / 2], [2]], rtol=1e-5)
  expected = [[nats / np.log(2) / 3], [3]]
  np.testing.assert_allclose(scores["bits_per_byte"], expected, rtol=1e-5)


def test_rows_are_packed_once(config, capsys, monkeypatch):
  task.make_dataset(config, "train", batch_size=4, seed=0)
  assert capsys.readouterr().out.count("reading, packing and caching") == 2
  monkeypatch.setattr(preparation, "write", None)
  task.make_dataset(config, "test", batch_size=8, seed=1)
  path = pathlib.Path(config.sources[0])
  path.touch()
  task.make_dataset(change(config, mixture=(0.5, 0.5)), "train", batch_size=4,
                    seed=0)  # fmt: skip
  for changes in (
    {"sequence_length": 65},
    {"validation_share": 0.06},
    {"prompt_field": "x"},
    {"separator": ""},
    {"test_share": 0.06},
  ):
    with pytest.raises(TypeError):
      task.make_dataset(
        change(config, **changes), "train", batch_size=4, seed=0
      )
  path.write_bytes(path.read_bytes() + b'{"text": "one more"}\n')
  with pytest.raises(TypeError):
    task.make_dataset(config, "train", batch_size=4, seed=0)


def test_there_are_processes_for_the_cpus_that_may_be_used(monkeypatch):
  """All CPUs, if the system does not report the available ones."""
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
  assert preparation._num_cpus() == 3
  monkeypatch.delattr(os, "sched_getaffinity")
  assert preparation._num_cpus() == os.cpu_count()


@pytest.mark.manual  # Processes take seconds to start.
def test_several_processes_pack_the_same_rows(config, monkeypatch):
  config = change(config, train_files=config.sources[0])
  monkeypatch.setattr(files, "CHUNK_BYTES", 4000)
  alone = batches(config, "train", 3)
  monkeypatch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "2")
  monkeypatch.setattr(preparation, "_MIN_BYTES", 0)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  started = []
  pool = preparation.concurrent.futures.ProcessPoolExecutor
  monkeypatch.setattr(
    preparation.concurrent.futures,
    "ProcessPoolExecutor",
    lambda *args, **kwargs: started.append(args) or pool(*args, **kwargs),
  )
  for expected, got in zip(alone, batches(config, "train", 3), strict=True):
    for name, value in expected.items():
      np.testing.assert_array_equal(got[name], value)
  assert len(started) == 1


def test_bad_documents_stop_or_are_counted(config, tmp_path):
  path = tmp_path / "bad.jsonl"
  rows = jsonl([{"text": t} for t in sentences(100)])
  path.write_bytes(b'{"body": "a"}\n' + rows + b"{\n")
  config = change(config, train_files=str(path))
  with pytest.raises(UserError, match="bad.jsonl:1: has no 'text'"):
    task.make_dataset(config, "train", batch_size=4, seed=0)
  skipping = change(config, on_bad_document="skip")
  facts = task.make_dataset(skipping, "train", batch_size=4, seed=0).facts
  assert facts["train_documents_skipped"] == 2
  with pytest.raises(UserError, match="bad.jsonl:1: has no 'text'"):
    task.make_dataset(config, "train", batch_size=4, seed=0)  # From the cache.


@pytest.mark.parametrize("field", ["prompt_field", "text_field"])
def test_plain_text_alone_has_no_fields(config, tmp_path, field):
  path = tmp_path / "notes.txt"
  path.write_text("q: 1\n" * 9000)
  alone = change(config, train_files=str(path), **{field: "q"})
  with refused(f"notes.txt: task.{field} needs JSONL, CSV, TSV or parquet"):
    task.make_dataset(alone, "train", batch_size=4, seed=0)
  both = tmp_path / "q.jsonl"
  both.write_bytes(jsonl([{"text": t, "q": t} for t in sentences(100)]))
  mixed = change(alone, train_files=f"{path},{both}")
  facts = task.make_dataset(mixed, "train", batch_size=4, seed=0).facts
  assert facts["train_documents"] > 80


def whole_text(config, split):
  """The text of a split, in the order of its documents' numbers."""
  num = task.make_dataset(config, split, batch_size=1, seed=0).facts
  return "".join(
    sorted(texts(joined(config, split, num[f"{split}_rows"], batch_size=1)))
  )


@pytest.mark.parametrize("num", [40, 300, 1500])
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
def test_small_text_is_split_by_position(
  config, tmp_path, capsys, monkeypatch, num, chunk
):
  """Every byte is in one split; the parts are in order, and end with lines."""
  monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
  monkeypatch.setattr(files, "SECTION_BYTES", 1 << 20)
  first, second = tmp_path / "a.txt", tmp_path / "b.txt"
  lines = [f"{n:05d} {n * n}\n" for n in range(num)]
  first.write_text("".join(lines[: num // 3]))
  second.write_text("".join(lines[num // 3 :]))
  config = change(
    config, train_files=f"{tmp_path}/*.txt", sequence_length=1 << 15
  )
  found = {split: whole_text(config, split) for split in preparation.SPLITS}
  assert "".join(found.values()) == "".join(lines)
  for split in ("validation", "test"):
    share = len(found[split]) / len("".join(lines))
    assert share == pytest.approx(0.05, abs=0.026), split
    assert found[split].endswith("\n")
  said = capsys.readouterr().out
  order = "in this order: train 0.9, validation 0.05, test 0.05"
  assert said.count(f"has few documents; its splits are parts of it {order}")
  task.make_dataset(config, "train", batch_size=1, seed=0)
  said = capsys.readouterr().out
  assert order in said and "reading" not in said


@pytest.mark.parametrize("chunk", [97, 301, 1000])
def test_parts_are_in_order_wherever_chunks_end(tmp_path, monkeypatch, chunk):
  monkeypatch.setattr(files, "CHUNK_BYTES", chunk)
  path = tmp_path / "a.txt"
  for num in range(200, 240):
    text = "".join(f"{n:05d} {n * n}\n" for n in range(num))
    path.write_text(text)
    job = JOB._replace(text_bytes=len(text))
    parts = list(preparation.chunks(job, [str(path)]))
    assert b"".join(part.content for part in parts).decode() == text
    order = [preparation.SPLITS.index(part.split) for part in parts]
    assert order == sorted(order) and {*order} == {0, 1, 2}
    starts = [part.first for part in parts]
    assert starts[1:] == [
      start + len(part.content)
      for start, part in zip(starts[:-1], parts[:-1], strict=True)
    ]


def test_few_documents_with_fields_are_in_every_split(config, tmp_path, capsys):
  """All answers to one prompt still are in one split."""
  path = tmp_path / "few.jsonl"
  rows = [{"p": f"{n % 4}?", "text": f"{n}!"} for n in range(8)]
  path.write_bytes(jsonl(rows))
  config = change(config, train_files=str(path), prompt_field="p")
  found = {}
  for split in preparation.SPLITS:
    dataset = task.make_dataset(config, split, batch_size=1, seed=0)
    num = dataset.facts[f"{split}_rows"]
    found[split] = set(texts(joined(config, split, num, batch_size=1)))
  prompts = {
    split: {text.partition("\n\n")[0] for text in found[split]}
    for split in found
  }
  assert sum(map(len, found.values())) == 8
  assert all(prompts.values()) and sum(map(len, prompts.values())) == 4
  assert "has few documents; the validation" in capsys.readouterr().out


def test_text_with_documents_in_all_splits_is_chosen_by_hash(config, capsys):
  """The checksum names the rows in the cache."""
  facts = task.make_dataset(config, "train", batch_size=1, seed=0).facts
  assert facts["train_sha256"] == CHECKSUM
  assert "few documents" not in capsys.readouterr().out


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "contains no documents"),
    (b"\n\n", "contains no documents"),
    (b'{"text": "alone"}', "has no document in the (train|validation) split"),
    (b'{"text": "same"}\n' * 9, "the same text if they have none, are in one"),
    (
      b'{"text": ""}',
      "contains no documents; 1 have no token to predict",
    ),
    (
      b"{\n",
      "contains no documents; 1 are malformed, the first one: .*:1: is not",
    ),
  ],
)
def test_an_empty_corpus_is_one_line(config, tmp_path, content, message):
  path = tmp_path / "few.jsonl"
  path.write_bytes(content)
  config = change(config, train_files=str(path), on_bad_document="skip")
  with refused(message):
    for split in ("train", "validation"):
      task.make_dataset(config, split, batch_size=4, seed=0)


def test_a_document_longer_than_a_row_is_cut(config, tmp_path):
  path = tmp_path / "long.txt"
  path.write_text("0123456789" * 100)
  only = change(config, test_files=str(path), sequence_length=100)
  facts = task.make_dataset(only, "test", batch_size=4, seed=0).facts
  assert facts["test_documents"] == facts["test_documents_cut"] == 1
  assert facts["test_rows"] == 11 and facts["test_tokens"] == 1001
  (batch,) = batches(only, "test", batch_size=11)
  tokens = batch["targets"][np.argsort(batch["documents"].sum(1))[::-1]]
  assert (
    np.sort(tokens[tokens < END]) == np.sort(list(b"0123456789" * 100))
  ).all()


def test_a_cache_entry_of_a_killed_process_is_made_again(
  config, user_cache, capsys
):
  """Files of a killed writer, and rows truncated later."""
  expected = batches(config, "train", 2)
  cache = user_cache / "text"
  entries = [path for path in cache.iterdir() if not path.suffix]
  rows = entries[0] / "train.array_record"
  rows.write_bytes(rows.read_bytes()[:-100])
  partial = cache / f".{entries[1].name}.partial"
  entries[1].rename(partial)
  (partial / "facts.json").unlink()
  capsys.readouterr()
  for one, other in zip(batches(config, "train", 2), expected, strict=True):
    np.testing.assert_array_equal(one["inputs"], other["inputs"])
  said = capsys.readouterr().out
  assert said.count("rebuilding it") == said.count("reading, packing") == 2


@pytest.mark.manual  # Processes take seconds to start.
def test_a_killed_process_is_one_line(config, monkeypatch):
  monkeypatch.setattr(preparation, "_MIN_BYTES", 0)
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
  chunks = [files.Chunk("a", "text", 0, b"", 0)]
  with pytest.raises(UserError, match="was killed"):
    list(preparation.in_order(_die, chunks, 1))


@pytest.mark.long
def test_processes_do_not_run_the_script_again(tmp_path):
  """A user's script needs no guard; two workers start on any machine."""
  path = tmp_path / "script.py"
  path.write_text(
    "from loopjax.data.text import preparation\n"
    "print('once')\n"
    "preparation._num_cpus = lambda: 2\n"
    "found = preparation.in_order(len, [b'a', b'bb', b'ccc'], 1 << 40)\n"
    "print(*found)\n"
  )
  done = subprocess.run(
    [sys.executable, str(path)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert done.stdout == "once\n1 2 3\n", done.stderr


def _die(_):
  os.kill(os.getpid(), signal.SIGKILL)


def test_without_files_there_is_a_way_out():
  with pytest.raises(UserError, match="task.train_files is empty"):
    task.make_dataset(task.Config(), "train", batch_size=4, seed=0)


def test_a_full_disk_is_one_line(config, monkeypatch, user_cache):
  monkeypatch.setattr(preparation, "rows_file", lambda *_: "/dev/full")
  with pytest.raises(UserError, match="No space left.*XDG_CACHE_HOME"):
    task.make_dataset(config, "train", batch_size=4, seed=0)
  kept = (user_cache / "text").iterdir()
  assert all(path.name.endswith(".lock") for path in kept)


@pytest.fixture
def tokenizer(tmp_path):
  """A byte-level BPE with a few merges, trained here."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<|end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(sentences(100), trainer)
  path = tmp_path / "tokenizer.json"
  made.save(str(path))
  return str(path), made


@pytest.mark.parametrize("end_token", ["", "<|end|>"])
def test_any_tokenizer(config, tokenizer, end_token):
  """Its tokens and their bytes; end tokens are added or its own."""
  path, library = tokenizer
  config = change(
    config, tokenizer=path, end_token=end_token, sequence_length=256
  )
  num_ids, spec = library.get_vocab_size(), task.spec(config)
  end = library.token_to_id(end_token) if end_token else num_ids
  assert spec.vocab_size == num_ids + (0 if end_token else 2)
  assert spec.num_padding_tokens == (0 if end_token else 1)
  rows = joined(config, "train", 10)
  checked = 0
  for row in range(len(rows["inputs"])):
    ids = rows["documents"][row]
    for number in range(1, ids.max() + 1):
      here = ids == number
      targets = rows["targets"][row][here]
      if rows["inputs"][row][here][0] == end == targets[-1]:
        text = library.decode(targets[:-1].tolist())
        assert library.encode(text).ids == targets[:-1].tolist()
        sizes = rows["bytes"][row][here]
        assert sizes.sum() == len(text.encode()) and sizes[-1] == 0
        assert (sizes[:-1] >= 1).all()
        checked += 1
  assert checked > 100


def test_texts_are_encoded_a_few_at_a_time(tokenizer, monkeypatch):
  path, library = tokenizer
  texts = ["ab", "cde", "", "fgh ij", "k"]
  expected = [library.encode(text).ids for text in texts]
  monkeypatch.setattr("loopjax.data.text.tokenizer._BATCH", 4)
  assert [x.tolist() for x in Tokenizer(path).encode(texts)] == expected


def test_bytes_are_those_of_the_text_whatever_becomes_of_it(config, tokenizer):
  """A normaliser changes how many bytes tokens stand for."""
  path, library = tokenizer
  library.normalizer = tokenizers.normalizers.Replace("é", "eee")
  library.save(path)
  config = change(config, tokenizer=path)
  facts = task.make_dataset(config, "train", batch_size=4, seed=0).facts
  whole = sentences(300) + sentences(200, 1000)
  train = [text for text in whole if JOB.split_of(text) == "train"]
  assert facts["train_bytes"] == sum(len(text.encode()) for text in train)


def library_of(kind):
  """A tokenizer whose tokens have other bytes than the text."""
  if kind == "wordpiece":
    words = ["[UNK]", "the", "lo", "##op", "##s", "state", "ét", "##e", "."]
    made = tokenizers.Tokenizer(
      tokenizers.models.WordPiece({w: i for i, w in enumerate(words)})
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.normalizer = {
    "nfkc": tokenizers.normalizers.NFKC, "nfd": tokenizers.normalizers.NFD,
  }[kind]()  # fmt: skip
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=280, show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )  # fmt: skip
  made.train_from_iterator(sentences(50), trainer)
  return made


@pytest.mark.parametrize("kind", ["wordpiece", "nfkc", "nfd"])
@pytest.mark.parametrize("prompted", [False, True])
def test_bits_per_byte_are_of_the_bytes_of_the_file(tmp_path, kind, prompted):
  """Of documents that are longer than a row, for a model without a clue."""
  path = tmp_path / "tokenizer.json"
  library_of(kind).save(str(path))
  words = "the loops ﬁ éte zzzzzzzz ①② state… 가 . "
  answers = [words * n + chr(0x4E00 + n) + chr(10) for n in (1, 3, 20)]
  prompts = [words * n for n in (3, 1, 7)]
  rows = [
    {"text": answer} | ({"prompt": prompt} if prompted else {})
    for prompt, answer in zip(prompts, answers, strict=True)
  ]
  file = tmp_path / "test.jsonl"
  file.write_bytes(jsonl(rows))
  config = task.Config(
    "not-read.txt", test_files=str(file), tokenizer=str(path),
    sequence_length=32, prompt_field="prompt" if prompted else "",
  )  # fmt: skip
  found = joined(config, "test")
  found = {name: array[found["valid"]] for name, array in found.items()}
  size = sum(len(answer.encode()) for answer in answers)
  assert found["bytes"].sum() == size and (found["bytes"] >= 0).all()
  assert not found["bytes"][found["weights"] == 0].any()
  num_ids = task.spec(config).vocab_size
  logits = jnp.zeros((*found["targets"].shape, num_ids))
  output = Output(logits, {}, {}, {}, {})
  value, weight = map(np.float64, task.score(output, found)["bits_per_byte"])
  bits = found["weights"].sum() * np.log2(num_ids)
  mean, _ = statistics.mean(value * weight, weight)
  assert mean == pytest.approx(bits / size, rel=1e-6)
  if kind == "wordpiece" and not prompted:  # Each piece has its own bytes.
    (whole,) = (x for x in answers if len(x) == max(map(len, answers)))
    library = tokenizers.Tokenizer.from_file(str(path))
    ends = [0, *(end for _, end in library.encode(whole).offsets)]
    ids = library.encode(whole).ids
    row = next(
      n for n in range(len(found["inputs"]))
      if found["targets"][n, :32].tolist() == ids[32:64]
    )  # fmt: skip
    piece = whole[ends[32] : ends[64]]
    assert found["bytes"][row].sum() == len(piece.encode())


def test_vocabularies_that_do_not_fit(config, tokenizer):
  path, _ = tokenizer
  assert task.spec(change(config, vocab_size=320)).num_padding_tokens == 63
  message = "vocab_size=301 is too small: .*tokenizer.json has 302 ids"
  with pytest.raises(UserError, match=message):
    task.spec(change(config, tokenizer=path, vocab_size=301))
  with pytest.raises(UserError, match="No such file"):
    task.spec(change(config, tokenizer=path + "x"))
  for name in ("bytes", path):
    with pytest.raises(UserError, match="end_token='<s>' is not a token of"):
      task.spec(change(config, tokenizer=name, end_token="<s>"))
  assert Tokenizer(path).key != Tokenizer(path, "<|end|>").key
  pathlib.Path(path).write_text("{}", encoding="utf-8")
  with pytest.raises(UserError, match="is not a tokenizer.json"):
    Tokenizer(path)


def test_a_vocabulary_of_another_tokenizer_is_not_trained_on(config):
  """As in the language models' presets, which name no tokenizer."""
  large = change(config, vocab_size=129_280)
  assert task.spec(large).vocab_size == 129_280  # To describe it.
  message = "vocab_size=129280 does not match the tokenizer: .*bytes has 258"
  with refused(message):
    task.make_dataset(large, "train", batch_size=4, seed=0)
