"""The measurements, as text."""

from loopjax import config as config_lib
from loopjax.fit.measure import Measured
from loopjax.fit.topology import Machine

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
  known = ", ".join(f"{name} {size(n)}" for name, n in parts.items())
  notes = {
    "arguments": known,
    "outputs": "excluding those that reuse an argument's memory",
    "program": "code and constants",
  }
  lines = ["memory per chip"]
  for name, number in measured.memory.items():
    note = notes.get(name, "")
    lines.append(f"  {name:<12}{size(number):>12}   {note}".rstrip())
  if measured.refusal:
    lines += [f"  {known}", f"  compiler: {measured.refusal}"]
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
