"""Request files, and errors in them."""

import gzip
import json

import pytest
from eval_examples import choices, request, texts, write

from loopjax.errors import UserError
from loopjax.eval import requests, tasks


def test_questions_with_their_choices(tmp_path):
  path = write(tmp_path / "sums.jsonl.gz", choices(5)[::-1])
  (tmp_path / "sums.config.json").write_text(
    json.dumps({"task_config": {"num_shots": 1}})
  )
  task = requests.read(path)
  assert task.name == "sums"
  assert task.facts["num_fewshot"] == 1 and task.facts["limit"] == 0
  # Unconditional requests, from 1,000,000 on, are not questions.
  assert [item.doc_id for item in task.items] == [0, 1, 2, 3, 4]
  item = task.items[4]
  assert item.continuations == (" 20", " 4", " 4 to the power 4")
  assert (item.gold, item.is_choice) == (1, True)
  assert item.contexts[0].endswith("Question: what is 4 + 16?\nAnswer:")


def test_an_answer_without_choices(tmp_path):
  task = requests.read(write(tmp_path / "a.jsonl.gz", texts(3)), limit=2)
  assert len(task.items) == 2 and task.facts["limit"] == 2
  assert (task.items[1].gold, task.items[1].is_choice) == (0, False)
  assert task.facts["num_fewshot"] is None  # Unknown.


def test_without_the_examples(tmp_path):
  path = write(tmp_path / "sums.jsonl.gz", choices(2))
  task = requests.read(path, zero_shot=True)
  assert task.items[0].contexts == ("Question: what is 0 + 0?\nAnswer:",) * 3
  assert task.name == "sums_0shot_local" and task.facts["num_fewshot"] == 0
  path = write(tmp_path / "b.jsonl.gz", texts(2))
  task = requests.read(path, zero_shot=True)
  assert task.name == "b"  # No examples to remove.
  assert task == requests.read(path)


def test_names_and_paths(tmp_path):
  paths = [write(tmp_path / f"{name}.jsonl.gz", texts(1)) for name in "ab"]
  assert requests.find(f" b,{paths[0]}", tmp_path) == paths[::-1]
  with pytest.raises(UserError, match="--tasks=c: no such .* has a, b"):
    requests.find("a,c", tmp_path)
  with pytest.raises(UserError, match="to pass names, set --folder"):
    requests.find("a", None)
  with pytest.raises(UserError, match="--tasks is empty"):
    requests.find(" , ", tmp_path)


def changed(**fields):
  return {**texts(1)[0], **fields}


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ({"text": "no request"}, "a.jsonl.gz:2: invalid request .* 'doc_id'"),
    (["a", "list"], "a.jsonl.gz:2: invalid request"),
    (changed(request={"context": "q"}), "2: invalid request .* 'continuation'"),
    (
      changed(request={"context": 3, "continuation": "a"}),
      "2: invalid request",
    ),
    (request(9, 0, "x", "q", ""), "a.jsonl.gz:2: its continuation is empty"),
    (request(9, 0, "x", "q", " \ud800"), "2: invalid request .* surrogates"),
    (request("9", 0, "x", "q", " a"), "2: .* doc_id='9' is not an integer"),
    (request(9, 0.5, "x", "q", " a"), "2: invalid request .* '0.5'"),
    (request(9, 0, 0, "q", " a"), "with choices and questions without; put"),
    (request(9, 1, 0, "q", " a"), r"doc_id 9: choices \[1\] and label 0"),
    (request(9, 0, 4, "q", " a"), r"doc_id 9: choices \[0\] and label 4"),
    (request(0, 1, "x", "q", " a"), r"doc_id 0: choices \[0, 1\] and label"),
  ],
)
def test_a_line_that_is_no_request(tmp_path, line, message):
  path = write(tmp_path / "a.jsonl.gz", [texts(1)[0], line])
  with pytest.raises(UserError, match=message):
    requests.read(path)


def test_labels_of_a_question_agree(tmp_path):
  lines = [request(3, n, label, "q", " a") for n, label in enumerate((1, 0))]
  path = write(tmp_path / "a.jsonl.gz", lines)
  message = "a.jsonl.gz: doc_id 3: .* contradict .* label 1 and label 0$"
  with pytest.raises(UserError, match=message):
    requests.read(path)


def test_files_that_cannot_be_read(tmp_path):
  path = tmp_path / "a.jsonl.gz"
  whole = gzip.compress(b'{"doc_id": 1}\n' * 1000)
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(UserError, match="a.jsonl.gz: the compressed data is"):
    requests.read(path)
  path.write_bytes(gzip.compress(b"{not json\n"))
  with pytest.raises(UserError, match="a.jsonl.gz:1: is not valid JSON"):
    requests.read(path)
  path.write_bytes(gzip.compress(b"\xff\xfe\n"))
  with pytest.raises(UserError, match="a.jsonl.gz:1: is not valid JSON"):
    requests.read(path)
  path.write_bytes(gzip.compress(b"\n\n"))
  with pytest.raises(UserError, match="a.jsonl.gz: contains no requests"):
    requests.read(path)
  other = tmp_path / "a.txt"
  other.write_text("some text\n")
  with pytest.raises(
    UserError, match="a.txt: expected a file name that ends with .jsonl"
  ):
    requests.read(other)


def test_a_question_that_its_prompt_does_not_end_with(tmp_path):
  line = request(0, 0, "x", "Context. Answer:", " a", query="Something else")
  path = write(tmp_path / "a.jsonl.gz", [line])
  with pytest.raises(UserError, match="1: .* does not end with the question"):
    requests.read(path, zero_shot=True)


def test_lines_end_where_those_of_json_do(tmp_path, monkeypatch):
  """Strings may contain other line separators; empty lines are ignored."""
  monkeypatch.setattr(tasks, "_documents", lambda documents: documents)
  there = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
  lines = [json.dumps(one, ensure_ascii=False) for one in there]
  path = tmp_path / "text.jsonl"
  path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
  assert tasks.json_lines("text.jsonl", str(tmp_path)) == there
  path.write_text("{}\n{")
  with pytest.raises(UserError, match="text.jsonl:2: is not valid JSON"):
    tasks.json_lines("text.jsonl", str(tmp_path))
