"""Loops around some layers of a trained transformer.

The layers before them become the prelude, those after them the coda, of a model
of the family `recurrent` with the same outputs. With "gate" they are the same
for any number of loops: from the second on, the state moves by a learned share
of each feature, initially 0. With "damped", h + (core(h) - h) / K (arXiv
2605.23872), they are the same for one loop, and more loops need no training.
With "relaxed", K loops replace the layers, and each adds matrices of low rank
to the shared ones (`loop.relaxed`).
"""

import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.hub import convert
from loopjax.loop import relaxed
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.run.checkpoints import restore
from loopjax.sections import flatten
from loopjax.types import PRECISIONS

UPDATES = ("gate", "damped", "relaxed")
# What a model of the family `recurrent` has if it is a transformer.
_TRANSFORMER = {
  "num_loops": 1,
  "injection": "none",
  "state": "input",
  "prelude_norm": False,
  "loop_norm": "final_only",
  "update": "replace",
  "relaxed_rank": 0,
}


class Retrofit(NamedTuple):
  """How to make the loop.

  Attributes:
    core: "s:t", the layers in the loop: s, ..., t - 1, counted from 0.
    update: one of UPDATES.
    num_loops: K of the new model.
    relaxed_rank: rank of what each loop adds, with "relaxed".
    checkpoint: step of a run; None for the newest.
  """

  core: str
  update: str = "gate"
  num_loops: int = 4
  relaxed_rank: int = 0
  checkpoint: int | None = None


def retrofit(
  source: pathlib.Path, workdir: pathlib.Path, options: Retrofit
) -> dict[str, Any]:
  """Writes a run with zero steps and a looped model; returns its summary.

  Args:
    source: a run of the family transformer, looped or recurrent without loops,
      or a folder of the Hub that becomes one.
    workdir: a directory without a run.
    options: how to make the loop.

  Raises:
    UserError: the source cannot be read, already has loops or has unsupported
      layers, or the options do not fit; nothing is written then.
  """
  relaxes = options.update == "relaxed"
  if relaxes != (options.relaxed_rank > 0):
    raise UserError(
      f"--update={options.update} and --relaxed_rank={options.relaxed_rank}:"
      " --update=relaxed needs a positive rank; other updates have none"
    )
  workdir_lib.check_new(workdir)
  config, params, folder = read_source(source, options.checkpoint)
  old = config.model.copy_and_resolve_references()
  try:
    num_layers = _num_layers(old)
  except UserError as error:
    raise UserError(f"{source}: {error}") from error
  start, end = _core(options.core, num_layers)
  if relaxes and (end - start) % options.num_loops:
    raise UserError(
      f"--core={options.core}: {end - start} layers cannot be replaced by"
      f" --num_loops={options.num_loops} loops of as many layers each"
    )
  settings = _set_loop(config, start, end, num_layers, options)
  target = convert.abstract_params(settings)

  def make(params: Any) -> Any:
    made = _split(_plain(old.name, params), start, end)
    if relaxes:
      made["layers"], made["differences"] = relaxed.split(
        made["layers"], options.num_loops, options.relaxed_rank
      )
    made["update_share"] = jnp.zeros(
      old.width, PRECISIONS[old.precision].params
    )
    # Without parts that have no layers, and gates that are not used.
    return {name: made[name] for name in target}

  places = jax.tree.map(lambda x: x.sharding, target)
  made = jax.jit(make, out_shardings=places)(params)
  origin = {"retrofitted": str(source), "core": options.core}
  return convert.write_run(workdir, config, made, folder, origin)


