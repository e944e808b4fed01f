"""The HTTP application: routes, authentication, errors.

When a client disconnects, the task that handles its request is cancelled. This
closes the generator `_chunks`, which cancels the engine's requests, for whole
and streamed responses alike.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loopjax.commands import hosts as hosts_lib
from loopjax.errors import UserError
from loopjax.generate.requests import GeneratedToken
from loopjax.serve import protocol
from loopjax.serve.answers import Answer
from loopjax.serve.errors import (
  ClientError,
  EngineFailedError,
  QueueFullError,
  engine_failed,
)
from loopjax.serve.metrics import ServerMetrics
from loopjax.serve.protocol import ServedModel
from loopjax.serve.streams import Stream, events, unless_disconnected, whole
from loopjax.serve.worker import Job, Worker

MAX_BODY = 1 << 20  # Bytes of a request body.
_BODY_SECONDS = 30  # Maximum time for a request body to arrive.


# From a prompt to its tokens after the first one, with their scores.
Score = Callable[[Sequence[int]], list[GeneratedToken]]


class Served(NamedTuple):
  """A model: its engine's worker, what its clients may ask, and its scorer."""

  worker: Worker
  model: ServedModel
  score: Score


class _Middleware:
  """Rejects requests of other hosts or without the bearer token, and counts."""

  def __init__(
    self, app: Any, token: str, hosts: Sequence[str], metrics: ServerMetrics
  ):
    self._app, self._token, self._metrics = app, token, metrics
    self._hosts = hosts

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)

    is_counted = False

    async def counted(message: Any) -> None:
      nonlocal is_counted
      if message["type"] == "http.response.start":
        is_counted = True
        self._metrics.responses.labels(message["status"]).inc()
      await send(message)

    headers = dict(scope["headers"])
    given = headers.get(b"authorization", b"")
    expected = f"Bearer {self._token}".encode()
    app = self._app
    host = headers.get(b"host", b"").decode("latin-1")
    is_open = scope["path"] == "/health"  # It says nothing about answers.
    refusal = "" if is_open else hosts_lib.refusal(host, self._hosts)
    if refusal:
      app = _error_response(ClientError(refusal))
    elif (
      self._token and not is_open and not hmac.compare_digest(given, expected)
    ):
      app = _error_response(
        ClientError(
          "the bearer token is missing or wrong",
          status=401,
          code="invalid_api_key",
          headers={"WWW-Authenticate": "Bearer"},
        )
      )
    try:
      await app(scope, receive, counted)
    except Exception:
      if not is_counted:  # The application outside answers it with status 500.
        self._metrics.responses.labels(500).inc()
      raise
    return None


