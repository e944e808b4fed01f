"""The page's local web server."""

import functools
import re
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from loopjax.commands import hosts as hosts_lib
from loopjax.errors import UserError, one_line
from loopjax.play import page
from loopjax.play.page import Inspection, Inspector

_MAX_SHOWN = 256  # Random prompts that are remembered; a public page runs on.


class _KnownHosts:
  """Rejects requests of other hosts, and of other sites' pages."""

  def __init__(self, app: Any, hosts: Collection[str]):
    self._app, self._hosts = app, hosts

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    app = self._app
    if scope["type"] == "http":
      headers = Headers(scope=scope)
      asked = [headers.get("host", "")]
      if (origin := headers.get("origin")) is not None:
        asked.append(origin.partition("//")[2] or origin)
      refusals = (hosts_lib.refusal(host, self._hosts) for host in asked)
      if error := next(filter(None, refusals), ""):
        app = JSONResponse({"error": error}, status_code=400)
    await app(scope, receive, send)


def make(
  inspector: Inspector,
  inspections: Sequence[Inspection],
  begin: Callable[[], Sequence[Inspection]] = tuple,
  hosts: Collection[str] = hosts_lib.LOCAL,
) -> Starlette:
  """The application.

  GET / returns the page; GET /begin the initial inspections, if the page has
  none; POST /think, with the prompt as its body, an Inspection as JSON, or
  status 400 and "error" for an invalid prompt; POST /think?start=N the same
  from a noisy start; GET /random?level=... the inspection of a random prompt of
  this difficulty, one of the facts' "levels" if there are any; GET
  /export?prompt=... the page of that prompt as a file.
  The last 256 random prompts that were shown are not parsed again: their texts
  may stand for other tokens. An inspector serves one request at a time.

  Args:
    inspector: the inspector that made them.
    inspections: initial inspections of the page.
    begin: makes the initial inspections on the first request, if the page has
      none: compiling takes seconds.
    hosts: permitted names in the headers Host and Origin; "*" permits any.
  """
  shown = {inspection["prompt"]: inspection for inspection in inspections}
  one_at_a_time = threading.Lock()  # An inspector's engine has one caller.

  def inspection_of(prompt: str, start: str = "") -> Inspection:
    with one_at_a_time:
      if start:
        return _from_start(inspector, prompt, start)
      return shown.get(prompt) or inspector.inspect(prompt)

  def home(request: Request) -> Response:
    del request
    return HTMLResponse(page.make(inspector, inspections, served=True))

  @functools.cache
  def beginning() -> Sequence[Inspection]:
    found = begin()
    shown.update({inspection["prompt"]: inspection for inspection in found})
    return found

  def first(request: Request) -> Response:
    del request
    with one_at_a_time:
      return JSONResponse(list(beginning()))

  async def inspect(request: Request) -> Response:
    try:
      prompt = (await request.body()).decode()
    except UnicodeDecodeError:
      return _refusal(UserError("the prompt is not UTF-8"))
    try:
      start = request.query_params.get("start", "")
      found = await run_in_threadpool(inspection_of, prompt, start)
      return JSONResponse(found)
    except UserError as error:
      return _refusal(error)

  def random(request: Request) -> Response:
    level = request.query_params.get("level", "")
    levels = inspector.facts["levels"]
    if level not in (levels or [""]):
      return _refusal(UserError(f"level={level!r} {_expected(levels)}"))
    with one_at_a_time:
      inspection = inspector.random(secrets.randbits(32), level)
      shown[inspection["prompt"]] = inspection
      if len(shown) > _MAX_SHOWN:
        del shown[next(iter(shown))]
    return JSONResponse(inspection)

  def export(request: Request) -> Response:
    try:
      inspection = inspection_of(request.query_params.get("prompt", ""))
    except UserError as error:
      return _refusal(error)
    return _file(inspector, inspection)

  return Starlette(
    routes=[
      Route("/", home),
      Route("/begin", first),
      Route("/think", inspect, methods=["POST"]),
      Route("/random", random),
      Route("/export", export),
    ],
    middleware=[Middleware(_KnownHosts, hosts=hosts)],
  )


def _from_start(inspector: Inspector, prompt: str, start: str) -> Inspection:
  """The inspection from a noisy start, given as in the address."""
  if not (inspector.again and re.fullmatch(r"[1-9]\d{0,8}", start)):
    raise UserError(f"start={start!r} is not a start of this page")
  return inspector.again(prompt, int(start))


def _file(inspector: Inspector, inspection: Inspection) -> Response:
  """The page of an inspection, for download."""
  # Headers hold ASCII; a run's name may have other characters and spaces.
  run = urllib.parse.quote(inspector.facts["run"], safe="")
  name = f"attachment; filename*=UTF-8''{run}.html"
  return HTMLResponse(
    page.make(inspector, [inspection], served=False),
    headers={"content-disposition": name},
  )


def _refusal(error: UserError) -> JSONResponse:
  """Status 400; the message may quote a whole prompt, and is cut."""
  return JSONResponse({"error": one_line(error)}, status_code=400)


def _expected(levels: Sequence[str]) -> str:
  """What a wrong level should have been, for a message."""
  if not levels:
    return "has no effect: this task has no levels"
  return f"must be one of {', '.join(levels)}"
