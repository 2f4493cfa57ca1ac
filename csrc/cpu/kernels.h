// What an instruction set has to offer, and which one is in use.
#pragma once

#include <cstdint>

#include "common/record.h"

namespace nf4tensor::cpu {

// The indices of the float dtypes in the tables below.
enum DType : int { kFloat32, kBFloat16, kFloat16, kNumDTypes };

// Decodes num_rows records [pitch] to weights [in_features]; past the caches where told to stream.
using DequantizeRows = void (*)(const RecordSpec& spec, int64_t num_rows, const uint8_t* record,
                                uint8_t* out, bool stream);

// Encodes num_rows weights [in_features] to records [pitch]. keep_phase: the rows have phases to
// keep, else these become 0. absmax: scratch for num_blocks floats.
using QuantizeRows = void (*)(const RecordSpec& spec, int64_t num_rows, const uint8_t* weight,
                              bool keep_phase, float* absmax, uint8_t* record);

struct Kernels {
  const char* isa;
  DequantizeRows dequantize[kNumDTypes];
  QuantizeRows quantize[kNumDTypes];
};

extern const Kernels kScalarKernels;
#ifdef NF4TENSOR_AVX2
extern const Kernels kAvx2Kernels;
#endif
#ifdef NF4TENSOR_AVX512
extern const Kernels kAvx512Kernels;
#endif
#ifdef NF4TENSOR_AVX512VBMI
extern const Kernels kAvx512VbmiKernels;
#endif
#ifdef NF4TENSOR_NEON
extern const Kernels kNeonKernels;
#endif

// The kernels in use: of the best instruction set, until UseIsa says otherwise.
const Kernels& CurrentKernels();

// The index in the tables of torch's dtype, which has been checked.
DType DTypeOf(int32_t torch_dtype);

}  // namespace nf4tensor::cpu
