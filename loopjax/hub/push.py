"""Uploads an exported folder to the Hugging Face Hub."""

import pathlib
import re

from loopjax.errors import UserError, needing, one_line
from loopjax.hub import card, convert, files

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# Files to upload; anything else in the folder is not.
PATTERNS = ("config.json", "*.safetensors", files.INDEX, card.FILE)


def push(folder: pathlib.Path, repository: str, public: bool = False) -> str:
  """Uploads a folder that has a model card; returns the commit's URL.

  Args:
    folder: a folder that `convert.export_run` wrote, with a card.
    repository: OWNER/NAME; created if it does not exist.
    public: whether a newly created repository is public.

  Raises:
    UserError: the folder is incomplete, or the upload failed.
  """
  if not _REPOSITORY.fullmatch(repository):
    raise UserError(f"{repository}: expected OWNER/NAME")
  if not (folder / card.FILE).is_file():
    raise UserError(
      f"{folder}: contains no {card.FILE}; write it with loopjax hub"
      f" card RUN {folder}"
    )
  if not (folder / "config.json").is_file():
    raise UserError(f"{folder}: contains no config.json")
  files.tensors(folder)  # Raises if incomplete or damaged.
  with needing("huggingface_hub", "hub", "push needs"):
    import huggingface_hub
  try:
    api = huggingface_hub.HfApi()
    api.create_repo(repository, private=not public, exist_ok=True)
    commit = api.upload_folder(
      repo_id=repository,
      folder_path=str(folder),
      allow_patterns=[*PATTERNS, *convert.FILES],
      commit_message="Export from loopjax",
    )
  except Exception as error:  # Whatever the network or the library raises.
    raise UserError(
      f"{repository}: the upload failed ({type(error).__name__}:"
      f" {one_line(error)}); check the name, the network and hf auth login"
    ) from error
  return str(commit.commit_url)
