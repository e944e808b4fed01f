"""Says what a trained model's loops do: does its state settle, and in what?

  loopjax dynamics RUN

RUN is a work directory, zoo:NAME, or a folder of the Hub. The examples are the
first of the test split of its task or, of a language model, rows of up to 256
tokens of --text=FILE. Lines are printed; records and a figure are written to
RUN/dynamics; for zoo:NAME or a folder of the Hub to runs/NAME/dynamics.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from loopjax import checks
from loopjax import config as config_lib
from loopjax.analysis import dynamics as analysis
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.data.text.config import Config as TextConfig
from loopjax.errors import (
  Parser,
  UserError,
  leave,
  local_path,
  one_line_errors,
  writing,
)
from loopjax.hub import convert
from loopjax.library import checked, functions
from loopjax.run import user_cache, zoo
from loopjax.run import workdir as workdir_lib

NUM_LOOPS = 64
_EXAMPLES, _TEXTS, _LENGTH = 64, 8, 256  # Examples, or rows of tokens.


def dynamics(
  model: Any, inputs: Any, *, num_loops: int | None = None
) -> analysis.Dynamics:
  """Runs a model's loops on some examples, and says what they do.

  Args:
    model: a `loopjax.Model`.
    inputs: token ids [B, T]; or a batch with targets, as in `Model.fit`, such
      as one of `loopjax.datasets`; or a list of texts, for a language model,
      which are cut to the length of the shortest.
    num_loops: K, at least 2; 64, or as many as the model can run, if None.

  Raises:
    UserError: the model cannot run this many loops, or does not read such
      inputs.
  """
  settings = model.about.settings
  loops = _num_loops(settings, num_loops)
  batch = _batch(settings, inputs)
  has_answers = not isinstance(settings.task, TextConfig)
  return analysis.analyse(model, batch, loops, has_answers=has_answers)


def _num_loops(settings: config_lib.Settings, given: int | None) -> int:
  if given is not None:
    checked.integer("num_loops", given, 2)
    return checked.loops(settings, given, NUM_LOOPS)
  found = (
    NUM_LOOPS if analysis.can_run(settings, NUM_LOOPS) else settings.eval_loops
  )
  if found < 2:
    raise UserError(
      f"{settings.model_name!r} runs one loop; pass num_loops of at least 2"
    )
  return found


def _batch(settings: config_lib.Settings, inputs: Any) -> dict[str, Any]:
  """The inputs, and "targets" and "weights", if known, as numpy arrays."""
  if isinstance(inputs, list) and inputs and isinstance(inputs[0], str):
    if not isinstance(settings.task, TextConfig):
      raise UserError(f"{settings.model_name!r} reads no texts; pass token ids")
    tokenizer = tokenizer_lib.of(settings.task)
    rows = [tokenizer.encode_prompt(text) for text in inputs]
    length = min(settings.spec.sequence_length + 1, *map(len, rows))
    if length < 2:
      raise UserError("inputs: a text has fewer than two tokens")
    ids = np.array([row[:length] for row in rows])
    inputs = ids[:, :-1], ids[:, 1:]
  if isinstance(inputs, Mapping):
    names = ("inputs", "targets", "weights", "documents")
    inputs = {name: inputs[name] for name in names if name in inputs}
  elif not isinstance(inputs, tuple):
    array = checked.array("inputs", inputs)
    return {"inputs": jax.device_get(checked.ids(settings, "inputs", array))}
  return jax.device_get(checked.batch(settings, inputs))


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
  """Analyses a model, prints lines and paths; returns the exit status."""
  parser = Parser(prog="loopjax dynamics", description=__doc__)
  parser.add_argument(
    "run",
    metavar="RUN",
    help="a work directory, zoo:NAME or a folder of the Hub",
  )
  parser.add_argument(
    "--num_loops", type=int, help="loops to run [64, or as many as it can]"
  )
  parser.add_argument(
    "--limit", type=int, help="number of examples [64; 8 rows of text]"
  )
  parser.add_argument(
    "--text", type=pathlib.Path, help="a text for a language model to read"
  )
  parser.add_argument(
    "--out", type=pathlib.Path, help="where to write [RUN/dynamics]"
  )
  options = parser.parse_args(argv)
  checks.flags_at_least(options, num_loops=2, limit=1)
  user_cache.keep_compiled()
  model = functions.load(options.run)
  inputs = _inputs(model, options)
  folder = local_path(options.run)
  if convert.is_folder(folder):  # As `loopjax score`.
    folder = pathlib.Path("runs", folder.resolve().name)
  output = options.out or zoo.output(folder) / "dynamics"
  with writing(f"--out={output}"):
    output.mkdir(parents=True, exist_ok=True)
  if not os.access(output, os.W_OK):
    raise UserError(f"--out={output}: cannot be written")
  found = dynamics(model, inputs, num_loops=options.num_loops)
  print("\n".join(found.lines()))
  for name in ("examples", "loops", "positions"):
    path = output / f"{name}.jsonl"
    workdir_lib.write_json_lines(path, getattr(found, name))
    print(path)
  print(found.draw(output / "dynamics.png"))
  return 0


def _inputs(model: Any, options: Any) -> Any:
  """The examples: of the test split, or rows of the text."""
  task = model.about.settings.task
  reads_text = isinstance(task, TextConfig)
  limit = options.limit or (_TEXTS if reads_text else _EXAMPLES)
  if options.text is None:
    try:
      batch = functions.datasets(model, batch_size=limit)["test"][0]
    except UserError as error:
      hint = "; --text=FILE reads a text" if reads_text else ""
      raise UserError(f"{error}{hint}") from None
    valid = batch["valid"].astype(bool)
    return {name: x[valid] for name, x in batch.items()}
  if not reads_text:
    raise UserError(f"--text={options.text}: {options.run} reads no texts")
  try:
    text = options.text.read_text(encoding="utf-8")
  except (OSError, ValueError) as error:
    raise UserError(f"--text={options.text}: {error}") from None
  (ids,) = tokenizer_lib.of(task).encode([text])
  length = min(model.spec.sequence_length, _LENGTH, len(ids) - 1)
  if length < 1:
    raise UserError(f"--text={options.text} has fewer than two tokens")
  number = min((len(ids) - 1) // length, limit)
  end = number * length
  return tuple(x.reshape(number, length) for x in (ids[:end], ids[1 : end + 1]))


if __name__ == "__main__":
  leave(main())
