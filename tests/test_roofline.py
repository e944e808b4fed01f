"""benchmarks/roofline.py: counts of programs against counts by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import roofline
import roofline_examples
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from roofline import PARTS, REST
from tests_support import ROOT


def array(text):
  (found,) = roofline.arrays(text)
  return found


def loop_of(text):
  module = roofline.parse(text)
  main = module.computations[module.entry].instructions
  return roofline.trip_count(module, module.entry, main["while"])


def traffic(text):
  return roofline.collectives(roofline.parse(text))


def count(text, steps=1):
  return roofline.count(roofline.parse(text), steps)


@pytest.mark.parametrize(
  ("text", "num_bytes", "padded"),
  [
    ("f32[4,16]{1,0}", 256, 256),
    ("bf16[3]", 6, 6),
    ("pred[]", 1, 1),
    ("s4[6]{0}", 3, 3),
    ("f8e4m3fn[5]", 5, 5),
    ("token[]", 0, 0),
    ("f32[<=8,2]{1,0}", 64, 64),
    # A TPU's tiles: 97 -> 104 rows, 1365 -> 1408 lanes.
    ("bf16[2,97,1365]{2,1,0:T(8,128)(2,1)}", 529620, 2 * 104 * 1408 * 2),
    # The tile's rows are the second dimension in the layout's order.
    ("f32[5,8,64,97]{2,3,1,0:T(8,128)}", 993280, 5 * 8 * 104 * 128 * 4),
    ("f32[]{:T(128)}", 4, 512),
    ("f32[6]{0:T(8,128)}", 24, 8 * 128 * 4),
    # Memory spaces.
    ("f32[8]{0:T(512)S(0)}", 32, 512 * 4),
    ("f32[8]{0:T(512)S(1)}", 32, 0),
  ],
)
def test_bytes_of_arrays(text, num_bytes, padded):
  assert array(text).num_bytes == num_bytes
  assert array(text).padded_bytes == padded


def test_instructions_of_hand_written_text():
  module = roofline.parse(roofline_examples.NESTED)
  assert module.entry == "main"
  assert list(module.computations)[-1] == "main"
  main = module.computations["main"].instructions
  assert main["x"].op_name == "state['x']"
  assert main["out"].element == 1 and main["out"].operands == ("loop",)
  assert main["loop"].called == (
    ("condition", "inner_condition"),
    ("body", "outer_body"),
  )
  pair = module.computations["outer_body"].instructions["pair"]
  assert [(a.dtype, a.dims) for a in pair.arrays] == [
    ("bf16", (8, 4, 16)),
    ("f32", (8,)),
  ]
  assert pair.operands == ("x.3", "x.3")
  done = module.computations["inner_body"].instructions["done"]
  assert done.opcode == "all-reduce-done"
  assert module.computations["inner_body"].root.name == "t.1"


def test_attributes_of_a_kernel_span_lines():
  attributes = (
    'backend_config={"size": 1}, frontend_attributes={xprof_metadata="{\n'
    '"block_q": 128}\n'
    '}}, metadata={op_name="kernel"}'
  )
  name = "ROOT %dot = f32[8]{0} custom-call(%x)"
  text = (
    "ENTRY %main (x: f32[8]) -> f32[8] {\n"
    f"  %x = f32[8]{{0}} parameter(0)\n  {name}, {attributes}\n}}\n"
  )
  root = roofline.parse(text).computations["main"].root
  assert root.name == "dot"
  assert root.op_name == "kernel"


@pytest.mark.parametrize(
  ("start", "step", "end", "trips"),
  [
    ("constant(0)", "constant(1)", "constant(18)", 18),
    ("constant(4)", "constant(1)", "constant(18)", 14),
    ("constant(0)", "constant(4)", "constant(18)", 5),
    ("constant(18)", "constant(1)", "constant(18)", 0),
    ("parameter(1)", "constant(1)", "constant(18)", None),
    ("constant(0)", "parameter(1)", "constant(18)", None),
    ("constant(0)", "constant(1)", "parameter(1)", None),
    ("constant(0)", "constant(0)", "constant(18)", None),
  ],
)
def test_length_of_a_loop_from_its_form(start, step, end, trips):
  assert loop_of(roofline_examples.counted_loop(start, step, end)) == trips


COUNTED = roofline_examples.counted_loop(
  "constant(0)", "constant(1)", "constant(18)"
)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("direction=LT", "direction=NE"),
    # Another element of the state grows.
    ("%i = s32[]{:T(128)} get-tuple-element(%p), index=0",
     "%i = s32[]{:T(128)} get-tuple-element(%p), index=1"),
    ("add(%copy, %step)", "multiply(%copy, %step)"),
  ],
)  # fmt: skip
def test_other_loops_have_no_known_length(old, new):
  assert old in COUNTED
  assert loop_of(COUNTED) == 18
  assert loop_of(COUNTED.replace(old, new)) is None


def test_loops_multiply_and_starts_do_not_count():
  got = traffic(roofline_examples.NESTED)
  # 2 x 3 all-reduces of [4, 16] float32; 2 all-gathers of a pair in the outer
  # loop and one of [32, 16] float32 outside.
  assert got.executions == {"all-reduce": 6, "all-gather": 3}
  assert got.num_bytes == {
    "all-reduce": 6 * 256,
    "all-gather": 2 * (8 * 4 * 16 * 2 + 8 * 4) + 32 * 16 * 4,
  }
  assert got.parts[("all-reduce", REST)] == 6 * 256


def test_what_libtpu_spreads_over_fusions_counts_once():
  got = traffic(roofline_examples.FUSED)
  assert got.executions == {
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
  }
  assert got.num_bytes == {
    "all-gather": 8 * 16 * 4,
    "reduce-scatter": 2 * 16 * 4,
    "all-to-all": 2 * 16 * 4,
  }


def test_a_loop_of_unknown_length_counts_once_and_is_named():
  known = traffic(COUNTED)
  assert known.executions == {"collective-permute": 18}
  assert known.num_bytes == {"collective-permute": 576}
  assert count(COUNTED).unknown == []
  text = COUNTED.replace("%end = s32[]{:T(128)} constant(18)",
                         "%end = s32[]{:T(128)} parameter(1)")  # fmt: skip
  assert traffic(text).executions == {"collective-permute": 1}
  unknown = count(text)
  assert unknown.unknown == ["jit(f)/while"]
  note = "counted once, because its length is unknown: jit(f)/while"
  assert roofline.page(unknown, traffic(text), "h200", 1).endswith(note)


def test_collectives_of_a_real_program_as_counted_by_hand():
  mesh = Mesh(np.array(jax.devices()), ("x",))

  def inner(c, _):
    return jax.lax.psum(jnp.cos(c), "x"), None

  def f(x):
    def outer(c, _):
      c, _ = jax.lax.scan(inner, c, None, length=3)
      # Times the device's shard: XLA knows that every device has the sum.
      gathered = jax.lax.all_gather(c * x, "x")
      return gathered[::3].max(0), None

    y, _ = jax.lax.scan(outer, x, None, length=5)
    ring = [(i, (i + 1) % 8) for i in range(8)]
    return jax.lax.ppermute(x * y, "x", ring)

  sharded = jax.shard_map(
    f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
  )
  x = jax.ShapeDtypeStruct(
    (8 * 4, 16), jnp.float32, sharding=NamedSharding(mesh, P("x"))
  )
  got = traffic(jax.jit(sharded).lower(x).compile().as_text())
  one = 4 * 16 * 4  # Bytes of a device's shard.
  assert got.executions == {
    "all-reduce": 15,
    "all-gather": 5,
    "collective-permute": 1,
  }
  assert got.num_bytes == {
    "all-reduce": 15 * one,
    "all-gather": 5 * 8 * one,
    "collective-permute": one,
  }


# The GPU program's kernels, bytes and operations, by operation.
SLICE = (3, 3 * (8 * 16 * 4 + 4 + 8 * 16 * 2), 0)
MATMUL = (3, 3 * (2 * 8 + 8 * 16 + 2 * 16) * 2, 3 * 2 * 2 * 8 * 16)
PUT = (3, 3 * (4 + 2 * (2 * 16 * 2)), 0)
HEADS = 2 * 32 * 8 * 2  # Bytes of one array of attention.
FORWARD = (1, 4 * HEADS + 2 * 32 * 4, 2 * 2 * (2 * 32 * 32 * 8) // 2)
BACKWARD = (1, 8 * HEADS + 2 * 32 * 4, 2 * 5 * (2 * 32 * 32 * 8) // 2)
GATHER = (1, (2 * 8 + 16 * 8) * 2, 0)
MOSAIC = (1, 2 * 8 * 2 + 4 * 4, 0)


def counted(work):
  flops = sum(work[dtype] for dtype in roofline.DTYPES)
  return work["kernels"], work["bytes"], flops


def summed(*counts):
  return tuple(map(sum, zip(*counts, strict=True)))


def test_a_program_for_a_gpu_as_counted_by_hand():
  got = count(roofline_examples.GPU)
  everything = SLICE, MATMUL, PUT, FORWARD, BACKWARD, GATHER, MOSAIC
  assert counted(got.total) == summed(*everything)
  assert {name: counted(work) for name, work in got.parts.items()} == {
    "attention": summed(FORWARD, BACKWARD),
    "mlp": summed(SLICE, MATMUL),
    REST: summed(PUT, GATHER, MOSAIC),
  }
  assert counted(got.operations["mlp: convert"]) == SLICE
  assert counted(got.operations["mlp: dot_general, backward"]) == MATMUL
  assert got.total["bf16"] == summed(*everything)[2]
  assert got.unseen == {"mosaic_gpu_v2": 1}


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
  module = roofline.parse(BY_HAND.replace("ONE", one))
  root = module.computations["main"].root
  assert roofline.num_bytes(module, "main", root) == expected


def test_a_program_for_a_tpu_as_counted_by_hand():
  got = count(roofline_examples.TPU)
  copy = 4 * 8 * 16 * 2  # From main memory; the kernel reads VMEM.
  fusion = 4 * 16 * 32 * 4 + 4 * 8 * 128 * 4
  flops = 2 * 4 * 8 * 16 * 32
  assert counted(got.total) == (2, copy + fusion, flops)
  assert got.total["f32"] == flops
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
  total = count(jax.jit(f).lower(x, weights).compile().as_text()).total
  flops = 5 * 2 * 24 * 16 * 16
  # A CPU may multiply bfloat16 as float32.
  widened = {"tf32"} if dtype == jnp.bfloat16 else {expected}
  (found,) = (x for x in roofline.DTYPES if total[x])
  assert found in {expected} | widened
  assert total[found] == flops
  # At least every product, with its operands and results once.
  assert total["kernels"] >= 5
  assert total["bytes"] >= 5 * (2 * 24 + 16) * 16 * dtype.dtype.itemsize


def test_a_chip_needs_at_least_the_time_for_operations_and_for_bytes():
  work = roofline.Work({"bf16": 1e12, "f32": 1e9, "bytes": 1e12})
  operations, moves = roofline.bounds(work, roofline.RATES["h200"])
  assert operations == pytest.approx(1e12 / 989.4e12 + 1e9 / 66.9e12)
  assert moves == pytest.approx(1e12 / 4.8e12)


def test_a_call_of_several_steps_is_shared_by_them():
  one, half = count(roofline_examples.GPU), count(roofline_examples.GPU, 2)
  assert counted(half.total) == tuple(x / 2 for x in counted(one.total))
  assert half.unseen == {"mosaic_gpu_v2": 0.5}


def test_parts_are_scopes_of_the_package():
  found = set()
  for file in (ROOT / "loopjax").rglob("*.py"):
    found |= set(re.findall(r'jax\.named_scope\("(\w+)"\)', file.read_text()))
  assert found == set(PARTS)
  name = "jit(f)/attention/transpose(jvp(gate))/dot"
  assert roofline.part_of(name) == "gate"
  assert roofline.part_of("jit(f)/while/dot_general") == REST


def test_the_page_says_what_was_counted_and_the_two_bounds():
  text = roofline_examples.GPU
  page = roofline.page(count(text), traffic(text), "h200", 1)
  parts, operations, others = (x.splitlines() for x in page.split("\n\n"))
  rows = {line[:9]: line.split()[-6:] for line in parts[1:]}
  total = count(text).total
  _, mib, tera, _, compute, moves = rows["all      "]
  assert mib == f"{total['bytes'] / 2**20:,.1f}"
  assert tera == f"{total['bf16'] / 1e12:.3g}"
  assert compute == f"{total['bf16'] / 989.4e9:.3g}"
  assert moves == f"{total['bytes'] / 4.8e9:.3g}"
  assert rows["mlp      "][0] == "6"
  assert any(line.startswith("mlp: dot_general, backward") for line in
             operations)  # fmt: skip
  assert others == [
    "1 x all-gather: MiB of results: the rest 0.0",
    "1 x mosaic_gpu_v2: operations not counted",
  ]
  # Without rates, there are no times.
  unknown = roofline.page(count(text), traffic(text), "cpu", 1)
  assert unknown.splitlines()[1].split()[-2:] == ["?", "?"]
