"""Models of the Hub that a command names: folders and files become runs."""

import pathlib

from loopjax import checks
from loopjax.errors import UserError, local_path
from loopjax.hub import convert, gguf
from loopjax.run import workdir as workdir_lib


def run_of(where: str, *, alone: bool = True) -> str:
  """The run of PATH: a folder of the Hub or a GGUF file is imported.

  Once, to runs/NAME.

  Args:
    where: a run, zoo:NAME, or what is imported.
    alone: whether the command runs in one process.

  Raises:
    UserError: it cannot be imported, or runs/NAME is of another model.
  """
  path = local_path(where)
  is_file, is_folder = path.is_file(), convert.is_folder(path)
  if not is_file and not is_folder:
    return where
  if is_file:
    _check_file(where, path)
  workdir = pathlib.Path("runs", path.stem if is_file else path.resolve().name)
  if (workdir / "config.json").exists():
    origin = workdir_lib.read_summary(workdir).get("imported", "")
    if pathlib.Path(origin).resolve() != path.resolve():
      raise UserError(
        f"{where}: {workdir} contains another model; import it"
        f" elsewhere: loopjax hub import {where} RUN"
      )
    return str(workdir)
  if not alone:
    raise UserError(
      f"{where}: import it before processes start: loopjax hub"
      f" import {where} {workdir}"
    )
  convert.import_folder(path, workdir)
  print(f"imported {where} to {workdir}", flush=True)
  return str(workdir)


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
