"""Writes the repository's address into all notebooks.

  python notebooks/address.py

The cell that fetches the repository on Colab cannot look it up. The address is
`repository-code` in CITATION.cff; set it once the repository is published.
"""

import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
_NAME = r"[\w.-]+/[\w.-]+"
_GIVEN = re.compile(
  rf'^repository-code: "https://github\.com/({_NAME})"$', re.M
)
# Matches the first cell, also as JSON.
_PLACES = re.compile(rf"(https://github\.com/){_NAME}" r'(?=\\?")')


def main(folder: pathlib.Path = HERE) -> None:
  """Rewrites the notebooks of a folder, with CITATION.cff above it."""
  citation = (folder.parent / "CITATION.cff").read_text(encoding="utf-8")
  found = _GIVEN.search(citation)
  if found is None:
    raise SystemExit("error: CITATION.cff has no repository-code on GitHub")
  for path in sorted(folder.glob("[0-9]*")):
    text = path.read_text(encoding="utf-8")
    path.write_text(_PLACES.sub(rf"\g<1>{found[1]}", text), encoding="utf-8")


if __name__ == "__main__":
  main()
