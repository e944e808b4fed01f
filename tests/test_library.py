"""loopjax from Python, as in docs/library.md."""

import copy
import dataclasses
import functools
import json
import pickle
import re
import textwrap
from concurrent import futures

import hub_examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests_support import ROOT, refused

import loopjax
from loopjax import config as config_lib
from loopjax import library
from loopjax.errors import UserError
from loopjax.generate import __main__ as generate
from loopjax.saved import trained

SMALL = {
  "width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 2,
  "task__sequence_length": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
  return loopjax.build("looped", **SMALL)


@functools.cache
def of_zoo(name):
  return loopjax.load(f"zoo:{name}")


@functools.cache
def boards():
  return loopjax.datasets("sudoku", batch_size=4, box_rows=2, box_cols=3)


def pairs():
  """Batches of a text of one letter, which is learned quickly."""
  rows = np.full((4, 16), ord("a"), np.int32)
  while True:
    yield rows, rows


def batch_with(**arrays):
  """A batch as a dict, with other arrays."""
  inputs, targets = next(pairs())
  return {"inputs": inputs, "targets": targets, **arrays}


def test_datasets_of_a_model_have_the_settings_of_its_task():
  found = loopjax.datasets(of_zoo("sudoku_6x6"), batch_size=4)
  for name in ("validation", "test"):
    expected = boards()[name][0]
    jax.tree.map(np.testing.assert_array_equal, found[name][0], expected)
  assert of_zoo("sudoku_6x6").about.settings.task.augment
  assert not np.array_equal(  # The name's default is no augmentation.
    found["train"][0]["inputs"], boards()["train"][0]["inputs"]
  )
  changed = loopjax.datasets(of_zoo("sudoku_6x6"), batch_size=4, augment=False)
  jax.tree.map(
    np.testing.assert_array_equal, changed["train"][0], boards()["train"][0]
  )


def test_a_model_is_a_pytree_of_its_parameters(model):
  """The gradient of the loss is a model; an Optax step equals `fit`'s."""
  inputs, targets = next(pairs())
  (value, metrics), grads = jax.value_and_grad(loopjax.loss, has_aux=True)(
    model, inputs, targets
  )
  assert metrics["loss"] == value
  tx = optax.sgd(0.1)
  updates, _ = tx.update(grads, tx.init(model), model)
  by_hand = optax.apply_updates(model, updates)
  trained = model.fit(pairs(), steps=1, tx=tx)
  assert isinstance(by_hand, loopjax.Model)
  for a, b in zip(
    jax.tree.leaves(by_hand), jax.tree.leaves(trained), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  after, _ = loopjax.loss(trained, inputs, targets)
  assert after < value


def test_a_loss_that_draws_or_changes_needs_a_key_or_step(model):
  """Without them, all steps had the same depth, mask and schedule."""
  batch = next(pairs())
  value, _ = loopjax.loss(model, batch)
  assert value == loopjax.loss(model, batch, key=jax.random.key(3), step=5)[0]
  dropped = loopjax.build("looped", **SMALL, dropout=0.5)
  with pytest.raises(UserError, match="'looped' depends on the key; pass"):
    loopjax.loss(dropped, batch)
  values = {
    float(loopjax.loss(dropped, batch, key=jax.random.key(n))[0])
    for n in range(3)
  }
  assert len(values) == 3
  drawn = loopjax.build("recurrent", **SMALL)  # Depth and first state.
  with pytest.raises(UserError, match="'recurrent' depends on the key; pass"):
    jax.grad(loopjax.loss, has_aux=True)(drawn, batch)
  growth = {"depth": "fixed", "growth_steps": (2,), "growth_loops": (1,)}
  grown = loopjax.build("recurrent", **SMALL, **growth)
  with pytest.raises(UserError, match="'recurrent' depends on the .*step; pas"):
    loopjax.loss(grown, batch)

  @jax.jit
  def at(n):
    return loopjax.loss(grown, batch, key=jax.random.key(7), step=n)[0]

  assert at(0) == at(1) != at(2)


def test_logits_have_the_loops_of_an_evaluation():
  """Otherwise `evaluate` scores other predictions than `logits` shows."""
  built = loopjax.build("looped", **SMALL, eval__num_loops=3)
  ids = np.arange(16)
  np.testing.assert_array_equal(
    built.logits(ids), built.logits(ids, num_loops=3)
  )
  assert not np.allclose(built.logits(ids), built.logits(ids, num_loops=2))
  assert len(built.trace(ids, "hidden")["hidden"]) == 3


@pytest.mark.parametrize("pattern", ["", "^layers/mlp/"])
def test_an_optimizer_of_ones_own_changes_nothing_frozen(pattern):
  """Neither what the user freezes nor what the family does."""
  start = loopjax.build(
    "looped", **SMALL, exit_gate="alone", optim__frozen=pattern
  )
  tx = optax.adamw(0.1, weight_decay=0.1)
  found = start.fit(pairs(), steps=2, tx=tx, quiet=True)
  changed = jax.tree.map(
    lambda a, b: not np.array_equal(a, b), start.params, found.params
  )
  gate = changed.pop("exit_gate")
  assert any(jax.tree.leaves(gate)) and not any(jax.tree.leaves(changed))
  whole = loopjax.build("looped", **SMALL, optim__frozen=pattern)
  found = whole.fit(pairs(), steps=1, tx=tx, quiet=True)
  for name, before in whole.params["layers"].items():
    same = jax.tree.map(np.array_equal, before, found.params["layers"][name])
    frozen = name == "mlp" and pattern != ""
    assert all(x is frozen for x in jax.tree.leaves(same))


def test_weights_choose_the_targets(model):
  """The mean over weighted targets, by hand from the logits."""
  inputs = np.arange(32, dtype=np.int32).reshape(2, 16)
  weights = np.zeros((2, 16), np.float32)
  weights[0, 3] = 1
  flat = loopjax.build("transformer", **{**SMALL, "num_loops": 1})
  value, _ = loopjax.loss(flat, inputs, inputs, weights=weights)
  chosen = jax.nn.log_softmax(flat.logits(inputs)[0, 3])[inputs[0, 3]]
  np.testing.assert_allclose(value, -chosen, rtol=1e-5)


def test_seeds_are_a_batch_of_models():
  def one(seed):
    model = loopjax.build("looped", seed=seed, **SMALL)
    return model, loopjax.loss(model, *next(pairs()))[0]

  models, losses = jax.vmap(one)(jnp.arange(3))
  alone, value = one(1)
  np.testing.assert_allclose(losses[1], value, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(alone), strict=True):
    np.testing.assert_allclose(a[1], b, rtol=1e-4, atol=1e-6)


def test_numbers_of_numpy_are_settings():
  sizes = dict(zip(SMALL, np.array([*SMALL.values()]), strict=True))
  built = loopjax.build("looped", seed=np.int64(1), **sizes)
  made = loopjax.build("looped", seed=1, **SMALL)
  assert built.about == made.about
  jax.tree.map(np.testing.assert_array_equal, built.params, made.params)


def test_models_of_the_same_settings_are_alike(model):
  """JAX combines them, and compiles once for both."""
  other = loopjax.build("looped", seed=1, **SMALL)
  ids = np.arange(16)
  model.logits(ids)
  compiled = library.model._forward._cache_size()
  found = jax.tree.map(lambda a, b: (a + b) / 2, model, other)
  assert found.logits(ids).shape == other.logits(ids).shape
  assert library.model._forward._cache_size() == compiled


def test_a_model_can_be_copied_and_pickled(model):
  """As by a pool of processes, or to keep one while another is trained."""
  tokens = np.arange(16)
  for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
    assert copied.about == model.about
    assert copied.about.settings.task_module is model.about.settings.task_module
    np.testing.assert_array_equal(copied.logits(tokens), model.logits(tokens))


def test_flax_trains_the_module(model):
  module, inputs = model.module(), next(pairs())[0]

  def size(module):
    return jnp.mean(jnp.square(module(inputs).logits[..., :256]))

  optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
  before, grads = nnx.value_and_grad(size)(module)
  optimizer.update(module, grads)
  assert size(module) < before


def test_logits_and_traces(model):
  ids = np.arange(16) % 5
  logits = model.logits(ids)
  assert logits.shape == (16, model.spec.vocab_size)
  batch = model.logits(np.stack([ids, ids]), num_loops=3)
  assert batch.shape == (2, 16, model.spec.vocab_size)
  trace = model.trace(ids, "hidden", "prediction", num_loops=3)
  assert trace["hidden"].shape == (3, 16, 16)
  np.testing.assert_array_equal(
    trace["prediction"][-1], jnp.argmax(batch[0], axis=-1)
  )


def test_a_state_is_seen_and_edited(model):
  ids = np.arange(16) % 5

  def erased(state, k):
    assert state["hidden"].shape == (1, 16, 16)
    return {"hidden": jnp.where(k == 1, 0.0, state["hidden"])}

  plain, edited = (
    model.trace(ids, "hidden", "state", num_loops=3, edit=edit)
    for edit in (None, erased)
  )
  assert set(edited) == {"hidden", "state"}
  np.testing.assert_array_equal(plain["state"]["hidden"], plain["hidden"])
  assert not edited["state"]["hidden"][1].any()
  # Records of other names are of before the edit.
  np.testing.assert_array_equal(edited["hidden"][:2], plain["hidden"][:2])
  logits = model.logits(ids, num_loops=2, edit=erased)
  np.testing.assert_array_equal(logits[0], logits[1])
  with pytest.raises(UserError, match=r"edit\(state, k\) must return the"):
    model.logits(ids, edit=lambda state, k: state["hidden"])


def test_it_is_trained_saved_and_read_by_commands(
  model, tmp_path, monkeypatch, capsys
):
  """Independent of a Hub model in the same place."""
  theirs = {"model_type": "llama", "eos_token_id": ord("a")}
  for folder in (tmp_path, tmp_path / "hub"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(theirs))
    (folder / "tokenizer.json").write_text("{}")
  monkeypatch.chdir(tmp_path)
  seen = []

  def on_log(number, scores, now):
    seen.append((number, scores["loss"], now.logits(np.full(16, 97))[-1, 97]))
    return number == 40

  found = model.fit(
    pairs(), steps=1000, tx=optax.adam(1e-2), every=20, on_log=on_log
  )
  assert [number for number, *_ in seen] == [20, 40]
  assert seen[1][1] < seen[0][1] and seen[1][2] > seen[0][2]
  text = found.generate("a", max_new_tokens=5, temperature=0.0, stop="ab")
  assert text == "aaaaa"
  prompts, drawn = ["a", "aa", "aaa"], {"max_new_tokens": 5, "temperature": 3.0}
  texts = found.generate(prompts, seed=7, **drawn)  # Seeds 7, 8, 9.
  assert texts == [
    found.generate(prompt, seed=7 + number, **drawn)
    for number, prompt in enumerate(prompts)
  ]
  assert len(set(texts)) == 3 and found.generate([]) == []
  greedy = found.generate(prompts, **{**drawn, "temperature": 0.0})
  for name, value in (("top_k", 1), ("top_p", 1e-9), ("min_p", 1.0)):
    assert found.generate(prompts, **drawn, **{name: value}) == greedy, name
  loopjax.save(found, tmp_path / "run")
  again = loopjax.load(str(tmp_path / "run"))
  ids = np.full(16, 97)
  np.testing.assert_array_equal(again.logits(ids), found.logits(ids))
  flags = ["--prompt=a", "--max_new_tokens=5", "--temperature=0"]
  assert generate.main([str(tmp_path / "run"), *flags]) == 0
  assert "aaaaa" in capsys.readouterr().out
  with pytest.raises(UserError, match="already contains a run"):
    loopjax.save(found, tmp_path / "run")


@pytest.mark.parametrize(
  ("family", "task", "settings"),
  [
    ("recurrent", "automaton", {"optim__warmup_steps": 2, "dropout": 0.1}),
    ("urm", "sudoku", {"task__box_rows": 2, "task__box_cols": 3}),  # Carries.
    ("looped", "automaton", {"optim__lora_rank": 2, "dropout": 0.1}),
  ],
)
def test_two_calls_of_fit_are_one(family, task, settings, capsys):
  """Batches, keys, rates, the optimizer's state and a carried one go on."""
  sizes = {"width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 2}
  start = loopjax.build(family, task, **sizes, **settings)
  data = loopjax.datasets(start, batch_size=4)["train"]
  whole = start.fit(data, steps=4, seed=3)
  assert len(capsys.readouterr().err.splitlines()) == 1
  seen = []
  half = start.fit(data, steps=2, total_steps=4, seed=3)
  copied = copy.deepcopy(half)
  for model in (half, copied):
    both = model.fit(
      data, steps=2, seed=3, every=1,
      on_log=lambda number, *_: seen.append(number),
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, both.params, whole.params)
    assert both.about.steps == whole.about.steps == 4
  assert seen == [3, 4] * 2
  assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize(("size", "start"), [(4, 3), (3, 4), (16, 1)])
def test_another_batch_size_continues_after_the_examples(
  model, size, start, monkeypatch
):
  """As in `loopjax train`: rounded up to a whole batch, none is read again."""
  read, rows = [], np.full((16, 16), ord("a"), np.int32)

  class Counted:
    """A dataset that writes down its batches."""

    def __init__(self, size):
      self.size = size

    def to_iter_dataset(self):
      """As Grain's."""

    def __len__(self):
      return 100

    def __getitem__(self, index):
      return {"inputs": rows[: self.size], "targets": rows[: self.size]}

  def iterate(data, start):
    read.append(start)
    return iter([data[0]] * 9)

  monkeypatch.setattr(library.training.pipeline, "iterate", iterate)
  found = model.fit(Counted(8), steps=1, total_steps=9, quiet=True)
  found = found.fit(Counted(2), steps=1, quiet=True)  # Examples 8 and 9.
  assert found.stopped.num_examples == 10
  found.fit(Counted(size), steps=1, quiet=True)
  assert read == [0, 4, start]


def test_a_copy_continues_and_what_jax_makes_does_not(model):
  found = model.fit(pairs(), steps=1, quiet=True)
  for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
    assert copied.stopped.num_steps == 1
  replaced = dataclasses.replace(found, params=found.params)
  for made in (replaced, jax.tree.map(jnp.copy, found)):
    assert made.stopped is None


def late(config, num_steps):
  """A schedule of one's own that falls after its length, too."""
  return optax.exponential_decay(config.learning_rate, num_steps, 0.5)


def test_what_is_not_known_of_a_schedule_is_not_said(capsys):
  schedule = f"{__name__}:late"
  model = loopjax.build("looped", **SMALL, optim__schedule=schedule)
  model.fit(pairs(), steps=1).fit(pairs(), steps=1)
  assert "stays at its end" not in capsys.readouterr().err


def test_nothing_is_said_before_another_batch_size_is_refused(capsys):
  sizes = {"width": 16, "num_heads": 2, "num_layers": 1, "num_loops": 2}
  board = {"task__box_rows": 2, "task__box_cols": 3}
  start = loopjax.build("urm", "sudoku", **sizes, **board)
  data = loopjax.datasets(start, batch_size=4)["train"]
  found = start.fit(data, steps=1, quiet=True)
  with refused("fit: the batch size must remain"):
    found.fit(loopjax.datasets(start, batch_size=2)["train"], steps=1)
  assert not capsys.readouterr().err


def test_fit_says_what_does_not_continue(model, capsys):
  """The rate after the end of its schedule, and a model that has no state."""
  tx = optax.adam(0.1)
  found = model.fit(pairs(), steps=2).fit(pairs(), steps=1)
  assert "stays at its end after step 2, " in capsys.readouterr().err
  begins = "fit: begins with step 0 and the first batch: "
  found.fit(pairs(), steps=1, tx=tx)
  assert f"{begins}another optimizer" in capsys.readouterr().err
  jax.tree.map(jnp.copy, found).fit(pairs(), steps=1)
  assert f"{begins}not a result of fit" in capsys.readouterr().err
  once = model.fit(pairs(), steps=1, tx=tx)
  once.fit(pairs(), steps=1, tx=optax.adam(0.1))
  assert begins not in capsys.readouterr().err


@pytest.mark.parametrize(
  ("key", "value", "instead"),
  [
    ("run__seed", 1, "use build.seed=. and fit.seed=."),
    ("run__init_from", "/nonexistent", "use loopjax.load"),
    ("run__teacher", "a", "use loopjax train, the command"),
    ("eval__every", 10, "use loopjax train"),
    ("eval__batch_size", 1, "use datasets.batch_size=."),
    ("eval__depth_factor", 2, "use loopjax train"),
    ("optim__ema_decay", 0.5, "use loopjax train"),
    ("mesh__fsdp", 2, "use loopjax train"),
  ],
)
def test_build_refuses_what_only_commands_read(key, value, instead):
  with refused(f"build: {key.replace('__', '.')} has no effect; {instead}"):
    loopjax.build("looped", **SMALL, **{key: value})


def test_heads_follow_the_width_unless_they_are_set(capsys):
  widths = ((32, 1), (48, 1), (96, 1), (128, 2), (192, 3), (200, 2), (768, 12))
  for width, heads in widths:
    capsys.readouterr()
    built = jax.eval_shape(lambda w=width: loopjax.build("looped", width=w))
    assert built.about.settings.model.num_heads == heads
    said = f"model.num_heads={heads}, for model.width={width}"
    assert (said in capsys.readouterr().err) == (width != 768)
  own = {"head_width": 32, "width": 100}
  built = jax.eval_shape(lambda: loopjax.build("looped", **own))
  assert built.about.settings.model.num_heads == 12
  with refused("width=128 must be a multiple of .*num_heads=12"):
    loopjax.build("looped", width=128, num_key_value_heads=4)
  with refused("width=33 must be a multiple of"):
    loopjax.build("looped", width=33)
  assert not capsys.readouterr().err
  with refused("width=32 must be a multiple of .*num_heads=12"):
    loopjax.build("looped", width=32, num_heads=12)


def test_a_saved_model_says_how_it_was_trained(model, tmp_path):
  """Steps add up over `fit`, `save` and `load`; no training is 0 steps."""
  rows = np.full((2, 16), ord("a"), np.int32)
  batches, tx = [(rows, rows)] * 9, optax.sgd(0.1)
  found = model.fit(pairs(), steps=2, seed=3, tx=tx, quiet=True)
  found = found.fit(
    batches, steps=9, seed=5, tx=tx, every=1, on_log=lambda *_: True, quiet=True
  )
  loopjax.save(found, tmp_path / "a")
  loopjax.save(loopjax.load(tmp_path / "a"), tmp_path / "b")
  loopjax.save(model, tmp_path / "c")
  names = "steps", "run.num_steps", "run.batch_size", "run.seed"
  default = model.about.settings.run.batch_size
  assert [
    tuple(row[name] for name in names) for row in loopjax.table(tmp_path)
  ] == [(3, 3, 2, 5), (3, 3, 2, 5), (0, 0, default, 0)]
  jax.tree.map(jnp.add, found, model)  # They can still be combined.


def test_a_model_is_not_saved_beside_checkpoints(model, tmp_path):
  """Of a run that was interrupted, or whose files were removed by hand."""
  loopjax.save(model, tmp_path / "run")
  (tmp_path / "run" / "config.json").unlink()
  other = loopjax.build("looped", **SMALL, seed=1)
  with refused("but checkpoints/0, which would be read"):
    loopjax.save(other, tmp_path / "run")


def test_models_of_the_zoo_and_their_task():
  """As loaded from its run, and trained further on its own task."""
  found = of_zoo("sudoku_6x6")
  expected = trained.read("zoo:sudoku_6x6")
  data = loopjax.datasets("sudoku", batch_size=4, box_rows=2, box_cols=3)
  batch = data["test"][0]
  logits = found.logits(batch["inputs"], num_loops=12)
  output = expected.model()(batch["inputs"], num_loops=12)
  np.testing.assert_allclose(logits, output.logits, rtol=1e-3, atol=1e-3)
  right = (jnp.argmax(logits, -1) == batch["targets"]) | (batch["weights"] == 0)
  assert right.mean() > 0.9
  assert {"train", "validation", "test"} == set(data)


def test_a_model_of_the_hub_keeps_its_files(tmp_path, monkeypatch):
  """Also in a program that changes its current folder."""
  folder = hub_examples.make_folder(tmp_path / "hub")
  (folder / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
  monkeypatch.chdir(tmp_path)
  found = loopjax.load("hub")
  loopjax.save(found, tmp_path / "run")
  again = loopjax.load("run")
  monkeypatch.chdir("/")
  jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
  task = again.about.settings.task
  assert task.tokenizer == str(tmp_path / "run" / "hub" / "tokenizer.json")
  assert task.end_token == "<end>"
  for model in (found, again):
    language_model, _ = library.text._generator(model, 1, None, 1)
    assert language_model.stop_tokens == (0, 5)
  with refused("checkpoint=3 has no effect on"):
    loopjax.load(folder, checkpoint=3)


def test_documents_do_not_read_each_other(model, tmp_path, monkeypatch):
  """The loss of a batch of packed questions is the metric of `fit`."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  rows = [{"q": f"{n}:", "a": "xyz"[n % 3]} for n in range(300)]
  for name, some in (("a", rows[:200]), ("b", rows[200:])):
    lines = "\n".join(json.dumps(row) for row in some)
    (tmp_path / f"{name}.jsonl").write_text(lines)
  files = [tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")]
  data = loopjax.datasets(
    "text", batch_size=4, train_files=files, text_field="a",
    prompt_field="q", sequence_length=16,
  )  # fmt: skip
  batch = data["train"][0]
  assert batch["documents"].max() > 1
  seen = []
  model.fit(
    [batch], steps=1, on_log=lambda _, found, __: seen.append(found["loss"])
  )
  value, _ = loopjax.loss(model, batch)
  names = "inputs", "targets", "weights", "documents"
  inputs, targets, weights, documents = (batch[name] for name in names)
  apart, _ = loopjax.loss(
    model, inputs, targets, weights=weights, documents=documents
  )
  np.testing.assert_allclose([value, apart], seen * 2, rtol=1e-5)
  mixed, _ = loopjax.loss(model, inputs, targets, weights=weights)
  assert abs(mixed - value) > 1e-4

  second = np.flatnonzero(documents[0] == 2)
  alone = model.logits(inputs[0, second])
  packed = model.logits(inputs[0], documents=documents[0])[second]
  np.testing.assert_allclose(packed, alone, rtol=1e-4, atol=1e-5)
  trace = model.trace(inputs, "hidden", documents=documents)["hidden"]
  whole = model.trace(inputs, "hidden")["hidden"]
  assert abs(trace - whole)[:, 0, second].max() > 1e-4
  scores = model.evaluate(data["validation"])
  assert {"loss", "bits_per_byte", "count"} <= scores.keys()
  assert f"loss/source={files[0]}" in scores


def test_scores_are_those_of_the_trainer():
  """By hand from the predictions; groups have names, also of a slice."""
  found, data = of_zoo("sudoku_6x6"), boards()["test"][:2]
  scores = found.evaluate(data, num_loops=3)
  right = []
  for batch in (data[0], data[1]):
    predicted = found.trace(batch["inputs"], "prediction", num_loops=3)
    same = predicted["prediction"][-1] == batch["targets"]
    right += [*(same | (batch["weights"] == 0)).all(axis=1)]
  assert scores["count"] == len(right) == 8
  np.testing.assert_allclose(scores["exact_match"], np.mean(right), rtol=1e-6)
  assert any(name.startswith("exact_match/rating=") for name in scores)
  assert scores == found.evaluate(data, num_loops=3)
  assert scores != found.evaluate(data)


def test_scores_of_every_example_are_columns():
  """Also how many loops each thought; their means are the scores."""
  found, data = of_zoo("sudoku_6x6"), boards()["test"][:2]
  table = found.evaluate(data, num_loops=3, per_example=True)
  means = found.evaluate(data, num_loops=3)
  assert {len(column) for column in table.values()} == {8}
  for name in ("exact_match", "loops_run", "ponder_steps"):
    np.testing.assert_allclose(table[name].mean(), means[name], rtol=1e-6)
  ratings = {f"count/rating={x}" for x in table["rating"]}
  assert ratings <= means.keys()


def test_prompts_begin_as_in_training(model):
  """After "a" comes "b" at the beginning of a text, and "a" elsewhere."""
  rows = np.full((8, 17), ord("a"), np.int32)
  rows[4:, 2:] = ord("b")
  rows[4:, 0] = 256
  found = model.fit(
    [(rows[:, :-1], rows[:, 1:])] * 60,
    steps=60,
    tx=optax.adam(2e-2),
    quiet=True,
  )
  greedy = {"max_new_tokens": 3, "temperature": 0.0}
  assert found.generate("a", **greedy) == "bbb"
  assert found.generate("a", bos="none", **greedy) == "aaa"
  assert len(found.generate("a", temperature=0.0)) == 15  # All that fits.


def test_a_step_is_compiled_once_and_tells_the_time_left(
  model, monkeypatch, capsys
):
  traced = []

  def loss(module, batch, key, step, teacher):
    traced.append(teacher)
    logits = module(batch["inputs"]).logits[..., :256]
    value = jnp.mean(logits**2)
    return value, {}

  monkeypatch.setattr(library.training, "_SECONDS", 0)
  tx, seen, calls = optax.sgd(0.1), [], 0
  other = loopjax.build("looped", seed=1, **SMALL)
  for start in (model, other):
    start.fit(
      pairs(), steps=3, tx=tx, loss=loss,
      on_log=lambda _, found, __: seen.append(found["loss"]),
    )  # fmt: skip
    calls = calls or len(traced)
  assert len(seen) == 2 and 0 < calls == len(traced)
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 4
  assert re.match("fit: ready; the first of 3 steps took ", lines[0])
  assert re.match(
    "fit: step 2 of 3: loss [0-9.e-]+; a few seconds left", lines[1]
  )
  model.fit(pairs(), steps=3, tx=tx, loss=loss, quiet=True)
  assert calls == len(traced) and not capsys.readouterr().err


def test_names_and_models_are_shown_in_a_line(model):
  assert {*loopjax._LIBRARY, "errors"} <= set(dir(loopjax))
  assert not {"importlib", "os"} & set(dir(loopjax))
  shown = repr(model)
  assert shown.startswith("<Model 'looped' task='text' ")
  assert " width=16 " in shown and "task__sequence_length=16" in shown
  assert shown.endswith(f": {model.num_parameters:,} parameters>")
  assert "\n" not in shown and len(shown) < 200
  assert len(repr(model.spec)) < 300


def test_models_of_the_pages_can_be_built():
  """Exactly with the printed numbers."""
  for page in ("README.md", "docs/library.md"):
    text = (ROOT / page).read_text()
    calls = re.findall(r"loopjax\.build\((?:[^()]|\n)*\)", text)
    assert calls
    for call in calls:
      names = {"loopjax": loopjax, "seed": 0}
      jax.eval_shape(functools.partial(eval, call, names))


@pytest.mark.parametrize(
  ("call", "says"),
  [
    (lambda m: m.trace(np.arange(4), "h"), "trace 'h' is not one of hidden"),
    (
      lambda m: m.trace(np.arange(4)),
      "pass the names of the traces to record: hidden",
    ),
    (
      lambda m: m.module()(np.ones((1, 4), int), trace=("h",)),
      "trace 'h' is not recorded; the model's loops record hidden",
    ),
    (
      lambda m: config_lib.check_loops(
        m.about.settings._replace(
          family=dataclasses.replace(
            m.about.settings.family,
            costs=lambda *_: {"flops_per_example": [1.0]},
          )
        ),
        2,
        "model.num_loops=2",
      ),
      "model.name='looped': the length of flops_per_example is 1; expected 2",
    ),
    (
      lambda m: m.logits(np.ones(4)),
      "dtype float.* are invalid: expected",
    ),
    (
      lambda m: m.logits(np.arange(4), num_loops=10**6),
      "exceed the maximum of 65,536",
    ),
    (lambda m: m.logits(np.arange(4), num_loops=0), "num_loops=0 must be at"),
    (lambda m: m.generate("a", num_loops=0), "num_loops=0 must be at"),
    (lambda m: m.generate("a", top_p=2.0), "top_p=2.0 is not a number in"),
    (
      lambda m: m.generate("a", repetition_penalty=0),
      "repetition_penalty=0 is not a number in",
    ),
    (
      lambda m: m.logits([3, 10**6]),
      "ids from 3 to 1000000 are not in",
    ),
    (lambda m: m.logits([-1, 3]), "ids from -1 to 3 are not in"),
    (lambda m: m.logits([[1, 2], [3]]), "tokens is not an array of numbers"),
    (
      lambda m: loopjax.loss(m, [[1, 2], [3]], [[1, 2], [3]]),
      "inputs is not an array of numbers",
    ),
    (lambda m: loopjax.loss(m, 5), "a batch is .inputs, targets."),
    (lambda m: m.fit([None], steps=1), "a batch is .inputs, targets."),
    (
      lambda m: m.fit([batch_with(text=np.array([["a"], ["b"]]))], steps=1),
      "text is not an array of numbers: array",
    ),
    (
      lambda m: m.fit([batch_with(weights=None)], steps=1),
      "weights is not an array of numbers: None",
    ),
    (
      lambda m: m.fit([(np.ones((2, 0), int),) * 2], steps=1),
      r"inputs of shape \(2, 0\) have no tokens",
    ),
    (lambda m: loopjax.build("looped", seed="a"), "seed='a' must be an integ"),
    (
      lambda m: loopjax.build("looped", width=16, num_heads=2, seed=2**32),
      "seed=4294967296 must be less than",
    ),
    (lambda m: m.fit(pairs(), steps=1, seed=2**32), "must be less than 2..32"),
    (
      lambda m: loopjax.datasets("text", train_files=[]),
      "task.train_files is empty",
    ),
    (
      lambda m: of_zoo("sudoku_6x6").evaluate(boards()["test"][:0]),
      "evaluate expects an evaluation split",
    ),
    (
      lambda m: loopjax.run_sweep(
        f"{ROOT}/configs/sudoku_utm.py:smoke", ["a", "b"]
      ),
      "item 'a' is not a dict",
    ),
    (
      lambda m: of_zoo("sudoku_6x6").logits([1, 2]),
      "tokens: 'utm' expects rows of 36 tokens, not 2",
    ),
    (
      lambda m: of_zoo("depo").logits(np.arange(13)),
      "tokens: 'sleep' expects rows of 24 tokens, not 13",
    ),
    (lambda m: m.fit(pairs(), steps=0), "steps=0 must be"),
    (lambda m: m.fit(pairs(), steps=2.5), "steps=2.5 must be an integer"),
    (lambda m: m.fit(pairs(), steps=1, tx="adam"), "tx='adam' is not an Optax"),
    (lambda m: m.fit(3, steps=1), "data=3 is not an iterator of batches"),
    (
      lambda m: m.fit(pairs(), steps=1, loss=lambda m, b, k: (0.0, {})),
      "loss must be a function .module, batch, key, step, teacher.",
    ),
    (
      lambda m: m.fit(pairs(), steps=1, on_log=lambda step, metrics: None),
      "on_log must be a function .step, metrics, model.",
    ),
    (lambda m: m.fit(pairs(), steps=1, on_log="x"), "on_log must be a func"),
    (
      lambda m: m.fit(
        pairs(), steps=1, loss=lambda *_: (jnp.zeros(()), {"a": "b"})
      ),
      "loss must return .* a dict of numbers by name, not ",
    ),
    (
      lambda m: m.fit(
        pairs(), steps=1, loss=lambda *_: (jnp.zeros(()), {1: 2})
      ),
      "loss must return .* a dict of numbers by name, not ",
    ),
    (
      lambda m: m.fit([batch_with() | {3: np.ones(2)}], steps=1),
      "a batch has arrays by name, not by 3",
    ),
    (lambda m: m.logits(np.ones((0, 4), int)), "tokens of shape .* no tokens"),
    (
      lambda m: m.fit(pairs(), steps=1, loss=lambda *_: jnp.zeros(())),
      "loss must return .loss, metrics.",
    ),
    (
      lambda m: of_zoo("sudoku_urm").fit(
        [(np.ones((1, 36), int),) * 2],
        steps=1,
        tx=optax.sgd(0.1),
        loss=lambda *_: (jnp.zeros(()), {}),
      ),
      "metrics need 'carried'",
    ),
    (
      lambda m: m.logits(np.arange(4), num_loops=2.5),
      "num_loops=2.5 must be an integer",
    ),
    (lambda m: m.generate(3), "prompt=3 must be a string"),
    (lambda m: m.generate(["a", 3]), "prompt=3 must be a string"),
    (lambda m: m.generate("a", bos="<s>"), "bos='<s>' is not a token of bytes"),
    (
      lambda m: m.generate("abc", max_new_tokens=14),
      "max_new_tokens=14 is more than the 13 tokens that fit after a prompt"
      " of 4",
    ),
    (
      lambda m: loopjax.loss(m, np.ones((1, 4), int), [[1, 2, -100, 3]]),
      r"targets: ids from -100 to 3 .*give it weight 0 in weights",
    ),
    (
      lambda m: loopjax.loss(m, next(pairs()), weights=np.ones((4, 16))),
      "loss: weights with a batch",
    ),
    (
      lambda m: loopjax.loss(m, {}, np.ones((1, 4), int)),
      "pass a dict, or inputs and targets, not both",
    ),
    (
      lambda m: m.logits(np.arange(4), documents=np.ones(3, int)),
      "documents of shape .1, 3. for tokens of .1, 4.",
    ),
    (
      lambda m: of_zoo("sudoku_6x6").logits(
        np.ones(36, int), documents=np.ones(36, int)
      ),
      "documents has no effect: a row of the task 'sudoku'",
    ),
    (
      lambda m: m.evaluate(pairs()),
      "evaluate expects an evaluation split",
    ),
    (
      lambda m: m.evaluate(boards()["train"]),
      "evaluate expects an evaluation split",
    ),
    (
      lambda m: of_zoo("depo").evaluate(boards()["test"]),
      "inputs: 'sleep' expects rows of 24 tokens, not 36",
    ),
    (
      lambda m: m.evaluate(boards()["test"]),
      r"task 'text' have 'inputs' of shape \(4, 16\)",
    ),
    (
      lambda m: loopjax.datasets("sudoku", batch_size=0),
      "batch_size=0 must be at least 1",
    ),
    (
      lambda m: loopjax.datasets("text", train_files=["a,b"]),
      "'a,b' has a comma",
    ),
    (
      lambda m: loopjax.build("looped", width="64"),
      "model.width='64' must be an integer",
    ),
    (lambda m: m.fit(pairs(), steps=1, every=0), "every=0 must be"),
    (
      lambda m: m.fit(pairs(), steps=1, total_steps=2, tx=optax.sgd(0.1)),
      "total_steps has no effect with tx",
    ),
    (
      lambda m: m.fit(iter([next(pairs()), np.ones((2, 3, 16), int)]), steps=2),
      r"a batch of shape \(3, 16\) follows one of \(4, 16\)",
    ),
    (
      lambda m: loopjax.loss(m, *next(pairs()), weights=np.ones(16)),
      "weights of shape",
    ),
    (
      lambda m: loopjax.loss(of_zoo("sums_melt"), *next(pairs())),
      "no teacher: model.distill='all' needs run.teacher",
    ),
    (
      lambda m: of_zoo("sums_melt").fit(pairs(), steps=9),
      "optim.warmup_steps=50 must be less than .*=9; or give tx, an optimizer",
    ),
    (lambda m: loopjax.build(["looped"]), "model.name=.* is not one of"),
    (
      lambda m: loopjax.build("looped", width=16, model__width=32),
      "a setting is given twice: width, model__width",
    ),
    (
      lambda m: loopjax.save(
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), m), "new"
      ),
      "this model does not fit: other shape .* .bfloat16.16. there, float32",
    ),
    (
      lambda m: loopjax.save(jax.tree.map(lambda _: None, m), "new"),
      "this model does not fit: missing ",
    ),
    (lambda m: loopjax.save(m, ""), "'' is not the path of a run"),
    (lambda m: loopjax.load(None), "None is not the path of a run"),
    (lambda m: loopjax.table(None), "None is not the path of a run"),
    (lambda m: loopjax.table(["a", 5]), "5 is not the path of a run"),
    (lambda m: loopjax.loss("m", *next(pairs())), "'m' is not a model of loop"),
    (lambda m: loopjax.save("runs/a", m), "'runs/a' is not a model of loopjax"),
    (lambda m: loopjax.build("loooped"), "did you mean 'looped'"),
    (lambda m: loopjax.build("looped", widht=3), "model.width"),
    (
      lambda m: loopjax.build("looped", lr=3),
      "'model.lr'; did you mean optim.learning_rate, ",
    ),
    (
      lambda m: loopjax.build("looped", batch_size=3),
      "did you mean eval.batch_size, run.batch_size",
    ),
    (
      lambda m: loopjax.build("utm"),
      "cannot predict next tokens: .*; choose another task, such as sudoku",
    ),
    (
      lambda m: loopjax.build("sleep"),
      "several documents: .*; task.packed=False makes",
    ),
    (lambda m: loopjax.load("zoo:nothing"), "no such model"),
    (lambda m: loopjax.load("nowhere"), "nowhere contains no run"),
    (lambda m: loopjax.save(m, "zoo:sudoku_6x6"), "is a trained model"),
    (lambda m: loopjax.datasets("sodoku"), "did you mean 'sudoku'"),
    (lambda m: loopjax.datasets("sudoku", boxes=2), "task.box_rows"),
    (
      lambda m: loopjax.datasets(of_zoo("sudoku_6x6"), box_cols=2),
      "task.box_cols=2",
    ),
    (
      lambda m: m.fit(iter([next(pairs())]), steps=2),
      "the data ended after 1 of 2 steps",
    ),
    (
      lambda m: m.fit({"train": next(pairs())}, steps=1),
      "a batch is .inputs, ",
    ),
    (
      lambda m: loopjax.build(
        "looped", width=8, num_heads=2, precision="bfloat16_params"
      ).fit(pairs(), steps=1),
      "'bfloat16_params' is for inference only",
    ),
    (
      lambda m: m.fit([{"inputs": np.ones((2, 3))}], steps=1),
      "inputs of shape .* dtype float64 are invalid: expected",
    ),
    (
      lambda m: loopjax.loss(
        of_zoo("sudoku_urm"), np.ones((1, 36), int), np.ones((1, 36), int)
      ),
      "carries state",
    ),
    (lambda m: loopjax.check_family(3), "family=3 is not a family's name"),
    (lambda m: m.generate("a\ud800"), "prompt is not UTF-8"),
    (lambda m: m.generate("a", stop=None), "stop=None must be a string"),
    (lambda m: m.generate("a", stop=["b", ""]), "stop='' is empty"),
    (
      lambda m: of_zoo("sudoku_6x6").generate("1"),
      "does not generate text",
    ),
  ],
)
def test_mistakes_are_one_line(model, call, says):
  with refused(says):
    call(model)


def test_a_schedule_must_fit_into_the_steps_of_fit():
  """As for `loopjax train`: otherwise no step has all loops."""
  growth = {"growth_steps": (2,), "growth_loops": (1,), "depth": "fixed"}
  model = loopjax.build("recurrent", **SMALL, **growth)
  with refused(r"growth_steps=\(2,\) must end before run.num_steps=2"):
    model.fit([], steps=2)


def test_all_that_a_family_needs_is_named_at_once():
  """Also what only the model's constructor knows."""
  with pytest.raises(UserError) as caught:
    loopjax.build("melt")
  teacher, chunk = str(caught.value).split("\n")
  assert "needs run.teacher" in teacher
  assert "model.chunk_size=500 does not divide the 1024" in chunk


def test_an_exploding_loss_is_named(model):
  def loss(module, batch, key, step, teacher):
    value = jnp.where(step == 1, jnp.inf, 0.0)
    return value, {}

  with pytest.raises(
    UserError, match="step 2: the loss or its gradient is not"
  ):
    model.fit(pairs(), steps=3, loss=loss)


def test_a_text_that_was_interrupted_is_not_continued(model, monkeypatch):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(library.text.text_lib, "generate_texts", interrupted)
  with pytest.raises(KeyboardInterrupt):
    model.generate("a")
  assert not library.text._generator.cache_info().currsize


def test_threads_get_the_texts_of_their_prompts(model):
  prompts = ["a", "bc", "def", "g"]
  greedy = functools.partial(model.generate, temperature=0.0)
  expected = [greedy(prompt) for prompt in prompts]
  with futures.ThreadPoolExecutor(len(prompts)) as pool:
    assert list(pool.map(greedy, prompts)) == expected


# Numbers of docs/library.md, and smaller ones.
SMALLER = {
  "width=128": "width=16", "num_layers=2": "num_layers=1",
  "steps=1000": "steps=2", "width=32": "width=16",
  "num_loops=24": "num_loops=2",
  "max_new_tokens=50": "max_new_tokens=2", "length=128": "length=32",
  "(8, 128)": "(2, 32)",
}  # fmt: skip


@pytest.mark.long
def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
  page = (ROOT / "docs/library.md").read_text()
  text = "\n\n".join(
    f"Once there was a house of {n} doors." for n in range(4000)
  )
  (tmp_path / "mine.txt").write_text(text)
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  names = {}
  for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page, re.M):
    code = textwrap.dedent(block)
    if code.strip().startswith("loopjax generate"):  # A command's.
      continue
    for number, smaller in SMALLER.items():
      code = code.replace(number, smaller)
    exec(compile(code, "docs/library.md", "exec"), names)
  assert names["losses"].shape == (3,)
  assert names["solved"]["prediction"].shape == (2, 1, 36)
  assert (tmp_path / "runs/mine/summary.json").exists()
  for name in loopjax._LIBRARY:
    assert name == "Model" or f"loopjax.{name}(" in page, name
