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
  and "error" for an invalid prompt; GET /random that of a random prompt; GET
  /export?prompt=... the page of that prompt as a file.
  """

  def home(request: Request) -> Response:
    del request
    return HTMLResponse(page.make(inspector, inspections, served=True))

  def inspect(request: Request) -> Response:
    try:
      return JSONResponse(
        inspector.inspect(request.query_params.get("prompt", ""))
      )
    except UserError as error:
      return JSONResponse({"error": str(error)}, status_code=400)

  def random(request: Request) -> Response:
    del request
    return JSONResponse(
      inspector.inspect(inspector.random(secrets.randbits(32)))
    )

  def export(request: Request) -> Response:
    try:
      inspection = inspector.inspect(request.query_params.get("prompt", ""))
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
