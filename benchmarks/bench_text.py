"""Speed and memory of reading and packing text.

python benchmarks/bench_text.py --folder=DIR --text=FILE... [--tokenizer=FILE]

Repeats the text files up to the sizes of --mib and packs the result as training
does, as bytes and as tokens of a `tokenizer.json`, each in a separate process
with an empty cache. "one core" uses only that process, and its rate is per
second of CPU time; "all cores" starts more, and its memory is the sum over all
of them (PSS). The bare tokenizer encodes the same documents in the same batches
and discards the result.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import tokenizers

from loopjax.data.text import files, preparation, task

_BATCH = 1 << 20  # Characters per batch of the bare tokenizer.


def make(path: pathlib.Path, text: list[pathlib.Path], mib: int) -> None:
  """Writes about this many MiB of text."""
  parts = [file.read_bytes() for file in text]
  left = mib << 20
  with open(path, "wb") as file:
    while left > 0:
      for part in parts:
        left -= file.write(part[:left] if left < len(part) else part)
        if left <= 0:
          break


def measure(arguments: argparse.Namespace) -> dict[str, float | int | str]:
  """Packs a file as training does, or encodes it with the bare tokenizer."""
  path, name = arguments.file, arguments.tokenizer or "bytes"
  before, started = time.process_time(), time.perf_counter()
  imports, peaks = _peak_mib(), [0]
  if arguments.part == "bare":
    num_tokens = _encode(path, name)
  else:
    if arguments.part == "one core":
      os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    else:
      threading.Thread(target=_watch, args=(peaks,), daemon=True).start()
    config = task.Config(train_files=str(path), tokenizer=name)
    with contextlib.redirect_stdout(sys.stderr):
      facts = preparation.make(config, str(path)).facts
    num_tokens = sum(facts[split]["tokens"] for split in preparation.SPLITS)
  cpu, size = time.process_time() - before, path.stat().st_size
  seconds = time.perf_counter() - started
  report = {
    "part": arguments.part,
    "tokenizer": pathlib.Path(name).name,
    "MB": round(size / 1e6, 1),
    "tokens": num_tokens,
    "seconds": round(seconds, 2),
    "peak_mib_imports": imports,
  }
  if arguments.part == "all cores":
    return {**report, "peak_mib": max(peaks)}
  return {
    **report,
    "peak_mib": _peak_mib(),
    "cpu_seconds": round(cpu, 2),
    "MB_per_cpu_second": round(size / 1e6 / cpu, 2),
  }


def _encode(path: pathlib.Path, name: str) -> int:
  """Encodes all documents of a file; returns the number of tokens."""
  library = tokenizers.Tokenizer.from_file(name)
  num, batch, size = 0, [], 0

  def encode():
    found = library.encode_batch_fast(batch, add_special_tokens=False)
    return sum(map(len, found))

  for chunk in files.read(str(path)):
    for section in files.sections(chunk):
      batch.append(section)
      size += len(section)
      if size >= _BATCH:
        num += encode()
        batch, size = [], 0
  return num + encode()


def _watch(peaks: list[int]) -> None:
  """Appends the memory of this process and its descendants, in MiB."""
  while True:
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        fields = (
          (folder / "stat")
          .read_text(encoding="utf-8")
          .rpartition(")")[2]
          .split()
        )
        parents[int(folder.name)] = int(fields[1])
    tree, total = [os.getpid()], 0
    for process in tree:  # The list grows.
      tree += [child for child, parent in parents.items() if parent == process]
      with contextlib.suppress(OSError, IndexError):
        text = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text(
          encoding="utf-8"
        )
        total += int(text.split("\nPss:")[1].split()[0])
    peaks.append(total // 1024)
    time.sleep(0.2)


def _peak_mib() -> int:
  """Peak memory of this process so far, in MiB."""
  status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
  return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
  parser.add_argument("--tokenizer", help="Of the parts after the bytes.")
  parser.add_argument("--mib", type=int, nargs="+", default=[128, 1024])
  parser.add_argument("--repeat", type=int, default=3)
  parser.add_argument("--part", help="One process of it.")
  parser.add_argument("--file", type=pathlib.Path)
  arguments = parser.parse_args()
  if arguments.part:
    print(json.dumps(measure(arguments)), flush=True)
    return
  arguments.folder.mkdir(parents=True, exist_ok=True)
  cache = arguments.folder / "cache"
  jobs = []
  for mib in arguments.mib:
    path = arguments.folder / f"text_{mib}.txt"
    make(path, arguments.text, mib)
    jobs += [(path, "one core", None), (path, "all cores", None)]
  small = arguments.folder / "text_16.txt"
  if arguments.tokenizer:
    make(small, arguments.text, 16)
    for part in ("bare", "one core"):
      jobs.append((small, part, arguments.tokenizer))
  for _ in range(arguments.repeat):
    for path, part, tokenizer in jobs:
      shutil.rmtree(cache, ignore_errors=True)
      command = [sys.executable, __file__, f"--folder={arguments.folder}"]
      command += [f"--part={part}", f"--file={path}", "--text", "-"]
      command += [f"--tokenizer={tokenizer}"] if tokenizer else []
      subprocess.run(
        command,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        check=True,
      )


if __name__ == "__main__":
  main()
