"""The routes: from an HTTP request to its response.

When a client disconnects, its task is cancelled; leaving `_written` then
cancels its requests in the engine, for whole and streamed responses alike.
"""

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from loopjax.errors import UserError
from loopjax.serve import protocol
from loopjax.serve.answers import Answer
from loopjax.serve.protocol import Ask, ClientError, Reader
from loopjax.serve.worker import BrokenError, FullError, Job, Worker

MAX_BODY = 1 << 20  # Bytes of a request body.
_BODY_SECONDS = 30
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
  """The Prometheus metrics that /metrics reports."""

  def __init__(self, worker: Worker):
    self.registry = prometheus_client.CollectorRegistry()
    shared: Any = {"registry": self.registry}
    self.responses = prometheus_client.Counter(
      "loopjax_responses", "Responses by status.", ["status"], **shared
    )
    self.tokens = prometheus_client.Counter(
      "loopjax_tokens", "Tokens read and written.", ["kind"], **shared
    )
    self.loops = prometheus_client.Counter(
      "loopjax_loops", "Loops run for tokens that were written.", **shared
    )
    self.first = prometheus_client.Histogram(
      "loopjax_first_token_seconds", "Until the first token of a request.",
      buckets=_SECONDS, **shared,
    )  # fmt: skip
    self.seconds = prometheus_client.Histogram(
      "loopjax_request_seconds", "Until the last token of a request.",
      buckets=_SECONDS, **shared,
    )  # fmt: skip
    live = prometheus_client.Gauge(
      "loopjax_live_requests", "Texts that are being written or wait.", **shared
    )
    live.set_function(lambda: worker.num_live)

  def count(self, answer: Answer) -> None:
    """Adds the tokens and loops of a request that ended or was cancelled."""
    usage = answer.usage()
    self.tokens.labels("prompt").inc(usage["prompt_tokens"])
    self.tokens.labels("completion").inc(usage["completion_tokens"])
    self.loops.inc(sum(choice.num_loops for choice in answer.choices))


class _Guard:
  """Middleware: rejects requests without the token and counts responses."""

  def __init__(self, app: Any, token: str, metrics: Metrics):
    self._app, self._token, self._metrics = app, token, metrics

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
      return await self._app(scope, receive, send)

    async def counted(message: Any) -> None:
      if message["type"] == "http.response.start":
        self._metrics.responses.labels(message["status"]).inc()
      await send(message)

    given = dict(scope["headers"]).get(b"authorization", b"")
    wanted = f"Bearer {self._token}".encode()
    app = self._app
    if (
      self._token
      and scope["path"] != "/health"
      and not hmac.compare_digest(given, wanted)
    ):
      app = _refusal(
        ClientError(
          "the bearer token is missing or wrong",
          status=401,
          code="invalid_api_key",
          headers={"WWW-Authenticate": "Bearer"},
        )
      )
    await app(scope, receive, counted)
    return None


