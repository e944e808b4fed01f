"""Command line: `loopjax play RUN`."""

import argparse
import contextlib
import os
import pathlib
import sys
import time
import webbrowser

from loopjax import checks
from loopjax.commands import hosts
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.play import load, page
from loopjax.play.page import Inspection
from loopjax.run import user_cache

_HOST = "127.0.0.1"


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Serves the page of a run, or writes it; returns the exit status."""
  parser = Parser(
    prog="loopjax play",
    description=(
      "Shows in the browser what a trained model predicts after each loop: for"
      " a puzzle, a text, a multi-hop question or a cycle."
    ),
  )
  parser.add_argument("workdir", type=pathlib.Path, metavar="RUN", help="a run")
  parser.add_argument(
    "--prompt",
    action="append",
    default=[],
    help=(
      "input, may be repeated: a puzzle, row by row, with . for a blank; a"
      " text; a question; or a cycle's edges, a>b c>a b>c"
    ),
  )
  parser.add_argument(
    "--random",
    type=int,
    default=3,
    help="number of random prompts, if none is given [3]",
  )
  parser.add_argument(
    "--num_loops", type=int, help="number of loops [as in evaluation]"
  )
  parser.add_argument("--checkpoint", type=int, help="checkpoint step [newest]")
  parser.add_argument(
    "--export",
    type=pathlib.Path,
    help="write the page to this file instead of serving it",
  )
  parser.add_argument(
    "--no_browser", action="store_true", help="do not open the page"
  )
  hosts.add_flags(parser, port=None)
  options = parser.parse_args(argv)
  _play(options)
  return 0


def _play(options: argparse.Namespace) -> None:
  if not options.prompt:
    checks.flags_at_least(options, random=1)
  hosts.check_port(options.port or 0)
  names = [*hosts.LOCAL, *hosts.allowed(options.allowed_hosts)]
  for prompt in options.prompt:
    checks.unicode("--prompt", prompt)
  user_cache.keep_compiled()
  inspector = load.load(options.workdir, options.num_loops, options.checkpoint)
  found = list(map(inspector.inspect, options.prompt))
  levels = inspector.facts["levels"] or [""]

  def begin() -> list[Inspection]:
    started = time.perf_counter()
    made = [  # One above the middle first, then a harder one.
      inspector.random(seed, levels[(len(levels) // 2 + seed) % len(levels)])
      for seed in range(options.random)
    ]
    seconds = time.perf_counter() - started
    if not options.export:
      print(
        f"first answers after {seconds:.1f} s, most of it compilation",
        flush=True,
      )
    return made

  if options.export:
    text = page.make(inspector, found or begin(), served=False)
    with writing(f"--export={options.export}"):
      options.export.write_text(text, encoding="utf-8")
    print(options.export)
    return
  try:
    import uvicorn

    from loopjax.play import server
  except ImportError as error:
    raise UserError(
      f"serving the page needs the package {error.name}; install it with pip"
      " install 'loopjax[serve]', or write the page with --export=FILE"
    ) from error
  listener = (
    hosts.bind_next(_HOST)
    if options.port is None
    else hosts.bind(_HOST, options.port)
  )
  with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
    address = f"http://{_HOST}:{listener.getsockname()[1]}"
    print(address, flush=True)
    if not options.no_browser and _has_display():
      # Its request waits until the server is up.
      webbrowser.open_new_tab(address)
    app = server.make(inspector, found, begin, names)
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def _has_display() -> bool:
  """Whether a browser could show a page; not one of a remote terminal."""
  return sys.platform in ("darwin", "win32") or bool(
    os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
  )


if __name__ == "__main__":
  leave(main())
