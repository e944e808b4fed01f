"""Time and memory needed to import a large model.

  python benchmarks/bench_hub.py --folder=DIR [--preset=NAME] [--dtype=NAME]

Writes a folder of the Hub with the tensors of a preset of configs/lm_looped.py,
random numbers in bfloat16, and imports it in separate processes: "read" is what
`loopjax generate FOLDER` does, "import" is `loopjax.hub import`, which also
writes a checkpoint. "peak" is the process's peak memory (VmHWM), and the memory
before the import, as multiples of the safetensors' size.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import numpy as np

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax.config import presets
from loopjax.hub import convert, files, weights
from loopjax.run import provenance

_PARTS = ("read", "import")


def make(folder: pathlib.Path, preset: str) -> None:
  """Writes config.json, tokenizer.json and files of at most 1 GB."""
  import tokenizers

  path = pathlib.Path(__file__).parents[1] / "configs" / "lm_looped.py"
  settings = config_lib.resolve(presets.read(path)["get_config"](preset))
  _, shapes = program_lib.abstract_model(settings)
  random = np.random.default_rng(0).normal(0.0, 0.02, 2**20).astype(np.float32)
  # Views of a few numbers: only one file's tensors need memory.
  params = jax.tree.map(
    lambda x: np.broadcast_to(random[: x.shape[-1]], x.shape), shapes
  )
  layout, vocab_size = convert.LAYOUTS["ouro"], settings.spec.vocab_size
  folder.mkdir(parents=True)
  head_width = settings.model.block_shape().head_width
  made = weights.tensors(layout, params, head_width, "BF16")
  files.write(folder, made, 10**9)
  words = {f"<{i}>": i for i in range(vocab_size)}
  model = tokenizers.models.WordLevel(words, unk_token="<0>")
  tokenizers.Tokenizer(model).save(str(folder / convert.TOKENIZER))
  content = convert.config_of(layout, settings.model, vocab_size)
  content |= {"max_position_embeddings": 4096, "eos_token_id": 0}
  # Written last: its presence marks a complete folder.
  (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def measure(folder: pathlib.Path, part: str, dtype: str) -> None:
  """Imports the folder; prints time and memory as JSON."""
  size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
  before, started = _peak(), time.perf_counter()
  if part == "read":
    jax.block_until_ready(convert.read_folder(folder, dtype=dtype).params)
  else:
    convert.import_folder(folder, folder / "imported", dtype=dtype)
  report = {
    "part": part,
    "dtype": dtype,
    "seconds": round(time.perf_counter() - started, 1),
    "cpu_seconds": round(time.process_time(), 1),
    "checkpoint_gb": round(size / 1e9, 3),
    "peak": round(_peak() / size, 3),
    "before": round(before / size, 3),
  }
  print(json.dumps(report))


def _peak() -> int:
  """Peak memory of this process so far, in bytes."""
  status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
  return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--preset", default="looplm_1_4b")
  parser.add_argument("--dtype", choices=convert.PRECISIONS, default="bfloat16")
  parser.add_argument("--part", choices=_PARTS, help="One process of it.")
  arguments = parser.parse_args()
  folder = arguments.folder
  if arguments.part:
    measure(folder, arguments.part, arguments.dtype)
    return
  if not (folder / "config.json").exists():
    make(folder, arguments.preset)
  for part in _PARTS:
    shutil.rmtree(folder / "imported", ignore_errors=True)
    subprocess.run(
      [
        sys.executable,
        __file__,
        f"--folder={folder}",
        f"--part={part}",
        f"--dtype={arguments.dtype}",
      ],  # fmt: skip
      check=True,
    )
  shutil.rmtree(folder / "imported", ignore_errors=True)
  print(json.dumps(provenance.environment(), indent=2))


if __name__ == "__main__":
  main()
