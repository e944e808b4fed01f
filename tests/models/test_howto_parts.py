"""Parts in models that users write, and parts in programs of their own."""

import contextlib
import re
from unittest import mock

import jax
import jax.numpy as jnp
import model_examples as examples
import numpy as np
import pytest
from tests_support import ROOT, refused

from loopjax.loop.injection import INJECTIONS
from loopjax.models import disco, recurrent, utm
from loopjax.models.disco import GATES
from loopjax.models.utm.config import HALTING
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), 2)
TOKENS = jax.random.randint(jax.random.key(1), (3, 8), 0, 21)
SMALL = {"width": 16, "num_heads": 2, "num_loops": 3}


def blocks_of(page):
  """The programs of a page of docs/howto."""
  text = (ROOT / "docs" / "howto" / f"{page}.md").read_text()
  return re.findall(r"(?ms)^```python\n(.*?)^```", text)


@pytest.fixture(autouse=True)
def parts():
  """What the page defines, in the dictionaries of parts during a test."""
  names = {"__name__": "howto"}
  with contextlib.ExitStack() as stack:
    for of_parts in (INJECTIONS, HALTING, GATES):
      stack.enter_context(mock.patch.dict(of_parts))
    for block in blocks_of("model"):
      exec(block, names)
    yield names


def test_the_injection_of_the_page_is_one_of_a_model():
  def output(injection):
    config = recurrent.Config(**SMALL, injection=injection, init_std=0.3)
    return examples.run(recurrent, config, SPEC, TOKENS)

  np.testing.assert_array_equal(
    INJECTIONS["halved"].make(4, None, precision=None, rngs=None)(6.0, 1.0), 4.0
  )
  assert not jnp.allclose(output("halved").logits, output("add").logits)


def test_the_gate_of_the_page_is_one_of_a_model(parts):
  decoded = jnp.array([[3.0, 4.0], [0.0, 0.0]])
  gate = GATES["loud"](disco.Config(gate_value=5.0), None)
  assert gate == parts["Loud"](5.0)  # So that programs are used again.
  np.testing.assert_allclose(gate(decoded), [0.5, 0.0067], atol=1e-4)
  config = disco.Config(**SMALL, gate="loud", init_std=0.3)
  fixed = disco.Config(**SMALL, init_std=0.3)
  output = [
    examples.run(disco, one, SPEC, TOKENS).logits for one in (config, fixed)
  ]
  assert not jnp.allclose(*output)


def test_the_rule_of_the_page_stops_where_it_is_confident(parts):
  config = utm.Config(**SMALL, halting="confident")
  assert HALTING["confident"](config) == parts["Confident"](0.5)
  chances = jnp.array([[0.1, 0.6, 0.9], [0.7, 0.1, 0.9], [0.2, 0.2, 0.2]])
  rule = HALTING["confident"](config)
  state, weights = rule.init((3,)), []
  for step in range(3):
    weight, state = rule.update(state, chances[:, step], jnp.array(step == 2))
    weights.append(weight)
  expected = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
  np.testing.assert_array_equal(np.stack(weights, 1), expected)
  np.testing.assert_array_equal(state.cost, [2, 1, 3])
  examples.run(utm, config, SPEC, TOKENS)


def test_a_function_in_place_of_an_injection_is_one_line():
  INJECTIONS["bare"] = lambda hidden, injected: hidden + injected
  with refused(r"INJECTIONS is a function, expected Injection\(make, num_p"):
    recurrent.Config(**SMALL, injection="bare")


@pytest.mark.long
def test_the_page_on_parts_runs_from_top_to_bottom():
  names = {"__name__": "howto"}
  for block in blocks_of("parts"):
    exec(block, names)
  output, cost, loops = names["ponder"](names["params"], names["x"])
  early = names["ponder"](names["params"], names["x"], "while")
  np.testing.assert_array_equal(early[0], output)
  np.testing.assert_array_equal(early[1], cost)
  assert early[2] < loops == 8
  assert all(jnp.any(x != 0) for x in names["gradient"].values())
  for rows, at_once in zip(
    names["cache"], (names["key"], names["value"]), strict=True
  ):
    np.testing.assert_allclose(rows[:, :6], at_once, atol=1e-5)
    assert not jnp.any(rows[:, 6:])
  assert names["values"][-1] < names["values"][0]
