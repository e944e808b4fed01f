"""Whether a config fits a machine, by compiling for it without access to it.

loopjax fit --config=FILE[:preset] --topology=v5e:16x16
"""

# Must be set before JAX is imported: disables the search for accelerators,
# locally and in the cloud, and compilers' warnings about absent machines.
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  "TF_CPP_MIN_LOG_LEVEL": "3",
  "TPU_SKIP_MDS_QUERY": "1",
}
