"""Checkpoints: retention, refusals and damaged files."""

import contextlib
import errno

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests_support import smoke

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import sharding, train
from loopjax.errors import UserError
from loopjax.nn import lora
from loopjax.run.checkpoints import checkpoint as checkpoint_lib
from loopjax.run.checkpoints import integrity, restore


def tree(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  return {
    "params": {
      "a": {"kernel": jax.random.normal(keys[0], (64, 96))},
      "b": jax.random.normal(keys[1], (8,), jnp.bfloat16),
    },
    "ema": {},
    "count": jnp.int32(7),
    "flag": jnp.array([True, False]),
    "key": keys[2],
  }


def abstract(value, mesh=None):
  def one(x):
    where = NamedSharding(mesh, P()) if mesh else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  return jax.tree.map(one, value)


@contextlib.contextmanager
def filled(tmp_path, steps, scores=None, **options):
  """Checkpoints of these steps; scores become known after the saves."""
  with checkpoint_lib.Checkpoints(tmp_path, **options) as checkpoints:
    for step in steps:
      checkpoints.save(step, tree(step), {"batches": step})
      if scores and step in scores:
        checkpoints.scores[step] = scores[step]
    checkpoints.wait()
    yield checkpoints


def test_what_is_saved_comes_back(tmp_path):
  with filled(tmp_path, [1, 2], keep=2):
    pass
  state, meta = restore.state(tmp_path, 1, abstract(tree()))
  assert meta["batches"] == 1
  for got, expected in zip(
    jax.tree.leaves(state), jax.tree.leaves(tree(1)), strict=True
  ):
    assert got.dtype == expected.dtype
    assert jnp.array_equal(got, expected)


def test_arrays_are_stored_as_they_are(tmp_path):
  """Compression takes longer than it saves, and a second copy in memory."""
  zeros = np.zeros(2**16, np.float32)
  with checkpoint_lib.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, {"params": jnp.asarray(zeros)}, {})
  files = (tmp_path / restore.DIRECTORY).rglob("*")
  stored = [path.read_bytes() for path in files if path.is_file()]
  assert any(zeros.tobytes() in content for content in stored)


def test_the_newest_and_the_best_stay(tmp_path):
  """The best step is known only after its checkpoint was written."""
  scores = {1: 0.1, 2: 0.9, 3: 0.3, 4: 0.2, 5: 0.4}
  with filled(tmp_path, range(1, 7), scores, keep=2, keep_best=1) as kept:
    assert kept.steps() == [2, 5, 6]
    assert restore.best(tmp_path, kept.scores) == 2
  with checkpoint_lib.Checkpoints(
    tmp_path, keep=1, keep_best=1, scores=scores
  ) as again:
    again.save(7, tree(7), {})
    again.wait()
    assert again.steps() == [2, 7]


def test_without_scores_there_is_no_best(tmp_path):
  no_score = pytest.raises(UserError, match="no checkpoint has a score")
  with filled(tmp_path, [1]) as checkpoints, no_score:
    restore.best(tmp_path, checkpoints.scores)


def test_saving_a_step_twice_keeps_the_first(tmp_path):
  with filled(tmp_path, [3]) as checkpoints:
    checkpoints.save(3, tree(99), {"batches": 99})
    checkpoints.wait()
  assert restore.meta(tmp_path, 3)["batches"] == 3


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: t["params"].pop("b"), r"not in the model params/b"),
    (lambda t: t["params"].update(c=jnp.ones(2)), r"missing params/c"),
    (
      lambda t: t["params"].update(b=jnp.ones(9)),
      r"params/b \(bfloat16\[8\] there, float32\[9\] here\)",
    ),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
  """A user error: an older checkpoint would not help."""
  wanted = tree()
  change(wanted)
  with filled(tmp_path, [1, 2], keep=2):
    pass

  def read(step):
    return restore.state(tmp_path, step, abstract(wanted))

  instead = f"cannot be resumed, but --config.run.init_from={tmp_path} starts"
  with pytest.raises(UserError, match=f"{message}.*{instead}"):
    restore.newest(tmp_path, read, set_aside=False)
  params = abstract(wanted["params"])
  with pytest.raises(UserError, match=message.replace("params/", "")):
    restore.params(tmp_path, 2, params)


def test_parameters_alone_and_fresh_ones_beside_them(tmp_path):
  wanted, expected = abstract(tree()["params"]), tree(1)["params"]
  with filled(tmp_path, [1]):
    pass
  loaded = restore.params(tmp_path, 1, wanted)
  np.testing.assert_array_equal(loaded["a"]["kernel"], expected["a"]["kernel"])
  wanted["gate"] = {"bias": wanted["b"]}
  with pytest.raises(UserError, match="missing gate/bias"):
    restore.params(tmp_path, 1, wanted, optional="^other")
  loaded = restore.params(tmp_path, 1, wanted, optional="^gate")
  assert "gate" not in loaded
  merged = lora.replaced({**tree()["params"], "gate": {"bias": 5}}, loaded)
  assert merged["gate"] == {"bias": 5}
  np.testing.assert_array_equal(merged["b"], expected["b"])


