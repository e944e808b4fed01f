"""Answers the page's browser, on this machine only."""

import secrets
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from loopjax.errors import UserError
from loopjax.play import page
from loopjax.play.thinker import Thinker, Thought


def make(thinker: Thinker, thoughts: Sequence[Thought]) -> Starlette:
  """The application.

  GET / is the page; GET /think?prompt=... a Thought, status 400 and "error" for
  what is none; GET /random one of a new prompt; GET /export?prompt=... the page
  of that prompt as a file.
  """

  def home(request: Request) -> Response:
    del request
    return HTMLResponse(page.make(thinker, thoughts, served=True))

  def think(request: Request) -> Response:
    try:
      return JSONResponse(thinker.think(request.query_params.get("prompt", "")))
    except UserError as error:
      return JSONResponse({"error": str(error)}, status_code=400)

  def random(request: Request) -> Response:
    del request
    return JSONResponse(thinker.think(thinker.random(secrets.randbits(32))))

  def export(request: Request) -> Response:
    try:
      thought = thinker.think(request.query_params.get("prompt", ""))
    except UserError as error:
      return JSONResponse({"error": str(error)}, status_code=400)
    name = f"attachment; filename={thinker.facts['run']}.html"
    return HTMLResponse(
      page.make(thinker, [thought], served=False),
      headers={"content-disposition": name},
    )

  routes = {"/": home, "/think": think, "/random": random, "/export": export}
  return Starlette(
    routes=[Route(path, endpoint) for path, endpoint in routes.items()]
  )
