"""The command reports what does not apply, and errors in one line."""

import multihop_runs
import pytest
from tests_support import crossing, load_config, untrained

from loopjax import config as config_lib
from loopjax.analysis.multihop import __main__ as command
from loopjax.analysis.multihop import rows, tables
from loopjax.run import workdir as workdir_lib

pytestmark = pytest.mark.usefixtures("sketches")


@pytest.mark.long
@crossing("family", ["utm", "ponderlm", "transformer"], manual=("ponderlm",))
def test_what_a_family_has_not_is_said(family, tmp_path, capsys):
  workdir = tmp_path / "run"
  untrained(workdir, multihop_runs.config_of(family))
  (workdir / "analysis").mkdir()
  old = workdir / "analysis" / "intervention_loop2.png"
  old.write_bytes(b"of an earlier run")
  status, found, pictures = multihop_runs.analyse(workdir)
  assert status == 0
  assert pictures == {"lens", "cosines", "role_exposure"}
  analyses = set(rows.values_of(found, "analysis"))
  assert analyses == {"stage", "role_exposure", "lens", "cosine"}
  printed = capsys.readouterr().out
  assert "skipped intervention and patching: equation 3 is for" in printed
  assert "skipped stages.png: metrics.jsonl" in printed


@pytest.mark.long
def test_three_hops_in_english_with_one_loop_too_few(tmp_path, capsys):
  """Bridge 2 comes after the last loop; only long questions have position 6."""
  workdir = tmp_path / "run"
  chains = ("task.num_train_chains=(20,20)", "task.num_test_chains=(10,10)")
  untrained(
    workdir, multihop_runs.config_of("disco", "task.format=direct", *chains)
  )
  flags = ("--loop=1", "--position=6", "--limit=60")
  status, found, pictures = multihop_runs.analyse(workdir, *flags)
  assert status == 0
  assert pictures == multihop_runs.PICTURES - {"stages"}
  edited = rows.select(found, "intervention")
  assert {(row["loop"], row["position"]) for row in edited} == {(1, 6)}
  assert all(row["split"].endswith("_3") for row in edited)
  whole = rows.select(found, "stage", loop=1)
  assert sum(row["count"] for row in whole) == 60
  printed = capsys.readouterr().out
  assert "skipped intervention and patching: loop 2 is the last" in printed
  assert "train_2: skipped intervention and patching: it ends" in printed
  here = {"split": "train_3", "entity": "bridge1", "loop": 1}
  shown = [line.split() for line in tables.logit_lens(found).splitlines()]
  shown = [line for line in shown if line[:3] == ["train_3", "bridge1", "1"]]
  cells = rows.select(found, "lens", **here)
  best = max(cells, key=lambda row: row["probability"])
  assert cells[0]["hop_position"] == 2  # Finley 's teacher.
  assert {line[3] for line in shown} == {"2", str(best["position"])}


@pytest.mark.long
def test_one_loop_passes_nothing_on(tmp_path, capsys):
  workdir = tmp_path / "run"
  untrained(workdir, multihop_runs.config_of("looped", "model.num_loops=1"))
  status, _, pictures = multihop_runs.analyse(workdir, "--limit=30")
  assert status == 0
  assert pictures == {"lens", "cosines", "role_exposure"}
  assert "one loop has no state to edit" in capsys.readouterr().out
  for flag in ("--loop=1", "--position=1"):
    assert command.main([str(workdir), flag]) == 2
    assert f"{flag} has no effect" in capsys.readouterr().err


def with_config(directory, change, family="looped"):
  """A directory with only a changed config."""
  plain = config_lib.to_dict(multihop_runs.config_of(family))
  change(plain)
  workdir_lib.write_json(directory / "config.json", plain)


@pytest.mark.parametrize(
  ("change", "flags", "message"),
  [
    (None, (), "contains no run"),
    (
      lambda c: c.update(
        config_lib.to_dict(load_config("sudoku_utm", "smoke"))
      ),
      (),
      "is only for 'multihop'; loopjax report shows",
    ),
    (
      lambda c: c["model"].update(name="gpt"),
      (),
      "model.name='gpt' is not one of",
    ),
    (lambda c: c.pop("model"), (), "is not a loopjax run's config"),
    (lambda c: c["model"].update(width="wide"), (), "model.width='wide'"),
    (lambda c: None, (), "contains no checkpoint"),
    (lambda c: None, ("--loop=2",), "--loop=2 must be 1 to 1"),
    (lambda c: None, ("--loop=0",), "--loop=0 must be 1 to 1"),
    (lambda c: None, ("--position=3",), "--position=3 must be 0 to 2"),
    (lambda c: None, ("--position=-1",), "--position=-1 must be"),
    (lambda c: None, ("--limit=-5",), "--limit=-5 must be"),
    (lambda c: None, ("--limit=few",), "--limit: invalid int"),
    (lambda c: None, ("--lens",), "unknown flag '--lens'"),
  ],
)
def test_mistakes_are_one_line(change, flags, message, tmp_path, refusal):
  if change:
    with_config(tmp_path, change)
  before = sorted(tmp_path.iterdir())
  assert message in refusal(command.main, [str(tmp_path), *flags])
  assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("flag", ["--loop=1", "--position=1"])
def test_flags_without_an_effect_are_refused(flag, tmp_path, refusal):
  with_config(tmp_path, lambda c: None, "transformer")
  message = f"error: {flag} has no effect on transformer: equation 3 is for"
  assert refusal(command.main, [str(tmp_path), flag]).startswith(message)


def test_a_family_that_shows_too_little_is_refused(tmp_path, refusal):
  with_config(tmp_path, lambda c: None, "sleep")
  message = "model.name='sleep' does not record prediction after every loop\n"
  assert refusal(command.main, [str(tmp_path)]).endswith(message)


def test_an_output_that_cannot_be_written_is_one_line(tmp_path, refusal):
  workdir = tmp_path / "run"
  untrained(workdir, multihop_runs.config_of("looped"))
  file = tmp_path / "file"
  file.write_text("")
  said = refusal(command.main, [str(workdir), f"--out={file}"])
  assert said.startswith(f"error: --out={file}: cannot be written")
