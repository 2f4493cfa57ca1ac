// The float dtypes of weights, inputs and outputs. No torch here.
#pragma once

#include <cstdint>

namespace nf4tensor {

// Also the indices of tables of kernels.
enum DType : int { kFloat32, kBFloat16, kFloat16, kNumDTypes };

constexpr int64_t ElementBytes(DType dtype) { return dtype == kFloat32 ? 4 : 2; }

}  // namespace nf4tensor