def test_parameters_of_a_run_that_averages_are_the_average(tmp_path):
  state = tree(1)
  state["ema"] = jax.tree.map(lambda x: 2 * x, state["params"])
  with checkpoint_lib.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state, {})
  loaded = restore.params(tmp_path, 1, abstract(state["params"]))
  np.testing.assert_array_equal(
    loaded["a"]["kernel"], state["ema"]["a"]["kernel"]
  )


# Failed reads close Orbax's event loop while others still use it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
  """Orbax itself would load some of them."""
  with filled(tmp_path, [1]):
    pass
  found, expected = [], jax.tree.leaves(tree(1))
  for path in (tmp_path / "checkpoints" / "1" / "state").rglob("d/*"):
    original = path.read_bytes()
    for place in np.linspace(0, len(original) - 1, 5).astype(int):
      changed = bytearray(original)
      changed[place] ^= 4
      path.write_bytes(bytes(changed))
      try:
        state, _ = restore.state(tmp_path, 1, abstract(tree()))
      except restore.DamagedCheckpointError as error:
        found.append(str(error))
      else:  # An unused bit.
        for got, value in zip(jax.tree.leaves(state), expected, strict=True):
          assert jnp.array_equal(got, value)
    path.write_bytes(original)
  assert any("corrupt bytes in" in line for line in found)


def test_falling_back_and_setting_aside(tmp_path, capsys):
  with filled(tmp_path, [1, 2], keep=2):
    pass
  directory = tmp_path / "checkpoints"
  (directory / "2" / "meta" / "metadata").write_text("{}")
  (directory / "5").mkdir()
  (directory / "9.orbax-checkpoint-tmp").mkdir()
  state, meta = restore.newest(
    tmp_path,
    lambda step: restore.state(tmp_path, step, abstract(tree())),
    set_aside=True,
  )
  assert meta["batches"] == 1
  assert jnp.array_equal(state["key"], tree(1)["key"])
  said = capsys.readouterr().out
  assert "checkpoint 5 is skipped" in said
  assert "checkpoint 2 is skipped" in said
  assert "checkpoint 9" not in said
  aside = sorted(path.name for path in (tmp_path / "damaged").iterdir())
  assert aside == ["2.0", "5.0"]
  with checkpoint_lib.Checkpoints(tmp_path, keep=2) as checkpoints:
    assert checkpoints.steps() == restore.steps(tmp_path) == [1]
    assert not list(directory.glob("*tmp*"))
    checkpoints.save(2, tree(2), {})  # Its place is free again.
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize(
  "error",
  [
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EIO, "Input/output error"),
    TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    PermissionError(errno.EACCES, "Permission denied"),
    MemoryError("no room"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"),
  ],
)
def test_an_error_of_the_machine_is_no_damage(tmp_path, monkeypatch, error):
  """Else an intact checkpoint would be set aside, and its steps be lost."""
  with filled(tmp_path, [1, 2], keep=2):
    pass
  read = ocp.PyTreeCheckpointHandler.restore

  def fail(handler, directory, **options):
    if directory.parent.name == "2":
      raise error
    return read(handler, directory, **options)

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
  with pytest.raises(type(error), match=str(error.args[-1])):
    restore.newest(
      tmp_path,
      lambda step: restore.state(tmp_path, step, abstract(tree())),
      set_aside=True,
    )
  assert restore.steps(tmp_path) == [1, 2]
  assert not (tmp_path / "damaged").exists()


def test_no_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
  usage = checkpoint_lib.shutil.disk_usage(tmp_path)._replace(free=1000)
  with checkpoint_lib.Checkpoints(tmp_path) as checkpoints:
    monkeypatch.setattr(checkpoint_lib.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="needs 24 KiB, 0 KiB are free"):
      checkpoints.save(1, tree(), {})
    assert checkpoints.steps() == []


def test_no_checkpoints_is_nothing_and_only_damaged_ones_an_error(tmp_path):
  def newest():
    return restore.newest(
      tmp_path, lambda step: restore.meta(tmp_path, step), set_aside=True
    )

  assert newest() is None
  (tmp_path / "checkpoints" / "4").mkdir(parents=True)
  with pytest.raises(UserError, match="cannot resume: all checkpoints"):
    newest()
  assert restore.steps(tmp_path) == [4]


def mesh_of(*sizes):
  count = int(np.prod(sizes))
  return sharding.make_mesh(sharding.Config(*sizes), jax.devices()[:count])


