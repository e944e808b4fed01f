"""The last lines of a run: its scores and next steps."""

from loopjax.commands import ending

SUMMARY = {
  "status": "completed",
  "parameters": 51_545,
  "wall_seconds": 180.0,
  "metrics": {
    "train/loss": 0.5,
    "validation/count": 839.0,
    "validation/exact_match": 0.5,
    "test/count": 3941.0,
    "test/count/rating=0": 3000.0,
    "test/exact_match": 0.96214,
    "test/exact_match/standard_error": 0.00312,
    "test/exact_match/rating=0": 0.99,
    "test/loss": 0.0148,
    "test/ponder_steps": 11.0,
    "test/ponder_steps/standard_error": 0.0,
  },
}
HEADLINE = ("exact_match", "ponder_steps", "never_measured")


def test_the_scores_of_the_test_are_in_one_line(tmp_path):
  (tmp_path / "figures").mkdir()
  assert ending.lines(SUMMARY, HEADLINE, tmp_path, "train_and_eval") == [
    "test: exact_match 0.9621 ± 0.003, ponder_steps 11, loss 0.0148 on 3,941"
    " examples; 51,545 parameters, 3 minutes",
    f"figures: {tmp_path}/figures; all scores: {tmp_path}/summary.json",
    f"next: loopjax report {tmp_path}",
  ]


def test_the_next_command_can_be_pasted(tmp_path):
  said = ending.lines(SUMMARY, (), tmp_path / "my run", "train_and_eval")
  assert said[-1] == f"next: loopjax report '{tmp_path}/my run'"


def test_an_evaluation_says_what_it_scored_and_where_the_rest_is(tmp_path):
  (tmp_path / "evaluation" / "figures").mkdir(parents=True)
  scored = {
    key: x for key, x in SUMMARY["metrics"].items() if key[:5] == "valid"
  }
  said = ending.lines({**SUMMARY, "metrics": scored}, (), tmp_path, "eval")
  assert said[0].startswith("validation: ")
  assert said[0].endswith(" on 839 examples; 51,545 parameters, 3 minutes")
  assert said[1].endswith(f"all scores: {tmp_path}/evaluation/summary.json")
  assert len(said) == 2


def test_there_are_at_most_a_few_lines(tmp_path):
  splits = [f"hops_{n}" for n in range(9)]
  counts = {f"{split}/count": 5.0 for split in splits}
  many = {**SUMMARY, "metrics": {"train_2/count": 5.0, **counts}}
  said = ending.lines(many, HEADLINE, tmp_path, "train_and_eval")
  assert [line.partition(":")[0] for line in said] == [
    *splits[:4], "and 5 more splits", "next",
  ]  # fmt: skip


def test_a_run_that_was_only_trained_says_that_and_others_nothing(tmp_path):
  trained = {**SUMMARY, "metrics": {"train/loss": 0.5}}
  said = ending.lines(trained, HEADLINE, tmp_path, "train")
  assert said[0] == "trained: 51,545 parameters, 3 minutes"
  for status in ("diverged", "preempted"):
    assert not ending.lines({"status": status}, HEADLINE, tmp_path, "train")
