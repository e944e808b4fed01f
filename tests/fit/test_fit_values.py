"""The largest values and where they come from."""

import fit_examples
import jax
import jax.numpy as jnp
import numpy as np

from loopjax.fit import hlo, values

LINE = "test_fit_values.py"


def test_what_a_loop_keeps_for_the_backward_pass_is_largest():
  """One [32, 64] array per step, stored by five steps of a scan."""

  def f(w, x):
    def step(c, _):
      return jnp.sin(c * w), None

    return jax.lax.scan(step, x, None, length=5)[0].sum()

  w = jax.ShapeDtypeStruct((32, 64), np.float32)
  compiled = jax.jit(jax.grad(f)).lower(w, w).compile()
  first, *others = values.largest(hlo.parse(compiled.as_text()), 20)
  assert first.array == "f32[5,32,64]"
  assert first.num_bytes == 5 * 32 * 64 * 4
  assert first.stacked
  assert first.origin.startswith(f"{LINE}:")
  assert first.number in (1, 2)  # cos of the sum, and perhaps the carry.
  assert {"w", "x"} <= {value.origin for value in others}
  sizes = [value.number * value.num_bytes for value in (first, *others)]
  assert sizes == sorted(sizes, reverse=True)


def test_values_of_hand_written_text():
  got = values.largest(hlo.parse(fit_examples.NESTED), 20)
  rows = {(v.number, v.array, v.origin): v.num_bytes for v in got}
  assert rows == {
    (1, "f32[32,16]", "gather-done"): 2048, (1, "bf16[8,4,16]", "pair"): 1024,
    (1, "f32[4,16]", "inner.py:20 psum"): 256,
    (1, "f32[4,16]", "state['x']"): 256, (1, "f32[8]", "pair"): 32,
    (1, "s32[]", "zero"): 4, (1, "pred[]", "less.2"): 1,
  }  # fmt: skip
  assert values.largest(hlo.parse(fit_examples.NESTED), 2) == got[:2]


# A TPU's loop: its buffer is allocated outside and gets a row per step.
STACKED = """\
HloModule stacked

%update (b: f32[18,100], v: f32[100], i: s32[]) -> f32[18,100] {
  %b = f32[18,100]{1,0:T(8,128)} parameter(0)
  %v = f32[100]{0:T(512)} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,100]{1,0} bitcast(%v)
  ROOT %dus = f32[18,100]{1,0:T(8,128)} dynamic-update-slice(%b, %row, %i), metadata={op_name="jit(f)/while/body/dynamic_update_slice"}
}

%body (p: (s32[], f32[18,100], f32[100])) -> (s32[], f32[18,100], f32[100]) {
  %p = (s32[], f32[18,100]{1,0:T(8,128)}, f32[100]{0:T(512)}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %kept = f32[18,100]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %c = f32[100]{0:T(512)} get-tuple-element(%p), index=2
  %exp = f32[100]{0:T(512)S(1)} exponential(%c), metadata={op_name="jit(f)/while/body/transpose(jvp())/exp"}
  %fusion = f32[18,100]{1,0:T(8,128)} fusion(%kept, %exp, %n), kind=kLoop, calls=%update
  ROOT %t = (s32[], f32[18,100]{1,0:T(8,128)}, f32[100]{0:T(512)S(1)}) tuple(%n, %fusion, %exp)
}

%condition (q: (s32[], f32[18,100], f32[100])) -> pred[] {
  %q = (s32[], f32[18,100]{1,0:T(8,128)}, f32[100]{0:T(512)}) parameter(0)
  ROOT %less = pred[] custom-call(%q), custom_call_target="Less"
}

ENTRY %main (x: f32[100]) -> f32[100,18] {
  %x = f32[100]{0:T(512)} parameter(0), metadata={op_name="x"}
  %zero = s32[]{:S(6)} constant(0)
  %buffer = f32[18,100]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %other = f32[7,100]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
  %t.2 = (s32[], f32[18,100]{1,0:T(8,128)}, f32[100]{0:T(512)}) tuple(%zero, %buffer, %x)
  %while = (s32[], f32[18,100]{1,0:T(8,128)}, f32[100]{0:T(512)}) while(%t.2), condition=%condition, body=%body
  %all = f32[18,100]{1,0:T(8,128)} get-tuple-element(%while), index=1
  ROOT %turned = f32[100,18]{1,0} transpose(%all), dimensions={1,0}
}
"""  # noqa: E501


def test_a_stack_is_one_value_named_by_its_rows():
  got = values.largest(hlo.parse(STACKED), 20)
  origin = "jit(f)/while/body/transpose(jvp())/exp"
  rows = {(v.array, v.origin, v.stacked): v.num_bytes for v in got}
  assert rows == {
    ("f32[18,100]", origin, True): 24 * 128 * 4,
    # The loop's result still consists of those rows.
    ("f32[100,18]", origin, True): 100 * 18 * 4,
    # No row is written into this value: it counts by itself.
    ("f32[7,100]", "other", False): 8 * 128 * 4,
    ("f32[100]", "x", False): 2048,
    ("pred[]", "less", False): 1,
  }
  assert all(v.number == 1 for v in got)
