"""The parameter table for every parameter of every family."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tests_support import refused, smoke

from loopjax import config as config_lib
from loopjax import program, sharding
from loopjax.errors import UserError
from loopjax.models import MODELS
from loopjax.nn import norm, stack
from loopjax.nn.shape import Shape
from loopjax.optim import parameters
from loopjax.types import Precision, TaskSpec


def under(name, *tables):
  """The tables' paths below a module's name."""
  return {
    f"{name}/{path}": label for table in tables for path, label in table.items()
  }


SQUARE = {
  "query/kernel": "muon",
  "key/kernel": "muon",
  "value/kernel": "muon",
  "output/kernel": "muon",
}
GELU = {"value/kernel": "muon", "output/kernel": "muon"}
SWIGLU = {**GELU, "gate/kernel": "muon"}
RMSNORM = {"scale": "adamw"}


def block(mlp, norm=RMSNORM, mixer="attention", parts=SQUARE):
  return {
    **under(f"{mixer}_norm", norm),
    **under(mixer, parts),
    **under("mlp_norm", norm),
    **under("mlp", mlp),
  }


def text(layers):
  """A family with a tied table and a norm before the read-out."""
  return {
    "token_embedding/embedding": "adamw",
    "final_norm/scale": "adamw",
    **layers,
  }


def ends():
  """Parameters of TRM, HRM and URM around their layers."""
  return under(
    "ends",
    dict.fromkeys(
      (
        "token_embedding/embedding",
        "puzzle_vector",
        "head/kernel",
        "halt_head/kernel",
        "halt_head/bias",
      ),
      "adamw",
    ),
  )


def post_norm(path, mixer=SQUARE, mlp=SWIGLU):
  """A block whose norms have no parameters."""
  return {**under(f"{path}/mixer", mixer), **under(f"{path}/mlp", mlp)}


def utm(*norm):
  norms = dict.fromkeys(norm, "adamw")
  return {
    "token_embedding/embedding": "adamw",
    "cell_type/embedding": "adamw",
    "memory_type/embedding": "adamw",
    "memory_tokens": "adamw",
    "step_embedding/embedding": "adamw",
    **under("block", block(SWIGLU, norms)),
    "block/attention/query_norm/scale": "adamw",
    "block/attention/key_norm/scale": "adamw",
    "router/kernel": "adamw",
    "router/bias": "adamw",
    "head/kernel": "adamw",
    "head/bias": "adamw",
  }


GATED_DELTA = {
  "query/kernel": "muon",
  "key/kernel": "muon",
  "value/kernel": "muon",
  "convolutions/0/taps": "adamw",
  "convolutions/1/taps": "adamw",
  "convolutions/2/taps": "adamw",
  "fast_weights/decay/kernel": "adamw",
  "fast_weights/write/kernel": "adamw",
  "fast_weights/A_log": "adamw",
  "fast_weights/dt_bias": "adamw",
  "fast_weights/gate/kernel": "muon",
  "fast_weights/norm/scale": "adamw",
  "fast_weights/output/kernel": "muon",
}
JET = {
  **{name: GATED_DELTA[name] for name in GATED_DELTA if "taps" not in name},
  "convolution/hidden/kernel": "muon",
  "convolution/taps/kernel": "adamw",
  "convolution/taps/bias": "adamw",
}


def sleep(memory):
  return {
    **text(under("layers", block(SWIGLU))),
    **under("memories", block(SWIGLU, mixer="memory", parts=memory)),
  }


def recurrent(injection):
  """A prelude and a core, whose blocks have norms of their sums."""
  norms = {f"{name}_post_norm/scale": "adamw" for name in ("attention", "mlp")}
  parts = [under(part, block(SWIGLU), norms) for part in ("prelude", "layers")]
  return {**text(parts[0]), **parts[1], **under("injection", injection)}


BIASES = {
  f"{name}/bias": "adamw"
  for name in (
    "attention/query", "attention/key", "attention/value", "attention/output",
    "mlp/value", "mlp/output", "mlp/gate",
  )
}  # fmt: skip
STACK = text(under("layers", block(GELU)))
MELT_GATE = ("bias", "input/kernel", "latent/kernel")
GATE = {"channel/gate/weight": "adamw", "channel/gate/bias": "adamw"}
READ = {
  **under("query_norm", {"scale": "adamw"}),
  **under("key_norm", {"scale": "adamw"}),
  "output/kernel": "muon",
  "gate/kernel": "muon",
  "gate/bias": "adamw",
}
BANK = {"keys": "adamw", "values": "adamw"}
LAYERNORM = {"scale": "adamw", "bias": "adamw"}
ADAPTIVE = {
  "token_embedding/embedding": "adamw",
  "head/kernel": "adamw",
  **under("final_norm", LAYERNORM),
  **under("global_bank", BANK),
  **under(
    "layers",
    under("block", block(GELU, LAYERNORM)),
    under("loop_norm", LAYERNORM),
    under("local_bank", BANK),
    under("local_read", READ),
    under("global_read", READ),
    {
      "loop_scale": "adamw",
      "router/kernel": "adamw",
      "router/bias": "adamw",
    },
  ),
}
MAP = {"kernel": "adamw", "bias": "adamw"}
LOOPFORMER = {
  **{
    path: optimizer
    for path, optimizer in STACK.items()
    if not path.startswith("layers/") or "norm" not in path
  },
  **under("layers/modulation", MAP),
  **under("time_embedding", under("input", MAP), under("output", MAP)),
  **under("size_embedding", under("input", MAP), under("output", MAP)),
}
# Families, settings that create all their parameters, and which have them.
FAMILIES = [
  ("adaptive", {}, ADAPTIVE),
  ("disco", {"gate": "learned"}, {**STACK, **GATE}),
  ("loopformer", {}, LOOPFORMER),
  ("looped", {"mlp": "swiglu"}, text(under("layers", block(SWIGLU)))),
  (
    "looped",
    {"mlp": "swiglu", "tied": False, "exit_gate": "joint"},
    {
      **text(under("layers", block(SWIGLU))),
      **{
        name: "adamw"
        for name in ("head/kernel", "exit_gate/kernel", "exit_gate/bias")
      },
    },
  ),
  (
    "melt",
    {"chunk_size": 48},
    {
      **text(under("layers", block(SWIGLU))),
      **under("latent_gates", dict.fromkeys(MELT_GATE, "adamw")),
      "layers/attention_post_norm/scale": "adamw",
      "layers/mlp_post_norm/scale": "adamw",
      "head/kernel": "adamw",
    },
  ),
  (
    "plt",
    {},
    {
      **STACK,
      "window_gates/weight": "adamw",
      "window_gates/bias": "adamw",
    },
  ),
  ("ponderlm", {"tied": False}, {**STACK, "head/kernel": "adamw"}),
  (
    "recurrent",
    {
      "mlp": "swiglu",
      "num_coda": 0,
      "loop_norm": "final_only",
      "update": "gate",
      "qk_bias": True,
    },
    {
      **recurrent({"adapter/kernel": "muon"}),
      "update_share": "adamw",
      **{
        f"{part}/attention/{name}/bias": "adamw"
        for part in ("prelude", "layers")
        for name in ("query", "key")
      },
    },
  ),
  (
    "recurrent",
    {
      "mlp": "swiglu",
      "num_coda": 0,
      "loop_norm": "final_only",
      "injection": "diagonal",
      "depth": "learned",
      "depth_per": "row",
    },
    {
      **recurrent(
        {"input_map/kernel": "adamw", "A_log": "adamw", "dt_bias": "adamw"}
      ),
      "depth_logits": "adamw",
    },
  ),
  ("sleep", {}, sleep(GATED_DELTA)),
  ("sleep", {"memory": "jet"}, sleep(JET)),
  ("transformer", {}, STACK),
  (
    "hrm",
    {"num_layers": 1},
    {**ends(), **post_norm("low/0"), **post_norm("high/0")},
  ),
  (
    "urm",
    {"num_layers": 1},
    {
      **ends(),
      **post_norm("layers/0"),
      "layers/0/mlp/convolution/taps": "adamw",
      "layers/0/mlp/convolution/bias": "adamw",
    },
  ),
  (
    "trm",
    {},
    {**ends(), **post_norm("layers/0"), **post_norm("layers/1")},
  ),
  (
    "trm",
    {"mixer": "mlp", "num_layers": 1},
    {**ends(), **post_norm("layers/0", under("mlp", SWIGLU))},
  ),
  ("utm", {"norm": "derf_utm"}, utm("alpha", "shift")),
  ("utm", {"norm": "derf"}, utm("alpha", "shift", "gain", "bias")),
  ("utm", {"norm": "rmsnorm"}, utm("scale")),
  ("utm", {"norm": "layernorm"}, utm("scale", "bias")),
]


def params_of(name, settings):
  """Abstract parameters of a family."""
  return _params_of(name, MODELS[name].Config(**settings))


@functools.cache
def _params_of(name, config):
  family, spec = MODELS[name], TaskSpec(8, 48, tuple((i,) for i in range(48)))
  model = nnx.eval_shape(
    lambda: family.Model(config, spec, rngs=nnx.Rngs(params=0))
  )
  return nnx.to_pure_dict(nnx.state(model))


def by_path(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


@pytest.mark.parametrize(("name", "settings", "expected"), FAMILIES)
def test_every_parameter_has_its_optimizer(name, settings, expected):
  assert by_path(parameters.optimizers(params_of(name, settings))) == expected


def decay_of(path):
  """By kind of parameter: maps and taps, tables, and others."""
  if path.endswith("input_map/kernel"):
    return "all"  # Initially the identity.
  if re.search("(kernel|taps)$", path):
    return "matrices"
  is_table = re.search("(token|step)_embedding/embedding$", path)
  return "tables" if is_table else "all"


def split_of(path):
  """Maps by inputs and outputs, wide arrays by width, gates not at all."""
  both, back = ("fsdp", "tensor"), ("tensor", "fsdp")
  for pattern, split in (
    ("(router|exit_gate|halt_head)/(kernel|bias)|head/bias", ()),
    ("(decay|write|latent_gates/(input|latent))/kernel", (both, None)),
    ("output/kernel", back),
    ("kernel", both),
    ("latent_gates/bias|channel/gate/bias|(local|global)_read/gate/bias", ()),
    ("(query|key|value|mlp/gate)/bias", (back,)),
    ("(output|convolution(/taps)?|norm)/bias|norm/(scale|gain)", (both,)),
    ("taps", (None, both)),
    ("token_embedding/embedding|bank/(keys|values)", (back, None)),
  ):
    if re.search(f"(^|/|_)({pattern})$", path):
      return P(*split)
  return P()


@pytest.mark.parametrize(("name", "settings", "expected"), FAMILIES)
def test_every_parameter_has_its_decay_and_its_place(name, settings, expected):
  del expected
  for path, row in by_path(parameters.rows(params_of(name, settings))).items():
    assert row.decay == decay_of(path), path
    assert row.split == split_of(path), path


def test_every_family_is_here():
  assert {name for name, _, _ in FAMILIES} == set(MODELS), "add it to FAMILIES"


def sandwich():
  """Abstract parameters of a stack with all parameters of a block."""
  shape = Shape(
    8, 2, num_key_value_heads=1, head_width=4, mlp_width=16,
    post_norm=norm.rms_norm, attention_bias=True, mlp_bias=True,
  )  # fmt: skip
  layers = nnx.eval_shape(
    lambda: stack.make_layers(
      shape, 2, precision=Precision(), rngs=nnx.Rngs(params=0)
    )
  )
  return nnx.to_pure_dict(nnx.state(layers))


def test_every_part_of_a_block_has_its_optimizer():
  post_norms = ("attention_post_norm", "mlp_post_norm")
  assert by_path(parameters.optimizers(sandwich())) == {
    **block(SWIGLU),
    **{f"{name}/scale": "adamw" for name in post_norms},
    **BIASES,
  }


def test_norms_and_biases_of_large_stacks_are_split():
  """48 layers of width 2,048: too large to replicate."""
  mesh = sharding.make_mesh(sharding.Config(fsdp=2), jax.devices()[:2])
  large = {
    f"layers/{name}": jax.ShapeDtypeStruct((48, 2048), jnp.float32)
    for name in ("mlp_post_norm/scale", "mlp/gate/bias", "mlp/output/bias")
  }
  found = sharding.parameter_shardings(
    mesh, large, parameters.splits(large), min_split_size=2**16
  )
  for leaf in jax.tree.leaves(found):
    assert leaf.spec == P(None, ("fsdp",))


def test_every_row_names_something():
  trees = [params_of(name, settings) for name, settings, _ in FAMILIES]
  pair = {"A": jnp.ones((4, 2)), "B": jnp.ones((2, 4))}
  used = {
    row.pattern
    for tree in [*trees, sandwich(), {"kernel": pair}]
    for row in jax.tree.leaves(parameters.rows(tree))
  }
  assert [row.pattern for row in parameters.TABLE] == [
    row.pattern for row in parameters.TABLE if row.pattern in used
  ]


@pytest.mark.parametrize(
  ("path", "leaf", "message"),
  [
    ("layers/new/weight", jnp.ones((2, 2)), "no row .* matches it"),
    ("layers/requery/kernel", jnp.ones((2, 2)), "no row .* matches it"),
    ("layers/query/biases", jnp.ones((2, 2)), "no row .* matches it"),
    ("layers/query/kernels", jnp.ones((2, 2)), "no row .* matches it"),
    ("layers/query/kernel", jnp.ones(2), r"\[2\]: .* for 2 dimensions"),
  ],
)
def test_a_parameter_without_a_place_is_named(path, leaf, message):
  with pytest.raises(UserError, match=f"^parameter {path}.*{message}"):
    parameters.rows({path: leaf})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_whose_parameters_have_no_row_does_not_start(
  optimizer, monkeypatch
):
  """On one device, without splitting, with either optimizer."""
  table = [row for row in parameters.TABLE if row.pattern != "router/bias"]
  monkeypatch.setattr(parameters, "TABLE", table)
  config = smoke(optim__name=optimizer)
  with pytest.raises(UserError, match=r"^parameter router/bias \[1\]: no row"):
    program.make_program(config_lib.resolve(config), jax.devices()[:1])


def test_rows_are_added_from_outside(monkeypatch):
  """They come after those of the table; what `Row` lists is checked."""
  monkeypatch.setattr(parameters, "_REGISTERED", {})
  params = {"share": jnp.ones(2), "router": {"bias": jnp.ones(1)}}
  with refused(r"share \[2\]: .* parameters.register\(.*Row\('share', P\(\), "):
    parameters.rows(params)
  own = parameters.Row("share|bias", P("fsdp"), "adamw", "matrices")
  for _ in range(2):  # A module may be imported again.
    parameters.register(own)
  found = parameters.rows(params)
  assert found["share"] == own and found["router"]["bias"] != own
  for wrong in ({"optimizer": "adam"}, {"decay": "none"}):
    with refused("must be muon or adamw, and decay .* one of matrices"):
      parameters.register(dataclasses.replace(own, **wrong))
