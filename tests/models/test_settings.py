"""Settings of families that cannot be, each named in one line."""

import dataclasses
import re

import model_examples as examples
import pytest
from tests_support import causal, refused

from loopjax.models import MODELS
from loopjax.nn import stack
from loopjax.types import TaskSpec

SPEC = TaskSpec(23, 8, tuple((i,) for i in range(8)), num_padding_tokens=2)
STACK = {"width": 16, "num_heads": 2, "num_layers": 2, "num_loops": 3}
# What is possible, and what the rows below change.
BASE = {
  "disco": STACK,
  "looped": {
    **STACK, "num_heads": 4, "num_key_value_heads": 2, "exit_gate": "joint",
    "qk_norm": False, "entropy_weight": 0.05,
  },
  "loopformer": STACK,
  "melt": {
    **STACK, "chunk_size": 4, "prefill_chunk": 1, "distill": "none",
  },
  "plt": {**STACK, "num_heads": 4},
  "ponderlm": STACK,
  "recurrent": {
    **STACK, "num_prelude": 1, "num_coda": 1, "num_with_gradient": 2,
  },
  "sleep": {
    "width": 16, "num_heads": 2, "num_layers": 2, "num_memory_layers": 2,
    "num_memory_heads": 2, "key_width": 8, "value_width": 8, "window": 8,
    "num_loops": 3,
  },
}  # fmt: skip
# Of all that are stacks of blocks.
STACKS = [
  ({"width": 20, "num_heads": 8}, "multiple"),
  ({"num_key_value_heads": 5}, "num_heads=[0-9]+ must be a multiple"),
  ({"head_width": 3}, "head_width=3 must be even"),
  ({"mlp": "relu"}, "mlp='relu'"),
  ({"mlp_ratio": 0.0}, "mlp_ratio=0.0"),
  ({"precision": "float16"}, "precision='float16'"),
  ({"rope_base": None}, "rope_base=None must be"),
]
IMPOSSIBLE = {
  "loopformer": [
    ({"num_loops": 1, "short_weight": 0.2}, "no effect .*: one loop has no sh"),
    ({"num_loops": 1, "consistency_weight": 0.0}, "weight has no effect while"),
  ],
  "looped": [
    ({"exit_gate": "both"}, "exit_gate='both' is not one of none"),
    ({"exit_gate": "alone", "entropy_weight": 0.1}, "weight has no effect"),
    ({"num_loops": 1}, "exit_gate='joint' needs model.num_loops of at least 2"),
  ],
  "sleep": [
    ({"num_layers": 3}, "num_memory_layers=2 must divide"),
    ({"num_memory_layers": 3}, "num_layers=2 or be a multiple of it"),
    ({"num_layers": 4, "num_coda": 1}, "multiple of 2"),
    ({"num_prelude": 1, "num_coda": 1}, "has no layers left"),
    ({"A_range": (3.0, 1.0)}, "A_range"),
    ({"A_range": ("a", 1.0)}, "A_range"),
    ({"A_range": (0.1,)}, "A_range"),
    ({"num_with_gradient": 9}, "num_with_gradient=9"),
    ({"num_with_gradient": 1, "gradient_cut": "S"}, "gradient_cut='S' is not"),
    ({"gradient_cut": "both"}, "no effect while model.num_with_gradient=0"),
    (
      {"gradient_cut": "both", "num_with_gradient": 1, "carry_state": False},
      "gradient_cut has no effect while model.carry_state=False",
    ),
    ({"memory": "lstm"}, "memory='lstm'"),
    ({"eviction": "soft"}, "eviction='soft'"),
  ],
  "plt": [
    ({"window": 1.5}, "window=1.5 must be of type int"),
    ({"rope_scaling": (1.0,)}, "rope_scaling="),
  ],
  "ponderlm": [
    ({"tied": 1}, "tied=1 must be of type bool"),
    ({"top_k": 22}, "top_k=22 is more than the 21"),
  ],
  "melt": [
    (
      {"chunk_size": 3},
      "chunk_size=3 does not divide the 8 tokens of a sequence; with 0, ",
    ),
    ({"gate": "gru"}, "model.gate='gru' is not one of element, scalar"),
    ({"gate": "mean", "gate_bias": 1.0}, "gate_bias has no effect while"),
    ({"interpolation_steps": 9}, "interpolation_steps has no effect while"),
    ({"interpolation_steps": 1, "alpha": 0.0}, "alpha=0.0 needs model.interp"),
    ({"alpha": 0.5}, "alpha=0.5 needs model.interpolation_steps of at least 2"),
    ({"align_weight": 0.1}, "align_weight has no effect while"),
  ],
  "disco": [
    ({"gate": "open"}, "gate='open'"),
    ({"gate": "learned", "gate_value": 0.5}, "gate_value has no effect"),
    ({"gate_value": 0.0, "top_k": 5}, "top_k has no effect"),
    ({"gate_value": 0.0, "temperature": 2.0}, "temperature has no effect"),
    ({"decode_gradient": "none"}, "decode_gradient='none'"),
    ({"loop_norm": "never"}, "loop_norm='never'"),
    ({"top_k": 22}, "top_k=22 is more than the 21"),
  ],
  "recurrent": [
    ({"depth": "fixed", "max_loops": 9}, "max_loops has no effect while"),
    ({"growth_steps": (5,), "growth_loops": (1,)}, "growth_steps has no eff"),
    ({"max_loops": 2}, "max_loops=2 is less than model.num_loops=3"),
    ({"calibrated": True, "max_loops": 3}, "^model.max_loops=3 allows no dist"),
    ({"num_coda": 0}, "loop_norm='coda' needs model.num_coda"),
    ({"state": "ones"}, "state='ones' is not one of input, zero, normal"),
    ({"injection": "add", "anchor_scale": 2.0}, "anchor_scale has no effect"),
    ({"injection": "none"}, "injection='none' no loop reads the tokens"),
    ({"injection": "anchor", "anchor_scale": 0.0}, "no loop reads the tokens"),
    (
      {"depth": "fixed", "growth_steps": (5, 3), "growth_loops": (1, 1)},
      "the steps must increase",
    ),
  ],
  "utm": [
    ({"norm": "batchnorm"}, "norm='batchnorm'"),
    ({"width": 20, "num_heads": 8}, "multiple"),
    ({"ponder_warmup_steps": 5}, "ponder_warmup_steps has no effect"),
    ({"positions": "none", "rope_base": 7.0}, "rope_base has no effect"),
    ({"width": None}, "width=None must be of type int"),
    ({"halting": "fixed", "router_bias": 0.0}, "router_bias has no effect"),
    ({"halting": "fixed", "ponder_weight": 0.1}, "ponder_weight has no effect"),
    ({"halting": "ponder", "epsilon": 0.1}, "epsilon has no effect"),
  ],
  "adaptive": [
    ({"halting_mass": "lost"}, "halting_mass='lost' is not one of"),
    (
      {"num_local_slots": 0, "num_global_slots": 0, "gate_bias": 3.0},
      "gate_bias has no effect",
    ),
    ({"num_loops": 1, "ponder_weight": 0.1}, "ponder_weight has no effect"),
    ({"ponder_prior": 0.2}, "ponder_prior has no effect while .*weight=0"),
    ({"ponder_prior": 1.0, "ponder_weight": 0.1}, "ponder_prior=1.0 must be"),
    (
      {"ponder_prior": 0.2, "ponder_weight": 0.1, "halting_mass": "printed"},
      "ponder_prior=0.2 needs model.halting_mass=remainder",
    ),
    ({"num_loops": 1, "halting_mass": "printed"}, "halting_mass has no effect"),
    ({"num_loops": 1, "scale_from_step": 2, "loop_scale": 0.0}, "loop_scale"),
  ],
  "trm": [
    ({"mixer": "convolution"}, "mixer='convolution'"),
    ({"token_mlp_width": 64}, "token_mlp_width has no effect while"),
    ({"mixer": "mlp", "num_heads": 4}, "num_heads has no effect while"),
    ({"mixer": "mlp", "positions": "grid"}, "positions has no effect"),
    ({"positions": "none", "rope_base": 9.0}, "rope_base has no effect"),
  ],
  "hrm": [
    ({"width": 36}, "model.width=36"),
  ],
  "urm": [
    ({"token_loss": "hinge"}, "token_loss='hinge'"),
  ],
}


