"""Schedules, decay, learning rates, clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests_support import refused

from loopjax.errors import UserError
from loopjax.models import utm
from loopjax.optim import chain, parameters
from loopjax.types import TaskSpec

CONFIG = chain.Config(
  learning_rate=1e-2, final_learning_rate=1e-3, warmup_steps=10
)


# Settings, steps of a run, and the rate at some of them.
WSD = {"schedule": "wsd", "learning_rate": 0.1, "final_learning_rate": 0.02}
SCHEDULES = [
  ({}, 110, {0: 0, 5: 5e-3, 10: 1e-2, 60: 5.5e-3, 110: 1e-3}),
  (
    {"schedule": "linear"},
    110,
    {0: 0, 5: 5e-3, 10: 1e-2, 60: 5.5e-3, 110: 1e-3, 200: 1e-3},
  ),
  (
    {**WSD, "warmup_steps": 4, "cooldown_fraction": 0.4},
    100,
    {2: 0.05, 4: 0.1, 60: 0.1, 80: 0.06, 99: 0.022, 100: 0.02, 200: 0.02},
  ),
  # Falls from the start.
  (
    {**WSD, "warmup_steps": 0, "cooldown_fraction": 1.0},
    10,
    {0: 0.1, 5: 0.06, 10: 0.02},
  ),
  # A cooldown of at least a step.
  (
    {**WSD, "warmup_steps": 9, "cooldown_fraction": 0.01},
    10,
    {8: 0.8 / 9, 9: 0.1, 10: 0.02},
  ),
]


def make_schedule(changes, num_steps):
  return chain.make_schedule(dataclasses.replace(CONFIG, **changes), num_steps)


@pytest.mark.parametrize(("changes", "num_steps", "rates"), SCHEDULES)
def test_schedules_at_their_corners(changes, num_steps, rates):
  schedule = make_schedule(changes, num_steps)
  found = schedule(jnp.array([*rates]))
  np.testing.assert_allclose(found, [*rates.values()], rtol=1e-5)


def test_constant_schedule_stays():
  config = chain.Config(schedule="constant", learning_rate=0.1, warmup_steps=4)
  schedule = chain.make_schedule(config, 100)
  np.testing.assert_allclose(
    schedule(jnp.array([0, 2, 4, 99])), [0, 0.05, 0.1, 0.1]
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({}, "warmup_steps=10 must be less than run.num_steps=10"),
    ({"schedule": "linear"}, "warmup_steps=10 must be less than"),
    (
      {**WSD, "warmup_steps": 7, "cooldown_fraction": 0.4},
      "warmup_steps=7 and the 4 steps of opt",
    ),
  ],
)
def test_warm_up_and_cooldown_must_fit(changes, message):
  with pytest.raises(UserError, match=message):
    make_schedule(changes, 10)


def test_a_schedule_warms_up_again():
  config = dataclasses.replace(CONFIG, warm_again=(40, 80))
  schedule, once = (chain.make_schedule(c, 110) for c in (config, CONFIG))
  steps = jnp.array([5, 39, 40, 45, 50, 79, 80, 82, 100])
  factors = jnp.array([1, 1, 0, 0.5, 1, 1, 0, 0.2, 1])
  np.testing.assert_allclose(
    schedule(steps), factors * once(steps), rtol=1e-5, atol=1e-9
  )
  with pytest.raises(UserError, match="must be before run.num_steps=80"):
    chain.make_schedule(config, 80)
  for wrong in ((3, 2), (0,)):
    with pytest.raises(UserError, match="must be increasing positive integers"):
      dataclasses.replace(CONFIG, warm_again=wrong)
  with pytest.raises(UserError, match="warm_again has no effect while"):
    dataclasses.replace(CONFIG, warmup_steps=0, warm_again=(4,))


def utm_params():
  spec = TaskSpec(6, 16, tuple((i,) for i in range(16)))
  config = utm.Config(width=16, num_heads=2, num_loops=3, norm="rmsnorm")
  model = utm.Model(config, spec, rngs=nnx.Rngs(params=0))
  return nnx.to_pure_dict(nnx.state(model))


def test_decay_includes_narrower_kinds():
  """Which kind a parameter is: `test_parameters`."""
  params = utm_params()
  masks = {
    decay: jax.tree.leaves(parameters.decay_mask(params, decay))
    for decay in parameters.DECAYS
  }
  kinds = [row.decay for row in jax.tree.leaves(parameters.rows(params))]
  assert masks["matrices"] == [kind == "matrices" for kind in kinds]
  assert masks["tables"] == [kind != "all" for kind in kinds]
  assert all(masks["all"]) and {*kinds} == {*parameters.DECAYS}


@pytest.mark.long
@pytest.mark.parametrize("decay", ["all", "matrices"])
def test_a_step_without_gradient_decays_what_the_mask_says(decay):
  config = chain.Config(
    learning_rate=0.1,
    weight_decay=0.5,
    decay=decay,
    schedule="constant",
    warmup_steps=0,
  )
  tx = chain.make_optimizer(config, 10)
  params = utm_params()
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
  changed = optax.apply_updates(params, updates)
  kernel = params["head"]["kernel"]
  np.testing.assert_allclose(
    changed["head"]["kernel"], 0.95 * kernel, rtol=1e-6
  )
  bias = params["router"]["bias"]
  factor = 0.95 if decay == "all" else 1.0
  np.testing.assert_allclose(
    changed["router"]["bias"], factor * bias, rtol=1e-6
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"learning_rate": 0.0}, "learning_rate"),
    ({"schedule": "step"}, "schedule='step'"),
    ({"ema_decay": 1.0}, "ema_decay"),
    ({"weight_decay": -1.0}, "weight_decay"),
    ({"name": "sgd"}, "optim.name='sgd' is not one of adamw, adam_atan2, muon"),
    ({"muon_learning_rate": 0.1}, "no effect while optim.name='adamw'"),
    ({"muon_momentum": 0.9}, "no effect while optim.name='adamw'"),
    ({"name": "muon", "muon_learning_rate": 0.0}, "muon_learning_rate=0.0"),
    ({"name": "muon", "muon_momentum": 1.0}, "muon_momentum=1.0"),
    ({"cooldown_fraction": 0.5}, "no effect while optim.schedule='cosine'"),
    (
      {"schedule": "constant", "cooldown_fraction": 0.5},
      "optim.cooldown_fraction has no effect while optim.schedule='constant'",
    ),
    (
      {"schedule": "constant", "final_learning_rate": 0.0},
      "final_learning_rate has no effect",
    ),
    ({"schedule": "wsd", "cooldown_fraction": 0.0}, "cooldown_fraction=0.0"),
    ({"schedule": "wsd", "cooldown_fraction": 1.5}, "cooldown_fraction=1.5"),
  ],
)
def test_impossible_settings_are_named(changes, message):
  with pytest.raises(UserError, match=message):
    chain.Config(**changes)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_pattern_has_its_own_learning_rate(name):
  """A factor scales step and decay alike; the first match applies."""
  config = chain.Config(name=name, warmup_steps=0, weight_decay=0.1)
  rates = ("query/=0.25", "bias$=4", "(query|router)/=8")
  params = {
    "head": {"kernel": jnp.ones((3, 1))},
    "query": {"kernel": jnp.eye(3), "bias": jnp.ones(3)},
    "router": {"kernel": jnp.ones((3, 1)), "bias": jnp.ones(1)},
  }

  def updates(**changes):
    tx = chain.make_optimizer(dataclasses.replace(config, **changes), 2000)
    return tx.update(params, tx.init(params), params)[0]

  factors = {
    "head": {"kernel": 1},
    "query": {"kernel": 0.25, "bias": 0.25},
    "router": {"kernel": 8, "bias": 4},
  }
  before = updates()
  expected = jax.tree.map(lambda update, by: by * update, before, factors)
  assert all(jnp.any(leaf) for leaf in jax.tree.leaves(before))
  jax.tree.map(np.testing.assert_array_equal, updates(rates=rates), expected)


@pytest.mark.parametrize(
  ("rates", "message"),
  [
    (("gates=0.25",), "optim.rates: 'gates=0.25' applies to no parameter"),
    # Another one has them all.
    (("router=2", "router/bias=0.25"), "'router/bias=0.25' applies to no"),
    (("router",), "'router' is not 'pattern=factor'|'router'"),
    (("=2",), "'=2' is not 'pattern=factor'"),
    (("router=0",), "'router=0' is not .* with a factor > 0"),
    (("router=-1.0",), "with a factor > 0"),
    (("router=inf",), "with a factor > 0"),
    (("router=nan",), "with a factor > 0"),
    (("router=two",), "'router=two': could not convert"),
    (("(=2",), r"'\(=2': missing \)"),
    ((2,), "2 is not"),
  ],
)
def test_impossible_rates_are_named(rates, message):
  params = {"router": {"kernel": jnp.ones((3, 1)), "bias": jnp.ones(1)}}
  with refused(message):
    tx = chain.make_optimizer(chain.Config(warmup_steps=0, rates=rates), 2000)
    tx.init(params)


def test_no_rates_add_no_operation():
  scale = parameters.scale_by_rate(("bias=2",))
  leaf = jnp.ones((2, 2))
  params = {"input": {"kernel": leaf, "bias": leaf}}
  updates, state = scale.update(params, scale.init(params))
  assert updates["input"]["kernel"] is leaf
  assert not jax.tree.leaves(state)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_stay_and_do_not_count(name):
  """No decay, and no effect of their gradients' norm on others."""
  config = chain.Config(
    name=name, warmup_steps=0, weight_decay=0.1, frozen="^old/"
  )
  params = {
    "old": {"value": {"kernel": jnp.ones((3, 3))}},
    "new": {"value": {"kernel": jnp.eye(3)}},
  }
  grads = jax.tree.map(lambda x: 100 * x, params)

  def update(config, params, grads):
    tx = chain.make_optimizer(config, 10)
    return tx.update(grads, tx.init(params), params)[0]

  updates = update(config, params, grads)
  assert not jnp.any(updates["old"]["value"]["kernel"])
  alone = {"new": params["new"]}
  expected = update(
    dataclasses.replace(config, frozen=""), alone, {"new": grads["new"]}
  )
  jax.tree.map(np.testing.assert_array_equal, {"new": updates["new"]}, expected)


