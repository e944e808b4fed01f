"""Memory inserted into a trained looped model, as on the page of Sleep."""

import re

import jax
import numpy as np
import pytest
from tests_support import load_config, namespace

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.nn import lora
from loopjax.run.checkpoints import integrity, restore
from loopjax.sweep import items as items_lib

SHORT = "run.log_every=5,run.checkpoint_every=5,run.num_steps=15"


def stages(workdir):
  """(item, its config) of the sweep."""
  config = load_config(
    "gsm_sleep", f"smoke,looplm,{SHORT},model.num_layers=2,model.num_loops=2"
  )
  sweeps = namespace("gsm_sleep")["sweeps"]
  items = items_lib.make_items(config, sweeps, "stages", {}, workdir)
  for item in items:
    one = config.copy_and_resolve_references()
    config_lib.override(one, item.overrides)
    yield item, one


def test_stages_go_on_from_each_other(tmp_path):
  """A LoopLM, then only the inserted memory, then everything."""
  items, configs = zip(*stages(tmp_path), strict=True)
  assert [len(item.needs) for item in items] == [0, 1, 1]
  assert [config.run.num_steps for config in configs] == [15, 5, 10]
  looped, warm, whole = map(config_lib.resolve, configs)
  assert [x.model_name for x in (looped, warm, whole)] == [
    "looped", "sleep", "sleep",
  ]  # fmt: skip
  assert (warm.model.eviction, whole.model.eviction) == ("hard", "sliding")
  theirs, ours, last = (
    integrity.describe(program_lib.abstract_model(x)[1])
    for x in (looped, warm, whole)
  )
  assert "head/kernel" in theirs and last == ours
  fresh = {name for name in ours if name not in theirs}
  assert {name: x for name, x in ours.items() if name not in fresh} == theirs
  for name in ours:
    is_new = name in fresh
    assert bool(re.search(warm.run.init_fresh, name)) == is_new
    assert bool(re.search(warm.optim.frozen, name)) != is_new
  assert not whole.optim.frozen and not whole.run.init_fresh


def test_parameters_that_are_there_take_the_place_of_fresh_ones():
  fresh = {"layers": {"kernel": 1, "bias": 2}, "memories": {"kernel": 3}}
  there = {"layers": {"kernel": 4, "bias": 5}}
  assert lora.replaced(fresh, there) == {**fresh, **there}


@pytest.mark.manual
def test_only_what_was_inserted_is_trained_at_first(tmp_path):
  kept = []
  for item, config in stages(tmp_path):
    workdir = tmp_path / item.slug
    train.run(config, workdir, "train")
    program = program_lib.make_program(config_lib.resolve(config))
    abstract = program.abstract_state.params
    kept.append(restore.chosen_params(workdir, None, abstract, "")[1])
  looped, warm, whole = kept
  inserted, later = warm.pop("memories"), whole.pop("memories")
  jax.tree.map(np.testing.assert_array_equal, warm, looped)
  # Initially zero.
  output = inserted["memory"]["fast_weights"]["output"]["kernel"]
  assert np.abs(output).max() > 0
  for before, after in ((inserted, later), (warm, whole)):
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
    assert all(x > 0 for x in jax.tree.leaves(moved)), moved
