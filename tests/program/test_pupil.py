"""A frozen teacher, and state carried between steps."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pupil
import pytest
from flax import nnx
from tests_support import smoke, stacked, train_batches

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.commands import describe
from loopjax.errors import UserError
from loopjax.fit import measure, topology
from loopjax.losses import tokens as token_losses
from loopjax.models import MODELS
from loopjax.program import step
from loopjax.program import teacher as teacher_lib
from loopjax.run.checkpoints import restore
from loopjax.train.score import score_model
from loopjax.types import Carried

pytestmark = pytest.mark.usefixtures("programs")
QUICK = {"eval__depth_factor": 0, "eval__batch_size": 64}


@pytest.fixture(scope="module", autouse=True)
def _among_the_families():
  """For this module only."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(MODELS, "pupil", pupil.FAMILY)
    yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """The work directory of a trained model of another family."""
  workdir = tmp_path_factory.mktemp("teacher")
  train.run(smoke(optim__ema_decay=0.9, **QUICK), workdir, "train")
  return workdir


def config_of(teacher, **overrides):
  config = smoke(**QUICK)
  config_lib.override(config, {"model.name": "pupil"})
  values = {"run.teacher": str(teacher)}
  values |= {key.replace("__", "."): v for key, v in overrides.items()}
  config_lib.override(config, values)
  return config


def taught(config, devices):
  """(program, the teacher's parameters)."""
  settings = config_lib.resolve(config)
  program = program_lib.make_program(
    settings, devices, teacher_lib.read(settings)
  )
  _, params = teacher_lib.load(settings, program.abstract_teacher, None)
  return program, params


def steps(config, devices, num_steps=3):
  """(state before, state after, metrics, the teacher's parameters)."""
  program, teacher_params = taught(config, devices)
  batch = stacked(program, train_batches(program.settings, num_steps))
  state = program.init(jax.random.key(0))
  before = jax.device_get(state)
  return before, *program.train(state, batch, teacher_params), teacher_params


def averaged(workdir, at):
  """The averaged parameters in a checkpoint, and their graph."""
  program = program_lib.make_program(
    config_lib.resolve(smoke(optim__ema_decay=0.9, **QUICK)), jax.devices()[:1]
  )
  state, _ = restore.state(workdir, at, program.abstract_state)
  return program.graphdef, state.ema


@pytest.mark.long
def test_the_loss_gets_the_averaged_model_of_the_newest_checkpoint(teacher):
  config = config_of(teacher)
  _, _, metrics, teacher_params = steps(config, jax.devices()[:1], 1)
  graphdef, expected = averaged(teacher, 20)
  jax.tree.map(np.testing.assert_array_equal, teacher_params, expected)
  (batch,) = train_batches(config_lib.resolve(config), 1)

  @jax.jit
  def score(params):
    output = nnx.merge(graphdef, params)(batch["inputs"])
    return token_losses.weighted_mean(
      token_losses.token_cross_entropy(output.logits, batch["targets"]),
      batch["weights"],
    )

  np.testing.assert_allclose(
    metrics["teacher_loss"], [score(expected)], rtol=1e-5
  )


def test_state_is_carried_from_step_to_step(teacher):
  before, state, _, _ = steps(config_of(teacher), jax.devices()[:1])
  size = len(before.carried.by_example["age"])
  np.testing.assert_array_equal(
    state.carried.by_example["age"], np.arange(size) + 3
  )
  answers = (x.carried.by_example["answer"] for x in (state, before))
  assert np.abs(np.subtract(*answers)).max() > 0.01


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mesh_and_parts_of_a_batch_carry_the_same(teacher, microbatches):
  expected = steps(config_of(teacher), jax.devices()[:1])[1]
  config = config_of(
    teacher,
    mesh__fsdp=2,
    mesh__tensor=2,
    mesh__min_split_size=200,
    run__num_microbatches=microbatches,
  )
  _, state, _, teacher_params = steps(config, jax.devices())
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    jax.device_get((state.carried, state.params)),
    jax.device_get((expected.carried, expected.params)),
  )
  answer = state.carried.by_example["answer"]
  assert len(answer.addressable_shards[0].data) == len(answer) // 4
  assert any(
    not leaf.is_fully_replicated for leaf in jax.tree.leaves(teacher_params)
  )


