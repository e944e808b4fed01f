"""Trained models of the package: small, complete, and as good as recorded."""

import pathlib
import re
import shutil

import hub_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import load_file, save_file
from tests_support import ROOT, crossing, smoke, summary_of

from loopjax import config as config_lib
from loopjax import score as scoring
from loopjax import train
from loopjax.errors import UserError
from loopjax.generate import source
from loopjax.generate.engine import GenerationRequest, Sampling
from loopjax.hub import convert
from loopjax.losses import tokens
from loopjax.play import load
from loopjax.report import __main__ as report
from loopjax.run import workdir as workdir_lib
from loopjax.run import zoo
from loopjax.run.checkpoints import restore
from loopjax.saved import language_model, trained
from loopjax.train.score import score_model
from loopjax.zoo import __main__ as command
from loopjax.zoo import entries

# A score on the first examples of the test split. Texts are not packaged.
SAMPLES = {
  "depo": ("test/answer_accuracy", 0.99),
  "sudoku_6x6": ("test/exact_match", 0.95),
  "sudoku_urm": ("test/exact_match", 0.88),
  "sudoku_nine": ("test/exact_match", 0.58),
  "two_hops": ("test_ood_2/accuracy", 0.5),
}
NOVELS = {"novels": 2.1, "novels_adaptive": 2.4}  # Maximum bits per byte.
# Loops per token; None: as in training.
SUMS = {
  "sums_looped": [None], "sums_melt": [None], "sums_plt": [None],
  "sums_recurrent": [3, 32],
}  # fmt: skip
PROSE = (
  "When the old man had finished his story there was a long silence in the"
  " room, and nobody looked at the fire. At last his daughter rose, went to the"
  " window and said that the rain was over, and that it was time to go home."
)


def test_there_is_a_test_of_every_entry():
  assert set(zoo.names()) == {*SAMPLES, *SUMS, *NOVELS}
  files = (path for path in zoo.ROOT.rglob("*") if path.is_file())
  assert sum(path.stat().st_size for path in files) < 7e6


@pytest.mark.parametrize("name", zoo.names())
def test_an_entry_is_small_and_says_what_it_is(name):
  folder = zoo.ROOT / name
  there = {path.name for path in folder.iterdir()}
  assert there == {"README.md", "config.json", "summary.json", zoo.PARAMS}
  assert (folder / zoo.PARAMS).stat().st_size < 1.1 * entries.MAX_BYTES
  card = (folder / "README.md").read_text()
  summary = summary_of(folder)
  settings = config_lib.of_run(folder, name)
  headline = (*settings.task_module.HEADLINE, *settings.family.headline)
  about = card.split("\n\n")[1].replace("\\", "")
  task = settings.plain["task"]["name"]
  assert card.startswith(entries.card(name, about, task, headline, summary))
  assert len(set(re.findall(r"^\| (test\S+)", card, re.M))) >= 2
  for text in (card, *map(pathlib.Path.read_text, folder.glob("*.json"))):
    assert not re.search(r"(?<![\w.:/])/\w+/", text), "a place of one machine"
  params = load_file(folder / zoo.PARAMS)
  assert sum(x.size for x in params.values()) == summary["parameters"]


