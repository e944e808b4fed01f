"""Training, then the analysis: the same numbers, and all figures."""

import matplotlib.image
import multihop_runs
import numpy as np
import pytest

from loopjax import train
from loopjax.analysis.multihop import rows
from loopjax.run import workdir as workdir_lib

# Minutes on two cores; other tests check its parts.
pytestmark = pytest.mark.manual


@pytest.mark.parametrize("family", ["looped", "disco"])
def test_a_run_from_its_training_to_its_pictures(family, tmp_path, capsys):
  workdir = tmp_path / "run"
  train.run(multihop_runs.config_of(family), workdir, "train_and_eval")
  before = {path.name for path in workdir.iterdir()}
  status, found, pictures = multihop_runs.analyse(workdir)
  assert status == 0
  assert pictures == multihop_runs.PICTURES
  for path in (workdir / "analysis").glob("*.png"):
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 200
    assert np.std(pixels[..., :3]) > 0.02, path
  assert {path.name for path in workdir.iterdir()} == before | {"analysis"}
  summary = workdir_lib.read_json(workdir / "summary.json")["metrics"]
  _check_against_evaluation(found, summary)
  assert {row["step"] for row in found} == {20}
  names = {"step", "split", "analysis", "loop", "position", "count"}
  assert all(names <= row.keys() for row in found)
  printed = capsys.readouterr().out
  num_questions = sum(
    row["count"] for row in rows.select(found, "stage", loop=1)
  )
  assert f"{family}, step 20, 2 loops, {num_questions:.0f} questions" in printed
  assert "train_atom: skipped intervention and patching: there is no" in printed


def _check_against_evaluation(found, summary):
  """Agreement with the trainer's evaluation, and an edit without effect."""
  stages = rows.select(found, "stage")
  assert len(stages) == 4 * 2
  for row in stages:
    name = f"{row['split']}/stage{row['loop']}_accuracy"
    assert row["accuracy"] == pytest.approx(summary[name], abs=1e-6)
    error = summary[f"{name}/standard_error"]
    assert row["accuracy/standard_error"] == pytest.approx(error, abs=1e-6)
    assert row["count"] == summary[f"{row['split']}/count"]
  role_exposure = rows.select(found, "role_exposure", loop=2)
  assert role_exposure
  for row in role_exposure:
    name = f"{row['split']}/accuracy/role_exposure={row['role_exposure']}"
    assert row["accuracy"] == pytest.approx(summary[name], abs=1e-6)
  untouched = rows.select(found, "intervention", alpha=0.0)
  assert len(untouched) == 3 * 3 * 3
  for row in untouched:
    accuracy = summary[f"{row['split']}/accuracy"]
    assert row["accuracy"] == pytest.approx(accuracy, abs=1e-6)