@pytest.mark.long
def test_resuming_is_bitwise_though_the_teacher_has_gone_on(teacher, tmp_path):
  """The run keeps the teacher's checkpoint with which it began."""
  source, straight, cut = (tmp_path / name for name in ("source", "a", "b"))
  shutil.copytree(teacher, source)
  later = source / "checkpoints" / "20"
  later.rename(tmp_path / "later")
  config = config_of(source)
  done = train.run(config, straight, "train")
  assert done["status"] == "completed"
  shutil.copytree(straight, cut)
  (cut / "summary.json").unlink()
  shutil.rmtree(cut / "checkpoints" / "20")
  (tmp_path / "later").rename(later)
  again = train.run(config, cut, "train")
  assert again["digest"] == done["digest"]
  fresh = train.run(config, tmp_path / "c", "train")
  assert fresh["digest"] != done["digest"]
  (cut / "summary.json").unlink()
  shutil.rmtree(source / "checkpoints" / "10")
  with pytest.raises(UserError, match="source/.* no checkpoint at step 10"):
    train.run(config, cut, "train")


@pytest.mark.long
def test_the_digest_and_the_checkpoint_hold_what_is_carried(teacher, tmp_path):
  config = config_of(teacher)
  train.run(config, tmp_path, "train")
  program, _ = taught(config, jax.devices())
  state, meta = restore.state(tmp_path, 20, program.abstract_state)
  assert meta["teacher_step"] == 20
  size = len(state.carried.by_example["age"])
  np.testing.assert_array_equal(
    state.carried.by_example["age"], np.arange(size) + 20
  )


@pytest.mark.long
def test_evaluation_needs_no_teacher(teacher, tmp_path):
  source = tmp_path / "source"
  shutil.copytree(teacher, source)
  config = config_of(source)
  train.run(config, tmp_path / "run", "train")
  shutil.rmtree(source)
  scores = score_model(config, tmp_path / "run")["metrics"]
  assert np.isfinite(scores["test/loss"])


@pytest.mark.long
def test_describe_and_fit_count_the_teacher(teacher):
  said = describe.describe(config_of(teacher))
  alone = describe.describe(smoke(optim__ema_decay=0.9, **QUICK))
  assert said["teacher"] == {
    name: alone[name] for name in ("parameters", "flops_per_example")
  }
  assert "teacher" not in alone
  machine = topology.machine(topology.parse("cpu:8"), 1.0)
  measured = measure.measure(config_lib.resolve(config_of(teacher)), machine)
  assert measured.arguments["teacher"] == 4 * alone["parameters"]
  known = sum(measured.arguments.values())
  assert known <= measured.memory["arguments"] + 2**12


def test_a_step_whose_carried_state_is_not_finite_changes_nothing():
  model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(model)
  params, tx = nnx.to_pure_dict(params), optax.sgd(0.1)

  def loss(model, batch, key, at, teacher):
    total = jnp.mean(model(batch["x"]))
    seen = batch["carried"].by_example + jnp.where(at == 1, jnp.inf, 1.0)
    return total, {"loss": total, "carried": Carried(seen)}

  state = step.init_state(
    params, tx, jax.random.key(0), False, Carried(jnp.zeros(2))
  )
  batches = {"x": np.ones((3, 2, 1), np.float32), "weights": np.ones((3, 2))}
  after, metrics = step.train_steps(
    state,
    batches,
    {},
    graphdef=graphdef,
    teacher_graphdef=None,
    loss_fn=loss,
    tx=tx,
    ema_decay=0.0,
    num_microbatches=1,
    max_bad_steps=9,
  )
  np.testing.assert_array_equal(metrics["accepted"], [1, 0, 1])
  np.testing.assert_array_equal(after.carried.by_example, [2, 2])


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"run__teacher": "nowhere"}, "run.teacher=nowhere contains no run"),
    ({"run__teacher": ""}, "model.name='pupil' learns from a teacher"),
    ({"task__box_cols": 3}, r"has 6 token ids, but the task has 8"),
  ],
)
def test_a_teacher_that_cannot_be_is_one_line(
  teacher, tmp_path, overrides, message
):
  with pytest.raises(UserError, match=message) as caught:
    train.run(config_of(teacher, **overrides), tmp_path / "run", "train")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_only_families_that_learn_have_a_teacher(teacher, tmp_path):
  message = "has no effect: model.name='utm' has no teacher"
  with pytest.raises(UserError, match=message):
    train.run(smoke(run__teacher=str(teacher)), tmp_path / "run", "train")
  train.run(config_of(teacher), tmp_path / "pupil", "train")
  with pytest.raises(UserError, match="pupil: a pupil teaches nobody"):
    describe.describe(config_of(tmp_path / "pupil"))


@pytest.mark.long
def test_a_folder_of_another_kind_is_one_line(tmp_path, teacher):
  hub = tmp_path / "hub"
  hub.mkdir()
  (hub / "config.json").write_text(json.dumps({"architectures": ["Ouro"]}))
  with pytest.raises(UserError, match="hub: config.json is not a loopjax"):
    describe.describe(config_of(hub))
  shutil.copy(teacher / "config.json", hub / "config.json")
  with pytest.raises(UserError, match="hub contains no checkpoints"):
    train.run(config_of(hub), tmp_path / "run", "train")
