"""Where a server listens, and the host names that requests may have.

A server that checks them is safe from DNS rebinding, by which pages of other
sites could read its answers.
"""

import argparse
import contextlib
import re
import socket
from collections.abc import Collection

from loopjax.errors import UserError

LOCAL = ("127.0.0.1", "localhost", "[::1]")


PORT = 8000


def add_flags(parser: argparse.ArgumentParser, port: int | None = PORT) -> None:
  """Adds --port, with this default, and --allowed_hosts."""
  default = PORT if port else f"{PORT} or the next free one"
  parser.add_argument(
    "--port", type=int, default=port, help=f"0 for any free port [{default}]"
  )
  parser.add_argument(
    "--allowed_hosts",
    default="",
    metavar="NAMES",
    help="public host names of this server behind a proxy, comma-separated",
  )


def is_local(host: str) -> bool:
  """Whether a server at this address accepts local connections only."""
  return host in LOCAL or f"[{host}]" in LOCAL


def listed(flag: str) -> list[str]:
  """The parts of a comma-separated flag."""
  return [part.strip() for part in flag.split(",") if part.strip()]


def allowed(flag: str) -> list[str]:
  """The names of --allowed_hosts, in lower case; "*" permits any."""
  names = listed(flag)
  for name in names:
    if name != "*" and not re.fullmatch(r"[\w.-]+", name):
      raise UserError(
        f"--allowed_hosts={name} is not a name such as api.example.org"
      )
  return [name.lower() for name in names]


def check_port(port: int) -> None:
  """Raises UserError unless a port exists; 0 is any free one."""
  if not 0 <= port <= 65_535:
    raise UserError(f"--port={port} must be in [0, 65535]")


def bind(host: str, port: int) -> socket.socket:
  """A socket bound to an address; raises UserError if it cannot be."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:  # In an address, IPv6 is in brackets.
    return socket.create_server((host.strip("[]"), port), family=family)
  except OSError as error:
    raise UserError(f"--port={port} at {host}: {error}") from error


def bind_next(host: str) -> socket.socket:
  """A socket bound to PORT or to one of the next few that are free."""
  for port in range(PORT, PORT + 20):
    with contextlib.suppress(UserError):
      return bind(host, port)
  return bind(host, 0)


def refusal(host: str, names: Collection[str]) -> str:
  """Why a host is refused; "" if it is permitted.

  Args:
    host: name and port, as in the Host header or after "//" in an origin.
    names: those that are permitted, in lower case; "*" permits any.
  """
  if {re.sub(r":\d*$", "", host).lower(), "*"} & set(names):
    return ""
  return f"unknown host {host[:80]!r}; --allowed_hosts sets the allowed names"