@pytest.mark.parametrize(
  ("pattern", "message"),
  [("none", "matches no"), ("kernel", "freezes all"), ("(", "optim.frozen")],
)
def test_a_pattern_that_freezes_nothing_or_all_is_named(pattern, message):
  params = {
    "key": {"kernel": jnp.ones((2, 2))},
    "value": {"kernel": jnp.ones((2, 2))},
  }
  with pytest.raises(UserError, match=message):
    chain.make_optimizer(chain.Config(frozen=pattern), 2000).init(params)


def test_adam_atan2_is_its_definition():
  """Means corrected for their start, their arctangent, and decay."""
  config = chain.Config(
    name="adam_atan2", learning_rate=0.1, schedule="constant", warmup_steps=0,
    b1=0.8, b2=0.9, weight_decay=0.5, clip_norm=0.0,
  )  # fmt: skip
  random = np.random.default_rng(0)
  start, gradients = random.normal(size=3), random.normal(size=(4, 3))
  gradients[:, 2] = 0.0  # No direction, and no division by zero.
  tx = chain.make_optimizer(config, 10)

  def trained(scale):
    params = {"puzzle_vector": jnp.asarray(start, jnp.float32)}
    state = tx.init(params)
    for gradient in gradients:
      updates = {"puzzle_vector": jnp.asarray(scale * gradient, jnp.float32)}
      updates, state = tx.update(updates, state, params)
      params = optax.apply_updates(params, updates)
    return params["puzzle_vector"]

  wanted, m, v = start.copy(), np.zeros(3), np.zeros(3)
  for step, gradient in enumerate(gradients, 1):
    m = 0.8 * m + 0.2 * gradient
    v = 0.9 * v + 0.1 * gradient**2
    direction = np.arctan2(m / (1 - 0.8**step), np.sqrt(v / (1 - 0.9**step)))
    wanted -= 0.1 * (direction + 0.5 * wanted)
  np.testing.assert_allclose(trained(1.0), wanted, rtol=1e-5)
  np.testing.assert_allclose(trained(1e-9), wanted, rtol=1e-5)


