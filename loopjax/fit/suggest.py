"""The smallest change that makes a config fit. Compiles every change."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loopjax import config as config_lib
from loopjax.fit.measure import Measured
from loopjax.nn import remat


class Change(NamedTuple):
  """A change of the config, and its effect.

  Attributes:
    overrides: by "section.key".
    effect: description of the effect.
  """

  overrides: dict[str, Any]
  effect: str


# Compiles the config with a change; None if the change is impossible.
Attempt = Callable[[Change], Measured | None]


def suggest(
  settings: config_lib.Settings, mesh: Mapping[str, int], attempt: Attempt
) -> Change | None:
  """The first change that makes the config fit; None if none does.

  Tries each kind of change alone, in this order: recompute more, split the
  state over more devices, compute the batch in more parts, halve the batch.
  Then parts and halves, combined with the maximum of the first two kinds.
  """
  kinds = [
    _remat(settings),
    _fsdp(settings, mesh),
    _microbatches(settings, mesh),
    _batch(settings, mesh),
  ]
  for kind in kinds:
    if suggestion := _mildest(kind, attempt):
      return suggestion
  remat, fsdp, microbatches, batch = kinds
  strongest = [kind[-1] for kind in (remat, fsdp) if kind]
  if len(strongest) == 2 and (
    suggestion := _mildest([_merged(strongest)], attempt)
  ):
    return suggestion
  for kind in (microbatches, batch) if strongest else ():
    together = [_merged([*strongest, change]) for change in kind]
    if suggestion := _mildest(together, attempt):
      return suggestion
  return None


def _mildest(changes: list[Change], attempt: Attempt) -> Change | None:
  """The first change that fits, of changes in order of increasing savings.

  The last change is tried first, to see whether the others are worth trying.
  Impossible changes are removed from the end of the list.
  """
  last = None
  while changes and (last := attempt(changes[-1])) is None:
    changes.pop()
  if last is None or not last.fits:
    return None
  for change in changes[:-1]:
    measured = attempt(change)
    if measured and measured.fits:
      return change
  return changes[-1]


def _remat(settings: config_lib.Settings) -> list[Change]:
  stronger = remat.ORDER[remat.ORDER.index(settings.loop.remat) + 1 :]
  return [
    Change({"loop.remat": policy}, "the same result, more computation")
    for policy in stronger
  ]


def _fsdp(
  settings: config_lib.Settings, mesh: Mapping[str, int]
) -> list[Change]:
  """Moves devices from the data axis to the fsdp axis."""
  changes = []
  for more in range(2, mesh["data"] + 1):
    if mesh["data"] % more:
      continue
    overrides = {"mesh.fsdp": mesh["fsdp"] * more}
    if settings.mesh.data != -1:
      overrides["mesh.data"] = mesh["data"] // more
    changes.append(Change(overrides, "the same result, more communication"))
  return changes


def _microbatches(
  settings: config_lib.Settings, mesh: Mapping[str, int]
) -> list[Change]:
  compares = settings.plain["model"].get("depth") == "learned"
  differs = "a different result: rows are compared within a part"
  effect = differs if compares else "the same result"
  return [
    Change({"run.num_microbatches": num}, effect)
    for num in _doublings(settings, mesh, settings.run.num_microbatches)
  ]


def _batch(
  settings: config_lib.Settings, mesh: Mapping[str, int]
) -> list[Change]:
  size, parts = settings.run.batch_size, settings.run.num_microbatches
  return [
    Change(
      {"run.batch_size": size * parts // num},
      "a different result: fewer examples per step",
    )
    for num in _doublings(settings, mesh, parts)
  ]


def _doublings(
  settings: config_lib.Settings, mesh: Mapping[str, int], num: int
) -> list[int]:
  """2 num, 4 num, ... parts of a batch that are equal on all devices."""
  ways = mesh["data"] * mesh["fsdp"]
  parts = []
  while settings.run.batch_size % (ways * num * 2) == 0:
    num *= 2
    parts.append(num)
  return parts


def _merged(changes: list[Change]) -> Change:
  overrides = {k: v for c in changes for k, v in c.overrides.items()}
  return Change(overrides, "; ".join(change.effect for change in changes))
