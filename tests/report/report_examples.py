"""Runs for the tests of reports, which nothing trained."""

from loopjax.run import workdir as workdir_lib


def write_run(workdir, config, summary=None, rows=()):
  """A work directory with config.json, and the other files if there are any."""
  workdir.mkdir(parents=True)
  workdir_lib.write_json(workdir / "config.json", config)
  if summary:
    workdir_lib.write_json(workdir / "summary.json", summary)
  if rows:
    log(workdir, rows)
  return workdir


def log(workdir, rows):
  """Writes the metrics.jsonl of a run."""
  workdir_lib.write_json_lines(workdir / "metrics.jsonl", rows)
