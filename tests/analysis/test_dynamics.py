"""Loops as a dynamical system: against dense matrices, and by hand."""

import functools
import importlib
import json
import sys

import hub_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_float64 import without_rounding
from tests_support import ROOT, crossing

import loopjax
from loopjax.analysis import dynamics, jacobian
from loopjax.data.text import tokenizer as tokenizer_lib
from loopjax.errors import UserError
from loopjax.library import Model
from loopjax.models import MODELS

sys.path.append(str(ROOT / "tests/models"))
import model_examples as examples
import test_families as families


@crossing("name", families.FAMILIES)
def test_the_largest_values_are_those_of_the_dense_jacobian(name):
  """In float64, of two examples, after the first loop."""
  family, config = MODELS[name], families.config_of(name)
  graphdef = examples.graph(family, config, families.SPEC)
  params = examples.params_of(family, config, families.SPEC)
  batch = {"inputs": families.batch()["inputs"][:2]}
  num_loops = families.LOOPS + (name in families.LOOPED)
  loop = (1, num_loops)

  def last(params):
    model = Model(params, graphdef, None)
    _, states = jacobian.watched(model, batch, num_loops)
    return jax.tree.map(lambda x: x[:, 0], states)

  def dense(params, state):
    model = Model(params, graphdef, None)

    def one(rows):
      found = jacobian.one_loop(
        model, batch, jacobian.shaped(rows, state), loop
      )
      return jacobian.flat(found)

    found = jax.jacrev(one)(jacobian.flat(state))  # [B, n, B, n]
    return jnp.stack([found[b, :, b] for b in range(2)]), found[0, :, 1]

  state = without_rounding(last)(params)
  matrices, across = without_rounding(dense)(params, state)
  assert not across.any()  # No example depends on another.
  like = np.zeros(matrices.shape[:2], np.float32)

  @without_rounding
  def krylov(params, state, start, squared):
    model = Model(params, graphdef, None)
    return jacobian.krylov(model, batch, state, start, squared, loop)

  for squared in (False, True):

    def run(start, squared=squared):
      return krylov(params, state, start, squared)

    value, error = jacobian.largest(run, like, squared)
    for b, matrix in enumerate(matrices):
      if squared:
        exact = np.linalg.svd(matrix)[1][0]
      else:
        exact = np.abs(np.linalg.eigvals(matrix)).max()
      assert exact > 1e-3
      assert abs(value[b] - exact) <= max(error[b], 3e-7), (squared, b)
      assert error[b] < 0.1 * exact


@functools.cache
def boards():
  """Twelve puzzles of 6x6, for twelve loops."""
  model = loopjax.load("zoo:sudoku_6x6")
  batch = loopjax.datasets(model, batch_size=12)["test"][0]
  return model, batch, loopjax.dynamics(model, batch, num_loops=12)


def test_records_are_those_of_the_states_and_read_outs():
  model, batch, found = boards()
  names = ("prediction", "confidence", "state")
  trace = model.trace(batch["inputs"], *names, num_loops=12)
  states = np.asarray(trace["state"]["hidden"], np.float64).reshape(12, 12, -1)
  size = np.linalg.norm(states, axis=-1)
  moved = np.linalg.norm(states[1:] - states[:-1], axis=-1) / size[1:]
  change = found.column("relative_change")
  assert np.isnan(change[0]).all()  # Before the first loop is no state.
  np.testing.assert_allclose(change[1:], moved, atol=1e-5)
  cosines = np.sum(states * states[-1], axis=-1) / (size * size[-1])
  np.testing.assert_allclose(found.column("cosine_to_last"), cosines, atol=1e-5)
  shown = np.asarray(trace["prediction"])
  np.testing.assert_allclose(
    found.column("right"), (shown == batch["targets"]).mean(axis=-1), atol=1e-6
  )
  np.testing.assert_allclose(
    found.column("confidence"), trace["confidence"].mean(axis=-1), atol=1e-5
  )
  answers = np.argmax(model.logits(batch["inputs"], num_loops=12), axis=-1)
  for b, one in enumerate(found.examples):
    last = max(
      k
      for k in range(1, 13)
      if k == 1 or (shown[k - 2, b] != shown[-1, b]).any()
    )
    assert one["final_after"] == last
    assert one["right"] == (answers[b] == batch["targets"][b]).all()
    flips = (shown[1:, b] != shown[:-1, b]).sum(axis=0).mean()
    np.testing.assert_allclose(one["flips"], flips, atol=1e-6)
  right = sum(one["right"] for one in found.examples)
  assert sum(n for (_, x), n in found.table().items() if x) == right
  assert sum(found.table().values()) == 12
  memory = model.about.settings.model.num_memory_tokens
  assert [x["position"] for x in found.positions] == [*range(-memory, 36)]
  assert all(x["noise/state"] > 0 for x in found.positions)