def test_checksums_do_not_depend_on_the_mesh():
  value = tree()["params"]["a"]["kernel"]
  expected = integrity.checksums({"x": value})
  for sizes, spec in (
    ((8, 1, 1), P()),
    ((1, 8, 1), P("fsdp")),
    ((2, 2, 2), P("fsdp", "tensor")),
  ):
    placed = jax.device_put(value, NamedSharding(mesh_of(*sizes), spec))
    assert integrity.checksums({"x": placed}) == expected


def test_one_checksum_is_computed_at_a_time(monkeypatch):
  """Several at once block each other on virtual devices and few cores."""
  begun = []

  class Sum:
    is_ready = False

    def block_until_ready(self):
      self.is_ready = True
      return self

    def __array__(self, dtype=None, copy=None):
      self.is_ready = True
      return np.zeros(2, np.uint32)

  def begin(x, on_one_device):
    assert all(earlier.is_ready for earlier in begun)
    begun.append(Sum())
    return begun[-1]

  monkeypatch.setattr(integrity, "_sum", begin)
  found = integrity.checksums({"a": np.ones(2), "b": np.ones((2, 3))})
  assert found == dict.fromkeys("ab", 16 * "0")
  assert len(begun) == 2


def test_checksums_need_no_memory_and_no_communication():
  """Importing and saving large models needs little more than their size."""
  value = jnp.ones((64, 4096), jnp.bfloat16)
  program = integrity._sum.lower(value, True).compile()
  assert program.memory_analysis().temp_size_in_bytes < value.nbytes / 100
  placed = jax.device_put(
    value, NamedSharding(mesh_of(2, 2, 2), P("fsdp", "tensor"))
  )
  text = integrity._sum.lower(placed, False).compile().as_text()
  assert "all-gather" not in text and "all-reduce" in text


@pytest.mark.parametrize(
  "dtype", ["float32", "bfloat16", "int8", "uint16", "int32", "bool"]
)
def test_checksums_see_every_bit_and_every_place(dtype):
  value = np.arange(24).reshape(4, 6) % 2
  array = jnp.asarray(value).astype(dtype)
  expected = integrity.checksums([array])
  changed = array.at[2, 3].set(array[2, 4])
  flipped = integrity.checksums([changed])
  swapped = integrity.checksums([array[:, ::-1]])
  turned = integrity.checksums([array.reshape(6, 4)])
  assert len({str(x) for x in (expected, flipped, swapped, turned)}) == 4
  assert integrity.checksums([jnp.copy(array)]) == expected


def test_restored_on_another_mesh(tmp_path):
  """Saved with one sharding, restored with another, bitwise equal."""
  before = NamedSharding(mesh_of(2, 4, 1), P("fsdp"))
  after = NamedSharding(mesh_of(1, 2, 2), P("tensor", "fsdp"))
  value = tree()["params"]["a"]["kernel"]
  with checkpoint_lib.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, {"x": jax.device_put(value, before)}, {})
    checkpoints.wait()
  wanted = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=after)
  state, _ = restore.state(tmp_path, 1, {"x": wanted})
  assert state["x"].sharding == after
  np.testing.assert_array_equal(state["x"], value)


@pytest.mark.long
def test_a_run_starts_from_the_parameters_of_another(tmp_path):
  """From the averaged ones, which hardly change here."""
  source, tuned = tmp_path / "source", tmp_path / "tuned"
  train.run(smoke(), source, "train")
  config = smoke(
    run__seed=1,
    run__init_from=str(source),
    run__num_steps=5,
    run__log_every=5,
    run__checkpoint_every=5,
    optim__learning_rate=1e-9,
    optim__final_learning_rate=0.0,
  )
  train.run(config, tuned, "train")
  program = program_lib.make_program(config_lib.resolve(config))
  wanted = program.abstract_state.params
  expected = restore.params(source, 20, wanted)
  got = restore.params(tuned, 5, wanted)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, expected
  )
  fresh = program.init(jax.random.key(1)).params["head"]["kernel"]
  assert not np.allclose(fresh, expected["head"]["kernel"], atol=1e-3)


def test_a_digest_sees_every_array_and_no_mesh():
  def digest(state):
    return integrity.digest(integrity.record(state))

  state = tree()
  expected = digest(state)
  value = state["params"]["a"]["kernel"]
  where = NamedSharding(mesh_of(2, 4, 1), P("fsdp"))
  state["params"]["a"]["kernel"] = jax.device_put(value, where)
  assert digest(state) == expected
  state["params"]["a"]["kernel"] = value.at[3, 4].add(1e-6)
  changed = digest(state)
  state["params"]["a"] = {"weight": value}
  assert len({expected, changed, digest(state)}) == 3


def test_a_source_that_holds_nothing_is_named(tmp_path):
  with pytest.raises(
    UserError, match="run.init_from=.* contains no checkpoints"
  ):
    train.run(smoke(run__init_from="nowhere"), tmp_path, "train")
