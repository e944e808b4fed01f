"""The endpoint over a real server, and an engine whose texts are known."""

import asyncio
import concurrent.futures
import json
import os
import pathlib
import socket
import sys
import threading
import time
import types

import pytest
from tests_support import ROOT

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate import source
from loopjax.generate.requests import GeneratedToken, GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.saved import language_model
from loopjax.serve import answers

httpx = pytest.importorskip("httpx")
for name in ("uvicorn", "starlette", "prometheus_client"):
  pytest.importorskip(name)
examples = pytest.importorskip("serve_examples")

TEXT = examples.TEXT
LENGTH = len(TEXT.encode())


def template(messages, *, continued=False):
  text = "".join(
    f"<{m.get('name', m['role'])}>{m['content']}" for m in messages
  )
  return text if continued else f"{text}<assistant>"


@pytest.fixture(scope="module")
def served():
  with examples.serve(examples.Engine(), chat=template) as made:
    yield made


@pytest.fixture
def alone():
  """A server for one test, of two slots and room for three requests."""
  with examples.serve(examples.Engine(num_slots=2), capacity=3) as made:
    yield made


def wait_for(what):
  for _ in range(1000):
    if what():
      return
    time.sleep(0.01)
  raise AssertionError("it does not happen")


def post_body(served, body):
  headers = {"Content-Type": "application/json"}
  return served.client.post("/v1/completions", content=body, headers=headers)


def events(response):
  """The parts of a stream; the last one says that it is over."""
  lines = [line for line in response.text.split("\n\n") if line]
  assert all(line.startswith("data: ") for line in lines)
  assert lines[-1] == "data: [DONE]"
  return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(served):
  answer = served.post(prompt="Go", max_tokens=99, model="tiny").json()
  (choice,) = answer["choices"]
  assert choice == {
    "index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop",
  }  # fmt: skip
  assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
  assert answer["usage"] == {
    "prompt_tokens": 3,  # The end of another document comes first.
    "completion_tokens": LENGTH + 1,
    "total_tokens": LENGTH + 4,
    "loops_per_token": 2.0,
  }
  assert served.engine.added[-1].prompt == (256, ord("G"), ord("o"))


def test_what_is_asked_reaches_the_engine(served):
  served.engine.added.clear()
  served.engine.live.clear()
  response = served.post(
    prompt=["a", "bc"], n=2, max_tokens=3, temperature=0.5, top_p=0.9, top_k=7,
    min_p=0.1, repetition_penalty=1.5, seed=11, logprobs=4, num_loops=4,
    exit_threshold=0.7, prefill_loops=3, user="me",
  )  # fmt: skip
  assert response.status_code == 200
  sampling = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1,
    "repetition_penalty": 1.5,
  }  # fmt: skip
  assert served.engine.added == [
    GenerationRequest(
      (256, *prompt),
      3,
      Sampling(**sampling, seed=seed),
      (256,),
      4,
      4,
      0.7,
      prefill_loops=3,
    )
    for prompt in (b"a", b"bc")
    for seed in (11, 12)
  ]
  assert [c["index"] for c in response.json()["choices"]] == [0, 1, 2, 3]


def test_prompts_are_read_with_the_servers_loops_unless_asked_otherwise():
  """And with no more than the loops that the request has."""
  protocol = examples.protocol
  model = protocol.ServedModel("tiny", examples.BYTES, (), 200, 99, None, 3)

  def asked(**fields):
    body = json.dumps({"prompt": "x", **fields}).encode()
    _, (requests, *_) = protocol.parse(body, {"tiny": model}, chat=False)
    return requests[0].prefill_loops

  assert (asked(), asked(prefill_loops=1), asked(prefill_loops=0)) == (3, 1, 0)
  assert (asked(num_loops=2), asked(num_loops=4)) == (2, 3)


