"""Command line: `python -m loopjax.main --config=FILE[:preset] --workdir=DIR`.

Exit status: 0 done, 2 a mistake of the user's, 3 training diverged.
"""

import json
import os
import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from loopjax.errors import UserError

MODES = ("train", "eval", "train_and_eval", "describe")

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Config file, with :preset[,section.key=value...] behind it."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes.")
_MODE = flags.DEFINE_enum("mode", "train_and_eval", MODES, "What to do.")


def main(argv: list[str]) -> int:
  del argv
  import jax

  from loopjax import describe, train

  jax.config.update("jax_compilation_cache_dir", _compilation_cache())
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  if _CONFIG.value is None:
    raise UserError("--config=FILE is missing")
  if _MODE.value == "describe":
    print(json.dumps(describe.describe(_CONFIG.value), indent=2))
    return 0
  if not _WORKDIR.value:
    raise UserError("--workdir=DIR is missing")
  summary = train.run(_CONFIG.value, pathlib.Path(_WORKDIR.value), _MODE.value)
  return {"completed": 0, "diverged": 3}[summary["status"]]


def _compilation_cache() -> str:
  """Compiled programs are kept per user, so that second starts are quick."""
  default = pathlib.Path.home() / ".cache" / "loopjax" / "compilation"
  return os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default))


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags; whatever is wrong with them is the user's mistake."""
  try:
    return flags.FLAGS(argv)
  except UserError:
    raise
  except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as e:
    raise UserError(" ".join(str(e.args[0] if e.args else e).split())) from e
  except (OSError, ImportError, SyntaxError) as error:
    raise UserError(f"--config: {error}") from error


def run(entry) -> None:
  """Runs `entry(argv) -> status` and turns UserError into one line."""

  def guarded(parse_or_entry, *args):
    try:
      return parse_or_entry(*args)
    except UserError as error:
      print(f"error: {error}", file=sys.stderr)
      sys.exit(2)

  logging.set_verbosity(logging.WARNING)
  app.run(
    lambda argv: sys.exit(guarded(entry, argv)),
    flags_parser=lambda argv: guarded(_parse, argv),
  )


if __name__ == "__main__":
  run(main)
