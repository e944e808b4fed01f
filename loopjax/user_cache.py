"""What is worked out once and kept for every later run of the user."""

import fcntl
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable

from loopjax.errors import UserError

_CHECKSUMS = "checksums.json"
_BLOCK = 1 << 20  # Bytes that are read at a time.


def directory(name: str) -> pathlib.Path:
  """Where things of one kind are kept: `$XDG_CACHE_HOME/loopjax/NAME`.

  As everywhere, `$XDG_CACHE_HOME` is `~/.cache` unless it is set.
  """
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "loopjax" / name


def entry(
  name: str, key: str, write: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """A directory of files that is written once, whole or not at all.

  Of several processes that want the same one, one writes and the others wait.
  What a killed one left is written anew, and so are files whose checksums are
  not those that were written.

  Args:
    name: of the kind, see `directory`.
    key: of the entry; the same key always stands for the same content.
    write: puts the files into an empty directory that it is given.

  Raises:
    UserError: the files cannot be written; nothing is left of them.
  """
  path = directory(name) / key
  if _is_whole(path):
    return path
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{key}.lock"), "a") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not _is_whole(path):  # It may be by now.
        _write(path, path.with_name(f".{key}.partial"), write)
  except OSError as error:
    raise UserError(
      f"{path}: cannot be written ({error.strerror}); make room there, or set "
      "XDG_CACHE_HOME to another directory"
    ) from error
  return path


def _write(path, partial, write):
  for old in (path, partial):
    if old.exists():
      print(f"{old}: is not whole and is made anew", flush=True)
      shutil.rmtree(old)
  partial.mkdir()
  try:
    write(partial)
    sums = {file.name: _checksum(file) for file in partial.iterdir()}
    (partial / _CHECKSUMS).write_text(json.dumps(sums))
    partial.replace(path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _is_whole(path: pathlib.Path) -> bool:
  try:
    sums = json.loads((path / _CHECKSUMS).read_text())
    return all(_checksum(path / name) == sums[name] for name in sums)
  except (OSError, ValueError):
    return False


def _checksum(file: pathlib.Path) -> int:
  total = 0
  with open(file, "rb") as stream:
    while block := stream.read(_BLOCK):
      total = zlib.crc32(block, total)
  return total
