"""Writes passages of a text, to compare models on texts never trained on.

  python benchmarks/make_passages.py wikitext2_test.txt held_out.jsonl

The passages are documents for `loopjax score --config.task.test_files`. They
begin with a line, at equal distances in the text, and have about --length
characters. Of a book of Project Gutenberg, the header and the licence are left
out.
"""

import argparse
import json
import pathlib
import re

_BOOK = re.compile(r"(?s)\n\*\*\* ?START OF.*?\*\*\*\n(.*)\n\*\*\* ?END OF")


def passages(text: str, number: int, length: int) -> list[str]:
  """`number` disjoint passages, each cut at its last space.

  Raises:
    ValueError: the text is too short.
  """
  book = _BOOK.search(text)
  text = book.group(1) if book else text
  found, end = [], 0
  for n in range(number):
    start = text.find("\n", max(n * len(text) // number, end)) + 1
    end = start + length
    if not start or end > len(text):
      raise ValueError(f"passage {n} of {number} is beyond the text's end")
    found.append(text[start:end].rpartition(" ")[0].strip())
  return found


def main() -> None:
  """Writes the file."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("text", type=pathlib.Path)
  parser.add_argument("out", type=pathlib.Path)
  parser.add_argument("--number", type=int, default=64)
  parser.add_argument("--length", type=int, default=600)
  options = parser.parse_args()
  text = options.text.read_text(encoding="utf-8")
  with options.out.open("w", encoding="utf-8") as out:
    for passage in passages(text, options.number, options.length):
      print(json.dumps({"text": passage}), file=out)


if __name__ == "__main__":
  main()
