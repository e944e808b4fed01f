"""Files of the harness's tasks, errors in them, and scores of a question."""

import json
import math

import pytest
from eval_examples import choices, request, texts, write
from tests_support import refused

from loopjax.eval import tasks


def test_questions_with_their_choices(tmp_path):
  path = write(tmp_path / "sums.jsonl.gz", choices(5)[::-1])
  # Unconditional requests, from 1,000,000 on, are not questions.
  found = tasks.questions(path)
  assert len(found) == 5
  assert found[4]["continuations"] == [" 20", " 4", " 4 to the power 4"]
  assert found[4]["gold"] == 1
  assert found[4]["context"].endswith("Question: what is 4 + 16?\nAnswer:")


def test_spaces_at_the_end_of_a_prompt_are_the_answers(tmp_path):
  lines = texts(2)
  lines[1]["request"]["context"] += "\n "
  _, second = tasks.questions(write(tmp_path / "a.jsonl.gz", lines))
  assert second["context"].endswith("Answer:") and second["gold"] == 0
  assert second["continuations"][0].startswith("\n  Three boxes")


def changed(**fields):
  return {**texts(1)[0], **fields}


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ({"text": "no request"}, "a.jsonl.gz:2: invalid request .* 'doc_id'"),
    (["a", "list"], "a.jsonl.gz:2: invalid request"),
    (changed(request={"context": "q"}), "2: invalid request .* 'continuation'"),
    (request(9, 0, "x", "q", ""), "a.jsonl.gz:2: its continuation is empty"),
    (request(9, 1, 0, "q", " a"), "doc_id 9: expected one line per choice"),
    (request(9, 0, 4, "q", " a"), "doc_id 9: expected one line per choice"),
    (request(0, 1, "0", "q", " a"), "doc_id 0: .* with the same context"),
  ],
)
def test_a_line_that_is_no_request(tmp_path, line, message):
  path = write(tmp_path / "a.jsonl.gz", [texts(1)[0], line])
  with refused(message):
    tasks.questions(path)


def test_lines_end_where_those_of_json_do(tmp_path, monkeypatch):
  """Strings may contain other line separators; empty lines are ignored."""
  monkeypatch.setattr(tasks, "_documents", lambda documents: documents)
  there = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
  lines = [json.dumps(one, ensure_ascii=False) for one in there]
  path = tmp_path / "text.jsonl"
  path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
  assert tasks.json_lines("text.jsonl", str(tmp_path)) == there
  path.write_text("{}\n{")
  with refused("text.jsonl:2: is not valid JSON"):
    tasks.json_lines("text.jsonl", str(tmp_path))
  with refused("--metadata=folder=.*: other.jsonl does not exist"):
    tasks.json_lines("other.jsonl", str(tmp_path))


def test_scores_of_a_question_by_hand():
  """The second is likelier per character; é has two bytes."""
  question = {"continuations": [" no", " a long é"], "gold": 1}
  found = tasks.choice_scores(question, [(-3.0, True), (-4.0, False)])
  assert found == {
    "accuracy": 0.0,
    "accuracy_per_char": 1.0,
    "bits_per_byte_of_answer": pytest.approx(4 / math.log(2) / 10),
  }
  one = {"continuations": [" no"], "gold": 0}
  assert tasks.text_scores(one, [(-3.0, True)]) == {
    "greedy_match": 1.0,
    "bits_per_byte_of_answer": pytest.approx(3 / math.log(2) / 3),
  }


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
  """Of 12 answers three are right; the last number counts."""
  right = ["3+4=7", "it is 7.0", "7 apples, 1,007, so 7"]
  wrong = ["7 or 8", "seven", "-7", "70", "", "7.5", "1,007", "17", "0"]
  found = tasks.pass_scores({"answer": "3 + 4 #### 7"}, [right + wrong])
  assert found["pass@1"] == pytest.approx(3 / 12)
  # 66 subsets of ten: of the two that are left out, none or one is right.
  assert found["pass@10"] == 1.0
  few = tasks.pass_scores({"answer": "7"}, [["7"] + ["8"] * 11])
  assert few["pass@10"] == pytest.approx(10 / 12)
