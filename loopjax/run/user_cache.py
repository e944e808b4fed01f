"""Results that are computed once and cached for all runs of the user."""

import fcntl
import functools
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable

import jax

from loopjax.errors import UserError

_CHECKSUMS = "checksums.json"
_BLOCK = 1 << 20  # Bytes read at a time.


def directory(name: str) -> pathlib.Path:
  """Where entries of one kind are kept: `$XDG_CACHE_HOME/loopjax/NAME`.

  `$XDG_CACHE_HOME` defaults to `~/.cache`.
  """
  try:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  except RuntimeError as error:
    raise UserError(
      "this user has no home directory; set XDG_CACHE_HOME to a directory"
    ) from error
  return pathlib.Path(home) / "loopjax" / name


def entry(
  name: str, key: str, write: Callable[[pathlib.Path], None]
) -> pathlib.Path:
  """A directory of files that is written once, whole or not at all.

  The same key of a name always stands for the same content, which `write`
  writes into the empty directory that it is given.

  If several processes need the same entry, one writes and the others wait. An
  incomplete entry of a killed process is written again, and so is one whose
  files no longer match their checksums.
  """
  path = directory(name) / key
  if _is_whole(path):
    return path
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{key}.lock"), "a", encoding="utf-8") as lock:
      fcntl.flock(lock, fcntl.LOCK_EX)
      if not _is_whole(path):  # Another process may have written it.
        _write(path, path.with_name(f".{key}.partial"), write)
  except OSError as error:
    raise UserError(
      f"{path}: cannot be written ({error.strerror}); free some space or set"
      " XDG_CACHE_HOME to another directory"
    ) from error
  return path


def _write(path, partial, write):
  for old in (path, partial):
    if old.exists():
      print(f"{old}: incomplete or damaged; rebuilding it", flush=True)
      shutil.rmtree(old)
  partial.mkdir()
  try:
    write(partial)
    sums = {file.name: _checksum(file) for file in partial.iterdir()}
    (partial / _CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")
    partial.replace(path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _is_whole(path: pathlib.Path) -> bool:
  try:
    sums = json.loads((path / _CHECKSUMS).read_text(encoding="utf-8"))
    return all(_checksum(path / name) == sums[name] for name in sums)
  except (OSError, ValueError):
    return False


def _checksum(file: pathlib.Path) -> int:
  state = file.stat()
  return _read_checksum(file, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _read_checksum(file: pathlib.Path, size: int, changed: int) -> int:
  """Of a file in a state: entries may be large, and every split asks again."""
  del size, changed
  total = 0
  with open(file, "rb") as stream:
    while block := stream.read(_BLOCK):
      total = zlib.crc32(block, total)
  return total


def keep_compiled() -> None:
  """Turns on JAX's compilation cache, in a directory that is per user.

  JAX's environment variables for the cache have precedence.
  """
  defaults = {
    "jax_compilation_cache_dir": str(directory("compilation")),
    "jax_persistent_cache_min_compile_time_secs": 0.5,
  }
  for name, value in defaults.items():
    if name.upper() not in os.environ:
      jax.config.update(name, value)