OWN = """
import optax

def lion(config):
  return optax.scale_by_lion(config.b1, config.b2)

def saw(config, num_steps):
  return lambda step: config.learning_rate * (1 + step) / num_steps
"""


def test_an_optimizer_and_a_schedule_of_a_module_are_named(
  tmp_path, monkeypatch
):
  """They are Optax's own Lion, with this rate and decay."""
  (tmp_path / "of_mine.py").write_text(OWN)
  monkeypatch.syspath_prepend(str(tmp_path))
  config = chain.Config(
    name="of_mine:lion", schedule="of_mine:saw", clip_norm=0.0
  )
  tx = chain.make_optimizer(config, 10)
  rate = lambda step: config.learning_rate * (1 + step) / 10  # noqa: E731
  expected = optax.lion(rate, config.b1, config.b2, weight_decay=0.01)
  params = {"attention": {"query": {"kernel": jnp.ones((2, 3)) / 7}}}
  state, other = tx.init(params), expected.init(params)
  for number in range(3):
    grads = jax.tree.map(lambda x, n=number: x - n, params)
    updates, state = tx.update(grads, state, params)
    wanted, other = expected.update(grads, other, params)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, wanted
    )
  for name, says in (
    ("of_mine:lyon", "AttributeError: module 'of_mine' has no"),
    ("nowhere:lion", "No module named 'nowhere'; a run that has it keeps a"),
  ):
    with refused(f"optim.name='{name}': {says}"):
      chain.make_optimizer(chain.Config(name=name), 2000)
  with refused("optim.muon_momentum has no effect while optim.name='of_mine:"):
    chain.Config(name="of_mine:lion", muon_momentum=0.5)
  with refused("not one of adamw, .*, or package.module:function"):
    chain.Config(name="lion")
  with refused("'__main__:lion': put the function into a module, which other"):
    chain.Config(name="__main__:lion")


