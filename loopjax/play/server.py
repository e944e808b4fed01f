"""Answers the page's browser, on this machine only."""

import secrets
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from loopjax.errors import UserError
from loopjax.play import page
from loopjax.play.inspector import Inspection, Inspector


def make(inspector: Inspector, inspections: Sequence[Inspection]) -> Starlette:
  """The application.

  GET / is the page; GET /think?prompt=... an Inspection as JSON, or status 400
  and "error" for an invalid prompt; GET /random?level=... that of a random
  prompt of this difficulty, one of the facts' "levels" if there are any; GET
  /export?prompt=... the page of that prompt as a file. A random prompt that was
  shown is not read anew: its text may stand for other tokens.
  """
  shown = {inspection["prompt"]: inspection for inspection in inspections}

  def inspection_of(request: Request) -> Inspection:
    prompt = request.query_params.get("prompt", "")
    return shown.get(prompt) or inspector.inspect(prompt)

  def home(request: Request) -> Response:
    del request
    return HTMLResponse(page.make(inspector, inspections, served=True))

  def inspect(request: Request) -> Response:
    try:
      return JSONResponse(inspection_of(request))
    except UserError as error:
      return JSONResponse({"error": str(error)}, status_code=400)

  def random(request: Request) -> Response:
    level = request.query_params.get("level", "")
    levels = inspector.facts["levels"] or [""]
    if level not in levels:
      message = f"level={level!r} must be one of {', '.join(levels)}"
      return JSONResponse({"error": message}, status_code=400)
    inspection = inspector.random(secrets.randbits(32), level)
    shown[inspection["prompt"]] = inspection
    return JSONResponse(inspection)

  def export(request: Request) -> Response:
    try:
      inspection = inspection_of(request)
    except UserError as error:
      return JSONResponse({"error": str(error)}, status_code=400)
    name = f"attachment; filename={inspector.facts['run']}.html"
    return HTMLResponse(
      page.make(inspector, [inspection], served=False),
      headers={"content-disposition": name},
    )

  routes = {"/": home, "/think": inspect, "/random": random, "/export": export}
  return Starlette(
    routes=[Route(path, endpoint) for path, endpoint in routes.items()]
  )
