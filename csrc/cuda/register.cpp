#include "boxed.h"
#include "cuda/backend.h"

// Registers the ops of CUDA devices, as nf4tensor_register_cpu does those of the CPU. Needs no such
// device, nor a torch that knows them.
extern "C" __attribute__((visibility("default"))) int nf4tensor_register_cuda() {
  using Backend = nf4tensor::cuda::Backend;
  static const int error = nf4tensor::Register<Backend>(Backend::kDispatchKey);
  return error;
}

// The processors that the kernels were compiled for, in the words of CMake: "80-real,90".
extern "C" __attribute__((visibility("default"))) const char* nf4tensor_cuda_architectures() {
  return NF4TENSOR_CUDA_ARCHITECTURES;
}

// Mapping and most blocks of dequantize from now on (see kernels.h).
extern "C" __attribute__((visibility("default"))) void nf4tensor_tune_dequantize(
    int mapping, int64_t max_blocks) {
  nf4tensor::cuda::SetDequantizeTuning(
      {static_cast<nf4tensor::cuda::Mapping>(mapping), max_blocks});
}

// Most inputs of a fused product from now on; below zero: as many as are faster so.
extern "C" __attribute__((visibility("default"))) void nf4tensor_fuse_linear(int64_t max_inputs) {
  nf4tensor::cuda::SetMaxFusedInputs(max_inputs);
}
