"""The endpoint with a real engine, in this process and in one of its own."""

import argparse
import asyncio
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import hub_examples
import numpy as np
import pytest
import texts_examples as texts
from tests_support import ROOT

import loopjax.serve
from loopjax.commands import hosts
from loopjax.errors import UserError
from loopjax.eval.scorer import Scorer, ScoringRequest
from loopjax.generate import source
from loopjax.generate.requests import GenerationRequest
from loopjax.generate.sampling import Sampling
from loopjax.generate.text import TextStream
from loopjax.serve import __main__ as serve

httpx = pytest.importorskip("httpx")
for name in ("uvicorn", "starlette", "prometheus_client"):
  pytest.importorskip(name)
examples = pytest.importorskip("serve_examples")


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
  folder = hub_examples.make_folder(tmp_path_factory.mktemp("hub") / "ouro")
  return source.load_folder(folder, dtype="float32")


@pytest.mark.long
def test_the_endpoint_says_what_the_engine_writes(language_model):
  """Six texts over two slots, half of them with exits."""
  asked = {"temperature": 1.0, "top_k": 5, "seed": 3, "max_tokens": 9, "n": 3}
  engine = source.make_engine(language_model, num_slots=2, max_tokens=32)
  with examples.serve(engine, tokenizer=language_model.tokenizer) as served:
    answers = [
      served.post(
        prompt="w3 w4 w5", logprobs=1, exit_threshold=exit, **asked
      ).json()
      for exit in (1.0, 0.4)
    ]
  requests = [
    GenerationRequest(
      (4, 5, 6), 9, Sampling(top_k=5, seed=3 + n), (0,), 1, 0, threshold
    )
    for threshold in (1.0, 0.4)
    for n in range(3)
  ]
  choices = [choice for answer in answers for choice in answer["choices"]]
  for request, choice in zip(requests, choices, strict=True):
    (tokens,) = engine.generate([request])  # One at a time.
    text = TextStream(language_model.tokenizer, prompt=request.prompt)
    text.read(tokens)
    assert choice["text"] == text.text
    assert choice["finish_reason"] == text.finish
    scores = choice["logprobs"]["token_logprobs"]
    expected = [one.log_probability for one in tokens if one.token]
    assert scores == pytest.approx(expected, abs=1e-5)
  full, fewer = (answer["usage"]["loops_per_token"] for answer in answers)
  assert full == 4.0 > fewer


def test_an_echo_has_the_scores_of_the_evaluation(language_model):
  """Of a short prompt through the endpoint, and of a long one."""
  from loopjax.serve import command

  score = command.prompt_scorer(language_model, 256)
  engine = source.make_engine(language_model, num_slots=1, max_tokens=32)
  prompt = np.array([4, 5, 6, 30, 1, 7])
  with examples.serve(
    engine, tokenizer=language_model.tokenizer, score=score
  ) as served:
    asked = {"prompt": prompt.tolist(), "echo": True, "logprobs": 3}
    one, more = (
      served.post(max_tokens=number, **asked).json()["choices"][0]["logprobs"]
      for number in (0, 1)
    )
  longer = language_model._replace(context_length=256)
  many = np.random.default_rng(0).integers(0, 31, 200)
  expected = Scorer(longer)(
    [ScoringRequest(x[:1], x[1:]) for x in (prompt, many)]
  )
  assert one["token_logprobs"][0] is None and one["top_logprobs"][0] is None
  scores = np.array(one["token_logprobs"][1:])
  np.testing.assert_allclose(scores, expected[0].log_probs, atol=1e-5)
  assert more["token_logprobs"][:6] == one["token_logprobs"]
  assert len(more["token_logprobs"]) == 7
  best = [max(top.values()) for top in one["top_logprobs"][1:]]
  assert (scores == best).tolist() == expected[0].greedy.tolist()
  assert [len(top) for top in one["top_logprobs"][1:]] == [3] * 5
  found = score(many.tolist())
  assert [x.token for x in found] == many[1:].tolist()
  np.testing.assert_allclose(
    [x.log_probability for x in found], expected[1].log_probs, atol=1e-5
  )
  greedy = [x.token == x.top[0][0] for x in found]
  assert greedy == expected[1].greedy.tolist()


def test_an_evaluation_client_gets_the_scores_of_transformers(tmp_path):
  """The request and the reading of `local-completions` of lm_eval."""
  from loopjax.serve import command

  stored = texts.stored()
  texts.make_model(tmp_path / "hub", stored["kinds"]["dummy_prefix"])
  expected = stored["expected"]["dummy_prefix"]
  model = source.load_folder(tmp_path / "hub", dtype="float32")
  engine = source.make_engine(model, num_slots=4, max_tokens=64)
  asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
  pairs = list(zip(expected["pairs"], expected["scores"], strict=True))
  pairs = [(*pair, score) for pair, score in pairs if score]
  score = command.prompt_scorer(model, 64)
  with examples.serve(engine, tokenizer=model.tokenizer, score=score) as served:
    prompts = [[*context, *after] for context, after, _ in pairs]
    asked["prompt"] = prompts[:8]  # As many as fit into the queue.
    choices = served.post(**asked).json()["choices"]
  for (context, _, known), choice in zip(pairs[:8], choices, strict=True):
    found = choice["logprobs"]
    scores = found["token_logprobs"][len(context) : -1]
    best = [max(x.values()) for x in found["top_logprobs"][len(context) : -1]]
    assert sum(scores) == pytest.approx(known[0], abs=1e-4)
    assert (scores == best) == known[1]


