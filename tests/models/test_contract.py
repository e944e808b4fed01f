"""What training checks of a family from outside the package."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests_support import SMOKE, load_config, refused

import loopjax
from loopjax import config as config_lib
from loopjax.models import MODELS, contract, looped
from loopjax.optim import parameters

SMALL = {
  "width": 16, "num_heads": 2, "num_layers": 1, "task__sequence_length": 16,
}  # fmt: skip
ROWS = np.full((2, 16), ord("a"), np.int32)
PROMISES = (
  "every parameter has a gradient: none, or not finite: unread",
  "scan and unrolled loops agree: ",
  "no logit depends on a later token: token 4 changes the logits of token 0",
  *(
    f"prefill and decode are the forward pass .cache {kind}.: logits differ"
    for kind in looped.FAMILY.reading.caches
  ),
  "a score after loop k equals that of a run with k loops: the losses at k=1",
)


class Model(looped.Model):
  """One that keeps no promise of the family whose parts it inherits."""

  def __init__(self, config, spec, options=looped.LoopOptions(), *, rngs):
    super().__init__(config, spec, options, rngs=rngs)
    self.unread = nnx.Param(jnp.ones(3))

  def __call__(self, inputs, **call):
    output = super().__call__(inputs, **call)
    factor = 2.0 if self.options.execution == "scan" else 3.0
    factor *= call.get("num_loops") or self.config.num_loops
    hidden = factor * (output.hidden + output.hidden.mean(1, keepdims=True))
    return output._replace(hidden=hidden, logits=self.logits(hidden))


def costs(config, spec, num_loops):
  once = looped.costs(config, spec, num_loops)["flops_per_example"]
  return {"flops_per_example": [2 * x for x in once]}


@pytest.fixture
def broken(monkeypatch):
  """Its name."""
  family = dataclasses.replace(looped.FAMILY, Model=Model, costs=costs)
  monkeypatch.setitem(MODELS, "broken", family)
  monkeypatch.setattr(parameters, "_REGISTERED", {**parameters._REGISTERED})
  parameters.register(parameters.Row("unread", parameters.P(), "adamw", "all"))
  return "broken"


def test_every_broken_promise_is_named_before_the_first_step(broken, capsys):
  model = loopjax.build(broken, **SMALL)
  with pytest.raises(loopjax.errors.UserError) as caught:
    model.fit([(ROWS, ROWS)], steps=1, quiet=True)
  lines = str(caught.value).split("\n")
  assert lines[-1].endswith("; check=False trains all the same")
  for line, promise in zip(lines, PROMISES, strict=True):
    assert re.match(f"model.name='broken': {promise}", line), line
  model.fit([(ROWS, ROWS)], steps=1, quiet=True, check=False)
  number = len(PROMISES) + 1  # And the costs, of which training is told.
  with refused(f"broken breaks {number} of {number} promises"):
    loopjax.check_family(broken)
  printed = capsys.readouterr().out.splitlines()
  assert all(line.startswith("FAILS  ") for line in printed)


def settings_of(family, monkeypatch):
  """Those of its smallest config, as of a family from outside the package."""
  monkeypatch.setitem(MODELS, "mine", MODELS[family])
  name, arg = SMOKE[family]
  return config_lib.resolve(load_config(name, f"{arg},model.name=mine"))


@pytest.mark.parametrize("family", ["melt", "sleep"])
def test_costs_of_a_small_model_are_a_note(family, monkeypatch):
  """Sizes that a family has besides the usual ones decide what XLA counts."""
  for name in ("gradients", "executions", "causality", "reading", "depths"):
    monkeypatch.setattr(contract._Small, name, lambda *_: "")
  doubt = contract.require(settings_of(family, monkeypatch), "")
  assert bool(doubt) == (family == "sleep")
  pattern = "model.name='mine': costs are what XLA counts: [0-9.]* of them"
  assert not doubt or re.match(pattern, doubt)


@pytest.mark.long
@pytest.mark.parametrize("family", ["melt", "sleep"])
def test_a_family_with_other_sizes_keeps_its_promises(family, monkeypatch):
  contract.require(settings_of(family, monkeypatch), "")


def test_a_family_that_cannot_be_made_small_says_how_to_train(monkeypatch):
  class Odd(looped.Model):
    def __init__(self, config, spec, options=None, *, rngs):
      raise loopjax.errors.UserError("model.odd=3 does not divide 8")

  family = dataclasses.replace(looped.FAMILY, Model=Odd)
  settings = settings_of("looped", monkeypatch)._replace(family=family)
  says = "mine.*can be made: UserError: model.odd=3 .*; train so all the same"
  with refused(says):
    contract.require(settings, "train so all the same")


def test_texts_of_another_model_are_named():
  """The loops of generation do not run the model's own `__call__`."""

  class Louder(looped.Model):
    def __call__(self, inputs, **call):
      output = super().__call__(inputs, **call)
      return output._replace(logits=2 * output.logits)

  family = dataclasses.replace(looped.FAMILY, Model=Louder)
  config = contract.small(looped.Config())
  assert "differ by" in contract._Small(family, config).reading("per_loop", 3)


# Their promises have tests of their own; here it matters that nothing else is
# named.
@pytest.mark.long
@pytest.mark.parametrize("name", ["looped", "utm", "urm", "recurrent"])
def test_families_of_the_package_keep_their_promises(name, capsys):
  loopjax.check_family(name)
  assert "FAILS" not in capsys.readouterr().out


def test_what_a_check_cannot_compute_is_a_line_with_its_place():
  def wrong():
    raise ValueError("of two\nlines")

  found = contract._said(wrong)
  assert found.startswith("ValueError: of two lines (") and __file__ in found
