"""The work directory of a run: its files, and the lock on it."""

import codecs
import contextlib
import fcntl
import json
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loopjax import checks
from loopjax.errors import UserError, local_path, unreadable, writing
from loopjax.run import zoo

# Sections that may differ between starts: they do not affect what is learned.
_FREE_SECTIONS = ("eval", "mesh", "loop")
_FREE_KEYS = (
  "run.num_microbatches",
  "run.checkpoint_every",
  "run.keep_checkpoints",
  "run.keep_best",
  "run.best_metric",
  "run.stop_after",
  "run.max_bad_steps",
  "run.debug_nans",
  "run.profile_steps",
  "run.wandb_project",
)
# Sections that a checkpoint depends on; the task may differ in evaluation.
_EVAL_SECTIONS = ("model", "optim")

LOCK = ".lock"  # The file that a run locks; the first one that it writes.
# Subdirectory of a run: its tokenizer and, if it was imported, other files of
# the Hub.
HUB = "hub"
_TOKENIZER = "tokenizer.json"
# With a chat template or its special tokens: data and chats depend on these.
_OF_CHATS = (
  "chat_template.jinja",
  "tokenizer_config.json",
  "special_tokens_map.json",
)


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Locks a work directory for one run; process 0 holds the lock."""
  from loopjax.run import processes  # Imports JAX: not to read.

  with contextlib.ExitStack() as stack:
    processes.from_process_0(lambda: stack.enter_context(_held(workdir)))
    yield


@contextlib.contextmanager
def _held(workdir: pathlib.Path) -> Iterator[None]:
  with writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    lock = open(workdir / LOCK, "a", encoding="utf-8")  # noqa: SIM115
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise UserError(f"{workdir}: another run is using it") from error
    except OSError as error:  # A file system without locks.
      raise UserError(
        f"{workdir}: cannot be locked: {error.strerror}; choose a --workdir on"
        " a file system with locks"
      ) from error
    yield


def keep_hub_files(
  source: pathlib.Path | None, workdir: pathlib.Path, tokenizer: str
) -> None:
  """Copies the tokenizer, if it is a file, and its chat template to a new run.

  If the run from which the new one starts has the same tokenizer, all its Hub's
  files are copied: they have what config.json lacks, such as a chat template.

  Args:
    source: the work directory, or zoo:NAME, of the run from which the new one
      starts; None if there is none.
    workdir: the new run's work directory.
    tokenizer: `task.tokenizer` of the new run. In a task from outside it may be
      anything.
  """
  path = pathlib.Path(os.path.expanduser(str(tokenizer)))
  if tokenizer == "bytes" or not os.path.isfile(path):
    return
  kept, own = zoo.located(source or workdir) / HUB, workdir / HUB
  theirs = kept / _TOKENIZER
  if source and theirs.is_file() and theirs.read_bytes() == path.read_bytes():
    shutil.copytree(kept, own, dirs_exist_ok=True)
  elif path.resolve() != (own / _TOKENIZER).resolve():
    own.mkdir(exist_ok=True)
    shutil.copyfile(path, own / _TOKENIZER)
    for name in _OF_CHATS if path.name == _TOKENIZER else ():
      if (path.parent / name).is_file():
        shutil.copyfile(path.parent / name, own / name)


def kept_tokenizer(workdir: pathlib.Path, recorded: str) -> str:
  """The path of a run's tokenizer, also where the run was moved or copied.

  Args:
    workdir: the run's work directory.
    recorded: `task.tokenizer` of its config.json, "bytes" or a path.

  Returns:
    `recorded`; or the run's own copy, if there is no such file, it differs, or
    its path depends on the current directory.
  """
  kept = workdir / HUB / _TOKENIZER
  if recorded == "bytes" or not kept.is_file():
    return recorded
  path = pathlib.Path(os.path.expanduser(recorded))
  with contextlib.suppress(OSError):  # It is gone, or another user's.
    if path.is_absolute() and path.read_bytes() == kept.read_bytes():
      return recorded
  return str(kept.resolve())


def binds(key: str, mode: str) -> bool:
  """Whether a run, or with mode "eval" its checkpoint, depends on a setting."""
  section = key.partition(".")[0]
  if mode == "eval":
    return section in _EVAL_SECTIONS
  return section not in _FREE_SECTIONS and key not in _FREE_KEYS


def read_summary(workdir: pathlib.Path) -> dict[str, Any]:
  """Reads summary.json: how a run ended, and its metrics if it is complete."""
  path = workdir / "summary.json"
  value = read_json(path)
  _check_types(path, value, status=str)
  if value["status"] == "completed":
    _check_types(path, value, metrics=dict, parameters=int, steps=int)
  return value


def read_config(workdir: pathlib.Path) -> dict[str, Any]:
  """Reads config.json, the settings of a run by section."""
  path = workdir / "config.json"
  value = read_json(path)
  _check_types(path, value, model=dict, task=dict, run=dict)
  for section in ("model", "task"):
    _check_types(path, value[section], name=str)
  return value


def _check_types(
  path: pathlib.Path, value: Mapping[str, Any], **types: type
) -> None:
  for name, one in types.items():
    if not isinstance(value.get(name), one):
      raise UserError(
        f"{path}: was not written by loopjax: {name} is missing or malformed"
      )


def path_of(where: object) -> pathlib.Path:
  """The path of a run or folder; raises UserError if it is none."""
  if not isinstance(where, str | os.PathLike) or not os.fspath(where):
    raise UserError(f"{where!r:.80} is not the path of a run")
  return local_path(where)


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object; raises UserError for any other file, or none."""
  try:
    content = path.read_bytes()
    value = json.loads(content.removeprefix(codecs.BOM_UTF8))
  except OSError as error:
    raise unreadable(str(path), error) from error
  except ValueError as error:
    said = checks.wrong_file(content) or f"cannot be read: {error}"
    raise UserError(f"{path}: {said}") from error
  if not isinstance(value, dict):
    raise UserError(f"{path}: is not a JSON object")
  return value


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON atomically; see `write_text`."""
  write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_json_lines(path: pathlib.Path, rows: Iterable[Any]) -> None:
  """Writes one line of JSON per row, atomically; see `write_text`."""
  lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
  write_text(path, "".join(lines))


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file atomically, even if several processes write at once.

  A reader sees the old file or a new one, never a partial one; none is left if
  the disk is full.
  """
  temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
  try:
    temporary.write_text(text, encoding="utf-8")  # On any machine.
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def check_new(workdir: pathlib.Path) -> None:
  """Raises UserError if a directory already contains a run."""
  if (workdir / "config.json").exists():
    raise UserError(f"{workdir}: already contains a run")


def no_run(workdir: pathlib.Path, label: str) -> str:
  """The message for a directory that is missing or does not contain a run."""
  if workdir.is_dir():
    return f"{label} contains no run: config.json is missing"
  return f"{label} contains no run: no such directory{zoo.suggestion(workdir)}"


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of metrics.jsonl, oldest first; none if there is no file.

  Lines that a crash has damaged are skipped.
  """
  path = workdir / "metrics.jsonl"
  try:
    text = path.read_text(errors="replace", encoding="utf-8")
  except FileNotFoundError:
    return []
  except OSError as error:
    raise unreadable(str(path), error) from error
  rows = []
  for line in text.splitlines():
    with contextlib.suppress(ValueError):  # A partly written line.
      row = json.loads(line)
      if isinstance(row, dict) and {"step", "split"} <= row.keys():
        rows.append(row)
  return rows


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
  """The metrics that JSON can represent, without NaN and infinity."""
  return {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
