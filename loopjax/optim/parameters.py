"""The parameter table: sharding, optimizer and decay of every parameter.

A new parameter needs a row here, or `register` from outside of this
package; a parameter without one is an error at the start of a run. Patterns
match the end of a path: parameters of a stack of layers have the names of one
layer's parameters and an additional leading dimension.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from loopjax.errors import UserError

# Values of `optim.decay`, from the narrowest to the widest.
DECAYS = ("matrices", "tables", "all")


@dataclasses.dataclass(frozen=True)
class Row:
  """Properties of the parameters that match a pattern.

  Attributes:
    pattern: regular expression of the last parts of a path.
    split: mesh axes of the parameter's last dimensions; leading ones are not
      split. P() for parameters that are small in every model.
    optimizer: "muon" or "adamw", if the run has both. Muon is for kernels of x
      W, [..., inputs, outputs], with one W each: fused kernels would have to be
      split first.
    decay: the narrowest `optim.decay` that includes these parameters, one of
      DECAYS.
  """

  pattern: str
  split: P
  optimizer: str
  decay: str


# The most specific row applies, the one that matches the longest end of a path;
# of several such rows the latest, and those of `register` come last.
TABLE = (
  # LoopFormer's maps of one vector per loop. A modulation is four maps.
  Row("((time|size)_embedding/input|modulation)/kernel", P("fsdp", "tensor"),
      "adamw", "matrices"),
  Row("(time|size)_embedding/output/kernel", P("tensor", "fsdp"),
      "adamw", "matrices"),
  Row("((time|size)_embedding/input|modulation)/bias", P(), "adamw", "all"),
  Row("(query|key|value|gate)/kernel", P("fsdp", "tensor"), "muon", "matrices"),
  Row("output/kernel", P("tensor", "fsdp"), "muon", "matrices"),
  Row("(query|key|value)/bias", P(("tensor", "fsdp")), "adamw", "all"),
  Row("output/bias", P(("fsdp", "tensor")), "adamw", "all"),
  Row("convolution/hidden/kernel", P("fsdp", "tensor"), "muon", "matrices"),
  # Taps of depthwise convolutions: orthogonalising them would make channels
  # compete. Jet's tap generator is treated alike.
  Row("convolution/taps/kernel", P("fsdp", "tensor"), "adamw", "matrices"),
  Row("convolution/(taps/)?bias", P(("fsdp", "tensor")), "adamw", "all"),
  Row(r"convolution(s/\d+)?/taps", P(None, ("fsdp", "tensor")),
      "adamw", "matrices"),
  # Gates and decays with one logit in total, or one per head.
  Row("(decay|write)/kernel", P(("fsdp", "tensor"), None), "adamw", "matrices"),
  Row("A_log|dt_bias", P(), "adamw", "all"),
  Row("gate/(weight|bias)", P(), "adamw", "all"),
  # Of loops that share the first one's keys and values, one per head.
  Row("window_gates/(weight|bias)", P(), "adamw", "all"),
  # MELT's gates per feature or per token, new parameters in a trained model.
  Row("latent_gates/(input|latent)/kernel", P(("fsdp", "tensor"), None),
      "adamw", "matrices"),
  Row("latent_gates/bias", P(), "adamw", "all"),
  # Recurrent depth: the injected input, and its weight per feature.
  Row("adapter/kernel", P("fsdp", "tensor"), "muon", "matrices"),
  Row("input_map/kernel", P("fsdp", "tensor"), "adamw", "all"),
  Row("update_share", P(), "adamw", "all"),
  Row("router/kernel", P(), "adamw", "matrices"),
  Row("router/bias", P(), "adamw", "all"),
  Row("exit_gate/kernel", P(), "adamw", "matrices"),
  Row("exit_gate/bias", P(), "adamw", "all"),
  Row("halt_head/kernel", P(), "adamw", "matrices"),
  Row("halt_head/bias", P(), "adamw", "all"),
  Row("head/kernel", P("fsdp", "tensor"), "adamw", "matrices"),
  Row("head/bias", P(), "adamw", "all"),
  Row(
    "token_embedding/embedding", P(("tensor", "fsdp"), None), "adamw", "tables"
  ),
  Row("step_embedding/embedding", P(), "adamw", "tables"),
  Row("(cell|memory)_type/embedding", P(), "adamw", "all"),
  Row("memory_tokens", P(), "adamw", "all"),
  Row("puzzle_vector", P(), "adamw", "all"),
  # Decay would pull a bank's slots together, and loop scales up to 0.69.
  Row("[a-z]+_bank/(keys|values)", P(("tensor", "fsdp"), None), "adamw", "all"),
  Row("loop_scale", P(), "adamw", "all"),
  Row(
    "([a-z_]+_)?norm/(scale|gain|bias)", P(("fsdp", "tensor")), "adamw", "all"
  ),
  Row("([a-z_]+_)?norm/(alpha|shift)", P(), "adamw", "all"),
  # Pairs of `nn.lora`.
  Row("(kernel|embedding)/A", P(("fsdp", "tensor"), None), "adamw", "matrices"),
  Row("(kernel|embedding)/B", P(None, ("fsdp", "tensor")), "adamw", "matrices"),
)  # fmt: skip

_REGISTERED: dict[str, Row] = {}  # By pattern.


def register(*rows: Row) -> None:
  """Adds rows for the parameters of a model that is not in this package.

  The module of the family calls it when it is imported. A row applies to the
  parameters of which no other row matches a longer end of the path, and no
  later row the same end: of those that TABLE lists, too.
  """
  for row in rows:
    if row.optimizer not in ("muon", "adamw") or row.decay not in DECAYS:
      raise UserError(
        f"parameter row {row.pattern!r}: optimizer {row.optimizer!r} must be"
        f" muon or adamw, and decay {row.decay!r} one of {', '.join(DECAYS)}"
      )
    _REGISTERED.pop(row.pattern, None)  # So that it becomes the latest.
    _REGISTERED[row.pattern] = row


def check_registered(params: Any) -> None:
  """Raises UserError if other rows apply wherever a registered one matches."""
  names = _names(params)
  applied = {name: _most_specific(name) for name in names}
  for row in _REGISTERED.values():
    matched = [name for name in names if _length(row, name)]
    others = {applied[name] for name in matched}
    if matched and row not in others:
      shown = ", ".join(sorted(f"{x.pattern!r}" for x in others if x))
      raise UserError(
        f"parameter row {row.pattern!r} never applies: {matched[0]} and all"
        f" others that it matches have more specific or later rows, {shown};"
        " give more of the path"
      )


def _length(row: Row, name: str) -> int:
  """The number of characters at the end of a path that a row matches."""
  found = re.search(f"(?:^|/)({row.pattern})$", name)
  return len(found[1]) if found else 0


def _most_specific(name: str) -> Row | None:
  """The row of a parameter, by its path; None if no row matches."""
  latest_first = reversed((*TABLE, *_REGISTERED.values()))
  row = max(latest_first, key=lambda row: _length(row, name))
  return row if _length(row, name) else None


def rows(params: Any) -> Any:
  """The Row of every parameter, in a tree with the same structure.

  Args:
    params: arrays or abstract arrays.
  """

  missing = []

  def row(path, leaf) -> Row | None:
    name = name_of(path)
    row = _most_specific(name)
    if row is None:
      missing.append((name, list(leaf.shape)))
    elif leaf.ndim < len(row.split):
      raise UserError(
        f"parameter {name} {list(leaf.shape)}: its row {row.pattern!r} is for"
        f" {len(row.split)} dimensions"
      )
    return row

  found = jax.tree_util.tree_map_with_path(row, params)
  if missing:
    named = ", ".join(f"{name} {shape}" for name, shape in missing)
    lines = dict.fromkeys(_suggested(name) for name, _ in missing)
    raise UserError(
      f"parameters {named}: no row of {__name__}.TABLE matches; outside of the"
      " package, the family's module adds them:"
      f" parameters.register({', '.join(lines)})"
    )
  return found


def _suggested(name: str) -> str:
  """A row for a parameter that has none, as code; not split over devices.

  With the name of its module: "kernel" alone would be a row of all kernels.
  """
  pattern = "/".join(name.split("/")[-2:])
  decay = {"kernel": "matrices", "embedding": "tables"}
  last = name.rpartition("/")[2]
  return (
    f"parameters.Row({pattern!r}, P(), 'adamw', {decay.get(last, 'all')!r})"
  )


def splits(params: Any) -> Any:
  """PartitionSpec of the last dimensions of every parameter."""
  return jax.tree.map(lambda row: row.split, rows(params))


def optimizers(params: Any) -> Any:
  """The optimizer of every parameter in a run with both, as in `Row`."""
  return jax.tree.map(lambda row: row.optimizer, rows(params))


def decay_mask(params: Any, decay: str) -> Any:
  """bool for every parameter: whether weight decay applies to it."""
  applied = DECAYS[: DECAYS.index(decay) + 1]
  return jax.tree.map(lambda row: row.decay in applied, rows(params))


def parsed_rates(rates: tuple[str, ...]) -> list[tuple[str, float]]:
  """(pattern, factor) of every "pattern=factor" of `optim.rates`."""
  parsed = []
  for text in rates:
    pattern, equals, number = str(text).rpartition("=")
    try:
      re.compile(pattern)
      factor = float(number)
    except (re.error, ValueError) as error:
      raise UserError(f"optim.rates: {text!r}: {error}") from error
    if not (equals and pattern and 0 < factor < math.inf):
      raise UserError(
        f"optim.rates: {text!r} is not 'pattern=factor' with a factor > 0"
      )
    parsed.append((pattern, factor))
  return parsed


def unused_rates(rates: tuple[str, ...], params: Any) -> list[str]:
  """Those of `optim.rates` that no parameter has: "pattern=factor".

  The first pattern that matches a parameter's path is the parameter's.
  """
  used = {_first(rates, name) for name in _names(params)}
  return [text for at, text in enumerate(rates) if at not in used]


def scale_by_rate(rates: tuple[str, ...]) -> optax.GradientTransformation:
  """Multiplies the updates by the factors of `optim.rates`.

  Args:
    rates: "pattern=factor" each.
  """
  factors = [factor for _, factor in parsed_rates(rates)]

  def init(params: Any) -> optax.EmptyState:
    unused = unused_rates(rates, params)
    # `optax.tree.map_params` calls this without parameters.
    if unused and jax.tree.leaves(params):
      raise UserError(f"optim.rates: {unused[0]!r} applies to no parameter")
    return optax.EmptyState()

  def scale(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    leaves, structure = jax.tree.flatten(updates)
    which = [_first(rates, name) for name in _names(updates)]
    scaled = [
      x if at is None else factors[at] * x
      for x, at in zip(leaves, which, strict=True)
    ]
    return jax.tree.unflatten(structure, scaled), state

  return optax.GradientTransformation(init, scale)


def _first(rates: tuple[str, ...], name: str) -> int | None:
  """The position of the first pattern that matches a path."""
  patterns = (pattern for pattern, _ in parsed_rates(rates))
  matches = (at for at, one in enumerate(patterns) if re.search(one, name))
  return next(matches, None)


def name_of(path: Any) -> str:
  """A path of `jax.tree_util` as text, "layers/mlp/gate/kernel"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _names(params: Any) -> list[str]:
  """The paths of parameters, in jax.tree order."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [name_of(path) for path, _ in leaves]
