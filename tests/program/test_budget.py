"""Models of equal size or cost, by the width of the MLPs."""

import pytest
from tests_support import load_config, namespace

from loopjax import config as config_lib
from loopjax.errors import UserError
from loopjax.program import budget


def config_of(preset="tiny", **overrides):
  config = load_config("lm_adaptive", preset)
  config_lib.override(
    config, {key.replace("__", "."): v for key, v in overrides.items()}
  )
  return config


@pytest.mark.long
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("measure", [budget.parameters, budget.flops])
def test_a_model_is_found_again(measure, mlp):
  """For any initial ratio of the search."""
  found = config_of(model__mlp=mlp, model__mlp_ratio=2.5)
  target = measure(config_lib.resolve(found))
  other = config_of(model__mlp=mlp)
  assert budget.mlp_ratio(other, target, measure) == 2.5


@pytest.mark.long
@pytest.mark.parametrize("multiple", [1, 8])
def test_no_other_width_is_closer(multiple):
  config = config_of()
  target = 700_000.0
  ratio = budget.mlp_ratio(config, target, multiple=multiple)
  width = config.model.width
  assert int(width * ratio) % multiple == 0

  def off(features):
    changed = config_of(model__mlp_ratio=features / width)
    return abs(budget.parameters(config_lib.resolve(changed)) - target)

  best = int(width * ratio)
  assert off(best) <= min(off(best - multiple), off(best + multiple))


def test_every_width_has_its_ratio():
  for width in (96, 100, 384, 768, 770):
    for features in range(1, 6000):
      assert int(width * budget.ratio_of(features, width)) == features


def test_a_model_that_is_too_large_without_mlps_is_one_line():
  with pytest.raises(UserError, match="no MLP width gives") as caught:
    budget.mlp_ratio(config_of(), 1000.0)
  assert "\n" not in str(caught.value)


@pytest.mark.long
def test_the_ten_models_of_the_paper():
  """Table 2; without norms, routers and scales 162.2 M, where it says 200 M."""
  config = load_config("lm_adaptive", "paper")
  items = namespace("lm_adaptive")["sweeps"](config)["table_1"]
  found = []
  for item in items:
    changed = load_config("lm_adaptive", "paper")
    config_lib.override(changed, item)
    settings = config_lib.resolve(changed)
    model = settings.model
    reads = 2 if model.num_local_slots else 0  # Four norms without biases.
    looped = model.num_loops > 1
    norms = (
      model.num_layers * (2 + reads + (model.loop_update == "literal")) + 1
    )
    rest = norms * 2 * 768
    rest += looped * model.num_layers * (769 + 1 + model.num_loops)
    found.append(round((budget.parameters(settings) - rest) / 1e6, 1))
  assert found == [162.2] * 4 + [332.1, 210.2] + [210.2] * 3 + [476.1]
  sizes = [item.get("model.mlp_ratio") for item in items]
  assert sizes[5] == sizes[9] == 5676 / 768


@pytest.mark.long
@pytest.mark.parametrize("preset", ["tiny", "paper"])
def test_controls_cost_what_loops_cost(preset):
  """Three times the layers, with the MLPs of equal size, within 8 %."""

  def flops(item):
    changed = load_config("lm_adaptive", preset)
    config_lib.override(changed, item)
    return budget.flops(config_lib.resolve(changed))

  config = load_config("lm_adaptive", preset)
  sweeps = namespace("lm_adaptive")["sweeps"](config)
  table = [flops(item) for item in sweeps["table_1"]]
  assert table[4] == pytest.approx(table[1], rel=1e-3)
  assert table[9] == pytest.approx(table[7], rel=0.08)
  frontier = [flops(item) for item in sweeps["frontier"]]
  assert len(frontier) == 12
  assert frontier == pytest.approx([frontier[0]] * 12, rel=2e-3)