def test_loops_and_what_was_copied_are_reported(alone):
  plain = alone.post(prompt="x", max_tokens=8).json()
  assert plain["usage"].keys() == {
    "prompt_tokens", "completion_tokens", "total_tokens", "loops_per_token",
  }  # fmt: skip
  alone.engine.copies = True
  copied = alone.post(prompt="x", max_tokens=8).json()
  assert copied["usage"]["loops_per_token"] == 2.0
  assert copied["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
  wait_for(lambda: alone.number("loopjax_loops_total") == 2 * 8 * 2)
  metrics = alone.client.get("/metrics").text
  assert 'loopjax_tokens_total{kind="cached"} 1.0' in metrics


def test_each_model_is_asked_by_its_name():
  """The first one without a name; all are listed, and live or dead together."""
  first, second = examples.Engine(), examples.Engine(text="Other.")
  with examples.serve(first, also={second: "other"}) as served:
    listed = served.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "other"]
    assert served.client.get("/v1/models/other").json() == listed[1]
    missing = served.client.get("/v1/models/zoo:none")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    for fields, engine, text in (
      ({}, first, TEXT), ({"model": "tiny"}, first, TEXT),
      ({"model": "other"}, second, "Other."),
    ):  # fmt: skip
      before = len(engine.added)
      answer = served.post(prompt="x", max_tokens=90, **fields).json()
      assert answer["choices"][0]["text"] == text
      assert answer["model"] == fields.get("model", "tiny")
      assert len(engine.added) == before + 1
    error = served.post(prompt="x", model="third").json()["error"]["message"]
    assert "expected one of 'tiny', 'other'" in error
    wait_for(lambda: served.number("loopjax_live_requests") == 0)
    second.broken = True
    assert served.post(prompt="x", model="other").status_code == 503
    assert served.client.get("/health").status_code == 503


def test_ids_are_prompts_too(served):
  served.post(prompt=[5, 6], max_tokens=1)
  assert served.engine.added[-1].prompt == (5, 6)
  served.post(prompt=[[5, 6], [7]], max_tokens=1)
  assert [r.prompt for r in served.engine.added[-2:]] == [(5, 6), (7,)]


def test_without_a_seed_every_request_has_another_one(served):
  for _ in range(2):
    served.post(prompt="a", max_tokens=1)
  one, other = (r.sampling.seed for r in served.engine.added[-2:])
  assert one != other


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_a_seed_is_any_integer_of_64_bits(served, seed):
  """Its last 32 bits are used, also of later choices."""
  answer = served.post(prompt="a", max_tokens=1, seed=seed, n=2)
  assert answer.status_code == 200, answer.text
  found = [request.sampling.seed for request in served.engine.added[-2:]]
  assert found == [seed % 2**32, (seed + 1) % 2**32]


def test_a_conversation_is_written_by_the_template(served):
  messages = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
  ]
  path = "/v1/chat/completions"
  answer = served.post(path, messages=messages).json()
  assert answer["object"] == "chat.completion"
  assert answer["choices"][0]["message"] == {
    "role": "assistant", "content": TEXT,
  }  # fmt: skip
  request = served.engine.added[-1]
  text = "<system>Be brief.<user>Hi<assistant>"
  assert bytes(request.prompt).decode() == text
  assert request.max_new_tokens == 100  # All that is allowed.
  served.post(path, messages=messages, max_completion_tokens=5)
  assert served.engine.added[-1].max_new_tokens == 5
  both = served.post(
    path, messages=messages, max_tokens=5, max_completion_tokens=5
  )
  assert both.status_code == 400 and "pass only one" in both.text
  messages.append({"role": "assistant", "content": "Well"})
  served.post(path, messages=messages, continue_final_message=True)
  assert bytes(served.engine.added[-1].prompt).decode() == text + "Well"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_what_the_whole_says(served, chat):
  asked = (
    {"messages": [{"role": "user", "content": "x"}]}
    if chat
    else {"prompt": "x"}
  )
  path = "/v1/chat/completions" if chat else "/v1/completions"
  response = served.post(
    path, **asked, n=2, max_tokens=90, stream=True,
    stream_options={"include_usage": True},
  )  # fmt: skip
  assert response.headers["content-type"].startswith("text/event-stream")
  *parts, last = events(response)
  assert last["choices"] == []
  assert last["usage"]["completion_tokens"] == 2 * (LENGTH + 1)
  assert {part["usage"] for part in parts} == {None}  # As OpenAI's.
  assert len({part["id"] for part in [*parts, last]}) == 1
  kind = "chat.completion.chunk" if chat else "text_completion"
  assert {part["object"] for part in parts} == {kind}
  for index in range(2):
    mine = [p["choices"][0] for p in parts if p["choices"][0]["index"] == index]
    if chat:
      assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    text = [c["delta"]["content"] if chat else c["text"] for c in mine]
    assert "".join(text) == TEXT
    assert len(text) > 20
    assert "\ufffd" not in "".join(text)  # No character comes in halves.
    finishes = [c["finish_reason"] for c in mine]
    assert finishes == [None] * (len(mine) - 1) + ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_a_stop(served, monkeypatch, stream):
  """ "len" is in "allen", whose first letters come one by one."""
  monkeypatch.setattr(served.engine, "seconds", 0.005)  # It is not over yet.
  served.engine.cancelled.clear()
  response = served.post(
    prompt="x", max_tokens=90, stop=["Wipfel", "len"], stream=stream
  )
  if stream:
    choices = [part["choices"][0] for part in events(response)]
  else:
    choices = response.json()["choices"]
  assert "".join(c["text"] for c in choices) == "Über al"
  assert choices[-1]["finish_reason"] == "stop"
  wait_for(lambda: served.engine.cancelled)  # Its slot is free at once.
  wait_for(lambda: served.worker.num_live == 0)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("sizes", [(60,), (5, 55), (11, 49)], ids=str)
