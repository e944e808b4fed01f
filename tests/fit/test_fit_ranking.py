"""Kernels, bytes, products and minimum times, against counts by hand."""

import json
import re
import types

import jax
import jax.numpy as jnp
import pytest
import ranking_examples
from tests_support import ROOT

from loopjax.errors import UserError
from loopjax.fit import __main__ as fit_main
from loopjax.fit import counts as counts_lib
from loopjax.fit import hlo, ranking, report
from loopjax.fit.ranking import PARTS, REST

# The GPU program's launches, bytes and operations, by line or operation.
SLICE = (3, 3 * (8 * 16 * 4 + 4 + 8 * 16 * 2), 0)
MATMUL = (3, 3 * (2 * 8 + 8 * 16 + 2 * 16) * 2, 3 * 2 * 2 * 8 * 16)
PUT = (3, 3 * (4 + 2 * (2 * 16 * 2)), 0)
HEADS = 2 * 32 * 8 * 2  # Bytes of one array of attention.
FORWARD = (1, 4 * HEADS + 2 * 32 * 4, 2 * 2 * (2 * 32 * 32 * 8) // 2)
BACKWARD = (1, 8 * HEADS + 2 * 32 * 4, 2 * 5 * (2 * 32 * 32 * 8) // 2)
GATHER = (1, (2 * 8 + 16 * 8) * 2, 0)
MOSAIC = (1, 2 * 8 * 2 + 4 * 4, 0)


def rank(text, kind="h200", steps=1):
  return ranking.rank(hlo.parse(text), kind, steps)


def counted(work):
  return work.launches, work.num_bytes, sum(work.flops.values())


def summed(*counts):
  return tuple(map(sum, zip(*counts, strict=True)))


def test_a_program_for_a_gpu_as_counted_by_hand():
  got = rank(ranking_examples.GPU)
  everything = SLICE, MATMUL, PUT, FORWARD, BACKWARD, GATHER, MOSAIC
  assert counted(got.total) == summed(*everything)
  assert {name: counted(work) for name, work in got.parts.items()} == {
    "attention": summed(FORWARD, BACKWARD),
    "mlp": summed(SLICE, MATMUL),
    REST: summed(PUT, GATHER, MOSAIC),
  }
  assert counted(got.lines["model.py:7 convert"]) == SLICE
  assert counted(got.lines["model.py:7 dot_general, backward"]) == MATMUL
  assert got.total.flops == {"bf16": summed(*everything)[2]}
  assert got.unseen == {"mosaic_gpu_v2": 1}
  assert got.asynchronous == {"all-gather": 1}


BY_HAND = """\
HloModule one

%updated (p: f32[8,16], u: f32[2,16], i: s32[]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %u = f32[2,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[8,16]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}

%sliced (p.1: f32[8,16], i.1: s32[]) -> f32[2,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %s.1 = f32[2,16]{1,0} dynamic-slice(%p.1, %i.1, %i.1), dynamic_slice_sizes={2,16}
}

%pair (p.2: f32[8,16], u.2: f32[2,16], i.2: s32[]) -> (f32[8,16], f32[8,16]) {
  %p.2 = f32[8,16]{1,0} parameter(0)
  %u.2 = f32[2,16]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %n.2 = f32[8,16]{1,0} negate(%p.2)
  %d.2 = f32[8,16]{1,0} dynamic-update-slice(%p.2, %u.2, %i.2, %i.2)
  ROOT %t.2 = (f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(%n.2, %d.2)
}

ENTRY %main (x: f32[8,16], y: f32[2,16], k: s32[], m: s32[5,1]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[2,16]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %m = s32[5,1]{1,0} parameter(3)
  ROOT %one = ONE
}
"""  # noqa: E501
WHOLE, PART, INDEX, ROWS = 8 * 16 * 4, 2 * 16 * 4, 4, 5 * 4


@pytest.mark.parametrize(("one", "expected"), [
  ("f32[8,16]{1,0} negate(%x)", 2 * WHOLE),
  ("f32[8,16]{1,0} copy(%x)", 2 * WHOLE),
  ("f32[2,16]{1,0} slice(%x), slice={[0:2], [0:16]}", 2 * PART),
  ("f32[2,16]{1,0} dynamic-slice(%x, %k, %k), dynamic_slice_sizes={2,16}",
   2 * PART + 2 * INDEX),
  ("f32[8,16]{1,0} dynamic-update-slice(%x, %y, %k, %k)", 2 * PART),
  ("f32[5,16]{1,0} gather(%x, %m), offset_dims={1}", 2 * 5 * 16 * 4 + ROWS),
  ("f32[8,16]{1,0} scatter(%x, %m, %y), to_apply=%add", ROWS + 2 * PART),
  ("f32[8,16]{1,0} fusion(%x, %y, %k), kind=kLoop, calls=%updated",
   2 * PART + INDEX),
  ("f32[2,16]{1,0} fusion(%x, %k), kind=kLoop, calls=%sliced",
   2 * PART + INDEX),
  ("(f32[8,16]{1,0}, f32[8,16]{1,0}) fusion(%x, %y, %k), kind=kLoop,"
   " calls=%pair", 2 * WHOLE + 2 * PART + INDEX),
])  # fmt: skip
def test_bytes_of_an_instruction_as_counted_by_hand(one, expected):
  module = hlo.parse(BY_HAND.replace("ONE", one))
  root = module.computations["main"].root
  assert counts_lib.num_bytes(module, "main", root) == expected


def test_a_program_for_a_tpu_as_counted_by_hand():
  got = rank(ranking_examples.TPU, "v5e")
  copy = 4 * 8 * 16 * 2  # From main memory; the kernel reads VMEM.
  fusion = 4 * 16 * 32 * 4 + 4 * 8 * 128 * 4
  flops = 2 * 4 * 8 * 16 * 32
  assert counted(got.total) == (2, copy + fusion, flops)
  assert got.total.flops == {"f32": flops}
  assert counted(got.parts["gate"]) == (1, fusion, flops)


@pytest.mark.parametrize(
  ("precision", "dtype", "expected"),
  [
    (None, jnp.float32, "tf32"),
    ("highest", jnp.float32, "f32"),
    (None, jnp.bfloat16, "bf16"),
  ],
)
def test_products_in_loops_of_a_real_program(precision, dtype, expected):
  def f(x, weights):
    def step(x, w):
      return jnp.matmul(x, w, precision=precision), None

    return jax.lax.scan(step, x, weights)[0]

  x, weights = jnp.zeros((24, 16), dtype), jnp.zeros((5, 16, 16), dtype)
  compiled = jax.jit(f).lower(x, weights).compile()
  got = rank(compiled.as_text(), "cpu")
  flops = 5 * 2 * 24 * 16 * 16
  # A CPU may multiply bfloat16 as float32.
  assert len(got.total.flops) == 1
  widened = {"tf32"} if dtype == jnp.bfloat16 else {expected}
  assert got.total.flops.keys() <= {expected} | widened
  assert sum(got.total.flops.values()) == flops
  # At least every product, with its operands and results once.
  assert got.total.launches >= 5
  assert got.total.num_bytes >= 5 * (2 * 24 + 16) * 16 * dtype.dtype.itemsize
  assert got.total.seconds == 0.0


def test_a_kernel_takes_as_long_as_the_slowest_of_its_parts():
  chip = ranking.RATES["h200"]
  flops = {"bf16": 1e12, "f32": 1e9}
  compute = (1e12 / 989.4e12 + 1e9 / 66.9e12) / 0.8
  launch = 2e-6
  assert ranking.seconds(chip, flops, 1e6, 0) == pytest.approx(compute + launch)
  memory = 1e12 / (0.9 * 4.8e12)
  assert ranking.seconds(chip, flops, 1e12, 0) == pytest.approx(memory + launch)
  network = 1e12 / (0.9 * 450e9)
  assert ranking.seconds(chip, {}, 1e9, 1e12) == pytest.approx(network + launch)
  assert ranking.seconds(ranking.RATES["v5e"], {}, 0, 0) == 0


def test_a_call_of_several_steps_is_shared_by_them():
  one, half = rank(ranking_examples.GPU), rank(ranking_examples.GPU, steps=2)
  assert half.total.launches == one.total.launches / 2
  assert half.total.seconds == pytest.approx(one.total.seconds / 2)
  assert half.unseen == {"mosaic_gpu_v2": 0.5}


def test_parts_are_scopes_of_the_package():
  found = set()
  for file in (ROOT / "loopjax").rglob("*.py"):
    found |= set(re.findall(r'jax\.named_scope\("(\w+)"\)', file.read_text()))
  assert found == set(PARTS)
  assert ranking.part_of("jit(f)/attention/transpose(jvp(gate))/dot") == "gate"
  assert ranking.part_of("jit(f)/while/dot_general") == REST


def test_the_report_says_that_it_is_a_ranking_and_no_time():
  got = rank(ranking_examples.GPU)
  text = report.ranking_table(got, 1e6)
  first, launches, _, products, least, *rest = text.splitlines()
  assert first.endswith("by its roofline (not a time)")
  assert launches == "  launches  13"
  assert products.endswith("16-bit; the model needs 1e-06 TFLOP")
  share = 1e6 / (got.total.seconds * 989.4e12)
  assert least.endswith(f"utilisation at most {share:.1%}")
  assert "  1 x mosaic_gpu_v2: products not counted" in rest
  assert "  1 x all-gather overlapping other work" in rest
  assert rest[-1].endswith(", share of all products: none")
  tpu = report.ranking_table(rank(ranking_examples.TPU, "v5e"), 1e6)
  assert tpu.splitlines()[-1].split() == ["100.00%", "3.277e-08", "TFLOP",
                                          "fusion"]  # fmt: skip


def test_json_has_what_was_counted():
  got = rank(ranking_examples.TPU, "v5e")
  record = report.ranking_record(got, 1e3, {"peak": 5}, None, 1)
  record = json.loads(json.dumps(record))
  assert record["total"]["flops"] == {"bf16": 0, "tf32": 0, "f32": 32768}
  assert record["parts"]["gate"]["launches"] == 1
  assert record["memory"] == {"peak": 5}
  assert record["rates"]["memory"] == 819
  assert "not a time" in record["what"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
  path = tmp_path / "none" / "step.json"
  measured = types.SimpleNamespace(
    ranking=rank(ranking_examples.GPU), model_flops=1.0, memory={}, traffic=None
  )
  with pytest.raises(UserError, match="--json=.*step.json: cannot be written"):
    fit_main._ranking(measured, 1, str(path))


def test_a_loop_whose_length_is_not_known_is_named_and_bounds_nothing():
  def run(x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

  compiled = jax.jit(run).lower(jnp.ones((8, 8)), jnp.int32(3)).compile()
  got = rank(compiled.as_text(), "h200")
  assert len(got.unknown) == 1
  text = report.ranking_table(got, 1e6)
  assert "counted once" in text and "utilisation" not in text
  known = report.ranking_table(rank(ranking_examples.GPU), 1e6)
  assert "counted once" not in known and "utilisation at most" in known