@pytest.mark.parametrize(("name", "changes", "message"), [
  *((name, *row) for name in causal() for row in STACKS),
  *((name, *row) for name, rows in IMPOSSIBLE.items() for row in rows),
])  # fmt: skip
def test_impossible_settings_are_named(name, changes, message):
  with refused(message):
    config = MODELS[name].Config(**{**BASE.get(name, {}), **changes})
    examples.abstract(MODELS[name], config, SPEC)


@pytest.mark.parametrize("name", BASE)
def test_what_is_changed_is_possible(name):
  config = MODELS[name].Config(**BASE[name])
  examples.abstract(MODELS[name], config, SPEC)


@pytest.mark.parametrize("name", ["recurrent", "sleep"])
def test_settings_are_grouped_by_mechanism(name):
  """Each is in one group or at the top, in the order of its documentation."""
  family = MODELS[name]
  fields = [field.name for field in dataclasses.fields(family.Config)]
  of_stacks = [field.name for field in dataclasses.fields(stack.StackConfig)]
  grouped = [key for keys in family.groups.values() for key in keys]
  assert len(set(grouped)) == len(grouped) and {*grouped} <= {*fields}
  assert len(fields) - len(grouped) <= 12
  own = [key for key in grouped if key not in of_stacks]
  assert fields[-len(own) :] == own
  entries = re.findall(r"(?m)^    (\w+(?:, \w+)*): ", family.Config.__doc__)
  documented = [key for entry in entries for key in entry.split(", ")]
  assert documented[-len(own) :] == own
