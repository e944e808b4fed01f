"""Models of the Hub that a command names: folders and files become runs."""

import pathlib

from loopjax import checks
from loopjax.errors import UserError, local_path
from loopjax.hub import convert, gguf
from loopjax.run import workdir as workdir_lib


def run_of(where: str, *, alone: bool = True) -> str:
  """The run of PATH: a folder of the Hub or a GGUF file is imported.

  Once for each content: to runs/NAME, or if that is another model, such as
  earlier weights of the same folder, to runs/NAME-DIGEST.

  Args:
    where: a run, zoo:NAME, or what is imported.
    alone: whether the command runs in one process.

  Raises:
    UserError: it cannot be imported.
  """
  path = local_path(where)
  is_file, is_folder = path.is_file(), convert.is_folder(path)
  if not is_file and not is_folder:
    return where
  if is_file:
    _check_file(where, path)
  content = convert.digest(path)
  workdir = pathlib.Path("runs", path.stem if is_file else path.resolve().name)
  if _is_there(workdir) and not _is_of(workdir, content):
    workdir = workdir.with_name(f"{workdir.name}-{content[:8]}")
  if _is_of(workdir, content):
    return str(workdir)
  if not alone:
    raise UserError(
      f"{where}: import it before processes start: loopjax hub"
      f" import {where} {workdir}"
    )
  convert.import_folder(path, workdir)
  print(f"imported {where} to {workdir}", flush=True)
  return str(workdir)


def _is_there(workdir: pathlib.Path) -> bool:
  return (workdir / "config.json").exists()


def _is_of(workdir: pathlib.Path, content: str) -> bool:
  """Whether a directory has a run that was imported from this content."""
  if not (workdir / "summary.json").exists():
    return False  # A run that was not imported, and has not ended.
  return workdir_lib.read_summary(workdir).get("imported_sha256") == content


def _check_file(where: str, path: pathlib.Path) -> None:
  """Raises UserError for a file that is certainly of another kind."""
  with path.open("rb") as file:
    head = file.read(64)
  if not head.startswith(gguf.MAGIC) and not checks.wrong_file(head):
    raise UserError(
      f"{where}: is not a model; expected a work directory, zoo:NAME, a folder"
      " of the Hub or a GGUF file. Your own data are a setting of the task:"
      f" --config.task.test_csv={where} (puzzles) or"
      f" --config.task.test_files={where} (text)"
    )
