"""Settings and fields of requests of earlier versions, which are still read.

One idea has one name in every family (docs/glossary.md). A config.json, a
config file, a command line or a request may have the name that a setting had in
an earlier version, and a config.json a setting that no longer exists; only
these tables know them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from loopjax.errors import UserError, note
from loopjax.sections import flatten


class Renamed(NamedTuple):
  """The present name of a setting.

  Attributes:
    name: "section.key", or the field of a request.
    values: the present values of old ones; others are unchanged.
    computed: old value -> present one, where `values` cannot list them.
  """

  name: str
  values: Mapping[Any, Any] = {}
  computed: Callable[[Any], Any] | None = None

  def value(self, old: Any) -> Any:
    """The present value of an old one."""
    if self.computed:
      return self.computed(old)
    known = isinstance(old, str | bool | int) and old in self.values
    return self.values[old] if known else old


def _rates(gate_rate: float) -> list[str]:
  return [] if gate_rate == 1 else [f"latent_gates={gate_rate}"]


ANY, REQUEST = "any family", "request"
_POST_NORM = Renamed("model.norm_order", {False: "pre", True: "branch"})
_WITH_POST_NORM = (
  "disco", "looped", "melt", "ponderlm", "sleep", "transformer",
)  # fmt: skip

# (family, old name) -> the present one.
RENAMED: Mapping[tuple[str, str], Renamed] = {
  **{(family, "model.post_norm"): _POST_NORM for family in _WITH_POST_NORM},
  ("recurrent", "model.exit_norm"): Renamed(
    "model.loop_norm", {"none": "final_only"}
  ),
  ("sleep", "model.pass_norm"): Renamed(
    "model.loop_norm", {False: "final_only", True: "per_loop"}
  ),
  ("sleep", "model.inject"): Renamed(
    "model.injection", {False: "none", True: "add"}
  ),
  ("sleep", "model.num_passes"): Renamed("model.num_loops"),
  ("sleep", "model.num_prelude_layers"): Renamed("model.num_prelude"),
  ("sleep", "model.num_coda_layers"): Renamed("model.num_coda"),
  ("sleep", "model.gradient_passes"): Renamed("model.num_with_gradient"),
  (ANY, "loop.kind"): Renamed("loop.execution"),
  (ANY, "eval.loop_kind"): Renamed("eval.execution"),
  (ANY, "optim.gate_rate"): Renamed("optim.rates", computed=_rates),
  (REQUEST, "exit"): Renamed("exit_threshold"),
  (REQUEST, "loops"): Renamed("num_loops"),
}

# (family or task, setting that no longer exists) -> its default, which is what
# loopjax now always does.
REMOVED: Mapping[tuple[str, str], Any] = {
  ("adaptive", "model.z_weight"): 0.0,
  ("melt", "model.history_hops"): -1,
  ("ponderlm", "model.residual"): "initial",
  ("ponderlm", "model.embedding_scale"): "none",
  ("ponderlm", "model.input_scale"): 1.0,
  ("recurrent", "model.depth_sigma"): 0.5,
  ("sleep", "model.answer_chunk"): "merged",
  ("sleep", "model.dt_range"): [1e-3, 0.1],
  ("utm", "model.memory_init_std"): 0.02,
  ("utm", "model.step_embedding"): "wrap",
  ("utm", "model.router_input"): "block",
  ("utm", "model.forced_remainder"): True,
  ("utm", "model.ponder_over"): "all",
  ("sudoku", "task.loss_on"): "all",
}


def find(family: str, name: str) -> Renamed | None:
  """What a family's setting of an old name is now; None for other names."""
  return RENAMED.get((family, name)) or RENAMED.get((ANY, name))


def present(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Values by their present names, in order.

  Args:
    family: `model.name`, or REQUEST.
    values: by present or old name.

  Raises:
    UserError: a setting has a value by its old name and by its present one.
  """
  found: dict[str, Any] = {}
  for name, value in values.items():
    renamed = find(family, name)
    if renamed and renamed.name in values:
      raise twice(name, renamed.name)
    found[renamed.name if renamed else name] = (
      renamed.value(value) if renamed else value
    )
  return found


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """The sections of a config.json, by present names, without removed settings.

  Raises:
    UserError: as in `present`, or a removed setting is not at its default.
  """
  family = config.get("model", {}).get("name", "")
  sections: dict[str, Any] = {
    name: {} if isinstance(section, Mapping) else section
    for name, section in config.items()
  }
  whole = {name: x for name, x in config.items() if isinstance(x, Mapping)}
  values = present(family, flatten(whole))
  for setting, value in without_removed(config, values).items():
    section, _, key = setting.partition(".")
    sections[section][key] = value
  return sections


def without_removed(
  config: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
  """The settings among a run's that still exist.

  Args:
    config: the run's sections; "model" and "task" have a name.
    values: by "section.key".

  Raises:
    UserError: a removed setting is not at its default.
  """
  found = dict(values)
  for name, value in values.items():
    section = config.get(name.partition(".")[0])
    owner = section.get("name", "") if isinstance(section, Mapping) else ""
    key = owner, name
    if key not in REMOVED:
      continue
    if value != REMOVED[key]:
      raise UserError(
        f"{name}={value!r} is no longer supported: it is always"
        f" {REMOVED[key]!r}"
      )
    del found[name]
  return found


def say(family: str, values: Mapping[str, Any], place: str = "") -> None:
  """Says, once and on one line of standard error, which names are old ones.

  Args:
    family: `model.name`, or REQUEST.
    values: by present or old name.
    place: where they are; "" if the user has just typed them.
  """
  said = [
    f"{name} is now {renamed.name}"
    + (
      f"={renamed.value(value)!r}" if renamed.values or renamed.computed else ""
    )
    for name, value in values.items()
    if (renamed := find(family, name))
  ]
  if said:
    note(f"{place}: {', '.join(said)}" if place else ", ".join(said))


def twice(old: str, name: str) -> UserError:
  """The mistake of setting one setting by two names."""
  return UserError(f"{old} is the old name of {name}: set only {name}")