@pytest.mark.long
@crossing("name", SAMPLES, manual=("sudoku_nine",))  # The family of 6x6.
def test_an_entry_is_as_good_as_it_was(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  score, least = SAMPLES[name]
  entry = pathlib.Path(f"zoo:{name}")
  config = config_lib.config_of_run(entry, name)
  scores = score_model(config, entry, limit=64)["metrics"]
  assert scores[score] >= least


@pytest.mark.long
@pytest.mark.parametrize(
  ("name", "num_loops"), [(name, k) for name in SUMS for k in SUMS[name]]
)
def test_an_entry_adds(name, num_loops):
  entry = pathlib.Path(f"zoo:{name}")
  model = language_model.load(entry, num_loops=num_loops)
  engine = source.make_engine(model, num_slots=8, max_tokens=64)
  terms = np.random.default_rng(7).integers(0, 10, (8, 8))
  requests = [
    GenerationRequest(
      model.tokenizer.encode_prompt("+".join(map(str, row)) + "="),
      40,
      Sampling(temperature=0),
      stop_tokens=model.stop_tokens,
    )
    for row in terms
  ]
  sums = np.cumsum(terms, axis=1)[:, 1:]
  right = 0
  for found, row in zip(engine.generate(requests), sums, strict=True):
    text = model.tokenizer.decode([token.token for token in found[:-1]])
    right += text == ",".join(map(str, row))
  assert right >= 7


@pytest.mark.long
@pytest.mark.parametrize("name", NOVELS)
def test_an_entry_has_read_novels(name):
  model = language_model.load(pathlib.Path(f"zoo:{name}"))
  ids = np.array([model.tokenizer.encode_prompt(PROSE)])
  output = nnx.merge(model.graphdef, model.params)(ids[:, :-1], **model.call)
  nats = tokens.token_cross_entropy(output.logits, jnp.asarray(ids[:, 1:]))
  assert nats.mean() / np.log(2) < NOVELS[name]


@pytest.mark.parametrize(
  ("name", "view"), [("sudoku_nine", "puzzle"), ("novels", "text")]
)
def test_the_pages_of_the_docs_are_of_today(name, view):
  """Otherwise docs/zoo.md says how to rewrite them."""
  play = ROOT / "loopjax" / "play"
  page = (ROOT / "docs" / "pages" / f"{name}.html").read_text()
  assert (play / "views" / f"{view}.html").read_text() in page
  before, after = (play / "page.html").read_text().split("<!-- VIEW -->")
  assert before in page and after.rpartition("/* DATA */ null")[0] in page
  assert f'"zoo:{name}' in page


def test_the_list_says_what_they_do(capsys):
  assert command.main([]) == 0
  alone = capsys.readouterr().out
  assert command.main(["list"]) == 0
  assert capsys.readouterr().out == alone
  lines = alone.splitlines()
  assert len(lines) == 1 + len(zoo.names())
  assert any("zoo:sudoku_6x6" in x and "6x6 Sudoku" in x for x in lines)
  played = {x.split()[0] for x in lines if " play, " in x}
  assert played == {f"zoo:{x}" for x in zoo.names()}
  assert set(entries.COMMANDS) == set(load.VIEWS)


def test_mistakes_in_a_name_are_said(capsys):
  with pytest.raises(UserError, match="did you mean 'sudoku_6x6'"):
    zoo.located(pathlib.Path("zoo:sudoku_6"))
  with pytest.raises(
    UserError, match="no checkpoint at step 7; available: 2600"
  ):
    trained.read(pathlib.Path("zoo:sudoku_6x6"), 7)
  assert scoring.main(["zoo:sums_melt"]) == 2  # Its text is elsewhere.
  assert "train.jsonl" in capsys.readouterr().err
  for name in ("../mine", "a/b", ""):
    assert command.main(["export", "runs/mine", name, "--about=x"]) == 2
    assert f"NAME={name!r} is a path" in capsys.readouterr().err


def test_runs_are_where_they_are_and_write_there():
  workdir = pathlib.Path("runs/mine")
  assert zoo.located(workdir) == zoo.output(workdir) == workdir
  there = zoo.output(pathlib.Path("zoo:sums_melt"))
  assert there == pathlib.Path("runs/sums_melt")


def test_a_trained_model_has_a_card_and_no_curves(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert report.main(["zoo:sudoku_6x6"]) == 0
  text = (tmp_path / "runs/sudoku_6x6/report.md").read_text()
  assert "## exact match 0.9" in text
  capsys.readouterr()
  assert report.main(["sudoku_6x6"]) == 2
  said = capsys.readouterr().err
  assert said.endswith("no such directory; did you mean zoo:sudoku_6x6?\n")


def test_a_directory_of_a_like_name_is_suggested(tmp_path):
  (tmp_path / "sudoku_utm").mkdir()
  near = zoo.suggestion(tmp_path / "sudoku_ut")
  assert near == "; did you mean 'sudoku_utm'?"
  assert not zoo.suggestion(tmp_path / "other")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, sketches):
  """The run of tests/train: its programs are in the cache."""
  workdir = tmp_path_factory.mktemp("finished")
  train.run(smoke(), workdir, "train_and_eval")
  return workdir


def abstract_params(workdir):
  params = trained.read(workdir).params
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    params,
  )


def exported(finished, tmp_path, monkeypatch, dtype="float32"):
  monkeypatch.setattr(zoo, "ROOT", tmp_path / "zoo")
  return entries.export(finished, "own", "It is small.", dtype, zoo.ROOT)


@pytest.mark.long
def test_an_entry_is_the_average_of_its_run(finished, tmp_path, monkeypatch):
  exported(finished, tmp_path, monkeypatch)
  run, entry = trained.read(finished), trained.read(pathlib.Path("zoo:own"))
  jax.tree.map(np.testing.assert_array_equal, run.params, entry.params)
  assert (entry.step, entry.settings.model) == (run.step, run.settings.model)
  summary = summary_of(finished)
  kept = summary_of(zoo.ROOT / "own")
  assert kept["metrics"].items() <= summary["metrics"].items()
  with pytest.raises(UserError, match="File exists"):
    exported(finished, tmp_path, monkeypatch)


