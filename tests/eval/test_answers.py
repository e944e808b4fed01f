"""Generated answers: correctness, scores and interruptions."""

import itertools
import json
import math
import re
import shutil
import types

import numpy as np
import pytest
from eval_examples import make_run

from loopjax.errors import UserError
from loopjax.eval.answers import __main__ as entry
from loopjax.eval.answers import questions as questions_lib
from loopjax.eval.answers import scores as scores_lib
from loopjax.eval.answers.questions import Question
from loopjax.generate import __main__ as generate
from loopjax.run import workdir as workdir_lib

TEXTS = ("1+1=", "What is three times four?", "1+1=", "Sum of 2 and 3: ")
FLAGS = ("--max_new_tokens=20", "--top_p=0.9", "--slots=3")


@pytest.mark.parametrize(("num", "right"), [(5, 0), (5, 2), (5, 5), (6, 1)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num, right, k):
  samples = [True] * right + [False] * (num - right)
  subsets = list(itertools.combinations(samples, k))
  share = sum(map(any, subsets)) / len(subsets)
  assert scores_lib.pass_at_k(num, right, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [1, 3])
def test_the_error_of_samples_is_their_spread(k):
  """The spread of repeated samples of the same questions is as estimated."""
  generator = np.random.default_rng(0)
  chances = np.array([0.02, 0.1, 0.3, 0.5, 0.9, 1.0])
  drawn = generator.random((4000, len(chances), 12)) < chances[:, None]
  scores = [scores_lib.of_questions(right, k).mean() for right in drawn]
  squares = [scores_lib.error_of_samples(right, k) ** 2 for right in drawn]
  assert math.sqrt(np.mean(squares)) == pytest.approx(np.std(scores), rel=0.05)


def test_the_error_of_one_sample_in_k_is_that_of_a_share():
  right = np.array([[1, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]], bool)
  expected = math.sqrt((0.4 * 0.6 + 0 + 0.2 * 0.8) / 4) / 3
  assert scores_lib.error_of_samples(right, 1) == pytest.approx(expected)
  assert scores_lib.error_of_samples(right, 5) is None


@pytest.mark.parametrize(
  ("text", "answer", "right"),
  [
    ("the sum is 18.", "18", True),
    ("18, so 19", "18", False),
    ("she has $1,250.50 left", "1250.5", True),
    ("7*(3-12)=-63", "-63", True),
    ("20-2", "2", True),  # An operator, not a sign.
    ("(9)-2", "-2", False),
    ("about .5", "0.50", True),
    ("1,2", "12", False),
    ("none", "0", False),
    ("", "0", False),
  ],
)
def test_the_last_number_is_compared(text, answer, right):
  check = questions_lib.make_check("number", [Question(0, "", answer)])
  assert check(text, answer) is right


def test_expressions_are_compared_by_their_value():
  pytest.importorskip("math_verify")
  check = questions_lib.make_check("math", [])
  said = r"Thus $x=2$ and the answer is $\boxed{\frac{1}{2}}$."
  assert check(said, "0.5") and check(said, r"\frac{2}{4}")
  assert not check(said, "2")
  assert not check("I do not know", "2")


@pytest.mark.parametrize(
  ("text", "answer", "right"),
  [
    ("the castle", "the castle", "exact contains"),
    ("  the\n castle\t", "the  castle", "exact contains"),
    ("It is the castle.", "the castle", "contains"),
    ("The castle", "the castle", "ignored"),  # Only without its case.
    ("thecastle", "the castle", ""),
    ("the castl", "the castle", ""),
    ("", "the castle", ""),
  ],
)
def test_text_is_compared_but_for_its_white_space(text, answer, right):
  def check(name, ignore_case=False):
    made = questions_lib.make_check(name, [], ignore_case)
    return made(text, answer)

  assert check("exact") is ("exact" in right)
  assert check("contains") is ("contains" in right)
  for name in ("exact", "contains"):
    assert check(name, True) is (name in right or right == "ignored")


def test_files_name_the_question_differently(tmp_path):
  path = tmp_path / "q.jsonl"
  rows = (
    {"question": "a?", "answer": "3 * 6 is 18.\n#### 18"},  # GSM8K
    {"problem": "b?", "answer": 7, "id": 3},
    {"prompt": "c?", "answer": "x^2"},
  )
  path.write_text("\n\n".join(map(json.dumps, rows)))
  found = questions_lib.read(path)
  assert found == [(0, "a?", "18"), (1, "b?", "7"), (2, "c?", "x^2")]
  assert questions_lib.read(path, limit=2) == found[:2]
  with pytest.raises(UserError, match=r"question 2: .* 'x\^2' is not a number"):
    questions_lib.make_check("number", found)


@pytest.mark.parametrize(
  "row",
  [
    '{"answer": 1}',
    '["a"]',
    '{"question": "a", "answer": null}',
    '{"question": 3, "answer": 1}',
    '{"question": "a", "answer": "#### "}',
  ],
)
def test_a_line_without_question_or_answer_is_refused(row, tmp_path):
  path = tmp_path / "q.jsonl"
  path.write_text('{"question": "a", "answer": 1}\n' + row)
  with pytest.raises(UserError, match=re.escape(f"{path}:2: ")):
    questions_lib.read(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """An untrained model with exits."""
  workdir = tmp_path_factory.mktemp("runs") / "a"
  return make_run(workdir, model__exit_gate="joint", model__num_loops=2)


def write(path, answers):
  """A file of questions with equal texts, and thus equal answers."""
  path.write_text(
    "".join(
      json.dumps({"question": text, "answer": answer}) + "\n"
      for text, answer in zip(TEXTS, answers, strict=True)
    )
  )
  return f"--questions={path}"


def answer(run, questions, *flags):
  return entry.main([str(run), questions, *FLAGS, *flags])


def rows_of(path):
  _, *lines = path.read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return sorted(rows, key=lambda row: (row["question"], row["sample"]))


@pytest.fixture(scope="module")
def answered(run, tmp_path_factory):
  """Four answers to each question, some of them correct.

  The correct answers are numbers that the model generated for another file.
  """
  folder = tmp_path_factory.mktemp("answers")
  flags = ("--samples=4", f"--out={folder}")
  assert answer(run, write(folder / "before.jsonl", "0000"), *flags) == 0
  rows = rows_of(folder / "before.answers.jsonl")
  said = [""] * len(TEXTS)
  for row in rows:
    digits = re.findall(r"\d", row["text"])
    if digits:
      said[row["question"]] = digits[-1]
  questions = write(folder / "q.jsonl", [x or "12345" for x in said])
  assert answer(run, questions, *flags, "--k=1,3,4") == 0
  return folder, questions


def test_scores_are_those_of_the_answers(run, answered, capsys):
  folder, questions = answered
  rows = rows_of(folder / "q.answers.jsonl")
  assert [(row["question"], row["sample"]) for row in rows] == list(
    itertools.product(range(4), range(4))
  )
  right = np.array([row["right"] for row in rows]).reshape(4, 4)
  assert 0 < right.sum() < 16
  for row in rows:
    numbers = re.findall(r"\d+", row["text"])
    assert row["right"] == (numbers[-1:] == [row["answer"]])
  assert len({row["text"] for row in rows}) == 16  # One question occurs twice.
  result = workdir_lib.read_json(folder / "q.answers.json")
  metrics = result["metrics"]
  assert metrics["pass@1"] == pytest.approx(right.mean())
  assert metrics["pass@4"] == pytest.approx(right.any(axis=1).mean())
  assert "pass@4/standard_error_of_samples" not in metrics
  shares = right.mean(axis=1)
  assert metrics["pass@1/standard_error"] == pytest.approx(
    shares.std(ddof=1) / 2
  )
  assert metrics["tokens"] == np.mean([row["num_tokens"] for row in rows])
  assert metrics["n"] == 4 and metrics["loops"] == 2
  ended = np.mean([row["finish"] == "stop" for row in rows])
  assert metrics["ended"] == ended
  # Nothing is left to generate; the table is printed again.
  assert answer(run, questions, "--samples=4", f"--out={folder}") == 0
  said = capsys.readouterr().out
  assert "generated" not in said and "4 questions, 4 answers each" in said
  assert re.search(rf"pass@1 +{right.mean():.4g} ", said)


def test_interrupted_answers_are_completed(run, answered, tmp_path):
  folder, _ = answered
  whole = (folder / "q.answers.jsonl").read_text()
  (tmp_path / "q.jsonl").write_text((folder / "q.jsonl").read_text())
  path = tmp_path / "q.answers.jsonl"
  first = whole.index("\n") + 1
  # Cuts within the first or second line.
  for size in (len(whole) // 2, first + 9, first, 30, 0):
    path.write_text(whole[:size])
    flags = (f"--questions={tmp_path}/q.jsonl", f"--out={tmp_path}")
    assert answer(run, *flags, "--samples=4") == 0
    assert rows_of(path) == rows_of(folder / "q.answers.jsonl")
    assert path.read_text().startswith(whole[:first])
    assert path.read_text().count(whole[:first]) == 1


def test_more_samples_leave_the_first_as_they_were(run, answered, tmp_path):
  folder, questions = answered
  flags = (questions, f"--out={tmp_path}")
  for more in ("--samples=1", "--samples=3"):
    assert answer(run, *flags, more) == 0
  path = tmp_path / "q.answers.jsonl"
  whole = rows_of(folder / "q.answers.jsonl")
  assert rows_of(path) == [row for row in whole if row["sample"] < 3]
  assert answer(run, *flags, "--samples=2", "--limit=3") == 0  # A subset.
  result = workdir_lib.read_json(path.with_suffix(".json"))
  rights = [row["right"] for row in whole]
  of_two = [rights[4 * q + s] for q in range(3) for s in range(2)]
  assert result["metrics"]["n"] == 3
  assert result["metrics"]["pass@1"] == pytest.approx(np.mean(of_two))


@pytest.mark.long
def test_prompts_are_read_with_fewer_loops(run, answered, tmp_path):
  """As many tokens as the text: the same answers as without the limit."""
  _, questions = answered
  flags = (questions, f"--out={tmp_path}", "--temperature=0")
  for more in ((), ("--prefill_loops=1",), ("--prefill_loops=2",)):
    assert answer(run, *flags, *more) == 0
  plain, one, two = (
    rows_of(tmp_path / f"q{name}.answers.jsonl")
    for name in ("", ",prefill_loops=1", ",prefill_loops=2")
  )
  assert two == plain != one
  facts = workdir_lib.read_json(tmp_path / "q,prefill_loops=1.answers.json")
  assert facts["prefill_loops"] == 1


# Another value of every flag; answers do not depend on flags without one.
OTHER = {
  "dtype": "float32", "checkpoint": 3, "num_loops": 3,
  "exit_rule": "kl", "exit_kept": "state", "cache_kind": "mean",
  "max_tokens": 33, "prefix_mib": None, "limit": None,
  "template": "Q: {question}", "chat": "", "check": "math", "k": None,
  "ignore_case": "",
  "slots": None, "out": "there", "max_new_tokens": 7, "samples": None,
  "stop": "e", "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
  "repetition_penalty": 1.5, "seed": 5, "exit_threshold": 0.5,
  "prefill_loops": 1, "bos": "none",
}  # fmt: skip


def test_an_answer_is_of_all_flags_that_change_it(
  tmp_path, monkeypatch, capsys
):
  """The first line of its file, for any other flags."""
  with pytest.raises(SystemExit):
    entry.main(["--help"])
  flags = {*re.findall(r"--([a-z_]+)", capsys.readouterr().out)} - {"help"}
  assert flags == {*OTHER, "questions"}
  given = []
  monkeypatch.setattr(entry, "run", given.append)
  (tmp_path / "other").mkdir()
  files = [
    write(tmp_path / name, answers)
    for name, answers in (
      ("q.jsonl", "1234"), ("p.jsonl", "1234"), ("other/q.jsonl", "1235")
    )
  ]  # fmt: skip

  def facts(questions, *flags, run="run"):
    assert entry.main([run, questions, *flags]) in (0, None)
    options = given.pop()
    flags = options.model
    limits = types.SimpleNamespace(
      num_loops=flags.num_loops, exit_rule=flags.exit_rule,
      max_tokens=flags.max_tokens,
    )  # fmt: skip
    engine = types.SimpleNamespace(limits=limits, cache_kind=flags.cache_kind)
    model = types.SimpleNamespace(
      facts={
        "workdir": str(flags.folder), "step": flags.checkpoint,
        "texts_begin_with": flags.bos,
      }
    )  # fmt: skip
    return entry._facts(options, model, engine)

  before = facts(files[0])
  assert facts(files[1]) != before != facts(files[2])
  assert facts(files[0], run="elsewhere") == before  # A moved run.
  for name, value in OTHER.items():
    flag = f"--{name}={value}" if value != "" else f"--{name}"
    if value is not None:
      assert facts(files[0], flag) != before, name


@pytest.mark.long
def test_answers_of_other_settings_are_not_mixed(
  run, answered, tmp_path, capsys
):
  folder, questions = answered
  before = (folder / "q.answers.jsonl").read_text()
  flags = (questions, f"--out={folder}", "--samples=4")
  assert answer(run, *flags, "--top_k=3") == 2
  said = capsys.readouterr().err
  assert "other settings: sampling=" in said and "'top_k': 3" in said
  other = shutil.copytree(run, tmp_path / "b")  # Byte-identical.
  assert answer(other, *flags) == 2
  assert "other settings: workdir=" in capsys.readouterr().err
  assert (folder / "q.answers.jsonl").read_text() == before
  # Flags in the file's name have a separate file.
  assert answer(run, *flags, "--cache_kind=last_loop") == 0
  name = "q,cache_kind=last_loop.answers.jsonl"
  assert rows_of(folder / name) != rows_of(folder / "q.answers.jsonl")


def test_a_greedy_answer_is_the_generated_text(
  run, tmp_path, capsys, monkeypatch
):
  clock = types.SimpleNamespace(monotonic=iter((100.0, 107.0)).__next__)
  monkeypatch.setattr(entry, "time", clock)
  flags = ("--max_new_tokens=20", "--temperature=0", "--stop=e")
  questions = write(tmp_path / "q.jsonl", "1234")
  template = "--template=Q: {question}"
  more = (template, f"--out={tmp_path}", "--slots=3", "--limit=2")
  assert entry.main([str(run), questions, *flags, *more]) == 0
  assert "2 answers generated in 7 s, " in capsys.readouterr().out
  for row in rows_of(tmp_path / "q.answers.jsonl"):
    capsys.readouterr()
    prompt = f"Q: {TEXTS[row['question']]}"
    assert generate.main([str(run), f"--prompt={prompt}", *flags]) == 0
    assert capsys.readouterr().out == f"{prompt}{row['text']}\n"


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--k=2"], "--k=2 is not in [1, 1], --samples=1"),
    (["--k=all"], "--k=all is invalid: expected numbers"),
    (["--samples=2", "--temperature=0"], "makes all --samples=2 identical"),
    (["--template=Hello"], "--template='Hello' does not contain {question}"),
    (["--slots=0"], "--slots=0 must be at least 1"),
    (["--limit=-1"], "--limit=-1 must be at least 0"),
    (["--exit_rule=gate"], "--exit_rule=gate has no effect without"),
    (["--check=text"], "invalid choice: 'text'"),
    (["--ignore_case"], "--ignore_case has no effect with --check=number"),
    (["--questions=no.jsonl"], "no.jsonl"),
    (["--chat"], "chat template"),
    (["--max_new_tokens=0"], "max_new_tokens=0"),
    (
      ["--max_new_tokens=45"],
      "question 0: after its prompt of 5 tokens, there",
    ),
    (["--max_tokens=18"], "question 1: after its prompt of 26 tokens, there"),
  ],
)
def test_mistakes_are_one_line(flags, said, run, tmp_path, refusal):
  questions = write(tmp_path / "q.jsonl", "1234")
  out = f"--out={tmp_path}/out"
  arguments = [str(run), questions, out, *flags]
  assert said in refusal(entry.main, arguments, said=True)
  # Correct flags work next: flags of a failed command are not stored.
  assert not any(path.read_text() for path in tmp_path.glob("out/*"))


def test_answers_in_words_are_scored(run, tmp_path, capsys):
  """The text itself is right, and also a part of it; the file says how."""
  flags = ("--temperature=0", f"--out={tmp_path}")
  assert answer(run, write(tmp_path / "a.jsonl", "1234"), *flags) == 0
  texts = [row["text"] for row in rows_of(tmp_path / "a.answers.jsonl")]
  assert all(len(text.split()[0]) > 1 for text in texts)
  for check, of in (
    ("exact", lambda text: text),
    ("contains", lambda text: text.split()[0][1:]),
  ):
    questions = write(tmp_path / f"{check}.jsonl", map(of, texts))
    wanted = (f"--check={check}", *flags)
    assert answer(run, questions, *wanted) == 0
    result = workdir_lib.read_json(tmp_path / f"{check}.answers.json")
    assert result["metrics"]["pass@1"] == 1 and result["check"] == check
    assert answer(run, questions, *wanted, "--ignore_case") == 2
    assert "ignore_case=None, not True" in capsys.readouterr().err


def test_a_damaged_file_of_answers_is_refused(run, answered, tmp_path, capsys):
  folder, questions = answered
  lines = (folder / "q.answers.jsonl").read_text().splitlines(keepends=True)
  path = tmp_path / "q.answers.jsonl"
  path.write_text("".join([*lines[:2], "damage\n", *lines[3:]]))
  assert answer(run, questions, "--samples=4", f"--out={tmp_path}") == 2
  assert capsys.readouterr().err == f"error: {path}:3: is damaged\n"