MISTAKEN = """
import optax

three = 3
none = lambda: optax.identity()
number = lambda config: 3
attribute = lambda config: optax.scale_by_lion(config.beta)
other = lambda config: optax.stateless(lambda grads, _: {"other": grads})
rate = lambda config, num_steps: 0.1
text = lambda config, num_steps: lambda step: "0.1"
vector = lambda config, num_steps: lambda step: optax.sgd
branch = lambda config, num_steps: lambda step: 1.0 if step else 0.0
"""


@pytest.mark.parametrize(
  ("field", "value", "says"),
  [
    ("name", "mistaken:three", "TypeError: 'int' object is not callable"),
    ("name", "mistaken:none", "TypeError: .*takes 0 positional arguments"),
    ("name", "mistaken:number", "returns 3, not an optax.Gradient"),
    ("name", "mistaken:attribute", "AttributeError: 'Config' object has no"),
    ("name", "mistaken:other", "ValueError: the updates' shapes are not"),
    ("name", "optax:scale_by_lion", "TypeError: .*'float' and 'Config'"),
    ("name", "unparsed:lion", "SyntaxError: .*unparsed.py, line 1"),
    ("name", "unnamed:lion", "NameError: name 'jaxx' is not defined"),
    ("schedule", "mistaken:rate", "returns 0.1, not a function of the step"),
    ("schedule", "mistaken:text", "TypeError: "),
    ("schedule", "mistaken:vector", "TypeError: "),
    ("schedule", "mistaken:branch", "TracerBoolConversionError: "),
    ("schedule", "mistaken:none", "TypeError: .*takes 0 positional arguments"),
  ],
)
def test_mistakes_in_an_own_optimizer_or_schedule_are_one_line(
  field, value, says, tmp_path, monkeypatch
):
  """Whatever the user's code raises or returns; before it is compiled."""
  for name, text in (
    ("mistaken", MISTAKEN), ("unparsed", "def lion(:"), ("unnamed", "jaxx.x"),
  ):  # fmt: skip
    (tmp_path / f"{name}.py").write_text(text)
  monkeypatch.syspath_prepend(str(tmp_path))
  params = {"attention": {"query": {"kernel": jnp.ones((2, 3))}}}
  with refused(f"optim.{field}='{value}':? {says}"):
    tx = chain.make_optimizer(chain.Config(**{field: value}), 2000)
    jax.eval_shape(tx.update, params, tx.init(params), params)
