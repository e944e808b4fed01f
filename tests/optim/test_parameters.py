"""The parameter table for every parameter of every family."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tests_support import by_path, refused, smoke

from loopjax import config as config_lib
from loopjax import program, sharding
from loopjax.errors import UserError
from loopjax.models import MODELS
from loopjax.nn import block, norm, stack
from loopjax.nn.shape import Shape
from loopjax.optim import parameters
from loopjax.types import Precision, TaskSpec

# Families, and settings that together create all their parameters.
FAMILIES = [
  ("adaptive", {}),
  ("disco", {"gate": "learned"}),
  ("loopformer", {}),
  ("looped", {"mlp": "swiglu"}),
  ("looped", {"mlp": "swiglu", "tied": False, "exit_gate": "joint"}),
  ("melt", {"chunk_size": 48}),
  ("plt", {}),
  ("ponderlm", {"tied": False}),
  ("recurrent", {"mlp": "swiglu", "update": "gate", "qk_bias": True}),
  (
    "recurrent",
    {"injection": "diagonal"},
  ),
  ("sleep", {}),
  ("sleep", {"memory": "jet"}),
  ("transformer", {}),
  ("hrm", {"num_layers": 1}),
  ("urm", {"num_layers": 1}),
  ("trm", {}),
  ("trm", {"mixer": "mlp", "num_layers": 1}),
  *(("utm", {"norm": x}) for x in ("derf_utm", "derf", "rmsnorm", "layernorm")),
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


def optimizer_of(path):
  """Muon for hidden maps, with one matrix each."""
  if re.search("(time|size)_embedding/", path):
    return "adamw"  # Of one vector per loop.
  maps = "query|key|value|output|gate|convolution/hidden|adapter"
  return "muon" if re.search(f"/({maps})/kernel$", path) else "adamw"


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


def assert_all_have_their_rows(params):
  for path, row in by_path(parameters.rows(params)).items():
    assert row.optimizer == optimizer_of(path), path
    assert row.decay == decay_of(path), path
    assert row.split == split_of(path), path


@pytest.mark.parametrize(("name", "settings"), FAMILIES)
def test_every_parameter_has_its_optimizer_decay_and_place(name, settings):
  assert_all_have_their_rows(params_of(name, settings))


def test_every_family_is_here():
  assert {name for name, _ in FAMILIES} == set(MODELS), "add it to FAMILIES"


def sandwich():
  """Abstract parameters of a stack with all parameters of a block."""
  shape = Shape(
    8, 2, num_key_value_heads=1, head_width=4, mlp_width=16,
    post_norm=norm.rms_norm, qk_bias=True, value_bias=True,
  )  # fmt: skip
  layers = nnx.eval_shape(
    lambda: stack.stacked(
      2, nnx.Rngs(params=0), block.Block, shape, precision=Precision()
    )
  )
  return nnx.to_pure_dict(nnx.state(layers))


def test_every_part_of_a_block_has_its_row():
  params = sandwich()
  assert len(by_path(params)) == 4 + 3 + 3 + 4  # Kernels, biases, norms.
  assert_all_have_their_rows(params)


def test_norms_and_biases_of_large_stacks_are_split():
  """48 layers of width 2,048: too large to replicate."""
  mesh = sharding.make_mesh(sharding.Config(fsdp=2), jax.devices()[:2])
  large = {
    f"layers/{name}": jax.ShapeDtypeStruct((48, 2048), jnp.float32)
    for name in ("mlp_post_norm/scale", "attention/query/bias")
  }
  found = sharding.parameter_shardings(
    mesh, large, parameters.splits(large), min_split_size=2**16
  )
  for leaf in jax.tree.leaves(found):
    assert leaf.spec == P(None, ("fsdp",))


def test_every_row_names_something():
  trees = [params_of(name, settings) for name, settings in FAMILIES]
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
    ("layers/new/weight", jnp.ones((2, 2)), "no row .* matches;"),
    ("layers/requery/kernel", jnp.ones((2, 2)), "no row .* matches;"),
    ("layers/query/biases", jnp.ones((2, 2)), "no row .* matches;"),
    ("layers/query/kernels", jnp.ones((2, 2)), "no row .* matches;"),
    ("layers/query/kernel", jnp.ones(2), r"\[2\]: .* for 2 dimensions"),
  ],
)
def test_a_parameter_without_a_place_is_named(path, leaf, message):
  with pytest.raises(UserError, match=f"^parameters? {path}.*{message}"):
    parameters.rows({path: leaf})


def test_all_parameters_without_a_row_are_named_at_once():
  params = {
    "new": jnp.ones((2, 2)),
    "other": jnp.ones(3),
    "router": {"bias": jnp.ones(1)},
  }
  lines = r"Row\('new', .*\), parameters.Row\('other', .*\)\)$"
  with pytest.raises(
    UserError, match=rf"^parameters new \[2, 2\], other \[3\]: .*{lines}"
  ):
    parameters.rows(params)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_whose_parameters_have_no_row_does_not_start(
  optimizer, monkeypatch
):
  """On one device, without splitting, with either optimizer."""
  table = [row for row in parameters.TABLE if row.pattern != "router/bias"]
  monkeypatch.setattr(parameters, "TABLE", table)
  config = smoke(optim__name=optimizer)
  with pytest.raises(UserError, match=r"^parameters router/bias \[1\]: no row"):
    program.make_program(config_lib.resolve(config), jax.devices()[:1])


def test_the_row_in_the_error_is_of_one_module():
  """ "kernel" alone would match the kernels of all modules without a row."""
  params = {
    "layers": {"carry_gate": {"kernel": jnp.ones((1, 2, 1))}},
    "sign": {"embedding": jnp.ones((2, 2)), "bias": jnp.ones(2)},
  }
  rows = {
    "carry_gate/kernel": "matrices", "sign/embedding": "tables",
    "sign/bias": "all",
  }  # fmt: skip
  with pytest.raises(UserError) as error:
    parameters.rows(params)
  for pattern, decay in rows.items():
    assert f"Row({pattern!r}, P(), 'adamw', {decay!r})" in str(error.value)


def test_rows_are_added_from_outside(monkeypatch):
  """Where others are not more specific; what `Row` lists is checked."""
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


def test_the_most_specific_row_applies_and_then_the_latest(monkeypatch):
  """The package's rows hide no registered one; one without use is said."""
  monkeypatch.setattr(parameters, "_REGISTERED", {})
  leaf = jnp.ones((2, 2))
  params = {"gate": {"kernel": leaf}, "mixer": {"gate": {"kernel": leaf}}}

  def optimizers() -> list[str]:
    return jax.tree.leaves(parameters.optimizers(params))

  assert optimizers() == ["muon", "muon"]
  row = parameters.Row("gate/kernel", P(), "adamw", "all")
  parameters.register(row)
  assert jax.tree.leaves(parameters.rows(params)) == [row, row]
  specific = parameters.Row("mixer/gate/kernel", P(), "muon", "tables")
  parameters.register(specific)
  parameters.register(row)  # Later, but less specific.
  assert jax.tree.leaves(parameters.rows(params)) == [row, specific]
  parameters.check_registered(params)
  parameters.register(parameters.Row("kernel", P(), "adamw", "all"))
  assert optimizers() == ["adamw", "muon"]
  with refused(r"row 'kernel' never applies: gate/kernel .* 'gate/kernel', "):
    parameters.check_registered(params)
  parameters.check_registered({"scale": leaf})  # Of another family.
