"""The parameter table: sharding, optimizer and decay of every parameter.

A new kind of parameter needs a row here; a parameter without one is an error at
the start of a run. Patterns match the end of a path: parameters of a stack of
layers have the names of one layer's parameters and an additional leading
dimension.
"""

import dataclasses
import re
from collections.abc import Mapping
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
    rate: setting in section optim that multiplies the learning rate; "" for
      none.
  """

  pattern: str
  split: P
  optimizer: str
  decay: str
  rate: str = ""


# The first row whose pattern matches applies.
TABLE = (
  Row("(query|key|value|gate)/kernel", P("fsdp", "tensor"), "muon", "matrices"),
  Row("output/kernel", P("tensor", "fsdp"), "muon", "matrices"),
  Row("(query|key|value|mlp/gate)/bias", P(("tensor", "fsdp")), "adamw", "all"),
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
      "adamw", "matrices", rate="gate_rate"),
  Row("latent_gates/bias", P(), "adamw", "all", rate="gate_rate"),
  # Recurrent depth: the injected input, and its weight per feature.
  Row("adapter/kernel", P("fsdp", "tensor"), "muon", "matrices"),
  Row("input_map/kernel", P("fsdp", "tensor"), "adamw", "all"),
  Row("update_share", P(), "adamw", "all"),
  Row("depth_logits", P(), "adamw", "all"),
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
)  # fmt: skip


def rows(params: Any) -> Any:
  """The Row of every parameter, in a tree with the same structure.

  Args:
    params: arrays or abstract arrays.

  Raises:
    UserError: no row matches a parameter, or it has fewer dimensions than its
      row splits.
  """

  def row(path, leaf) -> Row:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for row in TABLE:
      if re.search(f"(^|/)({row.pattern})$", name):
        if leaf.ndim < len(row.split):
          raise UserError(
            f"parameter {name} {list(leaf.shape)}: its row {row.pattern!r} of"
            f" {__name__}.TABLE is for {len(row.split)} dimensions"
          )
        return row
    raise UserError(f"parameter {name}: no row of {__name__}.TABLE matches it")

  return jax.tree_util.tree_map_with_path(row, params)


def splits(params: Any) -> Any:
  """PartitionSpec of the last dimensions of every parameter."""
  return jax.tree.map(lambda row: row.split, rows(params))


def optimizers(params: Any) -> Any:
  """ "muon" or "adamw" for every parameter of a run that has both."""
  return jax.tree.map(lambda row: row.optimizer, rows(params))


def decay_mask(params: Any, decay: str) -> Any:
  """bool for every parameter: whether weight decay applies to it."""
  applied = DECAYS[: DECAYS.index(decay) + 1]
  return jax.tree.map(lambda row: row.decay in applied, rows(params))


def scale_by_rate(rates: Mapping[str, float]) -> optax.GradientTransformation:
  """Multiplies updates by the rates that their rows name, if these are not 1.

  Args:
    rates: rates by name of the setting in section optim.

  Raises:
    UserError: from `init`, if no parameter has one of the rates.
  """
  rates = {name: rate for name, rate in rates.items() if rate != 1}

  def init(params: Any) -> optax.EmptyState:
    there_are = {row.rate for row in jax.tree.leaves(rows(params))}
    for name, rate in rates.items():
      # `optax.tree.map_params` calls this without parameters.
      if there_are and name not in there_are:
        raise UserError(f"optim.{name}={rate}: no parameter uses this rate")
    return optax.EmptyState()

  def scale(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    scaled = jax.tree.map(
      lambda x, row: rates[row.rate] * x if row.rate in rates else x,
      updates,
      rows(updates),
    )
    return scaled, state

  return optax.GradientTransformation(init, scale)
