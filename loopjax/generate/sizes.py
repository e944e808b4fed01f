"""The shapes that programs are compiled for: few, and not much too large."""

SMALLEST_SPAN = 64


def powers(least: int, most: int) -> list[int]:
  """least, 4 least, 16 least ... below `most`, and `most`."""
  sizes = [least]
  while sizes[-1] * 4 < most:
    sizes.append(sizes[-1] * 4)
  return [size for size in sizes if size < most] + [most]


def span(num_tokens: int, most: int) -> int:
  """The next of 64, 96, 128, 192, 256 ... for so many tokens, or `most`."""
  size = SMALLEST_SPAN
  while size < num_tokens:
    size = size * 4 // 3 if size % 3 == 0 else size * 3 // 2
  return min(size, most)
