"""The model of lm-evaluation-harness and its command, if it is installed."""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import warnings

import numpy as np
import pytest
from eval_examples import LENGTH, choices, make_run, texts, write

from loopjax.errors import UserError
from loopjax.eval import __main__ as entry
from loopjax.eval import bits_per_byte, requests
from loopjax.eval.scorer import Scorer, ScoringRequest
from loopjax.saved import language_model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def harness():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval")
    from loopjax.eval import harness
  return harness


def test_without_the_package_the_command_is_one_line(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  with pytest.raises(SystemExit) as ended:
    runpy.run_module("loopjax.eval.harness", run_name="__main__")
  assert ended.value.code == 2
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith("error: No module named 'lm_eval")
  assert said.endswith("pip install 'loopjax[eval]'")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return make_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def model(harness, run):
  return harness.Model(workdir=str(run), batch_size=1, device=None)


def instances(kind, *arguments):
  from lm_eval.api.instance import Instance

  return [
    Instance(request_type=kind, doc={}, arguments=one, idx=i)
    for i, one in enumerate(arguments)
  ]


def agree(model, run, task):
  """Both paths give every log-likelihood."""
  (scores,) = bits_per_byte.score([task], Scorer(language_model.load(run)))
  found = model.loglikelihood(
    instances(
      "loglikelihood",
      *((i.contexts[0], i.continuations[0]) for i in task.items),
    )
  )
  ours = [(of[0].log_likelihood, of[0].is_greedy) for of in scores]
  assert len(found) == len(task.items)
  np.testing.assert_allclose(found, ours, atol=1e-4)


def test_both_paths_agree(model, run, tmp_path):
  path = write(tmp_path / "boxes.jsonl.gz", texts(20))
  agree(model, run, requests.read(path))


def test_both_paths_agree_on_gsm8k(harness, tmp_path):
  name = "gsm8k__gold_bpb_5shot.jsonl.gz"
  path = pathlib.Path(os.environ.get("LOOPJAX_DATA", ""), "olmes", name)
  if "LOOPJAX_DATA" not in os.environ or not path.exists():
    pytest.skip(f"needs LOOPJAX_DATA with olmes/{name}")
  run = make_run(tmp_path / "run", task__sequence_length=512)
  model = harness.Model(workdir=str(run))
  agree(model, run, requests.read(path, limit=20))


def test_a_whole_text_is_scored_by_windows(model, run):
  text = "The loop ends when every token has halted. " * 3
  (found,) = model.loglikelihood_rolling(
    instances("loglikelihood_rolling", (text,))
  )
  assert isinstance(found, float)
  tokens = np.array([256, *text.encode()])
  windows = [(1, 1 + LENGTH), (1 + LENGTH, 1 + 2 * LENGTH)]
  scorer = Scorer(language_model.load(run))
  scores = scorer(
    [ScoringRequest(tokens[a - 1 : a], tokens[a:b]) for a, b in windows]
  )
  # The rest is scored after as much text as fits.
  rest = len(tokens) - 1 - 2 * LENGTH
  (last,) = scorer(
    [ScoringRequest(tokens[-LENGTH - 1 : -rest], tokens[-rest:])]
  )
  expected = sum(one.log_likelihood for one in (*scores, last))
  assert found == pytest.approx(expected, abs=1e-3)


def test_an_empty_context_is_the_beginning_of_a_document(model, run):
  (found,) = model.loglikelihood(instances("loglikelihood", ("", "Loops")))
  (ours,) = Scorer(language_model.load(run))(
    [ScoringRequest(np.array([256]), np.array([*b"Loops"]))]
  )
  assert found[0] == pytest.approx(ours.log_likelihood, abs=1e-4)


def test_generation_is_greedy_and_ends_at_a_stop(model):
  options = {"until": [], "max_gen_toks": 12, "do_sample": False}
  (whole,) = model.generate_until(
    instances("generate_until", ("Loops", options))
  )
  options = {**options, "until": [whole[3:5]]}
  (text,) = model.generate_until(
    instances("generate_until", ("Loops", options))
  )
  assert text == whole[: whole.index(whole[3:5])]
  with pytest.raises(UserError, match="only greedy decoding"):
    model.generate_until(
      instances("generate_until", ("Loops", {"do_sample": True}))
    )


def test_a_mistake_in_the_arguments(harness, run):
  with pytest.raises(UserError, match="--model_args: unknown argument loops"):
    harness.Model(workdir=str(run), loops=3)


def test_texts_begin_with_nothing_if_asked(harness, run):
  """The harness converts bos=none to None."""
  from lm_eval import utils

  for words, says in (
    ("bos=none", "nothing"),
    ("bos=None", "nothing"),
    ("batch_size=1", "document separator"),
  ):
    given = utils.simple_parse_args_string(words)
    found = harness.Model(workdir=str(run), **given)
    assert found.get_model_info()["texts_begin_with"] == says


@pytest.mark.manual
def test_the_command(harness, run, tmp_path):
  """The tasks of the package through the real command, and ours."""
  folder = tmp_path / "data"
  arc, gsm = "arc_easy__rc_0shot", "gsm8k__gold_bpb_5shot"
  write(folder / f"{arc}.jsonl.gz", choices(10))
  write(folder / f"{gsm}.jsonl.gz", texts(10))
  (folder / "text.jsonl").write_text(json.dumps({"text": "Loops end."}) + "\n")
  (folder / "gsm8k_test.jsonl").write_text(
    json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"}) + "\n"
  )
  tasks = "olmes_arc_easy,olmes_gsm8k,text_local,gsm8k_local"
  ended = subprocess.run(
    [
      *(sys.executable, "-m", "loopjax.eval.harness", "run"),
      *("--model=loopjax", f"--model_args=workdir={run},num_loops=3"),
      *(f"--tasks={tasks}", f"--metadata=folder={folder}"),
      f"--output_path={tmp_path / 'results.json'}",
    ],
    capture_output=True,
    text=True,
    env=os.environ | {"HF_HOME": str(tmp_path / "home")},
  )
  assert ended.returncode == 0, ended.stderr[-2000:]
  (path,) = tmp_path.glob("results*.json")
  written = json.loads(path.read_text())
  assert written["config"]["num_loops"] == 3
  assert written["config"]["trained_num_loops"] == 2
  results = written["results"]
  assert results["gsm8k_local"]["exact_match,last-number"] == 0.0
  assert results["text_local"]["bits_per_byte,none"] > 0

  flags = (f"--tasks={arc},{gsm}", f"--folder={folder}", "--num_loops=3")
  assert entry.main([str(run), *flags]) == 0
  for task, name, scores in (
    ("olmes_arc_easy", arc, ("accuracy", "accuracy_per_char")),
    ("olmes_gsm8k", gsm, ("greedy_match",)),
  ):
    ours = json.loads((run / "eval" / f"{name},num_loops=3.json").read_text())
    for score in scores:
      assert results[task][f"{score},none"] == ours["metrics"][score]
    found = results[task]["bits_per_byte_of_answer,none"]
    assert found == pytest.approx(ours["metrics"]["bits_per_byte"], abs=1e-4)