def test_scores_are_of_the_tokens_of_the_text(chat, sizes):
  """Not of a stop, nor of those that the engine wrote after it in a step."""
  asked = {"prompt": "x", "logprobs": 1}
  if chat:
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
  protocol = examples.protocol
  model = protocol.ServedModel("tiny", examples.BYTES, (), 200, 99, template)
  body = json.dumps({**asked, "stop": ["Wipfel", "len"]}).encode()
  _, completion = protocol.parse(body, {"tiny": model}, chat=chat)
  answer = answers.Answer(completion, model, chat=chat)
  tokens = [
    GeneratedToken(0, token, -float(place), (), 2, None)
    for place, token in enumerate(TEXT.encode()[:60])
  ]
  parts, at = [], 0
  for size in sizes:
    for chunk in answer.chunks(0, tokens[at : at + size]):
      parts.append(chunk["choices"][0]["logprobs"])
    at += size
  num = len("Über al".encode())

  def scores(part):
    if chat:
      return [one["logprob"] for one in part["content"]]
    return part["token_logprobs"]

  expected = [-float(place) for place in range(num)]
  assert sum((scores(part) for part in parts), []) == expected
  (choice,) = answer.body()["choices"]
  assert scores(choice["logprobs"]) == expected
  # All that were sampled until the stop was there.
  assert answer.usage()["completion_tokens"] == num + len("len")


def test_a_beginning_of_a_stop_is_given_out_at_the_end(served):
  answer = served.post(prompt="x", max_tokens=8, stop="lex").json()
  (choice,) = answer["choices"]
  assert choice["text"] == "Über al"
  assert choice["finish_reason"] == "length"


def test_half_a_character_at_the_end(served):
  answer = served.post(prompt="x", max_tokens=1).json()
  assert answer["choices"][0]["text"] == "\ufffd"


def test_log_probabilities(served):
  answer = served.post(prompt="x", max_tokens=3, logprobs=2).json()
  scores = answer["choices"][0]["logprobs"]
  assert scores["token_logprobs"] == [-0.5] * 3
  assert scores["tokens"] == [r"bytes:\xc3", r"bytes:\x9c", "b"]
  assert scores["top_logprobs"][0] == {"\0": -1.0, "\1": -2.0}
  answer = served.post(
    "/v1/chat/completions", messages=[{"role": "user", "content": "x"}],
    max_tokens=3, logprobs=True, top_logprobs=1,
  ).json()  # fmt: skip
  content = answer["choices"][0]["logprobs"]["content"]
  assert [one["bytes"] for one in content] == [[x] for x in "Üb".encode()]
  assert content[2] == {
    "token": "b", "logprob": -0.5, "bytes": [98],
    "top_logprobs": [{"token": "\0", "logprob": -1.0, "bytes": [0]}],
  }  # fmt: skip
  parts = events(served.post(prompt="x", max_tokens=3, logprobs=0, stream=True))
  seen = [part["choices"][0]["logprobs"]["token_logprobs"] for part in parts]
  assert sum(seen, []) == [-0.5] * 3


def test_a_prompt_is_echoed_with_its_scores(served):
  """Alone, or before what follows it; the first token has no score."""
  before = len(served.engine.added)
  asked = {"echo": True, "max_tokens": 0}
  answer = served.post(prompt=["Go", [71, 195]], logprobs=1, n=2, **asked)
  choices = answer.json()["choices"]
  assert len(served.engine.added) == before
  assert [x["text"] for x in choices] == ["Go", "Go", "G\ufffd", "G\ufffd"]
  assert {x["finish_reason"] for x in choices} == {"length"}
  assert (
    choices[0]["logprobs"]
    == choices[1]["logprobs"]
    == {
      "tokens": ["", "G", "o"],
      "token_logprobs": [None, -1.0, -2.0],
      "top_logprobs": [None, {"G": -1.0}, {"o": -2.0}],
    }
  )
  assert choices[3]["logprobs"]["tokens"] == ["G", r"bytes:\xc3"]
  usage = answer.json()["usage"]
  assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)
  (choice,) = served.post(prompt="Go", **asked).json()["choices"]
  assert (choice["text"], choice["logprobs"]) == ("Go", None)
  (choice,) = served.post(prompt="Go", max_tokens=3, echo=True).json()[
    "choices"
  ]
  assert choice["text"] == "Go\u00dcb"