class Service:
  """The handlers of the routes."""

  def __init__(self, served: Sequence[Served], metrics: ServerMetrics):
    self._served = {one.model.name: one for one in served}
    self._models = {name: one.model for name, one in self._served.items()}
    # One prompt is scored at a time.
    self._scoring = {name: asyncio.Lock() for name in self._served}
    self._metrics, self._started = metrics, int(time.time())

  async def health(self, request: Request) -> Response:
    """Status 200, or 503 after an engine has failed."""
    del request
    healthy = all(one.worker.healthy for one in self._served.values())
    status = {"status": "ok" if healthy else "failed"}
    return JSONResponse(status, 200 if healthy else 503)

  async def models(self, request: Request) -> Response:
    """The list of models."""
    del request
    models = [self._facts(name) for name in self._models]
    return JSONResponse({"object": "list", "data": models})

  async def model(self, request: Request) -> Response:
    """One of the models."""
    name = request.path_params["name"]
    protocol.check_model(name, self._models)
    return JSONResponse(self._facts(name))

  def _facts(self, name: str) -> dict[str, Any]:
    return {
      "id": name,
      "object": "model",
      "created": self._started,
      "owned_by": "loopjax",
    }

  async def metrics(self, request: Request) -> Response:
    """The metrics in Prometheus' text format."""
    del request
    return Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  async def completions(self, request: Request) -> Response:
    """Completes prompts."""
    return await self._respond(request, chat=False)

  async def chat(self, request: Request) -> Response:
    """Completes a conversation."""
    return await self._respond(request, chat=True)

  async def _respond(self, request: Request, chat: bool) -> Response:
    """The response to a request for completions or chat completions."""
    started = time.monotonic()
    body = await _body(request)
    model, completion = protocol.parse(body, self._models, chat=chat)
    worker = self._served[model.name].worker
    answer = Answer(completion, model, chat=chat)
    num_choices, capacity = len(answer.choices), worker.capacity
    if num_choices > capacity:
      raise ClientError(
        f"{num_choices} choices exceed the {capacity} that the server can run"
        " and queue",
        param="n",
      )
    try:
      job = await worker.submit(completion.requests)
    except QueueFullError:
      raise ClientError(
        f"the queue is full: at most {capacity} requests can run or wait; try"
        " again later",
        status=429,
        code="queue_full",
        headers={"Retry-After": "1"},
      ) from None
    except UserError as error:
      raise protocol.refused(error) from error
    is_scored = completion.echoed and completion.log_probabilities
    prompts = completion.prompts if is_scored else ()
    chunks = self._chunks(model.name, job, answer, started, prompts)
    if not completion.stream:
      return await unless_disconnected(request, whole(chunks, answer))
    return Stream(events(chunks, answer, completion))

  async def _chunks(
    self,
    name: str,
    job: Job,
    answer: Answer,
    started: float,
    prompts: Sequence[Sequence[int]],
  ) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the chunks of an answer; cancels its requests at the end.

    Before that, scores the given prompts, beside the engine.
    """
    is_first, (worker, _, score) = True, self._served[name]
    try:
      for prompt in prompts:
        async with self._scoring[name]:
          try:
            scores = await asyncio.to_thread(score, prompt)
          except UserError as error:
            raise protocol.refused(error) from error
        answer.prompt_scores.append(scores)
      async for new_tokens in job.tokens():
        if is_first:
          self._metrics.first.observe(time.monotonic() - started)
          is_first = False
        for index in dict.fromkeys(n for n, _ in new_tokens):
          tokens = [token for n, token in new_tokens if n == index]
          for chunk in answer.chunks(index, tokens):
            yield chunk
          if answer.choices[index].finish:
            worker.cancel(job, {index})
    finally:
      worker.cancel(job)
      self._metrics.count(answer)
      self._metrics.seconds.observe(time.monotonic() - started)


def make_app(
  served: Sequence[Served],
  *,
  token: str,
  hosts: Sequence[str],
  origins: Sequence[str],
) -> Starlette:
  """The application; it starts and stops the workers' threads.

  Args:
    served: the models, with workers that have not been started.
    token: the bearer token that clients must send; "" for none.
    hosts: permitted names in the Host header, in lower case; "*" permits any.
    origins: of the web pages whose scripts may send requests; "*" for any.
  """
  workers = [one.worker for one in served]
  metrics = ServerMetrics(workers)
  service = Service(served, metrics)

  @contextlib.asynccontextmanager
  async def lifespan(app: Starlette) -> AsyncIterator[None]:
    del app
    for worker in workers:
      worker.start()
    try:
      yield
    finally:
      for worker in workers:
        await worker.stop()

  cors = Middleware(
    CORSMiddleware,
    allow_origins=origins,
    allow_methods=["GET", "POST"],
    allow_headers=["*"],
  )

  def route(path: str, endpoint: Callable[..., Any], method: str) -> Route:
    return Route(path, endpoint, methods=[method])

  return Starlette(
    routes=[
      route("/health", service.health, "GET"),
      route("/metrics", service.metrics, "GET"),
      route("/v1/models", service.models, "GET"),
      route("/v1/models/{name:path}", service.model, "GET"),
      route("/v1/completions", service.completions, "POST"),
      route("/v1/chat/completions", service.chat, "POST"),
    ],
    middleware=[
      *([cors] if origins else []),
      Middleware(_Middleware, token=token, hosts=hosts, metrics=metrics),
    ],
    exception_handlers={
      ClientError: lambda request, error: _error_response(error),
      EngineFailedError: lambda request, error: _error_response(
        engine_failed()
      ),
      ClientDisconnect: lambda request, error: Response(status_code=400),
      HTTPException: lambda request, error: _error_response(
        ClientError(
          f"{request.method} {request.url.path}: {error.detail}",
          status=error.status_code,
          headers=error.headers,
        )
      ),
      # Starlette raises it again after the response, so that it is logged.
      Exception: lambda request, error: _error_response(
        ClientError(
          "internal error; see the server's log",
          status=500,
          headers={"Connection": "close"},  # The server closes it after errors.
        )
      ),
    },
    lifespan=lifespan,
  )


async def _body(request: Request) -> bytes:
  """The body of a request; raises ClientError if it is too large or slow."""
  kind = request.headers.get("content-type", "").partition(";")[0].strip()
  # HTML forms of other sites cannot send this.
  if kind.lower() != "application/json":
    raise ClientError(
      f"Content-Type is {kind[:80]!r}, expected 'application/json'",
      status=415,
    )
  parts, size = [], 0
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
          raise ClientError(f"the body exceeds {MAX_BODY} bytes", status=413)
  except TimeoutError:
    raise ClientError(
      f"the body did not arrive within {_BODY_SECONDS} s", status=408
    ) from None
  return b"".join(parts)


def _error_response(error: ClientError) -> JSONResponse:
  return JSONResponse(error.content, error.status, headers=error.headers)
