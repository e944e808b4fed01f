"""Command line: `loopjax eval RUN... --tasks=FILE,...`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loopjax import checks
from loopjax.commands import document
from loopjax.errors import Parser, UserError, leave, one_line_errors, writing
from loopjax.eval import bits_per_byte, requests
from loopjax.eval.scorer import BATCH_TOKENS, Scorer
from loopjax.generate import source
from loopjax.run import provenance, user_cache, zoo
from loopjax.run import workdir as workdir_lib
from loopjax.saved import language_model

DIRECTORY = "eval"  # Subdirectory of a work directory.
_COLUMNS = {
  "bits_per_byte": "bits/byte",
  "bits_per_byte_v1": "v1",
  "bits_per_byte_corpus": "corpus",
  "accuracy": "accuracy",
  "accuracy_per_char": "per char",
  "accuracy_per_token": "per token",
  "greedy_match": "greedy",
}


class Options(NamedTuple):
  """The flags."""

  workdirs: list[pathlib.Path]
  tasks: str
  folder: pathlib.Path | None
  compare: pathlib.Path | None
  limit: int
  zero_shot: bool
  num_loops: int | None
  exit_threshold: float | None
  checkpoint: int | None
  bos: str | None
  batch_tokens: int


def run(options: Options) -> None:
  """Scores the runs and prints a table.

  Raises:
    UserError: a task is unknown, two have the same name, a run cannot be
      evaluated, a file cannot be read, or scores are meaningless (see
      `Scorer.__call__`).
  """
  _check(options)
  paths = requests.find(options.tasks, options.folder)
  tasks = [
    requests.read(path, options.limit, options.zero_shot) for path in paths
  ]
  _check_names(paths, tasks)
  workdirs = list(dict.fromkeys(options.workdirs))
  if options.compare:
    workdirs = [path for path in workdirs if path != options.compare]
    workdirs.append(options.compare)
  measured: dict[pathlib.Path, list[dict[str, bits_per_byte.Values]]] = {}
  counted: list[str] = []  # Printed after all files are written.
  for workdir in workdirs:
    measured[workdir], lines = _of_run(workdir, tasks, options)
    counted += lines
  table = [
    _row(workdir, task.name, bits_per_byte.summarise(of))
    for workdir, metrics in measured.items()
    for task, of in zip(tasks, metrics, strict=True)
  ]
  print("\n".join(counted), end="\n\n")
  header = "run", "task", "n", *_COLUMNS.values()
  columns = zip(header, *table, strict=True)
  filled = [column for column in columns if any(column[1:])]
  print(document.aligned(list(zip(*filled, strict=True))))
  for workdir in workdirs[:-1] if options.compare else ():
    print(f"\n{workdir} - {options.compare}: difference, 95 % interval, p")
    rows = []
    for task, own_values, other in zip(
      tasks, measured[workdir], measured[workdirs[-1]], strict=True
    ):
      for name, by in bits_per_byte.compare(own_values, other).items():
        rows.append((task.name, name, *by.cells()))
    print(document.aligned(rows))


def _check(options: Options) -> None:
  """Raises UserError for flags that are out of range."""
  checks.flags_at_least(options, limit=0, num_loops=1, batch_tokens=1)
  if options.compare and options.workdirs == [options.compare]:
    raise UserError(f"--compare={options.compare} is the run itself")


def _check_names(
  paths: Sequence[pathlib.Path], tasks: Sequence[requests.EvalTask]
) -> None:
  """Raises UserError if two tasks would write the same file."""
  by_name: dict[str, pathlib.Path] = {}
  for path, task in zip(paths, tasks, strict=True):
    if task.name in by_name:
      raise UserError(
        f"--tasks: {by_name[task.name]} and {path} have the same name,"
        f" {task.name!r}; one's results would overwrite the other's"
      )
    by_name[task.name] = path


def _of_run(
  workdir: pathlib.Path, tasks: Sequence[requests.EvalTask], options: Options
) -> tuple[list[dict[str, bits_per_byte.Values]], list[str]]:
  """Computes and writes the scores of every item of every task.

  Returns:
    (the scores by task, lines that describe the counts).
  """
  model = language_model.load(
    workdir,
    num_loops=options.num_loops,
    exit_threshold=options.exit_threshold,
    checkpoint=options.checkpoint,
    bos=options.bos,
  )
  directory = zoo.output(workdir) / DIRECTORY
  with writing(directory):  # Fails before hours of work.
    directory.mkdir(parents=True, exist_ok=True)
  scorer = Scorer(model, options.batch_tokens)
  all_scores = bits_per_byte.score(tasks, scorer)
  padding = scorer.num_padding / (scorer.num_tokens + scorer.num_padding)
  lines = [f"{workdir}: {scorer.num_tokens:,} tokens, {padding:.0%} padding"]
  results = []
  for task, scores in zip(tasks, all_scores, strict=True):
    of_items = bits_per_byte.measure(task.items, scores)
    results.append(of_items)
    rows = bits_per_byte.rows(task.items, scores)
    counts = {
      "continuations": len(rows),
      "with_a_cut_context": sum(row["num_cut"] > 0 for row in rows),
      "in_parts": sum(row["num_parts"] > 1 for row in rows),
    }
    lines.append(
      f"  {task.name}: {counts['continuations']:,} continuations,"
      f" {counts['with_a_cut_context']:,} with a truncated context,"
      f" {counts['in_parts']:,} split because longer than the context length"
    )
    name = _file_name(task.name, options)
    result = {
      "task": task.name,
      "metrics": workdir_lib.finite(bits_per_byte.summarise(of_items)),
      **task.facts,
      **model.facts,
      "counts": counts,
      **provenance.environment(),
    }
    with writing(directory):
      workdir_lib.write_json_lines(directory / f"{name}.items.jsonl", rows)
      workdir_lib.write_json(directory / f"{name}.json", result)
  return results, lines


def _file_name(task: str, options: Options) -> str:
  """File name: the task and the given flags that affect its scores."""
  options_set = {
    "limit": options.limit or None,
    "num_loops": options.num_loops,
    "exit_threshold": options.exit_threshold,
    "checkpoint": options.checkpoint,
    "bos": options.bos,
  }
  return ",".join(
    [task, *(f"{flag}={x}" for flag, x in options_set.items() if x is not None)]
  )


def _row(
  workdir: pathlib.Path, task: str, summary: Mapping[str, Any]
) -> tuple[str, ...]:
  """A row of the table: scores with standard errors, "" where missing."""
  cells = [
    " ± ".join(
      f"{summary[x]:.4f}"
      for x in (name, f"{name}/standard_error")
      if x in summary
    )
    for name in _COLUMNS
  ]
  return str(workdir), task, f"{summary['n']:,}", *cells


@one_line_errors
def main(argv: list[str] | None = None) -> int:
  """Scores runs on tasks and prints a table; returns the exit status."""
  parser = Parser(
    prog="loopjax eval",
    description=(
      "Scores language models on OLMES request files: bits per byte and"
      " accuracy. Writes RUN/eval/TASK.json and TASK.items.jsonl."
    ),
  )
  parser.add_argument(
    "workdirs", type=pathlib.Path, nargs="+", metavar="RUN", help="runs"
  )
  parser.add_argument(
    "--tasks", default="", help="request files, or file names in --folder"
  )
  parser.add_argument("--folder", type=pathlib.Path, help="request files")
  parser.add_argument(
    "--compare",
    type=pathlib.Path,
    help="baseline run: compare all others with it",
  )
  parser.add_argument(
    "--limit", type=int, default=0, help="number of questions per task [all]"
  )
  parser.add_argument(
    "--zero_shot",
    action="store_true",
    help="remove the solved examples before each question",
  )
  source.add_model_flags(parser)
  parser.add_argument(
    "--exit_threshold",
    type=float,
    help="exit threshold, for models with early exits",
  )
  parser.add_argument(
    "--batch_tokens",
    type=int,
    default=BATCH_TOKENS,
    help=f"maximum number of tokens in a batch [{BATCH_TOKENS}]",
  )
  options = vars(parser.parse_args(argv))
  user_cache.keep_compiled()
  run(Options(**options))
  return 0


if __name__ == "__main__":
  leave(main())