class _Stream(StreamingResponse):
  """A streamed response that closes its generator however the stream ends."""

  def __init__(self, parts: AsyncGenerator[str, None]):
    super().__init__(
      parts,
      media_type="text/event-stream",
      headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    self._parts = parts

  async def stream_response(self, send: Any) -> None:
    async with contextlib.aclosing(self._parts):
      await super().stream_response(send)


class Service:
  """The handlers of the routes, for one model."""

  def __init__(self, worker: Worker, reader: Reader, metrics: Metrics):
    self._worker, self._reader, self._metrics = worker, reader, metrics
    self._started = int(time.time())

  async def health(self, request: Request) -> Response:
    """Status 200 while the engine works, 503 after it has failed."""
    del request
    healthy = self._worker.healthy
    status = {"status": "ok" if healthy else "failed"}
    return JSONResponse(status, 200 if healthy else 503)

  async def models(self, request: Request) -> Response:
    """The list of models, which has one entry."""
    del request
    model = {
      "id": self._reader.name,
      "object": "model",
      "created": self._started,
      "owned_by": "loopjax",
    }
    return JSONResponse({"object": "list", "data": [model]})

  async def metrics(self, request: Request) -> Response:
    """The metrics in Prometheus' text format."""
    del request
    return Response(
      prometheus_client.generate_latest(self._metrics.registry),
      media_type=prometheus_client.CONTENT_TYPE_LATEST,
    )

  async def completions(self, request: Request) -> Response:
    """Completes prompts."""
    return await self._answered(request, chat=False)

  async def chat(self, request: Request) -> Response:
    """Completes a conversation."""
    return await self._answered(request, chat=True)

  async def _answered(self, request: Request, chat: bool) -> Response:
    started = time.monotonic()
    body = await _body(request)
    ask = protocol.read(body, self._reader, chat=chat)
    if len(ask.requests) > self._worker.capacity:
      raise ClientError(
        f"{len(ask.requests)} choices are more than the"
        f" {self._worker.capacity} that the server can hold",
        param="n",
      )
    try:
      job = await self._worker.submit(ask.requests)
    except FullError:
      raise ClientError(
        f"{self._worker.capacity} texts are being written or wait, which is all"
        " that there is room for; try again",
        status=429,
        code="queue_full",
        headers={"Retry-After": "1"},
      ) from None
    except UserError as error:
      raise ClientError(str(error)) from error
    answer = Answer(
      ask, self._reader.tokenizer, model=self._reader.name, chat=chat
    )
    parts = self._written(job, answer, started)
    if not ask.stream:
      return await _while_there(request, _whole(parts, answer))
    return _Stream(_events(parts, answer, ask))

  async def _written(
    self, job: Job, answer: Answer, started: float
  ) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the chunks of an answer; cancels its requests at the end."""
    waiting = True
    try:
      async for news in job.tokens():
        if waiting:
          self._metrics.first.observe(time.monotonic() - started)
          waiting = False
        for index in dict.fromkeys(n for n, _ in news):
          tokens = [token for n, token in news if n == index]
          for part in answer.parts(index, tokens):
            yield part
          if answer.choices[index].finish:
            self._worker.cancel(job, {index})
    finally:
      self._worker.cancel(job)
      self._metrics.count(answer)
      self._metrics.seconds.observe(time.monotonic() - started)


def make_app(
  worker: Worker, reader: Reader, *, token: str, hosts: list[str]
) -> Starlette:
  """The application; the worker's thread starts and stops with it.

  Args:
    worker: a worker that has not been started.
    reader: the model's settings for reading requests.
    token: the bearer token that clients must send; "" for none.
    hosts: host names that requests may be addressed to; "*" for any.
  """
  metrics = Metrics(worker)
  service = Service(worker, reader, metrics)

  @contextlib.asynccontextmanager
  async def lifespan(app: Starlette) -> AsyncIterator[None]:
    del app
    worker.start()
    try:
      yield
    finally:
      await worker.stop()

  def route(path: str, endpoint: Callable[..., Any], method: str) -> Route:
    return Route(path, endpoint, methods=[method])

  return Starlette(
    routes=[
      route("/health", service.health, "GET"),
      route("/metrics", service.metrics, "GET"),
      route("/v1/models", service.models, "GET"),
      route("/v1/completions", service.completions, "POST"),
      route("/v1/chat/completions", service.chat, "POST"),
    ],
    middleware=[
      Middleware(_Guard, token=token, metrics=metrics),
      # Prevents DNS rebinding, by which another site's page could read answers.
      Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
    ],
    exception_handlers={
      ClientError: lambda request, error: _refusal(error),
      BrokenError: lambda request, error: _refusal(_broken()),
      ClientDisconnect: lambda request, error: Response(status_code=400),
      HTTPException: lambda request, error: _refusal(
        ClientError(
          f"{request.method} {request.url.path}: {error.detail}",
          status=error.status_code,
          headers=error.headers,
        )
      ),
      # Starlette raises it again so that the server logs it.
      Exception: lambda request, error: _refusal(
        ClientError("an error in the server; see its log", status=500)
      ),
    },
    lifespan=lifespan,
  )


async def _body(request: Request) -> bytes:
  """The body of a request, limited in size and in the time it may take."""
  kind = request.headers.get("content-type", "").partition(";")[0].strip()
  if kind != "application/json":  # Other sites' forms cannot send this.
    raise ClientError(
      f"Content-Type is {kind[:80]!r} and must be 'application/json'",
      status=415,
    )
  parts, size = [], 0
  try:
    async with asyncio.timeout(_BODY_SECONDS):
      async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY:
          raise ClientError(
            f"the body has more than {MAX_BODY} bytes", status=413
          )
  except TimeoutError:
    raise ClientError(
      f"the body did not arrive within {_BODY_SECONDS} s", status=408
    ) from None
  return b"".join(parts)


async def _whole(
  parts: AsyncGenerator[dict[str, Any], None], answer: Answer
) -> Response:
  """The whole response, once all tokens are sampled."""
  async with contextlib.aclosing(parts):
    async for _ in parts:
      pass
  return JSONResponse(answer.body())


async def _while_there(
  request: Request, making: Coroutine[Any, Any, Response]
) -> Response:
  """The response, or status 400 if the client disconnects before it is made."""

  async def gone() -> Response:
    while (await request.receive())["type"] != "http.disconnect":
      pass
    return Response(status_code=400)  # The client has gone.

  tasks = [asyncio.ensure_future(making), asyncio.ensure_future(gone())]
  try:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)


async def _events(
  parts: AsyncGenerator[dict[str, Any], None], answer: Answer, ask: Ask
) -> AsyncGenerator[str, None]:
  """Server-sent events, one per chunk."""
  try:
    async with contextlib.aclosing(parts):
      for part in answer.beginning():
        yield _event(part)
      async for part in parts:
        yield _event(part)
    if ask.include_usage:
      yield _event(answer.final())
    yield "data: [DONE]\n\n"
  except BrokenError:
    yield _event(_broken().content)


def _event(part: Any) -> str:
  return f"data: {json.dumps(part)}\n\n"


def _broken() -> ClientError:
  return ClientError("the engine has failed; see the server's log", status=503)


def _refusal(error: ClientError) -> JSONResponse:
  return JSONResponse(error.content, error.status, headers=error.headers)
