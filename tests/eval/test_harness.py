"""The model of lm-evaluation-harness and its command, if it is installed."""

import json
import os
import runpy
import subprocess
import sys
import warnings
from unittest import mock

import numpy as np
import pytest
from eval_examples import LENGTH, choices, make_run, texts, write

from loopjax.errors import UserError
from loopjax.eval import tasks
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


def test_likelihoods_are_the_scorers(model, run, tmp_path):
  questions = tasks.questions(write(tmp_path / "a.jsonl.gz", texts(20)))
  pairs = [(x["context"], x["continuations"][0]) for x in questions]
  encoded = language_model.load(run).tokenizer.encode_pairs(pairs)
  scores = Scorer(language_model.load(run))(
    [ScoringRequest(*pair) for pair in encoded]
  )
  found = model.loglikelihood(instances("loglikelihood", *pairs))
  ours = [(one.log_likelihood, one.is_greedy) for one in scores]
  np.testing.assert_allclose(found, ours, atol=1e-4)


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


def test_samples_of_a_text_differ_and_can_be_drawn_again(model):
  options = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
  asked = instances("generate_until", *[("Loops", options)] * 4)
  texts = model.generate_until(asked)
  assert len(set(texts)) > 1
  assert model.generate_until(asked) == texts
  greedy = {"max_gen_toks": 12, "do_sample": False, "temperature": 1.0}
  (text,) = model.generate_until(instances("generate_until", ("Loops", greedy)))
  assert text not in texts


@pytest.mark.parametrize(("options", "temperature"), [
  ({}, 0), ({"do_sample": False}, 0), ({"do_sample": True}, 1),
  ({"temperature": 0.7}, 0.7), ({"do_sample": True, "temperature": 0.7}, 0.7),
  ({"do_sample": False, "temperature": 0.7}, 0),
])  # fmt: skip
def test_options_of_a_task_say_how_it_is_sampled(
  options, temperature, monkeypatch
):
  """Without the package, which is too large for every machine."""
  api = ("", ".api", ".api.instance", ".api.model", ".api.registry", ".models",
         ".utils", ".__main__")  # fmt: skip
  stub = mock.MagicMock(TemplateLM=object, register_model=lambda _: lambda x: x)
  for part in api:
    monkeypatch.setitem(sys.modules, f"lm_eval{part}", stub)
  module = runpy.run_module("loopjax.eval.harness", run_name="harness")
  found = module["_options"]({"until": "\n", "top_k": 5, **options})
  assert found.stops == ("\n",) and found.sampling.top_k == 5
  assert found.sampling.temperature == temperature


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
  """The tasks of the package through the real command."""
  folder = tmp_path / "data"
  arc, gsm = "arc_easy__rc_0shot", "gsm8k__gold_bpb_5shot"
  write(folder / f"{arc}.jsonl.gz", choices(10))
  write(folder / f"{gsm}.jsonl.gz", texts(10))
  (folder / "text.jsonl").write_text(json.dumps({"text": "Loops end."}) + "\n")
  question = json.dumps({"question": "1 + 1?", "answer": "It is 2.\n#### 2"})
  for name in ("gsm8k_test", "questions"):
    (folder / f"{name}.jsonl").write_text(question + "\n")
  names = "olmes_arc_easy,olmes_gsm8k,text_local,gsm8k_local,pass_local"
  ended = subprocess.run(
    [
      *(sys.executable, "-m", "loopjax.eval.harness", "run"),
      *("--model=loopjax", f"--model_args=workdir={run},num_loops=3"),
      *(f"--tasks={names}", f"--metadata=folder={folder}"),
      "--gen_kwargs=max_gen_toks=16",
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
  assert results["pass_local"]["pass@1,samples"] == 0.0
  model = language_model.load(run, num_loops=3)
  for task, name in (("olmes_arc_easy", arc), ("olmes_gsm8k", gsm)):
    questions = tasks.questions(folder / f"{name}.jsonl.gz")
    pairs = [(x["context"], x["continuations"][x["gold"]]) for x in questions]
    encoded = model.tokenizer.encode_pairs(pairs)
    scores = Scorer(model)([ScoringRequest(*pair) for pair in encoded])
    bits = [
      -one.log_likelihood / np.log(2) / len(text.encode())
      for one, (_, text) in zip(scores, pairs, strict=True)
    ]
    found = results[task]["bits_per_byte_of_answer,none"]
    assert found == pytest.approx(np.mean(bits), abs=1e-4)
