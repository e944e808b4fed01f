"""Limits of connections, which uvicorn does not have.

A client that sends half of a request's head, or nothing, would otherwise hold
its connection for good.
"""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from loopjax.serve.errors import ClientError

HEAD_SECONDS = 30.0  # Maximum time for the head of a request to arrive.


def limited(
  max_connections: int, head_seconds: float = HEAD_SECONDS
) -> type[H11Protocol]:
  """The class of a server's connections, for `uvicorn.Config(http=...)`.

  Args:
    max_connections: how many may be open; another one is closed with 503.
    head_seconds: a connection whose request has no complete head after so many
      seconds is closed with 408. Between requests uvicorn's own limit holds.
  """

  class Connection(H11Protocol):
    """A connection whose head is waited for."""

    _waiting: asyncio.TimerHandle | None = None

    # The type of uvicorn's own method, which is narrower than asyncio's.
    def connection_made(  # type: ignore[override]
      self, transport: asyncio.Transport
    ) -> None:
      super().connection_made(transport)
      if len(self.connections) > max_connections:
        message = f"{max_connections} connections are open; try again later"
        self._close(ClientError(message, status=503))
      else:
        self._wait()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self.conn.their_state is not h11.IDLE:  # A request, or an error.
        self._stop_waiting()
      elif self._waiting is None:
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
      self._stop_waiting()
      super().connection_lost(exc)

    def _wait(self) -> None:
      error = ClientError(
        f"the request headers did not arrive within {head_seconds:g} s",
        status=408,
      )
      self._waiting = self.loop.call_later(head_seconds, self._close, error)

    def _stop_waiting(self) -> None:
      if self._waiting is not None:
        self._waiting.cancel()
        self._waiting = None

    def _close(self, error: ClientError) -> None:
      body = json.dumps(error.content).encode()
      head = (
        f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
      )
      self.transport.write(head.encode() + body)
      self.transport.close()

  return Connection
