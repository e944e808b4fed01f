"""The text of compiled programs: instructions, sizes, loops, sources."""

import pathlib

import fit_examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopjax.fit import hlo


def array(text):
  (found,) = hlo.arrays(text)
  return found


def loop_of(text):
  module = hlo.parse(text)
  return hlo.trip_count(
    module,
    module.entry,
    module.computations[module.entry].instructions["while"],
  )


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
  ],
)
def test_bytes_of_arrays(text, num_bytes, padded):
  assert array(text).num_bytes == num_bytes
  assert array(text).padded_bytes == padded


def test_memory_spaces():
  assert array("f32[8]{0:T(512)}").in_main_memory
  assert array("f32[8]{0:T(512)S(0)}").in_main_memory
  assert not array("f32[8]{0:T(512)S(1)}").in_main_memory


def test_instructions_of_hand_written_text():
  module = hlo.parse(fit_examples.NESTED)
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
  assert [str(a) for a in pair.arrays] == ["bf16[8,4,16]", "f32[8]"]
  assert pair.operands == ("x.3", "x.3")
  done = module.computations["inner_body"].instructions["done"]
  assert done.opcode == "all-reduce-done"
  assert module.computations["inner_body"].root.name == "t.1"
  # Frame 2 was called from frame 1.
  assert module.sources[2] == (
    ("/somewhere/inner.py", 20),
    ("/somewhere/outer.py", 10),
  )


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
  root = hlo.parse(text).computations["main"].root
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
  assert loop_of(fit_examples.counted_loop(start, step, end)) == trips


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
  text = fit_examples.counted_loop("constant(0)", "constant(1)", "constant(18)")
  assert old in text
  assert loop_of(text) == 18
  assert loop_of(text.replace(old, new)) is None


def test_a_real_program():
  def f(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), c), x, None, length=6)

  x = jax.ShapeDtypeStruct((16, 16), np.float32)
  module = hlo.parse(jax.jit(f).lower(x).compile().as_text())
  (entry,) = (c for n, c in module.computations.items() if n == module.entry)
  loops = [i for i in entry.instructions.values() if i.opcode == "while"]
  assert [hlo.trip_count(module, module.entry, i) for i in loops] == [6]
  # A program from the persistent cache names the checkout that compiled it.
  stacks = module.sources.values()
  files = {pathlib.Path(file).name for stack in stacks for file, _ in stack}
  assert pathlib.Path(__file__).name in files
