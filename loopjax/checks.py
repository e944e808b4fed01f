"""Checks that several modules share, most of them of settings."""

import codecs
import contextlib
import dataclasses
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loopjax.errors import Moot, UserError, one_line, similar

if TYPE_CHECKING:  # It imports JAX, which commands that only read do not.
  from loopjax.types import TaskSpec


def setting(
  default: Any,
  *,
  least: float | None = None,
  above: float | None = None,
  within: str = "",
  own: bool = False,
) -> Any:
  """A field of a config, with the bounds that `plain_values` checks.

  Args:
    default: its default; a config that extends this one may give another.
    least, above: it must be at least this, or more.
    within: an interval like "[0, 1)".
    own: it means something else where another family or task has its name, to
      which its value does not cross.
  """
  bounds = {"least": least, "above": above, "within": within, "own": own}
  return dataclasses.field(default=default, metadata=bounds)


def setting_of(config: type, name: str) -> Mapping[str, Any]:
  """The arguments of the field's `setting`, where it has one; of its bases."""
  for one in config.__mro__:
    field = getattr(one, "__dataclass_fields__", {}).get(name)
    if field is not None and field.metadata:
      return dict(field.metadata)
  return {}


def _outside(bounds: Mapping[str, Any], value: float) -> str:
  """What a value must be, or "" if it is."""
  if not bounds:
    return ""
  least, above, within = (bounds[x] for x in ("least", "above", "within"))
  if least is not None and not value >= least:
    return f"must be at least {least}"
  if above is not None and not value > above:
    return f"must be > {above}"
  if within and not _is_within(value, within):
    return f"must be in {within}"
  return ""


def one_of(section: str, record: Any, **allowed: Iterable[str]) -> None:
  """Raises UserError unless each named field is among its allowed values.

  A family or task that has the same field as another one may have other values.
  """
  wrong = {
    field: f"{section}.{field}={value!r} is not one of "
    f"{', '.join(values)}{similar(value, values)}"
    for field, values in allowed.items()
    if (value := getattr(record, field)) not in values
  }
  if wrong:
    moot = tuple(
      Moot(f"{section}.{field.name}", field.default, (f"{section}.name",))
      for field in dataclasses.fields(record)
      if field.name in wrong
    )
    raise UserError("\n".join(wrong.values()), moot)


def made_by_own(setting: str, value: str, *arguments: Any) -> Any:
  """The result of the user's function, "package.module:function"."""
  module, _, name = value.partition(":")
  with of_own(setting, value):
    return getattr(importlib.import_module(module), name)(*arguments)


@contextlib.contextmanager
def of_own(setting: str, value: str) -> Iterator[None]:
  """Raises UserError for any error of the user's code that a setting names."""
  try:
    yield
  except ModuleNotFoundError as error:
    raise UserError(
      f"{setting}={value!r}: {error}; a run that has it keeps a copy in"
      " RUN/sources"
    ) from error
  except Exception as error:
    kind = type(error).__name__
    raise UserError(
      f"{setting}={value!r}: {kind}: {one_line(error)}"
    ) from error