def test_scores_after_an_echo_are_of_every_token(served):
  """Also of the end token: clients count from the end."""
  answer = served.post(prompt="Go", max_tokens=99, logprobs=2, echo=True).json()
  (choice,) = answer["choices"]
  assert choice["text"] == f"Go{TEXT}" and choice["finish_reason"] == "stop"
  scores = choice["logprobs"]
  count = answer["usage"]["total_tokens"]
  assert {name: len(x) for name, x in scores.items()} == dict.fromkeys(
    ("tokens", "token_logprobs", "top_logprobs"), count
  )
  assert scores["token_logprobs"][:4] == [None, -1.0, -2.0, -0.5]
  assert scores["top_logprobs"][2] == {"o": -2.0, "\x07": -9.0}


def test_a_scorer_that_fails_is_no_answer(capsys):
  def fail(prompt):
    raise RuntimeError("no memory for a prompt")

  with examples.serve(examples.Engine(), score=fail) as made:
    fields = {"prompt": "x", "max_tokens": 0, "logprobs": 1, "echo": True}
    assert made.post(**fields).status_code == 500
    assert made.post(prompt="x", max_tokens=1).status_code == 200
    assert not made.failures
  assert "no memory for a prompt" in capsys.readouterr().err


def test_texts_go_on_while_a_prompt_is_scored():
  """Its program may have to be compiled."""
  go_on = threading.Event()

  def score(prompt):
    go_on.wait(20)
    return examples.score_prompt(prompt)

  fields = {"prompt": "ab", "max_tokens": 0, "logprobs": 1, "echo": True}
  with (
    examples.serve(examples.Engine(), score=score) as made,
    concurrent.futures.ThreadPoolExecutor() as pool,
  ):
    echoed = pool.submit(made.post, **fields)
    assert made.post(prompt="x", max_tokens=3).status_code == 200
    assert not echoed.done()
    go_on.set()
    scores = echoed.result().json()["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == [None, -1.0, -2.0]


def test_scores_that_are_not_finite_are_refused():
  """The scorer raises UserError; the engine goes on."""

  def refuse(prompt):
    raise UserError("the log-likelihoods of 1 of 1 are not finite")

  with examples.serve(examples.Engine(), score=refuse) as made:
    fields = {"prompt": "x", "max_tokens": 0, "logprobs": 1, "echo": True}
    refused = made.post(**fields)
    assert refused.status_code == 400
    assert "are not finite" in refused.json()["error"]["message"]
    assert made.post(prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_no_more_log_probabilities_than_text(served, stream):
  """After a stop string, nor of the token that ends the text."""
  for fields, text in (({"stop": "len"}, "Über al"), ({}, TEXT)):
    answer = served.post(
      prompt="x", max_tokens=90, logprobs=0, stream=stream, **fields
    )
    parts = events(answer) if stream else [answer.json()]
    choices = [part["choices"][0] for part in parts]
    found = [x for one in choices for x in one["logprobs"]["token_logprobs"]]
    assert len(found) == len(text.encode())
    assert "".join(one["text"] for one in choices) == text


def test_tokens_are_those_of_a_text_with_their_spaces(tmp_path):
  """And of ids with the same text the most likely one is reported."""
  texts = pytest.importorskip("texts_examples")
  folder = tmp_path / "hub"
  texts.write_folder(folder, texts.stored()["kinds"]["dummy_prefix"])
  tokenizer = Tokenizer(str(folder / "tokenizer.json"), "</s>")
  ids = tokenizer.encode(["The loop halts"])[0].tolist()
  space, byte = 3 + ord(" "), int(tokenizer.encode([" \t"])[0][0])
  assert tokenizer.piece(space) == tokenizer.piece(byte) == b" "
  request = GenerationRequest((1,), 9, top_log_probabilities=2)
  completion = examples.protocol.CompletionRequest(
    (request,), ((1,),), 1, (), (), False, False, True, 2
  )
  model = examples.protocol.ServedModel("x", tokenizer, (2,), 99, 99, None)
  for chat in (False, True):
    answer = answers.Answer(completion, model, chat=chat)
    top = ((space, -1.0), (byte, -2.0), (ids[0], -3.0))
    answer.chunks(
      0,
      [
        examples.GeneratedToken(0, one, -0.5, top, 1, None)
        for one in (*ids, 3 + 0xE2)
      ],
    )
    scores = answer.body()["choices"][0]["logprobs"]
    first = tokenizer.piece(ids[0]).decode()
    if chat:
      tokens = [one["token"] for one in scores["content"]]
      assert scores["content"][0]["bytes"] == [*first.encode()]
      assert [x["token"] for x in scores["content"][0]["top_logprobs"]] == [
        " ", " ", first,
      ]  # fmt: skip
    else:
      tokens = scores["tokens"]
      assert scores["top_logprobs"][0] == {" ": -1.0, first: -3.0}
    assert "".join(tokens) == " The loop halts"


@pytest.mark.parametrize(("fields", "param", "message"), [
  ({}, "prompt", "prompt is missing"),
  ({"prompt": {}}, "prompt", "prompt={}: Input should be a valid array"),
  ({"prompt": []}, "prompt", "at least 1 item"),
  ({"prompt": ["a", 3]}, "prompt", "=3: Input should be a valid string"),
  ({"prompt": [True]}, "prompt", "=True: Input should be a valid string"),
  ({"prompt": ["a"] * 129}, "prompt", "at most 128 items"),
  ({"prompt": "x" * 300}, "prompt", "the maximum is 200"),
  ({"prompt": "x", "max_tokens": 101}, "max_tokens", "maximum of 100 new"),
  ({"prompt": "x" * 150, "max_tokens": 60}, "max_tokens", "more than the 49"),
  ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens=0 generates no"),
  ({"prompt": "x", "max_tokens": 10**400}, "max_tokens", "less than or equal"),
  ({"prompt": "x", "max_tokens": True}, "max_tokens", "a valid integer"),
  ({"prompt": "x", "n": 0}, "n", "n=0: Input should be greater than or equal"),
  ({"prompt": "x", "n": 9}, "n", "9 choices exceed the 8"),
  ({"prompt": ["x"] * 65, "n": 2}, "n",
   "130 choices exceed the maximum of 128"),
  ({"prompt": "x", "temperature": -1}, "temperature",
   "temperature=-1: Input should be greater than or equal to 0"),
  ({"prompt": "x", "temperature": "hot"}, "temperature", "a valid number"),
  ({"prompt": "x", "top_p": 0}, "top_p", "top_p=0 must be more than 0"),
  ({"prompt": "x", "exit_threshold": 0}, "exit_threshold", "is not in (0, 1]"),
  ({"prompt": "x", "num_loops": 3}, "num_loops", "this model runs 4"),
  ({"prompt": "x", "prefill_loops": 1.5}, "prefill_loops", "a valid integer"),
  ({"prompt": "x", "prefill_loops": -1}, "prefill_loops", "or equal to 0"),
  ({"prompt": "x", "stop": ["a", ""]}, "stop", "at least 1 character"),
  ({"prompt": "x", "stop": list("abcde")}, "stop", "at most 4 items"),
  ({"prompt": "x", "stream": "yes"}, "stream", "a valid boolean"),
  ({"prompt": "x", "stream_options": [1]}, "stream_options", "an object"),
  ({"prompt": "x", "stream_options": {"include_usage": True}},
   "stream_options", "no effect without stream"),
  ({"prompt": "x", "stream": True, "stream_options": {"include_x": 1}},
   "stream_options", "stream_options.include_x=1: Extra inputs are not"),
  ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty",
   "in [0.01, 100]"),
  ({"prompt": "x", "seed": 2**63}, "seed", "less than 9223372036854775808"),
  ({"prompt": "x", "logprobs": True}, "logprobs", "a valid integer"),
  ({"prompt": "x", "echo": 1}, "echo", "a valid boolean"),
  ({"prompt": "x", "max_tokens": False, "echo": True}, "max_tokens",
   "a valid integer"),
  *(({"prompt": [5, id_], **fields}, "prompt",
   f"the prompt has token id {id_}, expected less than 257")
   for id_ in (257, -1, 10**12)
   for fields in ({}, {"max_tokens": 0, "echo": True})),
  ({"prompt": "x" * 200, "max_tokens": 0, "echo": True}, "prompt",
   "the prompt has 201 tokens; the maximum is 200"),
  *(({"prompt": "x", "echo": True, name: value}, name,
   "unsupported with") for name, value in {"stream": True, "stop": "x",
   "num_loops": 2, "exit_threshold": 0.5, "prefill_loops": 1}.items()),
  ({"prompt": "x", "best_of": 3}, "best_of", "best_of=3: Input should be 1"),
  ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias", "at most 0 items"),
  ({"prompt": "x", "mesages": []}, "mesages", "unknown field"),
  ({"prompt": "x", "model": "gpt"}, "model", "expected one of 'tiny'"),
])  # fmt: skip
def test_mistakes_are_named(served, fields, param, message):
  before = len(served.engine.added)
  body = json.dumps(fields).encode()
  response = served.client.post(
    "/v1/completions",
    content=body,
    headers={"Content-Type": "application/json"},
  )
  error = response.json()["error"]
  assert response.status_code == (404 if param == "model" else 400)
  assert error["param"] == param
  assert message in error["message"]
  assert "\n" not in error["message"] and len(error["message"]) < 200
  assert error["type"] == "invalid_request_error"
  assert len(served.engine.added) == before
  assert served.worker.num_live == 0


@pytest.mark.parametrize(("fields", "message"), [
  ({"messages": []}, "messages=[] has no message"),
  ({"messages": ["Hi"]}, "messages.0='Hi': Input should be a"),
  ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
   "messages.0.tool_calls=[{}]: Extra inputs are not permitted"),
  ({"messages": [{"role": "god", "content": "x"}]}, "should be 'system', 'dev"),
  ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
  ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content"),
  ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"},
   "unknown fiel"),
  ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
   "without logprobs"),
  ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
   "tools=[{}]: List should have at most 0 items"),
  ({"messages": [{"role": "user", "content": "x"}],
   "continue_final_message": True}, "needs a last message of the assistant"),
  ({"messages": [{"role": "assistant", "content": "x"}],
   "continue_final_message": True, "add_generation_prompt": True},
   "exactly one of"),
])  # fmt: skip
def test_mistakes_in_a_conversation_are_named(served, fields, message):
  response = served.post("/v1/chat/completions", **fields)
  assert response.status_code == 400
  assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(("body", "message"), [
  (b"", "Invalid JSON"),
  (b"{", "Invalid JSON"),
  (b"\xff\xfe{}", "Invalid JSON"),
  (b"[" * 100_000, "Invalid JSON"),
  (b'{"prompt": "\\ud800"}', "Invalid JSON"),
  (b'{"prompt": "x", "top_p": NaN}', "top_p=nan: Input should be"),
  (b'{"prompt": "x", "top_p": 1' + b"0" * 5000 + b"}", "Invalid JSON"),
  (b"[]", "the body: Input should be an object"),
])  # fmt: skip
def test_garbage_is_one_json_error(served, body, message):
  response = served.client.post(
    "/v1/completions",
    content=body,
    headers={"Content-Type": "application/json"},
  )
  assert response.status_code == 400
  assert message in response.json()["error"]["message"]