def read_source(
  source: pathlib.Path, checkpoint: int | None, dtype: str = "float32"
) -> tuple[ml_collections.ConfigDict, Any, pathlib.Path]:
  """Config, parameters, and the folder of Hub files, if any.

  Args:
    source: a run, or a folder of the Hub.
    checkpoint: step of a run; None for the newest.
    dtype: of the parameters of a folder.
  """
  if source.is_file() or convert.is_folder(source):
    if checkpoint is not None:
      raise UserError(f"--checkpoint={checkpoint}: {source} is not a run")
    config, _, params = convert.read_folder(source, dtype=dtype)
    return config, params, source
  settings = config_lib.of_run(source, str(source))
  config = config_lib.make(settings.model_name, settings.plain["task"]["name"])
  config_lib.override(config, flatten(settings.plain))
  _, params = restore.chosen_params(
    source, checkpoint, convert.abstract_params(settings), str(source)
  )
  return config, params, zoo.located(source) / convert.DIRECTORY


def _num_layers(model: ml_collections.ConfigDict) -> int:
  """L of a transformer; raises UserError if it has loops."""
  if model.name == "recurrent":
    for name, value in _TRANSFORMER.items():
      if model[name] != value:
        raise UserError(f"model.{name}={model[name]!r}: expected {value!r}")
    return model.num_prelude + model.num_layers + model.num_coda
  if model.get("rope_scaling"):
    raise UserError("model.rope_scaling: `recurrent` does not support it")
  if model.name == "looped" and model.num_loops == 1:
    return model.num_layers
  if model.name == "transformer":
    if model.num_loops > 1 and model.loop_norm == "per_loop":
      raise UserError(
        "model.loop_norm='per_loop': norms between layers are unsupported"
      )
    return model.num_loops * model.num_layers
  raise UserError(
    f"model.name={model.name!r}, model.num_loops={model.get('num_loops')}:"
    " expected a transformer without loops"
  )


def _plain(family: str, params: Any) -> Any:
  """Parameters with all layers in one stack, and one final norm."""
  if family == "recurrent":
    names = [x for x in ("prelude", "layers", "coda") if x in params]
    parts = [params[name] for name in names]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return {**params, "layers": whole}
  norm = params["final_norm"]["scale"]
  # That of a transformer's copies is stacked.
  return {**params, "final_norm": {"scale": norm.reshape(norm.shape[-1])}}


def _split(params: Any, start: int, end: int) -> dict[str, Any]:
  """The parameters with the stack in three parts."""
  spans = {
    "prelude": slice(0, start),
    "layers": slice(start, end),
    "coda": slice(end, None),
  }
  parts = {
    name: jax.tree.map(lambda x, of=span: x[of], params["layers"])
    for name, span in spans.items()
  }
  return {**params, **parts}


def _core(text: str, num_layers: int) -> tuple[int, int]:
  """(s, t) of "s:t"; raises UserError unless 0 <= s < t <= L."""
  found = re.fullmatch(r"(\d+):(\d+)", text)
  start, end = map(int, found.groups()) if found else (0, 0)
  if not 0 <= start < end <= num_layers:
    raise UserError(
      f"--core={text}: expected s:t, for layers s to t - 1 of {num_layers}"
    )
  return start, end


def _set_loop(
  config: ml_collections.ConfigDict,
  start: int,
  end: int,
  num_layers: int,
  options: Retrofit,
) -> config_lib.Settings:
  """Changes a config to the looped model's; returns its settings."""
  model, relaxes = config.model, options.update == "relaxed"
  values = {
    **_TRANSFORMER,
    "norm_order": model.norm_order,
    "num_prelude": start,
    "num_layers": (end - start) // (options.num_loops if relaxes else 1),
    "num_coda": num_layers - end,
    "num_loops": options.num_loops,
    "update": "replace" if relaxes else options.update,
    "relaxed_rank": options.relaxed_rank,
    "depth": "fixed",
    "num_with_gradient": 0,
    "growth_steps": (),
    "growth_loops": (),
  }
  fresh = {
    "run.init_from": "", "run.init_fresh": "", "run.teacher": "",
    "optim.frozen": "",
  }  # fmt: skip
  config_lib.override(config, {"model.name": "recurrent"})
  named = {f"model.{name}": value for name, value in values.items()}
  config_lib.override(config, {**named, **fresh})
  return config_lib.resolve(config)
