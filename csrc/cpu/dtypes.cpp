// torch's dtypes as indices of the tables of kernels.
#include "cpu/kernels.h"
#include "torch_shim.h"

namespace nf4tensor::cpu {

DType DTypeOf(int32_t torch_dtype) {
  if (torch_dtype == aoti_torch_dtype_float32()) return kFloat32;
  return torch_dtype == aoti_torch_dtype_bfloat16() ? kBFloat16 : kFloat16;
}

int32_t TorchDTypeOf(DType dtype) {
  if (dtype == kFloat32) return aoti_torch_dtype_float32();
  return dtype == kBFloat16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float16();
}

}  // namespace nf4tensor::cpu
