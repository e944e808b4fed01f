"""Responses: whole, or streamed as server-sent events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from loopjax.serve.answers import Answer
from loopjax.serve.errors import EngineFailedError, engine_failed
from loopjax.serve.protocol import CompletionRequest


class Stream(StreamingResponse):
  """A streamed response that always closes its generator."""

  def __init__(self, events: AsyncGenerator[str, None]):
    super().__init__(
      events,
      media_type="text/event-stream",
      headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    self._events = events

  async def stream_response(self, send: Any) -> None:
    async with contextlib.aclosing(self._events):
      await super().stream_response(send)


async def whole(
  chunks: AsyncGenerator[dict[str, Any], None], answer: Answer
) -> Response:
  """The response that is not streamed; waits for all tokens."""
  async with contextlib.aclosing(chunks):
    async for _ in chunks:
      pass
  return JSONResponse(answer.body())


async def unless_disconnected(
  request: Request, response: Coroutine[Any, Any, Response]
) -> Response:
  """Awaits the response; cancels it if the client disconnects."""

  async def disconnected() -> Response:
    while (await request.receive())["type"] != "http.disconnect":
      pass
    return Response(status_code=400)  # Nobody receives it.

  tasks = [
    asyncio.ensure_future(response), asyncio.ensure_future(disconnected()),
  ]  # fmt: skip
  try:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return done.pop().result()
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)


async def events(
  chunks: AsyncGenerator[dict[str, Any], None],
  answer: Answer,
  completion: CompletionRequest,
) -> AsyncGenerator[str, None]:
  """The server-sent events of a streamed response, one per chunk."""
  try:
    async with contextlib.aclosing(chunks):
      for chunk in answer.first_chunks():
        yield _event(chunk)
      async for chunk in chunks:
        yield _event(chunk)
    if completion.include_usage:
      yield _event(answer.last_chunk())
    yield "data: [DONE]\n\n"
  except EngineFailedError:
    yield _event(engine_failed().content)


def _event(content: Any) -> str:
  """A server-sent event with JSON content."""
  return f"data: {json.dumps(content)}\n\n"
