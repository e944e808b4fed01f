"""The errors that serving a request can raise."""

from collections.abc import Mapping


class ClientError(Exception):
  """A rejected request, with its error in OpenAI's format.

  Attributes:
    status: the HTTP status.
    content: the body of the response, to be written as JSON.
    headers: additional headers of the response.
  """

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    """Creates the error.

    Args:
      message: one line that says what is wrong.
      status: the HTTP status.
      param: the field that is wrong, if it is one.
      code: OpenAI's error code, if there is one.
      headers: additional headers of the response.
    """
    super().__init__(message)
    self.status, self.headers = status, dict(headers or {})
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
      status, "invalid_request_error" if status < 500 else "server_error"
    )
    self.content = {
      "error": {"message": message, "type": kind, "param": param, "code": code}
    }


class QueueFullError(Exception):
  """The maximum number of requests is already running or waiting."""


class EngineFailedError(Exception):
  """The engine has failed and accepts no more requests."""


def engine_failed() -> ClientError:
  """The error of every request after the engine has failed."""
  return ClientError("the engine failed; see the server's log", status=503)
