"""The changes tried, their order, and the suggestion."""

import pytest
from tests_support import load_config, smoke

from loopjax import config as config_lib
from loopjax.fit import suggest
from loopjax.fit.measure import Measured
from loopjax.nn import remat as remat_lib

MESH = {"data": 4, "fsdp": 1, "tensor": 1}


class Attempts:
  """Replaces the compiler: programs must need at most `available`."""

  def __init__(self, needs, available, impossible=()):
    self.needs, self.available = needs, available
    self.impossible, self.tried = impossible, []

  def __call__(self, change):
    self.tried.append(change.overrides)
    if change.overrides in self.impossible:
      return None
    needed = self.needs(change.overrides)
    fits = needed <= self.available
    return Measured(fits, needed, {}, {}, "", None, [], None, 0.0, MESH, 0.0)


def settings(**overrides):
  return config_lib.resolve(smoke(**{"loop__remat": "none", **overrides}))


def memory(overrides):
  """100 at first: 16 of state, 80 of activations, 4 of the rest."""
  remat = remat_lib.ORDER.index(overrides.get("loop.remat", "none"))
  parts = overrides.get("run.num_microbatches", 1)
  parts *= 16 // overrides.get("run.batch_size", 16)
  state = 16 / overrides.get("mesh.fsdp", 1)
  return state + 80 / (1 + remat) / parts + 4


def run(available, mesh=MESH, impossible=(), **overrides):
  attempts = Attempts(memory, available, impossible)
  change = suggest.suggest(settings(**overrides), mesh, attempts)
  return change and change.overrides, attempts.tried


def test_every_policy_has_its_place():
  assert sorted(remat_lib.ORDER) == sorted(remat_lib.POLICIES)


def test_the_mildest_policy_that_fits():
  # The strongest policy needs 36, the others 60, 47, 40.
  found, tried = run(available=47)
  assert found == {"loop.remat": "dots_no_batch"}
  assert [t["loop.remat"] for t in tried] == ["full", "dots", "dots_no_batch"]


def test_from_the_policy_that_is_set():
  found, tried = run(available=36, loop__remat="outputs")
  assert found == {"loop.remat": "full"}
  assert len(tried) == 1


@pytest.mark.parametrize(
  ("data", "expected"),
  [(-1, {"mesh.fsdp": 4}), (4, {"mesh.fsdp": 4, "mesh.data": 1})],
)
def test_then_the_mesh(data, expected):
  found, tried = run(available=88, loop__remat="full", mesh__data=data)
  assert found == expected
  assert [t["mesh.fsdp"] for t in tried] == [4, 2]


def test_then_microbatches():
  # 16 examples over 4 devices make 4 parts at most.
  found, tried = run(available=60, loop__remat="full")
  assert found == {"run.num_microbatches": 2}
  assert tried == [
    {"mesh.fsdp": 4},
    {"run.num_microbatches": 4},
    {"run.num_microbatches": 2},
  ]


@pytest.mark.parametrize(
  ("change", "effect"),
  [
    ("model.num_loops=2", "the same result"),
    (
      "model.depth=learned,model.depth_per=row",
      "a different result: rows are compared within a part",
    ),
  ],
)
def test_what_microbatches_change(change, effect):
  config = load_config("lm_recurrent", f"smoke,{change}")
  (first, *_) = suggest._microbatches(config_lib.resolve(config), MESH)
  assert first == ({"run.num_microbatches": 2}, effect)


def test_then_the_batch():
  def needs(overrides):
    return overrides.get("run.batch_size", 16)

  attempts = Attempts(needs, 8)
  change = suggest.suggest(settings(loop__remat="full"), MESH, attempts)
  assert change.overrides == {"run.batch_size": 8}
  assert attempts.tried[-2:] == [{"run.batch_size": 4}, {"run.batch_size": 8}]


def test_last_all_together():
  found, tried = run(available=16)
  assert found == {
    "loop.remat": "full",
    "mesh.fsdp": 4,
    "run.num_microbatches": 2,
  }
  alone = [change for change in tried if len(change) == 1]
  assert tried[: len(alone)] == alone
  assert tried[len(alone)] == {"loop.remat": "full", "mesh.fsdp": 4}


def test_nothing_fits():
  found, tried = run(available=1)
  assert found is None
  assert tried[-1] == {
    "loop.remat": "full",
    "mesh.fsdp": 4,
    "run.batch_size": 4,
  }


def test_what_is_impossible_is_left_out():
  found, tried = run(
    available=92, loop__remat="full", impossible=({"mesh.fsdp": 4},)
  )
  assert found == {"mesh.fsdp": 2}
  found, tried = run(available=16, impossible=({"mesh.fsdp": 4},))
  assert {"loop.remat": "full", "mesh.fsdp": 2} in tried
  assert all(change.get("mesh.fsdp") != 4 for change in tried[3:])


def test_nothing_to_try():
  one = {"data": 1, "fsdp": 1, "tensor": 1}
  attempts = Attempts(memory, 1)
  change = suggest.suggest(
    settings(loop__remat="full", run__batch_size=1), one, attempts
  )
  assert change is None and attempts.tried == []