def test_other_requests_are_json_errors_too(served):
  client = served.client
  for response, status in (
    (client.get("/v1/none"), 404),
    (client.get("/v1/completions"), 405),
    (client.post("/v1/completions", content=b"prompt=x"), 415),
    (
      client.post(
        "/v1/completions",
        content=b"",
        headers={"Content-Type": "Application/JSON; charset=UTF-8"},
      ),
      400,
    ),
    (served.post(prompt="x" * (1 << 20)), 413),
  ):
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_model_that_does_not_chat(alone):
  response = alone.post("/v1/chat/completions", messages=[])
  assert "no chat template" in response.json()["error"]["message"]


def test_models_and_health(served):
  (model,) = served.client.get("/v1/models").json()["data"]
  assert (model["id"], model["object"]) == ("tiny", "model")
  response = served.client.get("/health")
  assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_who_comes_when_it_is_full_is_sent_away(alone):
  alone.engine.go_on.clear()
  with alone.client.stream(
    "POST", "/v1/completions",
    json={"prompt": "x", "n": 2, "max_tokens": 5, "stream": True},
  ) as first:  # fmt: skip
    assert first.status_code == 200
    response = alone.post(prompt="y", n=2)
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert len(alone.engine.added) == 2
    alone.engine.go_on.set()
    assert "[DONE]" in first.read().decode()
  assert alone.post(prompt="y", n=2).status_code == 200
  assert alone.number('loopjax_responses_total{status="429"}') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_slots(alone, stream):
  """Two texts are being written, and the third one waits."""
  alone.engine.seconds = 0.02
  asked = {"prompt": "x", "max_tokens": 60, "n": 3, "stream": stream}
  if stream:
    with alone.client.stream("POST", "/v1/completions", json=asked) as response:
      next(response.iter_lines())
  else:
    with pytest.raises(httpx.ReadTimeout):
      alone.client.post("/v1/completions", json=asked, timeout=0.2)
  wait_for(lambda: alone.worker.num_live == 0)
  wait_for(lambda: len(alone.engine.cancelled) == 3)
  assert not alone.engine.live
  assert alone.post(prompt="x", n=3, max_tokens=1).status_code == 200
  assert alone.number("loopjax_live_requests") == 0


