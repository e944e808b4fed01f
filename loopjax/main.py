"""Command line: `python -m loopjax.main --config=FILE[:preset] --workdir=DIR`.

Exit status: 0 done, 2 a mistake of the user's, 3 training diverged.
"""

import json
import os
import pathlib

from absl import flags

from loopjax import command_line
from loopjax.errors import UserError

MODES = ("train", "eval", "train_and_eval", "describe")

flags.adopt_module_key_flags(command_line)  # So that --help shows them.
_MODE = flags.DEFINE_enum("mode", "train_and_eval", MODES, "What to do.")


def main(argv: list[str]) -> int:
  """Does what --mode says; returns the exit status."""
  del argv
  import jax

  from loopjax import describe, train

  jax.config.update("jax_compilation_cache_dir", _compilation_cache())
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  config, workdir = command_line.CONFIG.value, command_line.WORKDIR.value
  if config is None:
    raise UserError("--config=FILE is missing")
  if _MODE.value == "describe":
    print(json.dumps(describe.describe(config), indent=2))
    return 0
  if not workdir:
    raise UserError("--workdir=DIR is missing")
  summary = train.run(config, pathlib.Path(workdir), _MODE.value)
  return {"completed": 0, "diverged": 3}[summary["status"]]


def _compilation_cache() -> str:
  """Compiled programs are kept per user, so that second starts are quick."""
  default = pathlib.Path.home() / ".cache" / "loopjax" / "compilation"
  return os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default))


if __name__ == "__main__":
  command_line.run(main)
