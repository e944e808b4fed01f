"""Compilers' text of programs whose kernels are counted by hand."""

# A loop of three for a GPU: a slice of a stack of weights, rounded; cuBLAS; and
# an in-place write of a row of a stack. Before it, cuDNN's attention and its
# backward pass, and an all-gather that overlaps other work.
GPU = """\
HloModule gpu, is_scheduled=true

FileNames
1 "/somewhere/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


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
  %slice = bf16[8,16]{1,0} fusion(%weights, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(f)/while/body/mlp/convert" stack_frame_id=1}
  %call = (bf16[2,16]{1,0}, s8[1024]{0}) custom-call(%x, %slice), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/while/body/transpose(jvp(mlp))/dot_general" stack_frame_id=1}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}
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