def test_a_token_is_asked_for():
  with examples.serve(examples.Engine(), token="secret") as made:
    assert made.client.get("/health").status_code == 200
    for headers in (
      {},
      {"Authorization": "Bearer secre"},
      {"Authorization": "secret"},
      {"Authorization": "Bearer \xe9".encode("latin-1")},
    ):
      for path in ("/v1/models", "/metrics", "/v1/none"):
        response = made.client.get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
      response = made.client.post(
        "/v1/completions", json={"prompt": "x"}, headers=headers
      )
      assert response.status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert made.client.get("/v1/models", headers=headers).status_code == 200
    assert not made.engine.added


def test_other_names_of_this_machine_are_refused():
  with examples.serve(examples.Engine(), hosts=["127.0.0.1"]) as made:
    assert made.client.get("/v1/models").status_code == 200
    headers = {"Host": "evil.example"}
    refused = made.client.get("/v1/models", headers=headers)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert message.startswith("unknown host 'evil.example'")
    assert made.client.get("/health", headers=headers).status_code == 200


def test_a_public_name_and_pages_that_may_ask():
  """As behind a proxy; a preflight needs no token."""
  origin = "https://page.example"
  with examples.serve(
    examples.Engine(), token="secret", hosts=["api.example"], origins=[origin]
  ) as made:
    headers = {"Host": "API.example:443", "Origin": origin}
    asked = {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    path = "/v1/completions"
    preflight = made.client.options(path, headers={**headers, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    allowed = preflight.headers["access-control-allow-headers"]
    assert "authorization" in allowed.lower()
    refused = made.client.get("/v1/models", headers=headers)
    assert refused.status_code == 401  # And the page may read why.
    assert refused.headers["access-control-allow-origin"] == origin
    bearer = {"Authorization": "Bearer secret"}
    answer = made.client.get("/v1/models", headers={**headers, **bearer})
    assert answer.status_code == 200
    other = {**headers, **bearer, "Origin": "https://other.example"}
    answer = made.client.get("/v1/models", headers=other)
    assert "access-control-allow-origin" not in answer.headers


def test_fields_that_clients_send_and_nothing_hangs_on(served):
  fields = {"prompt_cache_key": "a", "max_tokens": 2, "stream": True}
  options = {"include_obfuscation": False, "include_usage": True}
  response = served.post(prompt="x", **fields, stream_options=options)
  assert response.status_code == 200
  messages = [
    {"role": "assistant", "content": "", "tool_calls": None},
    {"role": "user", "content": "x", "name": "Ann"},
  ]
  response = served.post(
    "/v1/chat/completions", messages=messages, max_tokens=2,
    reasoning_effort="low", logprobs=False, top_logprobs=0,
  )  # fmt: skip
  assert response.status_code == 200
  assert response.json()["choices"][0]["logprobs"] is None
  prompt = bytes(served.engine.added[-1].prompt).decode()
  assert prompt == "<assistant><Ann>x<assistant>"


def test_no_more_tokens_are_cached_than_a_prompt_has(alone):
  """Of two choices the second copies what the first has read."""
  alone.engine.copies = True
  answer = alone.post(prompt=["x", "yz"], max_tokens=4)
  assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
  answer = alone.post(prompt="x", n=3, max_tokens=4)
  assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_connections_have_a_number():
  engine = examples.Engine()
  with examples.serve(engine, max_connections=2) as served:
    address = served.url.removeprefix("http://").split(":")
    served.post(prompt="a", max_tokens=1)  # This client's own.
    with socket.create_connection(address):
      with socket.create_connection(address) as third:
        third.settimeout(20)
        third.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        said = third.recv(1000).decode()
        assert said.startswith("HTTP/1.1 503 ")
      assert served.post(prompt="a", max_tokens=1).status_code == 200


def test_what_is_measured(alone):
  alone.post(prompt="ab", n=2, max_tokens=4)
  alone.post(prompt="ab", max_tokens=0)
  assert alone.number('loopjax_tokens_total{kind="prompt"}') == 3
  assert alone.number('loopjax_tokens_total{kind="completion"}') == 8
  assert alone.number("loopjax_loops_total") == 16
  assert alone.number("loopjax_first_token_seconds_count") == 1
  assert alone.number("loopjax_request_seconds_count") == 1
  assert alone.number('loopjax_responses_total{status="200"}') >= 1
  assert alone.number('loopjax_responses_total{status="400"}') == 1


def test_internal_errors_are_counted(alone, monkeypatch):
  monkeypatch.setattr(examples.app.protocol, "parse", lambda *_, **__: 1 / 0)
  response = alone.post(prompt="x")
  assert response.status_code == 500
  assert "internal error" in response.json()["error"]["message"]
  assert response.headers["connection"] == "close"  # As the server does.
  assert alone.number('loopjax_responses_total{status="500"}') == 1


def test_a_request_for_scores_alone_does_not_wait_for_the_engine():
  """It would do so for good if the engine failed meanwhile."""
  held = threading.Event()

  async def submitted():
    made = examples.worker.Worker(examples.Engine(), 8, held.set)
    made.start()
    made._commands.put(held.wait)
    try:
      return await asyncio.wait_for(made.submit([]), 10)
    finally:
      held.set()
      await made.stop()

  assert not asyncio.run(submitted()).unread


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_no_answer(alone, stream, capsys):
  alone.engine.broken = True
  response = alone.post(prompt="x", stream=stream)
  if stream:  # Its status has been sent.
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    error = json.loads(response.text.strip().removeprefix("data: "))
  else:
    assert response.status_code == 503
    error = response.json()
  assert error["error"]["type"] == "server_error"
  assert alone.post(prompt="y").status_code == 503
  assert alone.client.get("/health").status_code == 503
  assert alone.failures == [1]  # The process ends by this.
  assert "the device is on fire" in capsys.readouterr().err


@pytest.mark.long
def test_of_many_requests_none_is_lost_and_mistakes_are_no_failures():
  """Of `zoo:novels`: a sixth with a mistake, a sixth broken off."""
  sys.path.append(str(ROOT / "benchmarks"))
  import bench_serve

  model = language_model.load(pathlib.Path("zoo:novels"))
  engine = source.make_engine(model, num_slots=8, max_tokens=128)
  options = types.SimpleNamespace(trial=48, prompt="It was", pid=os.getpid())

  async def ask(url):
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
      return await bench_serve.trial(client, options)

  with examples.serve(engine, capacity=64) as made:
    found = asyncio.run(ask(made.url))
  assert found["right"] == 32 and found["broken_off"] == 8
  assert found["status_400"] + found["status_404"] == 8
  assert found["lost"] == 0 and "mixed_up" not in found and engine.idle
  assert set(found["memory_mib"]) == {9, 18, 27, 36, 45, 48}


def test_many_at_once_have_their_own_texts():
  """64 streams over four slots: nothing is mixed up, none is lost."""
  engine = examples.Engine(num_slots=4)
  with (
    examples.serve(engine, capacity=64) as made,
    concurrent.futures.ThreadPoolExecutor(64) as pool,
  ):

    def ask(number):
      response = made.client.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": number + 1, "stream": True},
      )
      return [part["choices"][0] for part in events(response)]

    found = list(pool.map(ask, range(64)))
  for number, choices in enumerate(found):
    text = "".join(choice["text"] for choice in choices)
    assert text == TEXT.encode()[: number + 1].decode(errors="replace")
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
  "fields",
  [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}],
  ids=["text", "chat"],
)
def test_what_a_request_leaves_out_is_what_the_command_leaves_out(fields):
  """A text of a server is that of `loopjax generate` without flags."""
  protocol = examples.protocol
  model = protocol.ServedModel("tiny", examples.BYTES, (), 200, 99, template, 0)
  body, chat = json.dumps(fields).encode(), "messages" in fields
  _, found = protocol.parse(body, {"tiny": model}, chat=chat)
  (request,) = found.requests
  assert request.sampling == Sampling(seed=request.sampling.seed)
  left_out = GenerationRequest(request.prompt, request.max_new_tokens)
  for name in ("num_loops", "exit_threshold", "prefill_loops"):
    assert getattr(request, name) == getattr(left_out, name), name
  assert (found.num_choices, found.stream, found.stops) == (1, False, ())
