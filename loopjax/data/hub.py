"""Files of datasets on the Hugging Face Hub."""

from loopjax.errors import UserError, one_line

PREFIX = "hf://"


def download(url: str, instead: str) -> str:
  """Downloads a file of a dataset and returns the path of the copy.

  Args:
    url: hf://OWNER/NAME/FILE.
    instead: the alternative that error messages suggest.

  Raises:
    UserError: the file cannot be downloaded.
  """
  parts = url.removeprefix(PREFIX).split("/", 2)
  if len(parts) < 3 or not all(parts):
    raise UserError(f"{url}: write it as {PREFIX}OWNER/NAME/FILE")
  owner, name, filename = parts
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(
      f"{url}: needs the package huggingface_hub; install it with pip install "
      f"huggingface_hub, or {instead}"
    ) from None
  try:
    return huggingface_hub.hf_hub_download(
      repo_id=f"{owner}/{name}", filename=filename, repo_type="dataset"
    )
  except Exception as error:  # Whatever the network or the library raises.
    raise UserError(
      f"{url}: the download failed ({type(error).__name__}:"
      f" {one_line(error)}); check the name and the network, or {instead}"
    ) from error
