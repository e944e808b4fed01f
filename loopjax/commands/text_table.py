"""Tables for a terminal."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], num_left: int | None = None) -> str:
  """Lines of cells with aligned columns, two spaces apart.

  Args:
    lines: each with as many cells.
    num_left: number of first columns that are aligned on the left, as text is;
      the others are aligned on the right, as numbers are. None for all.
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  num_left = len(widths) if num_left is None else num_left
  return "\n".join(
    "  ".join(
      cell.ljust(width) if place < num_left else cell.rjust(width)
      for place, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in lines
  )
