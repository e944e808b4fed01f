"""Programs as text, small enough to count by hand."""

# Two steps of an outer loop around three of an inner one, as XLA prints loops
# for CPUs and GPUs.
NESTED = """\
HloModule nested, is_scheduled=true

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
  %done = f32[4,16]{1,0} all-reduce-done(%start), metadata={op_name="psum"}
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

# A loop of three for a GPU: a slice of a stack of weights, rounded; cuBLAS; and
# an in-place write of a row of a stack. Before it, cuDNN's attention and its
# backward pass, and an all-gather that overlaps other work.
GPU = """\
HloModule gpu, is_scheduled=true

%fused_slice (p.0: f32[4,8,16], p.1: s32[]) -> bf16[8,16] {
  %p.0 = f32[4,8,16]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %none.1 = s32[] constant(0)
  %row = f32[1,8,16]{2,1,0} dynamic-slice(%p.0, %p.1, %none.1, %none.1), dynamic_slice_sizes={1,8,16}
  %flat = f32[8,16]{1,0} bitcast(%row)
  ROOT %narrow = bf16[8,16]{1,0} convert(%flat)
}

%fused_put (q.0: bf16[4,2,16], q.1: s32[], q.2: bf16[2,16]) -> bf16[4,2,16] {
  %q.0 = bf16[4,2,16]{2,1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %q.2 = bf16[2,16]{1,0} parameter(2)
  %none.2 = s32[] constant(0)
  %one = bf16[1,2,16]{2,1,0} bitcast(%q.2)
  ROOT %put = bf16[4,2,16]{2,1,0} dynamic-update-slice(%q.0, %one, %q.1, %none.2, %none.2)
}

%body (s: (s32[], f32[4,8,16], bf16[2,8], bf16[4,2,16])) -> (s32[], f32[4,8,16], bf16[2,8], bf16[4,2,16]) {
  %s = (s32[], f32[4,8,16]{2,1,0}, bf16[2,8]{1,0}, bf16[4,2,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %weights = f32[4,8,16]{2,1,0} get-tuple-element(%s), index=1
  %x = bf16[2,8]{1,0} get-tuple-element(%s), index=2
  %stack = bf16[4,2,16]{2,1,0} get-tuple-element(%s), index=3
  %slice = bf16[8,16]{1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(f)/while/body/mlp/convert"}
  %call = (bf16[2,16]{1,0}, s8[1024]{0}) custom-call(%x, %slice), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/while/body/transpose(jvp(mlp))/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
  %y = bf16[2,16]{1,0} get-tuple-element(%call), index=0
  %rows = bf16[4,2,16]{2,1,0} fusion(%stack, %i, %y), kind=kLoop, calls=%fused_put
  ROOT %t.1 = (s32[], f32[4,8,16]{2,1,0}, bf16[2,8]{1,0}, bf16[4,2,16]{2,1,0}) tuple(%i, %weights, %x, %rows)
}

%condition (c: (s32[], f32[4,8,16], bf16[2,8], bf16[4,2,16])) -> pred[] {
  %c = (s32[], f32[4,8,16]{2,1,0}, bf16[2,8]{1,0}, bf16[4,2,16]{2,1,0}) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%j, %three), direction=LT
}

ENTRY %main (w: f32[4,8,16], z: bf16[2,8], rows.0: bf16[4,2,16], q: bf16[1,2,32,8]) -> bf16[4,2,16] {
  %w = f32[4,8,16]{2,1,0} parameter(0)
  %z = bf16[2,8]{1,0} parameter(1)
  %rows.0 = bf16[4,2,16]{2,1,0} parameter(2)
  %q = bf16[1,2,32,8]{3,2,1,0} parameter(3)
  %forward = (bf16[1,2,32,8]{3,2,1,0}, f32[1,2,32]{2,1,0}, u8[64]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/attention/custom"}, backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "2", "32", "32"]}, "mask_type": "CAUSAL"}}
  %o = bf16[1,2,32,8]{3,2,1,0} get-tuple-element(%forward), index=0
  %stat = f32[1,2,32]{2,1,0} get-tuple-element(%forward), index=1
  %backward = (bf16[1,2,32,8]{3,2,1,0}, bf16[1,2,32,8]{3,2,1,0}, bf16[1,2,32,8]{3,2,1,0}, u8[128]{0}) custom-call(%q, %q, %q, %stat, %o, %o), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="jit(f)/transpose(jvp(attention))/custom"}, backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["1","2","32","32"]},"mask_type":"CAUSAL"}}
  %gather = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%z), channel_id=1, dimensions={0}
  %gathered = bf16[16,8]{1,0} all-gather-done(%gather)
  %zero = s32[] constant(0)
  %t = (s32[], f32[4,8,16]{2,1,0}, bf16[2,8]{1,0}, bf16[4,2,16]{2,1,0}) tuple(%zero, %w, %z, %rows.0)
  %loop = (s32[], f32[4,8,16]{2,1,0}, bf16[2,8]{1,0}, bf16[4,2,16]{2,1,0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %mosaic = f32[4]{0} custom-call(%z), custom_call_target="mosaic_gpu_v2"
  ROOT %out = bf16[4,2,16]{2,1,0} get-tuple-element(%loop), index=3
}
"""  # noqa: E501

# A fused batched product for a TPU, as a convolution whose window is the batch;
# its input was copied to VMEM. Tiles pad the result from 8 rows of 32 to 8 of
# 128.
TPU = """\
HloModule tpu, is_scheduled=true

%fused (a: bf16[4,8,16], b: f32[4,16,32]) -> f32[4,8,32] {
  %a = bf16[4,8,16]{2,1,0} parameter(0)
  %b = f32[4,16,32]{2,1,0} parameter(1)
  ROOT %conv = f32[4,8,32]{2,1,0:T(8,128)} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf, operand_precision={highest,highest}
}

ENTRY %main (x: bf16[4,8,16], y: f32[4,16,32]) -> f32[4,8,32] {
  %x = bf16[4,8,16]{2,1,0} parameter(0)
  %y = f32[4,16,32]{2,1,0} parameter(1)
  %start = (bf16[4,8,16]{2,1,0:S(1)}, bf16[4,8,16]{2,1,0}, u32[]{:S(2)}) copy-start(%x)
  %near = bf16[4,8,16]{2,1,0:S(1)} copy-done(%start)
  ROOT %out = f32[4,8,32]{2,1,0:T(8,128)} fusion(%near, %y), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/gate/dot_general"}
}
"""  # noqa: E501