def recorded(traces: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
  """The traces of these names; raises UserError if a model lacks one.

  Also "state", which is only among them if the loop is watched, see
  `loop.driver.Watched`.
  """
  if isinstance(names, str):
    raise UserError(f"trace={names!r} must be names: ({names!r},)")
  for name in names:
    if name not in traces:
      raise UserError(
        f"trace {name!r} is not recorded; the model's loops record"
        f" {', '.join(traces)}"
      )
  state = [name for name in ("state",) if name in traces]
  return {name: traces[name] for name in (*names, *state)}


def plain_values(section: str, record: Any) -> None:
  """Raises UserError unless every field has its default's type and is finite.

  An integer is accepted as a float; no other conversion is made. Integers are
  less than 2**32: JAX would drop the higher bits of a seed. Fields are within
  the bounds of their `setting`.
  """
  mistakes = []
  for field in dataclasses.fields(record):
    value = getattr(record, field.name)
    kind = type(field.default)
    allowed = (float, int) if kind is float else (kind,)
    finite = not isinstance(value, float) or math.isfinite(value)
    if type(value) not in allowed or not finite:
      expected = (
        "a finite float" if kind is float else f"of type {kind.__name__}"
      )
      mistakes.append(f"{section}.{field.name}={value!r} must be {expected}")
    elif type(value) is int and abs(value) >= 2**32:
      mistakes.append(f"{section}.{field.name}={value} must be less than 2**32")
    elif said := _outside(setting_of(type(record), field.name), value):
      mistakes.append(f"{section}.{field.name}={value} {said}")
  _raise_all(mistakes)


def without_effect(
  section: str,
  record: Any,
  because: str | tuple[str, ...],
  *fields: str,
  why: str = "",
) -> None:
  """Raises UserError if fields were changed that other settings disable.

  Args:
    section: "model", "task", ...
    record: the section's record.
    because: the names of the settings of the record that disable the fields.
    *fields: names of the fields.
    why: the end of the message, if these settings do not explain themselves.
  """
  names = (because,) if isinstance(because, str) else because
  causes = tuple(f"{section}.{name}" for name in names)
  moot = tuple(
    Moot(f"{section}.{field.name}", field.default, causes)
    for field in dataclasses.fields(record)
    if field.name in fields and getattr(record, field.name) != field.default
  )
  if moot:
    values = " and ".join(
      f"{section}.{name}={getattr(record, name)!r}" for name in names
    )
    one = moot[0].setting
    raise UserError(f"{one} has no effect while {values}{why}", moot)


def one_document(spec: "TaskSpec", reads: str) -> None:
  """Raises UserError if rows hold several documents.

  Args:
    spec: the task's spec.
    reads: the end of the message: how the model would mix documents.
  """
  if spec.packs_documents:
    raise UserError(
      f"this model does not support rows of several documents: it {reads};"
      " task.packed=False makes a row of text one document"
    )


def no_next_tokens(spec: "TaskSpec") -> None:
  """Raises UserError if targets are inputs of a model that sees whole rows."""
  if spec.predicts_next:
    raise UserError(
      "this model cannot predict next tokens: it attends to the whole row;"
      " choose another task, such as sudoku"
    )


def at_least(section: str, record: Any, **bounds: float) -> None:
  """Raises UserError unless each named field is at least its bound."""
  _raise_all(
    f"{section}.{field}={value} must be at least {bound}"
    for field, bound in bounds.items()
    if not (value := getattr(record, field)) >= bound
  )


def within(section: str, record: Any, **intervals: str) -> None:
  """Raises UserError unless each named field is in an interval like [0, 1)."""
  _raise_all(
    f"{section}.{field}={value} must be in {interval}"
    for field, interval in intervals.items()
    if not _is_within(value := getattr(record, field), interval)
  )


def _is_within(value: float, interval: str) -> bool:
  low, high = map(float, interval[1:-1].split(","))
  is_end = value == low and interval[0] == "["
  is_end |= value == high and interval[-1] == "]"
  return low < value < high or is_end


def num_loops(config: Any, given: int | None, why_no_more: str = "") -> int:
  """The given number of loops, or that of training if None.

  Args:
    config: the model's config.
    given: the number, or None.
    why_no_more: why there are at most as many loops as in training, the end of
      the message; "" if there may be more.
  """
  number: int = config.num_loops if given is None else given
  if why_no_more and not 1 <= number <= config.num_loops:
    raise UserError(
      f"num_loops={number} must be 1 to {config.num_loops}: {why_no_more}"
    )
  if number < 1:
    raise UserError(f"num_loops={number} must be at least 1")
  return number


def flags_at_least(options: Any, **bounds: float) -> None:
  """Raises UserError unless each named flag is absent or at least its bound."""
  for flag, bound in bounds.items():
    value = getattr(options, flag)
    if value is not None and not value >= bound:
      raise UserError(f"--{flag}={value} must be at least {bound}")


def unicode(name: str, text: str) -> None:
  """Raises UserError for bytes of a terminal that are not UTF-8."""
  try:
    text.encode()
  except UnicodeEncodeError:
    raise UserError(f"{name} is not UTF-8") from None


def wrong_file(head: bytes) -> str:
  """What a file is that was downloaded wrongly, from its first bytes, or ""."""
  start = head.lstrip()[:64].lower()
  if start.startswith((b"<!doctype html", b"<html")):
    return "is a web page, not the file; download it again"
  for magic, message in _WRONG.items():
    if head.startswith(magic):
      return message
  return ""


_WRONG = {  # By the first bytes.
  b"PK\x03\x04": "is a zip archive; unpack it",
  b"BZh": "is compressed with bzip2; unpack it",
  b"\xfd7zXZ\0": "is compressed with xz; unpack it",
  b"%PDF-": "is a PDF file, not text",
  codecs.BOM_UTF16_LE: "is UTF-16; save it as UTF-8",
  codecs.BOM_UTF16_BE: "is UTF-16; save it as UTF-8",
}


def integer(name: str, value: Any, low: int, high: int = 2**31 - 1) -> None:
  """Raises UserError unless `value` is an integer in [low, high]."""
  if type(value) is not int or not low <= value <= high:
    raise UserError(f"{name}={value!r} is not an integer in [{low}, {high}]")


def _raise_all(mistakes: Iterable[str]) -> None:
  """Raises UserError with a line for each mistake, if there are any."""
  if message := "\n".join(mistakes):
    raise UserError(message)
