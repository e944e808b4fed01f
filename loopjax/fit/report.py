"""The measurements and the ranking, as text and as JSON."""

from collections.abc import Mapping
from typing import Any

from loopjax import config as config_lib
from loopjax.commands import document
from loopjax.fit import ranking as ranking_lib
from loopjax.fit.counts import DTYPES, Traffic
from loopjax.fit.measure import Measured
from loopjax.fit.ranking import Ranking, Work
from loopjax.fit.topology import Machine

_NUM_LINES = 20


def ranking_table(ranking: Ranking, model_flops: float) -> str:
  """The whole ranking, several lines.

  Args:
    ranking: of one optimizer step on one chip.
    model_flops: operations of the step on one chip, without recomputation.
  """
  total, chip = ranking.total, ranking.rates
  lines = [
    "one optimizer step on one chip, ranked by its roofline (not a time)"
  ]
  lines.append(f"  launches  {total.launches:,.0f}")
  lines.append(f"  memory    {size(total.num_bytes)} read and written")
  lines.append(
    "  products  "
    + (_flops(total.flops) or "none")
    + f"; the model needs {_tera(model_flops)}"
  )
  if chip:
    share = most_used(ranking, model_flops)
    used = (
      "" if share is None else f"; model FLOPs utilisation at most {share:.1%}"
    )
    lines.append(f"  at least  {total.seconds:.4g} s{used}")
  else:
    lines.append("  unknown rates of this machine: sorted by bytes")
  for loop in ranking.unknown:
    lines.append(f"  counted once, because its length is unknown: {loop}")
  for target, number in sorted(ranking.unseen.items()):
    lines.append(f"  {number:,.0f} x {target}: products not counted")
  for kind, number in sorted(ranking.asynchronous.items()):
    lines.append(f"  {number:,.0f} x {kind} overlapping other work")
  lines += ["", _table("part of the model", ranking.parts, total)]
  heaviest = dict(_sorted(ranking.lines)[:_NUM_LINES])
  lines += ["", _table("line", heaviest, total)]
  wide = _wide(ranking)
  heading = "products with float32 inputs (TF32 on GPUs), share of all products"
  lines += ["", heading if wide else heading + ": none"]
  every = sum(total.flops.values())
  for name, flops in wide[:_NUM_LINES]:
    lines.append(f"  {flops / every:>6.2%}  {_tera(flops):>12}  {name}")
  return "\n".join(lines)


def most_used(ranking: Ranking, model_flops: float) -> float | None:
  """The model's operations divided by what the chip could compute in this time.

  None if there are loops of unknown length.
  """
  assert ranking.rates
  if ranking.unknown:
    return None
  return model_flops / (ranking.total.seconds * ranking.rates.bf16 * 1e12)


def ranking_record(
  ranking: Ranking,
  model_flops: float,
  memory: Mapping[str, int],
  traffic: Traffic | None,
  steps: int,
) -> dict[str, Any]:
  """All counts for JSON, of one optimizer step on one chip.

  Args:
    ranking, model_flops: as in `ranking_table`.
    memory: bytes, by kind.
    traffic: collectives of a call, which has this many optimizer steps.
  """
  chip = ranking.rates
  record: dict[str, Any] = {
    "what": "ranking by the roofline of the compiled program, not a time",
    "total": _plain(ranking.total),
    "model_flops": model_flops,
    "memory": dict(memory),
    "parts": {name: _plain(work) for name, work in _sorted(ranking.parts)},
    "lines": {name: _plain(work) for name, work in _sorted(ranking.lines)},
    "float32_products": dict(_wide(ranking)),
    "unseen": ranking.unseen,
    "counted_once": list(ranking.unknown),
  }
  if traffic:
    record["collectives"] = {
      kind: {
        "executions": number / steps,
        "bytes": traffic.num_bytes[kind] / steps,
        "asynchronous": ranking.asynchronous.get(kind, 0),
      }
      for kind, number in sorted(traffic.executions.items())
    }
  if chip:
    record["rates"] = {
      **chip._asdict(),
      "compute_share": ranking_lib.COMPUTE_SHARE,
      "bandwidth_share": ranking_lib.BANDWIDTH_SHARE,
    }
    record["utilisation_at_most"] = most_used(ranking, model_flops)
  return record


def _plain(work: Work) -> dict[str, Any]:
  return {
    "seconds": work.seconds,
    "launches": work.launches,
    "bytes": work.num_bytes,
    "flops": {key: work.flops.get(key, 0) for key in DTYPES},
  }


def _sorted(works: Mapping[str, Work]) -> list[tuple[str, Work]]:
  return sorted(
    works.items(), key=lambda item: (-item[1].seconds, -item[1].num_bytes)
  )