def test_half_the_bytes_are_read_as_the_model_wants_them(
  finished, tmp_path, monkeypatch
):
  folder = exported(finished, tmp_path, monkeypatch, "bfloat16")
  assert {x.dtype for x in load_file(folder / zoo.PARAMS).values()} == {
    jnp.dtype(jnp.bfloat16)
  }
  run, entry = trained.read(finished), trained.read(pathlib.Path("zoo:own"))
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x.astype(jnp.bfloat16), y),
    run.params,
    entry.params,
  )
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(entry.params))


def test_what_does_not_fit_is_named(finished, tmp_path, monkeypatch):
  folder = exported(finished, tmp_path, monkeypatch)
  params = load_file(folder / zoo.PARAMS)
  name = min(params)
  for change, message in (
    ({name: params[name][None]}, f"other shape {name}"),
    ({"extra": jnp.ones(3)}, "not in the model extra"),
  ):
    save_file({**params, **change}, folder / zoo.PARAMS)
    with pytest.raises(UserError, match=re.escape(message)):
      trained.read(pathlib.Path("zoo:own"))
  less = {key: value for key, value in params.items() if key != name}
  save_file(less, folder / zoo.PARAMS)
  with pytest.raises(UserError, match=f"missing {name}"):
    trained.read(pathlib.Path("zoo:own"))
  # Unless new files are allowed.
  abstract = abstract_params(finished)
  _, found = restore.chosen_params(
    pathlib.Path("zoo:own"), None, abstract, "", optional=re.escape(name)
  )
  assert len(jax.tree.leaves(found)) == len(params) - 1
  (folder / zoo.PARAMS).write_bytes(b"1234")
  with pytest.raises(UserError, match="cannot be read"):
    trained.read(pathlib.Path("zoo:own"))


def task_of_entry(run, tmp_path, monkeypatch, **changes):
  """Section task of the entry of a run in which settings are changed."""
  config = workdir_lib.read_json(run / "config.json")
  config["task"] |= changes
  workdir_lib.write_json(run / "config.json", config)
  folder = exported(run, tmp_path, monkeypatch)
  return workdir_lib.read_config(folder)["task"]


def test_an_entry_names_files_without_their_folders(
  finished, tmp_path, monkeypatch
):
  run = shutil.copytree(finished, tmp_path / "run")
  files = {"train_csv": "train.csv", "test_csv": "test.csv"}
  there = {name: f"/one/machine/{file}" for name, file in files.items()}
  task = task_of_entry(run, tmp_path, monkeypatch, **there)
  assert {name: task[name] for name in files} == files


def test_an_entry_has_its_tokenizer(tmp_path, monkeypatch):
  run = tmp_path / "run"
  convert.import_folder(hub_examples.make_folder(tmp_path / "folder"), run)
  summary = workdir_lib.read_summary(run) | {"wall_seconds": 1.0}
  workdir_lib.write_json(run / "summary.json", summary)
  task = task_of_entry(run, tmp_path, monkeypatch)
  assert task["tokenizer"] == "tokenizer.json"
  found = language_model.load(run).tokenizer.key
  shutil.rmtree(run)
  assert language_model.load(pathlib.Path("zoo:own")).tokenizer.key == found


@pytest.mark.long
def test_only_complete_runs_become_entries(finished, tmp_path, monkeypatch):
  monkeypatch.setattr(entries, "MAX_BYTES", 100)
  with pytest.raises(UserError, match="exceed the maximum of 100"):
    exported(finished, tmp_path, monkeypatch)
  config = smoke(run__num_steps=10)
  workdir = tmp_path / "begun"
  train.run(config, workdir, "train")
  (workdir / "summary.json").write_text('{"status": "preempted"}')
  with pytest.raises(UserError, match="not the directory of a complete run"):
    exported(workdir, tmp_path, monkeypatch)


@pytest.mark.long
def test_a_run_begins_from_an_entry(finished, tmp_path, monkeypatch):
  exported(finished, tmp_path, monkeypatch)
  config = smoke(run__init_from="zoo:own", run__num_steps=10)
  config_lib.resolve(config)
  train.run(config, tmp_path / "next", "train")
  start = restore.params(tmp_path / "next", 0, abstract_params(finished))
  params = trained.read(finished).params
  jax.tree.map(np.testing.assert_array_equal, start, params)


def test_a_run_that_is_not_of_the_zoo_may_begin_with_the_home(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("HOME", str(tmp_path))
  assert zoo.located("~/mine") == tmp_path / "mine"
