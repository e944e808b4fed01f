"""Converts Hub folders to work directories and back.

An imported work directory is a run with zero steps: `run.init_from` and
`run.teacher` accept it, and it can be evaluated and exported. The model's
original config.json and tokenizer are stored in hub/.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.errors import UserError, unreadable
from loopjax.hub import files, gguf, huginn, llama, tokenizer_files, weights
from loopjax.hub import layout as layout_lib
from loopjax.hub.layout import Layout
from loopjax.hub.tokenizer_files import FILES, TOKENIZER
from loopjax.program import state as state_lib
from loopjax.run import provenance, user_cache
from loopjax.run import workdir as workdir_lib
from loopjax.run.checkpoints import checkpoint, integrity, restore

DIRECTORY = workdir_lib.HUB
_ADAPTER = "adapter_config.json"  # What PEFT writes beside a LoRA's matrices.
STEP = "loopjax_step"  # Key of an exported config.json: the checkpoint's step.
# From the dtype of parameters to `model.precision`.
PRECISIONS = {"float32": "float32", "bfloat16": "bfloat16_params"}
# Tokens of a row of an imported run, and of a text, unless a flag says more: a
# cache for all that some models can read would not fit into memory.
MAX_TOKENS = 4096
# Of exported tensors; a GGUF file may also quantise them.
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
EXPORTED = (*_DTYPES, gguf.QUANTIZED)
# Keys of config.json not exported: code to run, and what wrote the file.
_DROPPED = ("auto_map", "transformers_version", "rope_parameters")


class Export(NamedTuple):
  """How to export a run; see `loopjax.hub.__main__`.

  Attributes:
    layout: a key of LAYOUTS; "" is an error that names those that fit.
    dtype: one of EXPORTED; "" for the dtype of the run's parameters.
    checkpoint: step; None for the newest.
    max_bytes: maximum size of a file of safetensors.
    gguf: whether to write a GGUF file.
  """

  layout: str
  dtype: str = ""
  checkpoint: int | None = None
  max_bytes: int = 5 * 10**9
  gguf: bool = False


class Imported(NamedTuple):
  """A model loaded from a folder.

  Attributes:
    config: the config of a run with this model.
    settings: `config`, resolved.
    params: the parameters, sharded over all devices.
  """

  config: ml_collections.ConfigDict
  settings: config_lib.Settings
  params: Any


def is_folder(path: pathlib.Path) -> bool:
  """Whether a path is a folder of the Hub, not a run."""
  config = path / "config.json"
  if not config.is_file():
    return (path / _ADAPTER).is_file()
  return "model_type" in workdir_lib.read_json(config)


def read_folder(
  folder: pathlib.Path,
  *,
  dtype: str = "float32",
  sequence_length: int = MAX_TOKENS,
  there: Mapping[str, files.Tensor] | None = None,
) -> Imported:
  """Reads a folder as `import_folder` does; writes nothing.

  Args:
    folder: contains config.json, tokenizer.json and safetensors.
    dtype: see `import_folder`.
    sequence_length: see `import_folder`.
    there: the tensors of a GGUF file, which replace those of the folder.
  """
  if folder.is_file():
    raise UserError(
      f"{folder}: is a file; `loopjax hub import` converts a GGUF file to a"
      " work directory, which can be used in its place"
    )
  if (folder / _ADAPTER).is_file():
    raise UserError(
      f"{folder}: is an adapter, not a model; merge it into its base model, in"
      " the package peft with merge_and_unload, and save that"
    )
  if not (folder / TOKENIZER).is_file():
    missing = (
      f"contains no {TOKENIZER}" if folder.exists() else "no such folder"
    )
    raise UserError(f"{folder}: {missing}")
  path = folder / "config.json"
  theirs = workdir_lib.read_json(path)
  try:
    layout = layout_of(theirs)
    theirs = with_defaults(layout, theirs)
    model = settings_of(layout, theirs)
    vocab_size = layout_lib.need(theirs, "vocab_size", int)
    longest = layout_lib.need(theirs, layout.context, int)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  config = config_lib.make(layout.family, "text")
  task = {
    "tokenizer": str(tokenizer_files.completed(folder).resolve()),
    "end_token": tokenizer_files.end_token(folder),
    **tokenizer_files.beginning(folder)._asdict(),
    "vocab_size": vocab_size,
    "sequence_length": min(sequence_length, longest),
  }
  values = {
    **{f"model.{name}": value for name, value in model.items()},
    "model.precision": PRECISIONS[dtype],
    **{f"task.{name}": value for name, value in task.items()},
    "optim.warmup_steps": 0,
    "eval.depth_factor": 0,
  }
  config_lib.override(config, values)
  settings = config_lib.resolve(config)
  made: Any = settings.model
  head_width = made.block_shape().head_width
  if there is not None:
    layout = gguf.layout_of(layout, theirs["model_type"])
  shapes = abstract_params(settings)
  params = weights.read(folder, layout, shapes, head_width, there)
  return Imported(config, settings, params)


def import_folder(
  folder: pathlib.Path,
  workdir: pathlib.Path,
  *,
  dtype: str = "float32",
  sequence_length: int = MAX_TOKENS,
) -> dict[str, Any]:
  """Imports a folder into a new work directory; returns its summary.

  Args:
    folder: contains config.json, tokenizer.json and safetensors; or a GGUF
      file.
    workdir: a directory without a run.
    dtype: dtype of the parameters, "float32" or "bfloat16".
    sequence_length: tokens per row; limited to the model's context length.

  Raises:
    UserError: a file is missing, damaged or not supported; nothing is written
      then.
  """
  workdir_lib.check_new(workdir)
  source = folder
  with contextlib.ExitStack() as stack:
    there = None
    if folder.is_file():
      folder, there = stack.enter_context(gguf.unpacked(folder))
    config, _, params = read_folder(
      folder, dtype=dtype, sequence_length=sequence_length, there=there
    )
    origin = {"imported": str(source), "imported_sha256": digest(source)}
    return write_run(workdir, config, params, folder, origin)


def digest(path: pathlib.Path) -> str:
  """SHA-256 of what an import of a folder or a GGUF file depends on.

  Files are read once: the user's cache knows their sizes and times.

  Raises:
    UserError: a file cannot be read.
  """
  if path.is_file():
    paths = [path]
  else:
    names = {"config.json", *FILES}
    paths = sorted(
      one
      for one in path.iterdir()
      if one.name in names or ".safetensors" in one.name
    )

  def write(directory: pathlib.Path) -> None:
    (directory / "sha256").write_text(_digest(paths), "utf-8")
    if _states(paths) != states:
      raise UserError(f"{path}: changed while it was being read; start again")

  states = _states(paths)
  key = hashlib.sha256(repr(states).encode()).hexdigest()
  return (user_cache.entry("digests", key, write) / "sha256").read_text("utf-8")


def _states(paths: Sequence[pathlib.Path]) -> list[tuple[str, int, int, int]]:
  """What changes with the content of files, whatever copies preserve."""
  found = []
  for path in paths:
    try:
      now = path.stat()
    except OSError as error:
      raise unreadable(str(path), error) from None
    times = now.st_mtime_ns, now.st_ctime_ns
    found.append((str(path.resolve()), now.st_size, *times))
  return found


def _digest(paths: Iterable[pathlib.Path]) -> str:
  """SHA-256 of the contents of files."""
  sha = hashlib.sha256()
  for path in paths:
    try:
      with path.open("rb") as file:
        sha.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
      raise unreadable(str(path), error) from None
  return sha.hexdigest()


def write_run(
  workdir: pathlib.Path,
  config: ml_collections.ConfigDict,
  params: Any,
  folder: pathlib.Path | None,
  origin: dict[str, Any],
) -> dict[str, Any]:
  """Writes a run that has only parameters; returns its summary.

  Args:
    workdir: a directory without a run.
    config, params: of the run; a tokenizer in `folder`
      becomes the run's.
    folder: has the Hub's files; None if there are none.
    origin: the source of the parameters, for the summary, and the "steps" of
      their training if there were any.

  Raises:
    UserError: the directory contains a run, or checkpoints of one.
  """
  origin = {"steps": 0, **origin}
  with workdir_lib.locked(workdir):
    workdir_lib.check_new(workdir)  # Another process may just have written it.
    left = [f"checkpoints/{step}" for step in restore.steps(workdir)]
    if left:
      raise UserError(
        f"{workdir}: has no config.json, but {', '.join(left)}, which would be"
        " read in place of this model; remove them"
      )
    kept = workdir / DIRECTORY
    kept.mkdir(exist_ok=True)
    for name in ("config.json", *FILES):
      if folder and (folder / name).is_file():
        shutil.copyfile(folder / name, kept / name)
    if folder and (folder / TOKENIZER).is_file():
      shutil.copyfile(tokenizer_files.completed(folder), kept / TOKENIZER)
    if (kept / TOKENIZER).is_file():
      config.task.tokenizer = str((kept / TOKENIZER).resolve())
    else:
      tokenizer = config.task.get("tokenizer", "")
      workdir_lib.keep_hub_files(None, workdir, tokenizer)
    with checkpoint.Checkpoints(workdir) as checkpoints:
      checkpoints.save(origin["steps"], {"params": params}, origin)
    summary = {
      "status": "completed",
      "metrics": {},
      "parameters": state_lib.num_elements(params),
      **origin,
      "digest": integrity.digest(integrity.record(params)),
      **provenance.environment(),
    }
    workdir_lib.write_json(workdir / "config.json", config_lib.to_dict(config))
    workdir_lib.write_json(workdir / "summary.json", summary)
  return summary


def export_run(
  workdir: pathlib.Path, folder: pathlib.Path, options: Export
) -> None:
  """Writes a run's newest parameters, averaged if it averages, to a folder.

  Or to a GGUF file. Token ids that exist only to pad the vocabulary are
  dropped.

  Raises:
    UserError: the run's model is not a language model that the layout can
      express, or the folder exists or is being written; nothing is written
      then.
  """
  _check_new(folder)
  _check_options(options)
  label = str(workdir)
  settings = config_lib.of_run(workdir, label)
  model: Any = settings.model
  if not isinstance(settings.task, TextConfig):
    raise UserError(f"{label}: its task is not 'text'")
  vocab_size = settings.spec.vocab_size
  if not settings.task.end_token:
    vocab_size -= settings.spec.num_padding_tokens
  config = _chosen_config(settings, options, vocab_size, label)
  layout = LAYOUTS[options.layout]
  step, params = restore.chosen_params(
    workdir, options.checkpoint, abstract_params(settings), label
  )
  table = params["token_embedding"]["embedding"]
  params["token_embedding"]["embedding"] = table[:vocab_size]
  if not model.tied:
    params["head"]["kernel"] = params["head"]["kernel"][:, :vocab_size]
  partial = folder.with_name(f".{folder.name}.partial")
  try:
    partial.mkdir(parents=True)
  except FileExistsError as error:
    raise UserError(
      f"{partial}: another export is writing it; if that was killed, remove it"
    ) from error
  with contextlib.ExitStack() as stack:
    stack.callback(shutil.rmtree, partial, ignore_errors=True)
    _check_new(folder)  # Another export may just have written it.
    kept, task = workdir / DIRECTORY, settings.task
    tokenizer = tokenizer_lib.of(task)
    longest = settings.spec.sequence_length
    base: dict[str, Any] = {
      layout.context: longest,
      "eos_token_id": tokenizer.end,
      "bos_token_id": tokenizer.begin,
    }
    if (kept / "config.json").is_file():
      base = workdir_lib.read_json(kept / "config.json")
    if task.tokenizer == "bytes":
      tokenizer_files.write_bytes(partial)
    else:
      tokenizer_files.copy(pathlib.Path(task.tokenizer), partial)
    tokenizer_files.write_ends(partial, tokenizer)
    config = {k: v for k, v in base.items() if k not in _DROPPED} | config
    dtype = options.dtype or params["token_embedding"]["embedding"].dtype.name
    config |= {"dtype": dtype, "torch_dtype": dtype}
    config[STEP] = step
    workdir_lib.write_json(partial / "config.json", config)
    made = weights.tensors(
      gguf.layout_of(layout, options.layout) if options.gguf else layout,
      params,
      model.block_shape().head_width,
      "F32" if options.gguf else _DTYPES[dtype],
      layout.constants(model, base.get(layout.context, longest)),
    )
    if options.gguf:
      gguf.pack(partial, made, dtype, tokenizer_files.end_tokens(partial))
      os.replace(partial / gguf.PACKED, folder)
    else:
      files.write(partial, made, options.max_bytes)
      os.replace(partial, folder)


def context_length(folder: pathlib.Path) -> int | None:
  """The most tokens that a folder's model can read; None without config.json.

  Raises:
    UserError: config.json cannot be read, or does not say it.
  """
  path = folder / "config.json"
  if not path.is_file():
    return None
  theirs = workdir_lib.read_json(path)
  try:
    layout = layout_of(theirs)
    return layout_lib.need(with_defaults(layout, theirs), layout.context, int)
  except UserError as error:
    raise UserError(f"{path}: {error}") from error


def _check_new(folder: pathlib.Path) -> None:
  """Raises UserError if there is something at the place of an export."""
  if folder.exists():
    raise UserError(f"{folder}: already exists")


def _chosen_config(
  settings: config_lib.Settings, options: Export, vocab_size: int, label: str
) -> dict[str, Any]:
  """The config.json in the layout; UserError, with those that fit, if not."""
  names = gguf.ARCHITECTURES if options.gguf else tuple(LAYOUTS)
  family, fitting, lacking = settings.model_name, {}, {}
  for name in names:
    if LAYOUTS[name].family == family:
      try:
        fitting[name] = config_of(LAYOUTS[name], settings.model, vocab_size)
      except UserError as error:
        lacking[name] = str(error)
  if options.layout in fitting:
    return fitting[options.layout]
  kind = "layout of a GGUF file" if options.gguf else "layout"
  if fitting:
    why = f"is not a layout of model.name={family!r}"
    why = lacking.get(options.layout, why) if options.layout else "is missing"
    raise UserError(
      f"{label}: --layout={options.layout or 'NAME'}: {why}; its model fits"
      f" {', '.join(fitting)}"
    )
  if not lacking:
    families = dict.fromkeys(LAYOUTS[name].family for name in names)
    raise UserError(
      f"{label}: no {kind} fits model.name={family!r}; there are some for"
      f" {', '.join(families)}"
    )
  if options.layout:
    why = f"is not a layout of model.name={family!r}"
    why = lacking.get(options.layout, why)
    raise UserError(
      f"{label}: --layout={options.layout}: {why}; no {kind} fits its model"
    )
  reasons = {
    why: [name for name in lacking if lacking[name] == why]
    for why in lacking.values()
  }
  shown = (f"{', '.join(of)}: {why}" for why, of in reasons.items())
  raise UserError(f"{label}: no {kind} fits its model; {'; '.join(shown)}")


def _check_options(options: Export) -> None:
  """Raises UserError for options of an export that contradict each other."""
  if not options.gguf:
    if options.dtype == gguf.QUANTIZED:
      raise UserError(f"--dtype={options.dtype} needs --gguf")
  elif options.layout and options.layout not in gguf.ARCHITECTURES:
    raise UserError(
      f"--layout={options.layout}: a GGUF file can have the layouts"
      f" {', '.join(gguf.ARCHITECTURES)}"
    )
  elif options.max_bytes != Export("").max_bytes:
    raise UserError(f"--max_bytes={options.max_bytes} has no effect on --gguf")


def abstract_params(settings: config_lib.Settings) -> Any:
  """Shapes, dtypes and shardings of a run's parameters, over many devices.

  These are the most devices that divide every large parameter: three do not
  divide a width of 128.
  """
  devices = jax.devices()
  _, shapes = program_lib.abstract_model(settings)
  least = settings.mesh.min_split_size
  for count in range(len(devices), 0, -1):
    sizes = sharding.Config(data=1, fsdp=count)
    mesh = sharding.make_mesh(sizes, devices[:count])
    try:
      shardings = state_lib.param_shardings(mesh, least, shapes)
    except UserError:
      continue
    return state_lib.with_shardings(shapes, shardings)
  raise AssertionError("one device splits nothing")


def check_beginning(workdir: pathlib.Path) -> None:
  """Raises UserError for a run that was imported without `task.begin_token`."""
  given = workdir_lib.read_json(workdir / "config.json")["task"]
  is_imported = (workdir / DIRECTORY / TOKENIZER).is_file()
  if is_imported and "begin_token" not in given:
    raise UserError(
      f"{workdir}: was imported by an earlier version that did not store the"
      " begin token; import it again"
    )


# Those without loops are here as starting points (`hub.retrofit`), and because
# MELT compares with Qwen 3. GPT-2 has learned positions, which no causal family
# here has.
LAYOUTS: Mapping[str, Layout] = {
  **llama.LAYOUTS,
  "huginn_raven": huginn.LAYOUT,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
  """The layout of a config.json; raises UserError if there is none."""
  kind = config.get("model_type")
  if not isinstance(kind, str) or kind not in LAYOUTS:
    raise UserError(f"model_type={kind!r} is not one of {', '.join(LAYOUTS)}")
  return LAYOUTS[kind]


def with_defaults(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json with its missing settings filled in."""
  return {**layout.defaults, **config}


def settings_of(layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
  """Settings of the layout's family from a config.json.

  Raises:
    UserError: a setting is missing or unknown, or no model here can express it.
  """
  for name, value in layout.fixed.items():
    if config.get(name, value) != value:
      raise UserError(
        f"{name}={config[name]!r} is unsupported: expected {value!r}"
      )
  if names := layout_lib.unknown(layout, config):
    shown = ", ".join(f"{name}={_short(config[name])}" for name in names)
    raise UserError(
      f"{shown}: unknown to loopjax; remove from the file what does not change"
      " the model"
    )
  return layout.settings(config)


def _short(value: Any, most: int = 60) -> str:
  shown = repr(value)
  return shown if len(shown) <= most else f"{shown[:most]}..."


def config_of(layout: Layout, model: Any, vocab_size: int) -> dict[str, Any]:
  """The config.json of a model; UserError if the layout cannot express it.

  Args:
    layout: the layout.
    model: config of the layout's family.
    vocab_size: number of token ids.
  """
  names = {of.architecture: name for name, of in LAYOUTS.items()}
  return {
    "architectures": [layout.architecture],
    "model_type": names[layout.architecture],
    **layout.fixed,
    **layout.config(model, vocab_size),
  }
