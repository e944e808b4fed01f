"""An engine whose texts are known, and servers to ask."""

import asyncio
import contextlib
import threading
import time
import types

import httpx
import uvicorn

from loopjax.data.text.tokenizer import Tokenizer
from loopjax.errors import UserError
from loopjax.generate.requests import GeneratedToken
from loopjax.serve import app, protocol, worker

BYTES = Tokenizer("bytes")
TEXT = "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum ein ☃."


class Engine:
  """Writes one text for every prompt, a byte a step, with two loops each.

  One token of each prompt is copied if the engine has `copies`.

  Attributes:
    added, cancelled: requests and numbers, in order.
    copies: see above.
    go_on: steps wait for it.
  """

  limits, num_loops = types.SimpleNamespace(max_tokens=200), 4

  def __init__(self, num_slots=4, text=TEXT):
    self.num_slots, self.ids = num_slots, list(text.encode())
    self.added, self.cancelled, self.live = [], [], {}
    self.go_on, self.broken = threading.Event(), False
    self.go_on.set()
    self.seconds, self.copies = 0.0, False  # Of a step.

  @property
  def idle(self):
    return not self.live

  def add(self, request):
    if request.num_loops not in (0, self.num_loops):
      raise UserError(f"num_loops={request.num_loops}: this model runs 4")
    self.added.append(request)
    self.live[len(self.added) - 1] = 0
    return len(self.added) - 1

  def cancel(self, number):
    self.cancelled.append(number)
    self.live.pop(number, None)

  def step(self):
    self.go_on.wait(20)
    time.sleep(self.seconds)
    if self.broken:
      raise RuntimeError("the device is on fire")
    found = []
    for number in sorted(self.live)[: self.num_slots]:
      request, place = self.added[number], self.live[number]
      token, finish = BYTES.end, "stop"
      if place < len(self.ids):
        is_last = place + 1 == request.max_new_tokens
        token, finish = self.ids[place], "length" if is_last else None
      top = tuple((t, -1.0 - t) for t in range(request.top_log_probabilities))
      copied = int(self.copies and not place)
      new = GeneratedToken(number, token, -0.5, top, 2, finish, copied)
      found.append(new)
      self.live[number] += 1
      if finish:
        del self.live[number]
    return found


def score_prompt(prompt):
  """Scores by position, with two alternatives."""
  return [
    GeneratedToken(
      0, token, -float(at), ((token, -float(at)), (7, -9.0)), 0, None
    )
    for at, token in enumerate(prompt[1:], 1)
  ]


class Served:
  """A server that runs, and clients of it."""

  def __init__(self, engine, server, made, url):
    self.engine, self.server, self.worker = engine, server, made
    self.url, self.client = url, httpx.Client(base_url=url, timeout=240)

  def post(self, path="/v1/completions", **fields):
    return self.client.post(path, json=fields)

  def number(self, name):
    """A number of /metrics."""
    for line in self.client.get("/metrics").text.splitlines():
      if line.startswith(f"{name} "):
        return float(line.split()[1])
    raise AssertionError(f"no {name}")


@contextlib.contextmanager
def serve(
  engine, *, capacity=8, limit=100, token="", chat=None, hosts=("*",),
  origins=(),
  tokenizer=BYTES, max_connections=100, also=None,
  score=None,
):  # fmt: skip
  """A real server on a free port of this machine, in another thread."""
  failures = []

  def make_worker(of):
    return worker.Worker(of, capacity, lambda: failures.append(1))

  made = make_worker(engine)
  model = protocol.ServedModel(
    "tiny", tokenizer, (tokenizer.end,), engine.limits.max_tokens, limit, chat
  )
  score = score or score_prompt
  models = [app.Served(made, model, score)]
  for other, name in (also or {}).items():
    other_model = model._replace(name=name)
    models.append(app.Served(make_worker(other), other_model, score))
  made_app = app.make_app(models, token=token, hosts=hosts, origins=origins)
  server = uvicorn.Server(
    uvicorn.Config(
      made_app, host="127.0.0.1", port=0, log_level="error",
      limit_concurrency=max_connections + 1,
      ws="none", timeout_graceful_shutdown=5,
    )
  )  # fmt: skip
  thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
  thread.start()
  while not server.started:
    assert thread.is_alive(), "it did not start"
    thread.join(0.01)
  port = server.servers[0].sockets[0].getsockname()[1]
  served = Served(engine, server, made, f"http://127.0.0.1:{port}")
  served.failures = failures
  try:
    yield served
  finally:
    served.client.close()
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
