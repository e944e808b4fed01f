"""The settings in which the groups of a table differ, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from loopjax.report.grouping import Group

# The settings that name a row or a line first, in words.
_NAMES = {
  "task.name": "task",
  "model.name": "model",
  "optim.name": "optimizer",
  "model.num_loops": "loops",
  "model.num_layers": "layers",
  "model.num_memory_tokens": "memory tokens",
  "model.halting": "halting",
  "model.injection": "injection",
  "model.depth": "loops in training",
  "model.update": "update",
  "task.num_steps": "rule steps",
  "model.num_local_slots": "slots per layer",
  "model.num_global_slots": "shared slots",
  "model.mlp_ratio": "MLP width over model width",
  "model.sweeps": "parallel sweeps after the chunks",
  "model.chunk_size": "tokens per chunk",
  "model.chunk_jitter": "chunks of random sizes",
  "model.A_range": "range of the decay A",
  "model.num_with_gradient": "last loops with a gradient (0: all)",
  "model.growth_steps": "steps at which loops grow",
  "model.growth_loops": "loops before each growth",
  "model.gate_bias": "initial bias of the gate",
  "model.num_heads": "heads",
  "model.ponder_weight": "ponder weight",
  "model.ponder_warmup_steps": "its warm-up steps",
  "optim.muon_learning_rate": "learning rate of Muon",
  "optim.warmup_steps": "warm-up steps",
  "run.num_steps": "training steps",
  "run.init_from": "starts from",
  "run.init_fresh": "reinitialised",
}
# How a run is watched and what it begins from: left to its command.
_MINOR = (
  "eval.", "run.log", "run.checkpoint", "run.steps_", "run.init", "run.teacher",
)  # fmt: skip


AS_IT_IS = "config defaults"


def varying(groups: Sequence[Group]) -> list[str]:
  """Keys whose values differ between groups, in order."""
  keys = dict.fromkeys(key for group in groups for key in group.overrides)
  return [
    key
    for key in keys
    if any(
      key not in group.overrides
      or group.overrides[key] != groups[0].overrides.get(key)
      for group in groups
    )
  ]


def distinguishing(groups: Sequence[Group]) -> list[str]:
  """The varying keys without keys that follow from others.

  Names of tasks and models are kept and come first; then the keys of _NAMES, in
  order, and other settings of task and model, before rates and steps.
  """
  names = varying(groups)
  for key in sorted(reversed(names), key=_interest):
    fewer = [name for name in names if name != key]
    if not key.endswith(".name") and (
      _num_different(groups, fewer) == _num_different(groups, names)
    ):
      names = fewer
  return sorted(names, key=_interest, reverse=True)


def of_group(group: Group, groups: Sequence[Group]) -> tuple[str, str]:
  """The settings that distinguish a group, and its other differences."""
  first = distinguishing(groups)
  more = [  # What one family alone has follows from its name.
    key
    for key in varying(groups)
    if key not in first
    and not key.startswith(_MINOR)
    and all(key in group.overrides for group in groups)
  ]
  name, also = (
    as_text({k: group.overrides[k] for k in keys if k in group.overrides})
    for keys in (first, more)
  )
  return name or (AS_IT_IS if len(groups) > 1 else "all runs"), also


def same_everywhere(groups: Sequence[Group]) -> str:
  """The settings that all groups override with the same value, in words."""
  keys = varying(groups)
  first = groups[0].overrides if groups else {}
  return as_text({k: v for k, v in first.items() if k not in keys})


def as_text(overrides: Mapping[str, Any]) -> str:
  """Overrides as readable text: `loops = 4, model = disco`."""
  return ", ".join(
    f"{words(key)}\u00a0=\u00a0{_as_said(value)}"
    for key, value in overrides.items()
  )


def words(key: str) -> str:
  """A setting's name in words, without its section."""
  name = key.partition(".")[2].removeprefix("num_").replace("_", " ")
  return _NAMES.get(key, name)


def _interest(key: str) -> tuple[bool, int, int]:
  """Sort key: what matters least comes first."""
  section = key.partition(".")[0]
  place = list(_NAMES).index(key) if key in _NAMES else len(_NAMES)
  return (
    not key.startswith(_MINOR),
    ("run", "optim").index(section) if section in ("run", "optim") else 2,
    -place,
  )


def _num_different(groups: Sequence[Group], keys: Sequence[str]) -> int:
  rows = {repr([group.overrides.get(key) for key in keys]) for group in groups}
  return len(rows)


def _as_said(value: Any) -> str:
  if isinstance(value, bool):
    return "yes" if value else "no"
  return "none" if value in ("", []) else str(value).replace("_", " ")
