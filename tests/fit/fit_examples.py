"""Programs as text, small enough to count by hand."""

# Two steps of an outer loop around three of an inner one, as XLA prints loops
# for CPUs and GPUs.
NESTED = """\
HloModule nested, is_scheduled=true

FileNames
1 "/somewhere/outer.py"
2 "/somewhere/inner.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (p.1: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %p.1 = (s32[], f32[4,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[4,16]{1,0} get-tuple-element(%p.1), index=1
  %start = f32[4,16]{1,0} all-reduce-start(%x.1), channel_id=1, to_apply=%add
  %done = f32[4,16]{1,0} all-reduce-done(%start), metadata={op_name="psum" stack_frame_id=2}
  ROOT %t.1 = (s32[], f32[4,16]{1,0}) tuple(%i.1, %done)
}

%inner_condition (p.2: (s32[], f32[4,16])) -> pred[] {
  %p.2 = (s32[], f32[4,16]{1,0}) parameter(0)
  ROOT %less.2 = pred[] constant(true)
}

%outer_body (p.3: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %p.3 = (s32[], f32[4,16]{1,0}) parameter(0)
  %loop.3 = (s32[], f32[4,16]{1,0}) while(%p.3), condition=%inner_condition, body=%inner_body, backend_config={"known_trip_count":{"n":"3"}}
  %x.3 = f32[4,16]{1,0} get-tuple-element(%loop.3), index=1
  %pair = (bf16[8,4,16]{2,1,0}, f32[8]{0}) all-gather(%x.3, %x.3), channel_id=2, dimensions={0}
  ROOT %t.3 = (s32[], f32[4,16]{1,0}) tuple(%x.3, %x.3)
}

ENTRY %main (x: f32[4,16]) -> f32[4,16] {
  %x = f32[4,16]{1,0} parameter(0), metadata={op_name="state['x']"}
  %zero = s32[] constant(0)
  %t = (s32[], f32[4,16]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[4,16]{1,0}) while(%t), condition=%inner_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"2"}}
  %gather-start = ((f32[4,16]{1,0}), f32[32,16]{1,0}) all-gather-start(%x), channel_id=3, dimensions={0}
  %gather-done = f32[32,16]{1,0} all-gather-done(%gather-start)
  ROOT %out = f32[4,16]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def counted_loop(start: str = "0", step: str = "1", end: str = "18") -> str:
  """A loop as libtpu prints it: without its length."""
  return f"""\
HloModule loop

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[]{{:T(128)}}, f32[8]{{0:T(512)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  %copy = s32[]{{:T(128)}} copy(%i)
  %step = s32[]{{:T(128)}} {step}
  %next = s32[]{{:T(128)}} add(%copy, %step)
  %x = f32[8]{{0:T(512)}} get-tuple-element(%p), index=1
  %y = f32[8]{{0:T(512)}} collective-permute(%x), channel_id=1
  ROOT %t = (s32[]{{:T(128)}}, f32[8]{{0:T(512)}}) tuple(%next, %y)
}}

%condition (p.1: (s32[], f32[8])) -> pred[] {{
  %end = s32[]{{:T(128)}} {end}
  %p.1 = (s32[]{{:T(128)}}, f32[8]{{0:T(512)}}) parameter(0)
  %i.1 = s32[]{{:T(128)}} get-tuple-element(%p.1), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%i.1, %end), direction=LT
}}

ENTRY %main (x.2: f32[8]) -> f32[8] {{
  %x.2 = f32[8]{{0:T(512)}} parameter(0)
  %start = s32[]{{:T(128)}} {start}
  %copy.2 = s32[]{{:T(128)}} copy(%start)
  %t.2 = (s32[]{{:T(128)}}, f32[8]{{0:T(512)}}) tuple(%copy.2, %x.2)
  %while = (s32[]{{:T(128)}}, f32[8]{{0:T(512)}}) while(%t.2), condition=%condition, body=%body, metadata={{op_name="jit(f)/while"}}
  ROOT %y.2 = f32[8]{{0:T(512)}} get-tuple-element(%while), index=1
}}
"""  # noqa: E501


# One all-gather that libtpu spreads over a chain of three fusions, a
# reduce-scatter in its notation, and an asynchronous call. Channels may be
# equal.
FUSED = """\
HloModule fused

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%gather_start (q: f32[2,16]) -> f32[8,16] {
  %q = f32[2,16]{1,0} parameter(0)
  ROOT %g.1 = f32[8,16]{1,0} all-gather(%q), channel_id=7, dimensions={0}, frontend_attributes={chain_id="3"}
}

%gather_more (q.2: f32[2,16]) -> f32[8,16] {
  %q.2 = f32[2,16]{1,0} parameter(0)
  ROOT %g.2 = f32[8,16]{1,0} all-gather(%q.2), channel_id=7, dimensions={0}, frontend_attributes={chain_id="3"}
}

%gather_done (q.3: f32[2,16]) -> f32[8,16] {
  %q.3 = f32[2,16]{1,0} parameter(0)
  ROOT %g.3 = f32[8,16]{1,0} all-gather(%q.3), channel_id=7, dimensions={0}, frontend_attributes={chain_id="3"}
}

%all-reduce-scatter.1 (r: f32[8,16]) -> f32[2,16] {
  %r = f32[8,16]{1,0} parameter(0)
  %reduced = f32[8,16]{1,0} all-reduce(%r), channel_id=7, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[2,16]{1,0} dynamic-slice(%reduced, %zero, %zero), dynamic_slice_sizes={2,16}
}

%wrapped (s: f32[2,16]) -> f32[2,16] {
  %s = f32[2,16]{1,0} parameter(0)
  ROOT %exchanged = f32[2,16]{1,0} all-to-all(%s), channel_id=9, dimensions={0}
}

ENTRY %main (x: f32[2,16]) -> f32[2,16] {
  %x = f32[2,16]{1,0} parameter(0)
  %f.1 = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%gather_start
  %f.2 = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%gather_more
  %f.3 = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%gather_done
  %f.4 = f32[2,16]{1,0} fusion(%f.3), kind=kCustom, calls=%all-reduce-scatter.1
  %async-start = ((f32[2,16]), f32[2,16], u32[]) async-start(%f.4), calls=%wrapped
  ROOT %async-done = f32[2,16]{1,0} async-done(%async-start), calls=%wrapped
}
"""  # noqa: E501
