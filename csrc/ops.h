// The launchers of every backend, with a checked spec in place of the op's six integers.
#pragma once

#include "common/record.h"
#include "torch_shim.h"

namespace nf4tensor {

namespace cpu {

// weight: [*lead, in_features] of a float dtype. Returns a record [*lead, pitch].
Tensor Quantize(const Tensor& weight, const RecordSpec& spec);
// record: uint8 [*lead, pitch]; every byte of it but the phases is written.
void QuantizeInto(const Tensor& weight, const RecordSpec& spec, const Tensor& record);
// record: uint8 [*lead, pitch]. Returns a weight [*lead, in_features] of the dtype.
Tensor Dequantize(const Tensor& record, const RecordSpec& spec, int32_t dtype);
// out: [*lead, in_features] of a float dtype.
void DequantizeInto(const Tensor& record, const RecordSpec& spec, const Tensor& out);
// input: [*lead, in_features]; record: uint8 [*lead, out_features, pitch]; bias: [out_features] of
// the input's dtype, or null. Returns input @ W.T + bias, summed in float32.
Tensor Linear(const Tensor& input, const Tensor& record, const RecordSpec& spec,
              const Tensor* bias);
// input: [*lead, out_features]. Returns input @ W, summed in float32.
Tensor Matmul(const Tensor& input, const Tensor& record, const RecordSpec& spec);

}  // namespace cpu

}  // namespace nf4tensor
