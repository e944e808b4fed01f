"""A ranking as text, and as JSON."""

from collections.abc import Mapping
from typing import Any

from loopjax.commands import document
from loopjax.fit import ranking as ranking_lib
from loopjax.fit.counts import products
from loopjax.fit.counts.traffic import Traffic
from loopjax.fit.ranking import Ranking, Work
from loopjax.fit.report import size

_NUM_LINES = 20


def text(ranking: Ranking, model_flops: float) -> str:
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


def record(
  ranking: Ranking,
  model_flops: float,
  memory: Mapping[str, int],
  traffic: Traffic | None,
  steps: int,
) -> dict[str, Any]:
  """All counts for JSON, of one optimizer step on one chip.

  Args:
    ranking, model_flops: as in `text`.
    memory: bytes, by kind.
    traffic: collectives of a call.
    steps: optimizer steps of a call.
  """
  chip = ranking.rates
  found: dict[str, Any] = {
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
    found["collectives"] = {
      kind: {
        "executions": number / steps,
        "bytes": traffic.num_bytes[kind] / steps,
        "asynchronous": ranking.asynchronous.get(kind, 0),
      }
      for kind, number in sorted(traffic.executions.items())
    }
  if chip:
    found["rates"] = {
      **chip._asdict(),
      "compute_share": ranking_lib.COMPUTE_SHARE,
      "bandwidth_share": ranking_lib.BANDWIDTH_SHARE,
    }
    found["utilisation_at_most"] = most_used(ranking, model_flops)
  return found


def _plain(work: Work) -> dict[str, Any]:
  return {
    "seconds": work.seconds,
    "launches": work.launches,
    "bytes": work.num_bytes,
    "flops": {key: work.flops.get(key, 0) for key in products.DTYPES},
  }


def _sorted(works: Mapping[str, Work]) -> list[tuple[str, Work]]:
  return sorted(
    works.items(), key=lambda item: (-item[1].seconds, -item[1].num_bytes)
  )


def _wide(ranking: Ranking) -> list[tuple[str, float]]:
  """Lines with float32 products, and their operations."""
  found = {
    name: work.flops.get("tf32", 0) + work.flops.get("f32", 0)
    for name, work in ranking.lines.items()
  }
  return sorted(
    ((name, flops) for name, flops in found.items() if flops),
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
    f"{_tera(flops[key])} {names[key]}"
    for key in products.DTYPES
    if flops.get(key)
  )


def _tera(flops: float) -> str:
  return f"{flops / 1e12:,.4g} TFLOP"
