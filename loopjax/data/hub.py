"""Files of datasets on the Hugging Face Hub."""

import pathlib
from collections.abc import Callable
from typing import Any

from loopjax.errors import UserError, needing, one_line

PREFIX = "hf://"


def download(url: str, instead: str) -> str:
  """Downloads a file of a dataset and returns the path of the copy.

  Args:
    url: hf://OWNER/NAME/FILE.
    instead: the alternative that error messages suggest.
  """
  repository, name = _split(url)
  return _ask(
    url,
    instead,
    lambda library: library.hf_hub_download(
      repo_id=repository, filename=name, repo_type="dataset"
    ),
  )


def download_all(url: str, instead: str) -> list[str]:
  """As `download`, for a pattern: the paths of all files, sorted by name.

  Args:
    url: hf://OWNER/NAME/PATTERN; `*` does not match a slash.
    instead: the alternative that error messages suggest.
  """
  repository, pattern = _split(url)
  if not {*"*?["} & {*pattern}:
    return [download(url, instead)]
  names = _ask(
    url,
    instead,
    lambda library: library.list_repo_files(repository, repo_type="dataset"),
  )
  depth = len(pathlib.PurePosixPath(pattern).parts)
  matching = sorted(
    name
    for name in names
    # A relative pattern is compared with the end of a path.
    if (path := pathlib.PurePosixPath(name)).match(pattern)
    and len(path.parts) == depth
  )
  if not matching:
    raise UserError(f"{url}: matches none of the dataset's {len(names)} files")
  return [download(f"{PREFIX}{repository}/{x}", instead) for x in matching]


def _split(url: str) -> tuple[str, str]:
  """(OWNER/NAME, the rest)."""
  parts = url.removeprefix(PREFIX).split("/", 2)
  if len(parts) < 3 or not all(parts):
    raise UserError(f"{url}: expected the form {PREFIX}OWNER/NAME/FILE")
  return "/".join(parts[:2]), parts[2]


def _ask(url: str, instead: str, function: Callable[[Any], Any]) -> Any:
  """Calls a function of the library huggingface_hub."""
  with needing("huggingface_hub", "hub", f"{url}: needs", instead):
    import huggingface_hub
  try:
    return function(huggingface_hub)
  except Exception as error:  # Any error of the network or the library.
    raise UserError(
      f"{url}: the download failed ({type(error).__name__}:"
      f" {one_line(error)}); check the name and the network, or {instead}"
    ) from error