def _wide(ranking: Ranking) -> list[tuple[str, float]]:
  """Lines with float32 products, and their operations."""
  arrays = {
    name: work.flops.get("tf32", 0) + work.flops.get("f32", 0)
    for name, work in ranking.lines.items()
  }
  return sorted(
    ((name, flops) for name, flops in arrays.items() if flops),
    key=lambda item: -item[1],
  )


def _table(title: str, works: Mapping[str, Work], total: Work) -> str:
  rows = [(title, "share", "launches", "memory", "TFLOP")]
  for name, work in _sorted(works):
    share = work.num_bytes / max(total.num_bytes, 1)
    if total.seconds:
      share = work.seconds / total.seconds
    rows.append(
      (
        name,
        f"{share:.1%}",
        f"{work.launches:,.0f}",
        size(work.num_bytes),
        f"{sum(work.flops.values()) / 1e12:.3g}",
      )
    )
  return document.aligned(rows, num_left=1)


def _flops(flops: Mapping[str, float]) -> str:
  names = {"bf16": "16-bit", "tf32": "float32, rounded", "f32": "float32"}
  return ", ".join(
    f"{_tera(flops[key])} {names[key]}" for key in DTYPES if flops.get(key)
  )


def _tera(flops: float) -> str:
  return f"{flops / 1e12:,.4g} TFLOP"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def headline(settings: config_lib.Settings, machine: Machine) -> str:
  """Machine and size of the step, one line."""
  kind = machine.devices[0].device_kind
  run = settings.run
  return (
    f"{machine.name}: {len(machine.devices)} x {kind}; {run.batch_size}"
    f" examples per step in {run.num_microbatches} part(s),"
    f" {run.steps_per_call} step(s) per call, loop.remat={settings.loop.remat}"
  )


def table(
  settings: config_lib.Settings, machine: Machine, measured: Measured
) -> str:
  """Memory, communication and largest values, several lines."""
  mesh = ", ".join(f"{axis} {size}" for axis, size in measured.mesh.items())
  lines = [f"mesh: {mesh}; compiled in {measured.seconds:.1f} s", ""]
  lines += _memory(machine, measured)
  if measured.traffic:
    lines += ["", *_traffic(measured, settings.run.steps_per_call)]
    lines += ["", *_largest(measured)]
  return "\n".join(lines)


def verdict(machine: Machine, measured: Measured) -> str:
  """Whether it fits, one line."""
  says = "fits" if measured.fits else "does not fit"
  share = measured.needed / machine.memory
  return (
    f"{says}: {size(measured.needed)} of {size(machine.memory)} per chip"
    f" ({share:.1%})"
  )


def size(num_bytes: float) -> str:
  """Bytes with a binary unit."""
  unit = 0
  while abs(num_bytes) >= 1024 and unit < len(_UNITS) - 1:
    num_bytes, unit = num_bytes / 1024, unit + 1
  return f"{num_bytes:.{2 if unit else 0}f} {_UNITS[unit]}"


def _memory(machine: Machine, measured: Measured) -> list[str]:
  parts = dict(measured.arguments)
  padding = measured.memory.get("arguments", 0) - sum(parts.values())
  if padding > 0:
    parts["padding and other"] = padding
  shown = ", ".join(f"{name} {size(n)}" for name, n in parts.items())
  notes = {
    "arguments": shown,
    "outputs": "excluding those that reuse an argument's memory",
    "program": "code and constants",
  }
  lines = ["memory per chip"]
  for name, number in measured.memory.items():
    note = notes.get(name, "")
    lines.append(f"  {name:<12}{size(number):>12}   {note}".rstrip())
  if measured.refusal:
    lines += [f"  {shown}", f"  compiler: {measured.refusal}"]
  lines.append(f"  {'peak':<12}{size(measured.needed):>12}")
  note = machine.memory_note
  lines.append(f"  {'available':<12}{size(machine.memory):>12}   {note}")
  return lines


def _traffic(measured: Measured, steps: int) -> list[str]:
  traffic = measured.traffic
  assert traffic
  lines = ["collectives per optimizer step, bytes of their results per chip"]
  for kind, count in sorted(traffic.executions.items()):
    number = traffic.num_bytes[kind] / steps
    lines.append(f"  {kind:<20}{count / steps:>8g} x {size(number):>14} total")
  if not traffic.executions:
    lines.append("  none")
  for loop in traffic.unknown:
    lines.append(f"  {loop} has unknown length: its contents count once")
  return lines


def _largest(measured: Measured) -> list[str]:
  lines = ["largest values (some share memory at different times)"]
  for value in measured.largest:
    stacked = ", one row per loop step" if value.stacked else ""
    lines.append(
      f"  {value.number:>2} x {size(value.num_bytes):>11}"
      f"  {value.array:<26} {value.origin}{stacked}"
    )
  return lines