def test_a_server_refuses_prompts_of_more_loops_than_there_are(language_model):
  """When it starts, not at each request."""
  from loopjax.serve import command

  engine = source.make_engine(language_model, num_slots=1, max_tokens=32)
  with pytest.raises(UserError, match="prefill_loops=5 is not in"):
    command._compile("ouro", language_model, engine, 5)


def test_models_have_the_names_of_their_directories():
  """The first one can have another, also if it is served twice."""
  from loopjax.serve import command

  def named(name, *folders):
    first, *also = map(pathlib.Path, folders)
    flags = source.ModelFlags(first)
    options = argparse.Namespace(model=flags, name=name, also=also)
    return [(str(x.folder), name) for x, name in command._models(options)]

  assert named("fast", "a", "a") == [("a", "fast"), ("a", "a")]
  for name, *folders in ((None, "a", "b/a"), ("c", "x", "a", "b/a")):
    with pytest.raises(UserError, match="are named 'a'; --name names the f"):
      named(name, *folders)


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs():
  """Else a request can meet the end of its connection: 5 s in both."""
  from loopjax.serve import command

  options = argparse.Namespace(
    host="127.0.0.1", allowed_hosts="", cors="", max_connections=4
  )
  server = command._server(options, [], "")
  theirs = httpx.Limits().keepalive_expiry
  assert server.config.timeout_keep_alive > 2 * theirs


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_the_local_address_of_ipv6_is_local(host):
  from loopjax.serve import command

  options = argparse.Namespace(host=host, token_file=None)
  assert not command._token(options)
  assert not hosts.refusal("[::1]:8000", hosts.LOCAL)


def test_what_is_missing_is_named(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "uvicorn", None)
  monkeypatch.delitem(sys.modules, "loopjax.serve.command", raising=False)
  monkeypatch.delattr(loopjax.serve, "command", raising=False)
  assert serve.main(["a"]) == 2
  assert "pip install 'loopjax[serve]'" in capsys.readouterr().err


@contextlib.contextmanager
def process(folder, *arguments):
  """(the server's process, its address), killed at the end."""
  command = [
    sys.executable, "-m", "loopjax.serve", str(folder), "--port=0",
    "--dtype=float32", *arguments,
  ]  # fmt: skip
  environment = {
    **os.environ,
    "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
  }
  with subprocess.Popen(
    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
  ) as child:
    try:
      said = []
      for line in child.stdout:
        said.append(line)
        if found := re.search(r"http://\S+:\d+/v1", line):
          yield child, found[0]
          break
      else:
        raise AssertionError(f"it ended: {said}")
    finally:
      child.kill()


@pytest.mark.manual
def test_64_streams_of_the_client_of_openai(tmp_path):
  openai = pytest.importorskip("openai")
  folder = hub_examples.make_folder(tmp_path / "ouro")
  (folder / "tokenizer_config.json").write_text(
    '{"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"}'
  )

  async def ask(client, number):
    stream = await client.chat.completions.create(
      model="ouro", messages=[{"role": "user", "content": f"w{number % 29}"}],
      seed=number, stream=True, max_completion_tokens=5 + number % 20,
      stream_options={"include_usage": True},
      extra_body={"exit_threshold": 0.5 if number % 2 else 1.0},
    )  # fmt: skip
    text, used = "", None
    async for part in stream:
      for choice in part.choices:
        text += choice.delta.content or ""
      used = part.usage or used
    return text, used.completion_tokens

  async def together(address):
    async with openai.AsyncOpenAI(
      base_url=address, api_key="none", max_retries=0
    ) as client:
      return await asyncio.gather(*(ask(client, n) for n in range(64)))

  async def alone(address):
    async with openai.AsyncOpenAI(base_url=address, api_key="none") as client:
      return [await ask(client, number) for number in range(64)]

  arguments = ("--slots=8", "--max_waiting=56", "--max_tokens=64")
  with process(folder, *arguments) as (child, address):
    found = asyncio.run(together(address))
    assert found == asyncio.run(alone(address))
    assert len({text for text, _ in found}) > 32
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["ouro"]
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
      client.completions.create(model="ouro", prompt="w1", max_tokens=0)
    with pytest.raises(openai.NotFoundError, match="expected one of 'ouro'"):
      client.completions.create(model="gpt", prompt="w1")
    client.close()
    assert child.poll() is None


@pytest.mark.manual
def test_a_signal_ends_it_after_what_is_being_written(tmp_path):
  folder = hub_examples.make_folder(tmp_path / "ouro")
  with process(folder, "--slots=1", "--max_tokens=4096") as (child, address):
    with httpx.stream(
      "POST", f"{address}/completions", timeout=120,
      json={
        "prompt": "w1", "max_tokens": 300, "stream": True, "temperature": 0,
      },
    ) as response:  # fmt: skip
      lines = response.iter_lines()
      next(lines)
      child.send_signal(signal.SIGTERM)
      time.sleep(0.5)
      with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/models")
      assert [line for line in lines if line][-1] == "data: [DONE]"
    assert child.wait(60) == 0
