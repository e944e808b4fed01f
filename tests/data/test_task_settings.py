"""Invalid settings of tasks, each named in one line."""

import pytest
from tests_support import refused

from loopjax.data import TASKS

# Settings required for a valid task.
BASE = {
  "text": {"train_files": "a.jsonl,b.jsonl", "sequence_length": 64},
}
IMPOSSIBLE = {
  "arithmetic": [
    ({"modulus": 2**21}, "modulus=2097152 must be in"),
    (
      {"num_eval_examples": 7},
      ".*a multiple of 5: equal numbers for 1, 2, 4, 8, 10",
    ),
  ],
  "automaton": [
    ({"num_steps": 32.0}, "num_steps=32.0 must be of type int"),
  ],
  "depo": [
    (
      {"num_nodes": 76},
      "context_length=300 is too short for task.num_nodes=76: .* 304 tokens",
    ),
    ({"context_length": 299}, "context_length=299 .* task.num_nodes=75"),
    ({"max_word": 3}, "context_length=300 is too short .* 450 tokens"),
    (
      {"word_base": 8},
      "num_nodes=75 exceeds the 72 words .* task.word_base=8",
    ),
    ({"num_nodes": 1, "num_queries": 1}, "num_nodes=1 must be at least 2"),
    ({"min_nodes": 80}, "min_nodes=80 is greater than task.num_nodes=75"),
    ({"num_queries": 76}, "num_queries=76 is greater than task.num_nodes=75"),
    ({"min_word": 3}, "min_word=3 is greater than task.max_word=2"),
    (
      {"max_word": 6, "context_length": 900},
      "max_word=6 tokens with task.word_base=50 gives more",
    ),
    ({"max_word": 2**31}, "context_length=300 is too short"),
    (
      {"num_eval_examples": 999},
      "num_eval_examples=999 must be a multiple of 5: .* 1, 2, 4, 8, 16 hops",
    ),
    ({"num_nodes": 75.0}, "num_nodes=75.0 must be of type int"),
  ],
  "gsm": [
    ({"train_ops": (0, 1)}, r"train_ops=\(0, 1\) .* from 1 to 8"),
    ({"eval_ops": (2, 9)}, r"eval_ops=\(2, 9\) .* from 1 to 8"),
    ({"eval_ops": ()}, r"eval_ops=\(\) must be distinct operation"),
    ({"eval_ops": (2, 2)}, r"eval_ops=\(2, 2\) must be distinct operation"),
    ({"train_ops": (2.0,)}, r"train_ops=\(2.0,\) must be"),
    ({"train_ops": 4}, "train_ops=4 must be of type tuple"),
    (
      {"context_length": 91, "min_length": 0, "max_length": 91},
      "context_length=91 is too short: .* 8 operations has 92 tokens",
    ),
    (
      {"context_length": 51, "train_ops": (2,), "eval_ops": (4,)},
      "context_length=51 is too short: .* 4 operations has 52 tokens",
    ),
    (
      {"context_length": 13_000, "max_length": 13_000},
      "max_length=13000 may need 1865 quantities, but only 1600",
    ),
    (
      {"max_length": 513},
      "max_length=513 is greater than .*context_length=512",
    ),
    (
      {"min_length": 400, "max_length": 399},
      "max_length=399 must be at least 400",
    ),
    (
      {"max_constant": 300, "max_value": 200},
      "max_constant=300 is greater than task.max_value=200",
    ),
    (
      {"num_eval_examples": 1602},
      "num_eval_examples=1602 .* multiple of 4: .* 2, 4, 6, 8 operations",
    ),
    ({"context_length": 512.0}, "context_length=512.0 must be of type int"),
  ],
  "maze": [
    ({"size": 7}, "size=7 must be even"),
    ({"size": 2**31}, "size=2147483648 must be even and at most 1024"),
    ({"augment": True}, "augment has no effect while task.num_train_mazes=0"),
  ],
  "multihop": [
    ({"out_degree": 51}, "out_degree=51 is greater than task.num_relations=50"),
    ({"num_train_chains": [10]}, r"num_train_chains=\[10\] must be of type"),
    (
      {"num_train_chains": (1.5,)},
      r"num_train_chains=\(1.5,\) must be non-neg",
    ),
    ({"num_test_chains": (-1,)}, r"num_test_chains=\(-1,\) must be non-neg"),
    ({"num_train_chains": ()}, ".*one count for each of 2, 3"),
    ({"num_test_chains": (10, 10)}, ".*one count for each of 2, 3"),
    (
      {"num_train_chains": (49_000,)},
      ".*request 53000 chains of 2 hops, but a graph has 50000",
    ),
    (
      {"num_train_chains": (1,) * 16, "num_test_chains": (1,) * 16},
      r".* 500 \* 10\*\*17 chains of 17 hops cannot be numbered in 63 bits",
    ),
    ({"format": "sideways"}, "format='sideways' is not one of symbolic"),
    (
      {"format": "direct", "num_entities": 5000},
      "num_entities=5000 in English must be at most 1200",
    ),
    (
      {"format": "reverse", "num_relations": 51},
      "num_relations=51 in English must be at most 50",
    ),
  ],
  "sudoku": [
    *(
      (
        {"max_revealed": share, "num_revealed_examples": 1},
        f"max_revealed={share} must be",
      )
      for share in (-0.1, 1.1)
    ),
    ({"max_revealed": 0.5}, ".*num_revealed_examples=0 must be set together"),
    ({"box_rows": 1}, "1x3"),
    ({"box_rows": 4, "box_cols": 4}, "4x4"),
    ({"on_bad_row": "ignore"}, "on_bad_row='ignore'"),
    ({"train_csv": "a.csv"}, ".*train_csv needs task.test_csv"),
    ({"train_csv": "a.csv", "test_csv": "a.csv"}, ".*is the training file"),
    ({"on_bad_row": "skip"}, "on_bad_row has no effect"),
    ({"on_overlap": "error"}, "on_overlap has no effect"),
    ({"on_overlap": "ignore"}, "on_overlap='ignore'"),
    ({"augment": 1}, "augment=1 must be of type bool"),
  ],
  "text": [
    ({"mixture": (0.5, 0.6)}, ".*sums to 1.1, expected 1"),
    ({"mixture": (1.0,)}, ".*has 1 weights for 2 sources"),
    ({"mixture": (1.001, -0.001)}, ".*must be numbers of at least 0.00195"),
    ({"mixture": (0.999, 0.001)}, ".*must be numbers of at least 0.00195"),
    ({"test_files": "a", "test_share": 0.1}, "test_share has no effect"),
    ({"tokenizer": ""}, "tokenizer is empty"),
    ({"on_bad_document": "fix"}, ".*is not one of error, skip"),
  ],
}


@pytest.mark.parametrize(
  ("name", "changes", "message"),
  [(name, *row) for name, rows in IMPOSSIBLE.items() for row in rows],
)
def test_impossible_settings_are_named(name, changes, message):
  with refused(rf"^(task\.|boxes of ){message}"):
    TASKS[name].Config(**{**BASE.get(name, {}), **changes})


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("automaton", {"num_states": 2**31}),
    ("depo", {"context_length": 2**31}),
    ("text", {"sequence_length": 2**21}),
  ],
)
def test_a_row_that_is_too_long_takes_no_memory(name, changes):
  with refused("^section task: rows of .* exceed the maximum of 1,048,576"):
    TASKS[name].spec(TASKS[name].Config(**changes))


def test_every_task_has_a_row():
  assert set(IMPOSSIBLE) == set(TASKS)
