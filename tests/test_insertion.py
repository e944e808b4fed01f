"""Memory put into a trained looped model, as docs/insertion.md says."""

import jax
import numpy as np
from tests_support import load_config, namespace

from loopjax import config as config_lib
from loopjax import program as program_lib
from loopjax import train
from loopjax.run import restore
from loopjax.sweep import items as items_lib

SHORT = "run.log_every=5,run.checkpoint_every=5,run.num_steps=15"


def test_stages_go_on_from_each_other(tmp_path):
  """A LoopLM, then only what is inserted into it, then everything."""
  config = load_config(
    "gsm_sleep", f"smoke,looplm,{SHORT},model.num_layers=2,model.num_passes=2"
  )
  sweeps = namespace("gsm_sleep")["sweeps"]
  items = items_lib.make_items(config, sweeps, "looplm", {}, tmp_path)
  assert [len(item.needs) for item in items] == [0, 1, 1]
  assert [item.config["run"]["num_steps"] for item in items] == [15, 5, 10]
  kept, names = [], ("looped", "sleep", "sleep")
  for item, name in zip(items, names, strict=True):
    one = config.copy_and_resolve_references()
    config_lib.override(one, item.overrides)
    train.run(one, tmp_path / item.slug, "train")
    settings = config_lib.resolve(one)
    assert settings.plain["model"]["name"] == name
    abstract = program_lib.make_program(settings).abstract_state.params
    _, params = restore.chosen_params(
      tmp_path / item.slug, None, abstract, item.slug
    )
    kept.append(params)
  looped, warm, whole = kept
  assert "head" in looped and "attention_post_norm" in looped["layers"]
  inserted = warm.pop("memories")
  jax.tree.map(np.testing.assert_array_equal, warm, looped)
  # It began as zero.
  output = inserted["memory"]["fast_weights"]["output"]["kernel"]
  assert np.abs(output).max() > 0
  later = whole.pop("memories")
  for before, after in ((inserted, later), (warm, whole)):
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
    assert all(x > 0 for x in jax.tree.leaves(moved)), moved
  assert [item.config["model"].get("eviction") for item in items] == [
    None, "hard", "sliding",
  ]  # fmt: skip