def test_the_table_counts_settled_and_right():
  kinds = [("settles", True), ("settles", True), ("drifts", True)]
  kinds += [("cycles", False), ("settles", False), ("undecided", False)]
  rows = [{"verdict": verdict, "right": right} for verdict, right in kinds]
  assert boards()[2]._replace(examples=rows).table() == {
    (True, True): 2, (True, False): 1, (False, True): 1, (False, False): 2,
  }  # fmt: skip


def changes(first, later=None):
  """Changes over one and two loops, [2, 64]."""
  return np.stack([first, later if later is not None else 2 * first])


def test_verdicts():
  loops = np.arange(1, 65)
  of = {
    "settles": changes(0.5**loops),
    "cycles": changes(0 * loops + 0.5, 0.5**loops),
    "drifts": changes(0 * loops + 0.1),
    "undecided": changes(0.96**loops),
  }
  for name, one in of.items():
    assert dynamics._verdict(one) == (name, 2 if name == "cycles" else 0)
  assert dynamics._verdict(of["drifts"][:, :6])[0] == "undecided"  # Too few.


def test_a_language_model_reads_texts():
  model = loopjax.build(
    "looped", width=16, num_heads=2, num_layers=1, num_loops=2,
    task__sequence_length=32,
  )  # fmt: skip
  texts = ["Once there was a house.", "It had a door and windows."]
  found = loopjax.dynamics(model, texts, num_loops=4)
  tokenizer = tokenizer_lib.of(model.about.settings.task)
  rows = [tokenizer.encode_prompt(text) for text in texts]
  ids = np.array([row[: len(rows[0])] for row in rows])
  for k in (1, 4):
    logits = model.logits(ids[:, :-1], num_loops=k)
    chances = jax.nn.log_softmax(logits, axis=-1)
    loss = -np.take_along_axis(chances, ids[:, 1:, None], axis=-1).mean((1, 2))
    np.testing.assert_allclose(found.column("loss")[k - 1], loss, atol=1e-5)
  assert "token final after loop" in "\n".join(found.lines())
  assert len(found.positions) == ids.shape[1] - 1


def test_the_command_writes_records_and_a_figure(tmp_path, capsys):
  command = importlib.import_module("loopjax.library.dynamics")
  out = tmp_path / "found"
  flags = ("--limit=5", "--num_loops=4", f"--out={out}")
  assert command.main(["zoo:sudoku_6x6", *flags]) == 0
  printed = capsys.readouterr().out
  assert "5 examples, 4 loops (trained with" in printed
  assert (out / "dynamics.png").read_bytes().startswith(b"\x89PNG")
  rows = [json.loads(x) for x in (out / "loops.jsonl").read_text().splitlines()]
  assert [(x["example"], x["loop"]) for x in rows[:5]] == [
    (0, 1), (0, 2), (0, 3), (0, 4), (1, 1),
  ]  # fmt: skip


@pytest.mark.long
def test_a_model_of_the_hub_reads_a_text(tmp_path, monkeypatch, capsys):
  hub_examples.make_folder(tmp_path / "hub")
  (tmp_path / "mine.txt").write_text("Once there was a house. " * 400)
  monkeypatch.chdir(tmp_path)
  command = importlib.import_module("loopjax.library.dynamics")
  assert command.main(["hub", "--text=mine.txt", "--num_loops=3"]) == 0
  assert "loss, nats, by loops: 1:" in capsys.readouterr().out
  assert (tmp_path / "runs/hub/dynamics/dynamics.png").exists()
  assert command.main(["zoo:novels"]) == 2  # Its texts are not in the package.
  assert "--text=FILE reads a text" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("call", "says"),
  [
    (lambda m: loopjax.dynamics(m, ["abc"]), "'utm' reads no texts"),
    (lambda m: loopjax.dynamics(m, [[1]]), "expects rows of 36 tokens"),
    (
      lambda m: loopjax.dynamics(m, np.ones((1, 36), int), num_loops=1),
      "num_loops=1 must be at least 2",
    ),
  ],
)
def test_mistakes_are_one_line(call, says):
  with pytest.raises(UserError, match=says) as error:
    call(boards()[0])
  assert "\n" not in str(error.value)
